"""Processing weights through HookedTransformer's methods, and loading state dicts with its names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from adapters.observe.observe import evaluating
from adapters.points import join
from bridge.bridge import TransformerBridge
from bridge.hooks.names import suggestion
from bridge.legacy.HookedTransformerConfig import HookedTransformerConfig
from bridge.legacy.module_tree import BUFFERS, ENDS, ModuleTree
from weight_processing.process import OFF, ON

_LOG = logging.getLogger(__name__)
#: The steps of processing.
TRANSFORMS = (
    "fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases", "refactor_factored_attn_matrices",
)  # fmt: skip


class LegacyWeights(ModuleTree):
    """Weights through HookedTransformer's methods."""

    def process_weights_(
        self,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        refactor_factored_attn_matrices: bool = False,
        fold_value_biases: bool = True,
    ) -> None:
        """Processes the weights in place. What the architecture forbids is left out with a warning in the log."""
        steps = (fold_ln, center_writing_weights, center_unembed, fold_value_biases, refactor_factored_attn_matrices)
        asked = dict(zip(TRANSFORMS, steps, strict=True))
        if fold_ln and self.cfg.num_experts:
            _LOG.warning("fold_ln left out: HookedTransformer does not fold norms that feed a mixture of experts")
            asked["fold_ln"] = False
        if fold_ln and self.cfg.dtype not in (torch.float32, torch.float64):
            _LOG.warning("folding weights of %s rounds them; from_pretrained_no_processing does not", self.cfg.dtype)
        self.process_weights(**{name: ON if wanted else OFF for name, wanted in asked.items()})  # type: ignore[arg-type]
        for name, state in self.cfg.processed.items():
            if asked.get(name) and state != "done":
                _LOG.warning("%s %s", name, state)

    def load_and_process_state_dict(
        self,
        state_dict: Mapping[str, Tensor],
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        fold_value_biases: bool = True,
        refactor_factored_attn_matrices: bool = False,
    ) -> None:
        """Loads a state dict with HookedTransformer's names, and processes the weights. What is missing stays as it is.

        Raises:
            ValueError: a name that the model does not have.
            RuntimeError: a shape that does not fit, or a value for which the model has no place.
        """
        steps = (center_writing_weights, center_unembed, fold_value_biases, refactor_factored_attn_matrices)
        if fold_ln and self._lacks_norms_of(state_dict):
            config = HookedTransformerConfig.of_model(self.cfg)
            config.normalization_type = str(config.normalization_type).removesuffix("Pre")
            made: Any = type(self)  # whose classes are made from a configuration
            other = made(config)  # which has the norms that are to be folded
            other.load_and_process_state_dict(state_dict, True, *steps)
            self.load_state_dict({name: x for name, x in other.state_dict().items() if name in self.weights.getters})
            self.cfg.processed = other.cfg.processed
            return
        unknown = {name for name in state_dict if name.rpartition(".")[2] not in BUFFERS} - set(self.weights.getters)
        for name in sorted(unknown):
            raise ValueError(f"{name!r} is no weight of this model.{suggestion(name, self.weights.getters)}")
        self.load_state_dict(state_dict, strict=False)
        self.process_weights_(fold_ln, *steps[:2], refactor_factored_attn_matrices, fold_value_biases)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:  # type: ignore[override]
        """Loads a state dict with HookedTransformer's names, or one with the Hugging Face model's own.

        Args:
            state_dict: what `state_dict` gave, here or in HookedTransformer.
            strict: missing and unknown names are errors; otherwise unknown ones are warned of in the log.
            assign: as for `torch.nn.Module.load_state_dict`; for the Hugging Face model's own names only.

        Raises:
            RuntimeError: names are missing or not known, a shape does not fit, or a value has no place.

        Example:
            >>> from bridge.legacy import HookedTransformer
            >>> cfg = {"n_layers": 1, "d_model": 8, "n_ctx": 5, "d_head": 4, "d_vocab": 10, "act_fn": "relu"}
            >>> HookedTransformer(cfg).load_state_dict(HookedTransformer(cfg).state_dict())
            <All keys matched successfully>
        """
        known = set(self.weights.getters)
        own = set(self.original_model.state_dict()) & set(state_dict)
        if own and not known & set(state_dict):
            found: Any = self.original_model.load_state_dict(state_dict, strict=strict, assign=assign)
        elif assign:
            raise ValueError("assign=True takes the Hugging Face model's own names: HookedTransformer's are views")
        else:
            if state_dict and not known & set(state_dict):
                raise RuntimeError(f"no weight of the model has any of these names, such as {next(iter(state_dict))!r}")
            fitting = {name: state_dict[name] for name in known & set(state_dict)}
            if all(self.fits(name, value) is None for name, value in fitting.items()):
                self.write({name: fitting[name] for name in ENDS if name in fitting})
            found = nn.Module.load_state_dict(self, state_dict, strict=strict)
        if found.unexpected_keys:
            _LOG.warning("names in the state dict that the model does not have: %s", ", ".join(found.unexpected_keys))
        return found

    def _lacks_norms_of(self, state_dict: Mapping[str, Tensor]) -> bool:
        """Whether the model was made without the norms' weights, which the state dict has (``LNPre``, ``RMSPre``)."""
        lacking = {word for name in state_dict.keys() - self.weights.getters.keys() for word in name.split(".")}
        return str(self.cfg.normalization_type).endswith("Pre") and bool(lacking & {"ln1", "ln2", "ln_final"})


# ----------------------------------------------------------------------------------------------------------------------
# Keys and values of their own for each query head, in models that compute one for each group of heads.
# ----------------------------------------------------------------------------------------------------------------------


#: What attention modules call the number of key heads.
_COUNTS = ("num_key_value_heads", "num_kv_heads")


class Ungrouping(LegacyWeights):
    """A bridge that can repeat a group's keys and values for each of its query heads."""

    #: What was replaced: holder, attribute, and what stood there.
    grouped: list[tuple[Any, str, Any]] | None = None

    def set_ungroup_grouped_query_attention(self, ungroup_grouped_query_attention: bool) -> None:
        """Whether each query head has a key and a value of its own: in ``hook_k``, ``hook_v``, ``hook_k_input``, ...

        The rows of the key and value projections are then repeated for each query head of a group: the Hugging Face
        model computes what it did, with as many key heads as query heads. False puts the projections back. A cache of
        before is to be read before: its patterns are computed when they are asked for.

        Raises:
            ValueError: keys and values do not come from layers of their own, or the model would compute another thing.
            RuntimeError: hooks are attached; or weights were changed in between, which False would lose.
        """
        if ungroup_grouped_query_attention and self.grouped is None and self.cfg.n_key_value_heads is not None:
            self._check_unheard()
            self._ungroup(self.cfg.n_key_value_heads)
        elif not ungroup_grouped_query_attention and self.grouped is not None:
            self._check_unheard()
            groups = self.cfg.n_heads // next(old for _, name, old in self.grouped if name in _COUNTS)
            for holder, name, old in self.grouped:
                if not isinstance(old, nn.Linear):
                    continue
                now = getattr(holder, name)
                old.to(now.weight)  # where the model has been moved since, in its type
                if not _same(now, _repeated(old, groups, self.cfg)):
                    raise RuntimeError(f"{name} was changed since keys and values were ungrouped: that would be lost")
            self._regroup()
        self.cfg.ungroup_grouped_query_attention = ungroup_grouped_query_attention

    def _check_unheard(self) -> None:
        if self.spliced:
            raise RuntimeError(
                f"a module is spliced in at {', '.join(self.spliced)}, which would be lost: put a bare HookPoint() "
                "there first"
            )
        if self.wiring.listening:
            raise RuntimeError("hooks are attached, which would be lost: reset_hooks(including_permanent=True) first")

    def _ungroup(self, n_kv: int) -> None:
        attn, groups = self.architecture.stack.attn, self.cfg.n_heads // n_kv
        wide = n_kv * self.cfg.d_head
        replaced: list[tuple[Any, str, Any]] = []
        config = self.core.config.get_text_config()
        for path in self.block_paths:
            assert attn
            module = self.original_model.get_submodule(join(path, attn.path))
            for part in (attn.k, attn.v):
                holder_path, _, name = part.path.rpartition(".")
                holder = module.get_submodule(holder_path)
                old = getattr(holder, name)
                if type(old) is not nn.Linear or old.out_features != wide:
                    raise ValueError(
                        f"keys and values of {self.cfg.model_name} cannot be ungrouped: {part.path} in "
                        f"{join(path, attn.path)} is no linear layer to their {wide} dimensions alone"
                    )
                replaced.append((holder, name, old))
            replaced += [(module, name, n_kv) for name in _COUNTS if hasattr(module, name)]
            replaced.append((module, "num_key_value_groups", groups))
        replaced += [(config, name, n_kv) for name in (*_COUNTS, "n_key_value_heads") if hasattr(config, name)]
        before = self._probe()
        self.grouped = replaced
        try:
            for holder, name, old in replaced:
                new = 1 if name == "num_key_value_groups" else self.cfg.n_heads
                setattr(holder, name, _repeated(old, groups, self.cfg) if isinstance(old, nn.Linear) else new)
            self._rewire()
            after, exact = self._probe(), self.cfg.dtype in (torch.float32, torch.float64)
            if not torch.allclose(after, before, atol=1e-4 if exact else 0.1):
                raise ValueError(
                    f"keys and values of {self.cfg.model_name} cannot be ungrouped: its output would change"
                )
        except BaseException:
            self._regroup()
            raise

    def _regroup(self) -> None:
        for holder, name, old in self.grouped or ():
            setattr(holder, name, old)
        self.grouped = None
        self._rewire()

    @torch.no_grad()
    def _probe(self) -> Tensor:
        """Log probabilities of a few tokens."""
        length = min(6, self.cfg.n_ctx or 6)
        tokens = torch.arange(length, device=self.cfg.device)[None] * 7 % self.cfg.d_vocab
        with evaluating(self.original_model):
            found: Tensor = self.original_model(input_ids=tokens, use_cache=False).logits
        return found.float().log_softmax(-1)

    def _rewire(self) -> None:
        """The bridge anew, around a model that has changed."""
        cfg, model, tokenizer, grouped = self.cfg, self.original_model, self.tokenizer, self.grouped
        self.__dict__.pop("_tree", None)
        TransformerBridge.__init__(self, model)  # a subclass of the user's may have other arguments
        for name in ("n_layers", "n_key_value_heads", "attn_types"):
            setattr(cfg, name, getattr(self.cfg, name))
        self.cfg, self.tokenizer, self.grouped = cfg, tokenizer, grouped


def _repeated(old: nn.Linear, groups: int, cfg: Any) -> nn.Linear:
    new = nn.Linear(old.in_features, old.out_features * groups, old.bias is not None, device="meta")
    for name, values in old.named_parameters():
        rows = values.detach().unflatten(0, (-1, cfg.d_head)).repeat_interleave(groups, 0).flatten(0, 1)
        setattr(new, name, nn.Parameter(rows, requires_grad=values.requires_grad))
    return new.train(old.training)


def _same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
