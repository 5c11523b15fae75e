"""`HookedTransformer`: a bridge that is made and called as HookedTransformer is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

import bridge.legacy.loading_from_pretrained as loading
from adapters.observe.observe import Watch, evaluating
from adapters.points import join
from adapters.views import Args, Kwargs
from bridge.bridge import TransformerBridge
from bridge.legacy.HookedTransformerConfig import HookedTransformerConfig
from bridge.legacy.running import TRANSFORMS, LegacyModel, Made
from bridge.legacy.table import named
from bridge.legacy.utilities import draw
from bridge.loading.loading import context_fields
from bridge.native import NativeConfig, NativeModel

__getattr__ = named(__name__)
SingleLoss = Float[Tensor, ""]
LossPerToken = Float[Tensor, "batch pos-1"]
Loss = SingleLoss | LossPerToken

Side = Literal["left", "right"]
#: What attention modules call the number of key heads.
_COUNTS = ("num_key_value_heads", "num_kv_heads")
#: Fields of a configuration that say nothing of the weights, and that the model's keeps.
_KEPT = {
    "init_mode", "initializer_range", "init_weights", "use_hook_tokens", "trust_remote_code", "seed",
    "use_NTK_by_parts_rope", "NTK_by_parts_low_freq_factor",
    "NTK_by_parts_high_freq_factor", "NTK_by_parts_factor", "NTK_original_ctx_len",
}  # fmt: skip


class HookedTransformer(LegacyModel):
    """A `TransformerBridge` with HookedTransformer's ways in: `from_pretrained`, or a configuration.

    The Hugging Face model runs, as in any bridge.

    Args:
        cfg: a `HookedTransformerConfig` or its fields, or another model's `cfg`, for a model with random weights
            (`bridge.native`); or a Hugging Face model, which is wrapped as it is.
        tokenizer, move_to_device, default_padding_side: HookedTransformer's. The tokenizer is copied, never changed.

    Raises:
        ValueError, TypeError: as for `HookedTransformerConfig`; or fields that only loaded models have.

    Example:
        >>> from bridge.legacy import HookedTransformer
        >>> model = HookedTransformer({"n_layers": 1, "d_model": 8, "n_ctx": 5, "d_head": 4, "d_vocab": 10,
        ...     "act_fn": "relu", "device": "cpu"})
        >>> model([[1, 2, 3]]).shape, model.blocks[0].attn.W_Q.shape
        (torch.Size([1, 3, 10]), torch.Size([2, 8, 4]))
    """

    #: Where keys and values are ungrouped, what was replaced: holder, attribute, and what stood there.
    grouped: list[tuple[Any, str, Any]] | None = None

    def __init__(
        self,
        cfg: Made,
        tokenizer: Any = None,
        move_to_device: bool = True,
        default_padding_side: Side = "right",
    ) -> None:
        given = None if isinstance(cfg, nn.Module | str) else HookedTransformerConfig.unwrap(cfg)
        model, found = self._make(given or cfg, tokenizer, move_to_device)
        super().__init__(model)
        if given is not None:
            for name in _KEPT:
                setattr(self.cfg, name, getattr(given, name))
            if given.init_weights:
                self.init_weights()
            self.cfg.ungroup_grouped_query_attention = given.ungroup_grouped_query_attention  # of what was drawn
        if found is not None:
            self.set_tokenizer(found, default_padding_side)

    @classmethod
    def _model_of(cls, config: HookedTransformerConfig, move_to_device: bool) -> nn.Module:
        native = NativeConfig(**(config.native() | ({} if move_to_device else {"device": None})))
        # HookedTransformer draws from the random state as it was before.
        with torch.random.fork_rng(devices=()):
            if not config.init_weights:
                return NativeModel(native)
            native.init_weights = False
            with Watch.calling(_nothing_is_drawn):
                model = NativeModel(native)
        native.init_weights = True
        return model

    @classmethod
    def from_pretrained(
        cls,
        model_name: str,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        refactor_factored_attn_matrices: bool = False,
        checkpoint_index: int | None = None,
        checkpoint_value: int | None = None,
        hf_model: nn.Module | None = None,
        device: torch.device | str | None = None,
        n_devices: int = 1,
        tokenizer: Any = None,
        move_to_device: bool = True,
        fold_value_biases: bool = True,
        default_prepend_bos: bool | None = None,
        default_padding_side: Side = "right",
        dtype: torch.dtype | str = torch.float32,
        first_n_layers: int | None = None,
        n_ctx: int | None = None,
        **from_pretrained_kwargs: Any,
    ) -> Any:
        """Loads a model and processes its weights. What it forbids is left out, with a warning in the log.

        The arguments are HookedTransformer's. An `hf_model` is copied where anything has to change; a tokenizer always.

        Args:
            from_pretrained_kwargs: what `TransformerBridge.boot_transformers` takes, and ``torch_dtype`` for `dtype`.

        Raises:
            ValueError: an unknown name, a model that is no decoder, or arguments that exclude each other.
            TypeError: an argument that nobody knows.

        Example:
            >>> from bridge.embedded import MODEL_DIR
            >>> from bridge.legacy import HookedTransformer
            >>> model = HookedTransformer.from_pretrained(str(MODEL_DIR), device="cpu")
            >>> model.cfg.normalization_type
            'RMSPre'
        """
        if first_n_layers is not None and hf_model is not None:
            raise ValueError("first_n_layers is for a model that is loaded, and hf_model is loaded already")
        steps = (fold_ln, center_writing_weights, center_unembed, refactor_factored_attn_matrices, fold_value_biases)
        own = loading.own_format(loading.get_official_model_name(model_name), from_pretrained_kwargs)
        if own is not None and hf_model is None:
            config = loading.get_pretrained_model_config(
                model_name, device=device, dtype=loading.as_type(dtype), first_n_layers=first_n_layers,
                default_prepend_bos=default_prepend_bos, checkpoint_index=checkpoint_index,
                checkpoint_value=checkpoint_value, n_ctx=n_ctx, **own.hub,
            )  # fmt: skip
            bridge: Any = cls(config, tokenizer, move_to_device, default_padding_side)
            loading.load_own_format(bridge, own, config)
            bridge.process_weights_(*steps)
            return bridge
        bridge = cls._load(
            model_name, hf_model=hf_model, tokenizer=tokenizer, device=device, move_to_device=move_to_device,
            dtype=dtype, passed_on=from_pretrained_kwargs, n_devices=n_devices, processing=any(steps),
            checkpoint_index=checkpoint_index, checkpoint_value=checkpoint_value, n_ctx=n_ctx,
        )  # fmt: skip
        if bridge.core.config.is_encoder_decoder:
            raise ValueError(f"{model_name} is an encoder-decoder model: HookedEncoderDecoder.from_pretrained loads it")
        if bridge.cfg.attention_dir == "bidirectional":
            raise ValueError(f"{model_name} reads in both directions: HookedEncoder.from_pretrained loads it")
        if first_n_layers is not None:
            bridge._keep_layers(first_n_layers)
        cfg = bridge.cfg
        if n_ctx is None:
            loading.cap_context(cfg)
        else:
            context_fields(bridge.core.config, n_ctx)  # an `hf_model` may have fewer positions
            cfg.n_ctx = n_ctx
        if bridge.tokenizer is not None and default_padding_side != "right":
            bridge.set_tokenizer(bridge.tokenizer, default_padding_side)
        cfg.default_prepend_bos = loading.starts_with_bos(cfg, default_prepend_bos)
        if any(steps):
            bridge.process_weights_(*steps)
        return bridge

    @classmethod
    def from_pretrained_no_processing(cls, model_name: str, **kwargs: Any) -> Any:
        """`from_pretrained` with all processing off, unless it is asked for."""
        return cls.from_pretrained(model_name, **(dict.fromkeys(TRANSFORMS, False) | kwargs))

    def _keep_layers(self, n: int) -> None:
        if not 0 <= n <= self.cfg.n_layers:
            raise ValueError(f"first_n_layers is {n}; {self.cfg.model_name} has {self.cfg.n_layers}")
        parent, _, last = self.block_paths[0].rpartition(".")[0].rpartition(".")
        holder, config = self.original_model.get_submodule(parent), self.core.config
        setattr(holder, last, getattr(holder, last)[:n])
        config.num_hidden_layers = n
        if isinstance(getattr(config, "layer_types", None), list):
            config.layer_types = config.layer_types[:n]
        self._rewire()

    def set_tokenizer(self, tokenizer: Any, default_padding_side: Side = "right") -> None:
        """Gives the model a copy of a tokenizer, which pads and starts texts with EOS where it has no token for it."""
        self.tokenizer = tokenizer = loading.copied_tokenizer(tokenizer, default_padding_side)
        self.cfg.tokenizer_name = tokenizer.name_or_path or None
        self.cfg.tokenizer_prepends_bos = self.tokenizer_facts.adds_bos

    def init_weights(self) -> None:
        """Draws the matrices of a model that was made from a configuration anew, as that says: the same numbers as in
        HookedTransformer, from `cfg.seed` or torch's random state."""
        if not isinstance(self.core, NativeModel):
            raise TypeError(f"{self.cfg.model_name} was loaded: weights are drawn of models made from a configuration")
        if self.cfg.seed is not None:
            torch.manual_seed(self.cfg.seed)
        in_order = sorted(self.weights.getters, key=self.place_of)
        for name, drawn in draw(self.cfg, [(name, self.weights[name]) for name in in_order]):
            self.write({name: drawn})

    def fill_missing_keys(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """`loading_from_pretrained.fill_missing_keys` for this model."""
        return loading.fill_missing_keys(self, state_dict)

    # Keys and values of their own for each query head, in models that compute one for each group of heads.

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


def _nothing_is_drawn(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Leaves matrices empty, and biases zero, of a model whose matrices `init_weights` draws at once."""
    if func.__name__ not in ("normal_", "uniform_", "kaiming_uniform_"):  # of tensors, and of torch.nn.init
        return func(*args, **kwargs)
    tensor = args[0] if args else kwargs["tensor"]
    with torch.no_grad():
        return tensor.zero_() if tensor.ndim == 1 else tensor


def one_layer_model(cfg: Any, fields: Kwargs, *more: Any, **kwargs: Any) -> HookedTransformer:
    """A model around a part that is made from a configuration."""
    config = HookedTransformerConfig.unwrap(cfg)
    length = kwargs.get("length", more[0] if more and "normalization_type" in fields else None)
    changes: Kwargs = {"n_layers": 1, "tokenizer_name": None, "d_vocab": max(config.d_vocab, 1), "seed": None} | fields
    changes |= {"d_vocab_out": max(config.d_vocab_out, 1)} | ({"d_model": length} if isinstance(length, int) else {})
    return HookedTransformer(replace(config, **changes))
