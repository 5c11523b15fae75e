"""Keys and values of their own for each query head, in models that compute one for each group of heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from adapters.observe.observe import evaluating
from adapters.points import join
from bridge.bridge import TransformerBridge
from bridge.legacy.loaded import LegacyLoading

#: What attention modules call the number of key heads.
_COUNTS = ("num_key_value_heads", "num_kv_heads")


class Ungrouping(LegacyLoading):
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
