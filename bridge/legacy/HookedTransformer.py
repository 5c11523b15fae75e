"""`HookedTransformer`: a bridge with HookedTransformer's constructors and call signature."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

import bridge.legacy.loading_from_pretrained as loading
from adapters.observe.observe import Watch, evaluating
from adapters.points import join
from adapters.views import Args, Kwargs
from bridge.bridge import TransformerBridge
from bridge.legacy.hook_points import Device
from bridge.legacy.HookedTransformerConfig import HookedTransformerConfig
from bridge.legacy.running import TRANSFORMS, LegacyModel, Made, Side
from bridge.legacy.table import named
from bridge.loading.loading import context_fields
from bridge.native import NativeConfig, NativeModel
from bridge.native.native import draw

__getattr__ = named(__name__)
SingleLoss = Float[Tensor, ""]
LossPerToken = Float[Tensor, "batch pos-1"]
Loss = SingleLoss | LossPerToken

#: What ungrouping replaced: holder, attribute, and original value.
Replaced = tuple[Any, str, Any]
#: The attribute of attention modules that holds the number of key heads.
_COUNTS = ("num_key_value_heads", "num_kv_heads")
#: Configuration fields unrelated to the weights, which keep the model's values.
_KEPT = {
    "init_mode",
    "initializer_range",
    "init_weights",
    "use_hook_tokens",
    "trust_remote_code",
    "seed",
    "use_NTK_by_parts_rope",
    "NTK_by_parts_low_freq_factor",
    "NTK_by_parts_high_freq_factor",
    "NTK_by_parts_factor",
    "NTK_original_ctx_len",
}


class HookedTransformer(LegacyModel):
    """A `TransformerBridge` with HookedTransformer's constructors: `from_pretrained`, or a
    configuration.

    The Hugging Face model runs, as in any bridge.

    Args:
        cfg: a `HookedTransformerConfig` or its fields, or another model's `cfg`, for a model with
            random weights (`bridge.native`); or a Hugging Face model, which is wrapped unchanged.
        tokenizer, move_to_device, default_padding_side: as in HookedTransformer. The tokenizer is
            copied, never modified.

    Raises:
        ValueError, TypeError: as for `HookedTransformerConfig`; or fields that only loaded models
            have.

    Example:
        >>> from bridge.legacy import HookedTransformer
        >>> model = HookedTransformer(
        ...     {
        ...         "n_layers": 1,
        ...         "d_model": 8,
        ...         "n_ctx": 5,
        ...         "d_head": 4,
        ...         "d_vocab": 10,
        ...         "act_fn": "relu",
        ...         "device": "cpu",
        ...     }
        ... )
        >>> model([[1, 2, 3]]).shape, model.blocks[0].attn.W_Q.shape
        (torch.Size([1, 3, 10]), torch.Size([2, 8, 4]))
    """

    #: For ungrouped keys and values, what was replaced: holder, attribute, and original value.
    grouped: list[Replaced] | None = None

    def __init__(
        self,
        cfg: Made,
        tokenizer: Any = None,
        move_to_device: bool = True,
        default_padding_side: Side = "right",
    ) -> None:
        config = None if isinstance(cfg, nn.Module | str) else HookedTransformerConfig.unwrap(cfg)
        model, tokenizer = self._make(config or cfg, tokenizer, move_to_device)
        super().__init__(model)
        if config is not None:
            for name in _KEPT:
                setattr(self.cfg, name, getattr(config, name))
            if config.init_weights:
                self.init_weights()
            self.cfg.ungroup_grouped_query_attention = config.ungroup_grouped_query_attention
        if tokenizer is not None:
            self.set_tokenizer(tokenizer, default_padding_side)

    @classmethod
    def _model_of(cls, config: HookedTransformerConfig, move_to_device: bool) -> nn.Module:
        fields = config.native()
        if not move_to_device:
            fields["device"] = None
        native = NativeConfig(**fields)
        # Keep the random state: `init_weights` draws from it, as in HookedTransformer.
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
        device: Device = None,
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
        """Load a model and process its weights. Steps that the model does not allow are skipped,
        with a warning in the log.

        The arguments are HookedTransformer's. An `hf_model` is copied if anything has to change; a
        tokenizer is always copied.

        Args:
            from_pretrained_kwargs: further arguments of `TransformerBridge.boot_transformers`, and
                ``torch_dtype`` for `dtype`.

        Raises:
            ValueError: an unknown name, a model that is not a decoder, or arguments that exclude
                each other.
            TypeError: an unknown argument.

        Example:
            >>> from bridge.embedded import MODEL_DIR
            >>> from bridge.legacy import HookedTransformer
            >>> model = HookedTransformer.from_pretrained(str(MODEL_DIR), device="cpu")
            >>> model.cfg.normalization_type
            'RMSPre'
        """
        if first_n_layers is not None and hf_model is not None:
            raise ValueError(
                "first_n_layers is for a model that is loaded, and hf_model is loaded already"
            )
        steps = (
            fold_ln,
            center_writing_weights,
            center_unembed,
            refactor_factored_attn_matrices,
            fold_value_biases,
        )
        options: Kwargs = {
            "device": device,
            "checkpoint_index": checkpoint_index,
            "checkpoint_value": checkpoint_value,
            "n_ctx": n_ctx,
        }
        official = loading.get_official_model_name(model_name)
        own = loading.own_format(official, from_pretrained_kwargs)
        if own is not None and hf_model is None:
            config = loading.get_pretrained_model_config(
                model_name,
                dtype=loading.as_type(dtype),
                first_n_layers=first_n_layers,
                default_prepend_bos=default_prepend_bos,
                **options,
                **own.hub,
            )
            bridge: Any = cls(config, tokenizer, move_to_device, default_padding_side)
            loading.load_own_format(bridge, own, config)
            bridge.process_weights_(*steps)
            return bridge
        bridge = cls._load(
            model_name,
            hf_model=hf_model,
            tokenizer=tokenizer,
            move_to_device=move_to_device,
            dtype=dtype,
            passed_on=from_pretrained_kwargs,
            n_devices=n_devices,
            processing=any(steps),
            **options,
        )
        bridge._check_decoder(model_name)
        bridge._keep_layers(first_n_layers)
        bridge._set_defaults(n_ctx, default_prepend_bos)
        if bridge.tokenizer is not None and default_padding_side != "right":
            bridge.set_tokenizer(bridge.tokenizer, default_padding_side)
        if any(steps):
            bridge.process_weights_(*steps)
        return bridge

    @classmethod
    def from_pretrained_no_processing(cls, model_name: str, **kwargs: Any) -> Any:
        """Load a model as `from_pretrained`, with all processing off by default."""
        return cls.from_pretrained(model_name, **(dict.fromkeys(TRANSFORMS, False) | kwargs))

    def _check_decoder(self, model_name: str) -> None:
        """Reject a model that another class loads."""
        if self.core.config.is_encoder_decoder:
            raise ValueError(
                f"{model_name} is an encoder-decoder model: HookedEncoderDecoder.from_pretrained"
                " loads it"
            )
        if self.cfg.attention_dir == "bidirectional":
            raise ValueError(
                f"{model_name} reads in both directions: HookedEncoder.from_pretrained loads it"
            )

    def _set_defaults(self, n_ctx: int | None, default_prepend_bos: bool | None) -> None:
        """Set the longest input, and whether texts start with BOS; None: HookedTransformer's
        default."""
        cfg = self.cfg
        if n_ctx is None:
            loading.cap_context(cfg)
        else:
            context_fields(self.core.config, n_ctx)  # an `hf_model` may have fewer positions
            cfg.n_ctx = n_ctx
        cfg.default_prepend_bos = loading.starts_with_bos(cfg, default_prepend_bos)

    def _keep_layers(self, n: int | None) -> None:
        """Keep the first layers; None: all."""
        if n is None:
            return
        if not 0 <= n <= self.cfg.n_layers:
            raise ValueError(
                f"first_n_layers is {n}; {self.cfg.model_name} has {self.cfg.n_layers}"
            )
        parent, _, last = self.block_paths[0].rpartition(".")[0].rpartition(".")
        holder, config = self.original_model.get_submodule(parent), self.core.config
        setattr(holder, last, getattr(holder, last)[:n])
        config.num_hidden_layers = n
        if isinstance(getattr(config, "layer_types", None), list):
            config.layer_types = config.layer_types[:n]
        self._rewire()

    def set_tokenizer(self, tokenizer: Any, default_padding_side: Side = "right") -> None:
        """Set a copy of a tokenizer that uses EOS for padding and BOS if it has no token for
        them.
        """
        self.tokenizer = tokenizer = loading.copied_tokenizer(tokenizer, default_padding_side)
        self.cfg.tokenizer_name = tokenizer.name_or_path or None
        self.cfg.tokenizer_prepends_bos = self.tokenizer_facts.adds_bos

    def init_weights(self) -> None:
        """Redraw the matrices of a model made from a configuration, with the same numbers as
        HookedTransformer, from `cfg.seed` or torch's random state.
        """
        if not isinstance(self.core, NativeModel):
            raise TypeError(
                f"{self.cfg.model_name} was loaded: weights are drawn of models made from a"
                " configuration"
            )
        if self.cfg.seed is not None:
            torch.manual_seed(self.cfg.seed)
        in_order = sorted(self.weights.getters, key=self.place_of)
        for name in in_order:
            if "W_" in name:
                self.write({name: self._drawn(name, self.weights[name])})

    def _drawn(self, name: str, weight: Tensor) -> Tensor:
        """Draw a matrix whose input axis is the second to last."""
        cfg = self.cfg
        assert isinstance(cfg, HookedTransformerConfig)
        fan_in = weight.shape[-2]
        fan_out = weight.shape[:-2].numel() * weight.shape[-1]
        if cfg.init_mode == "muP":
            std = 1.0 if "embed" in name else fan_in**-0.5
            return torch.empty(weight.shape, dtype=weight.dtype, device="cpu").normal_(std=std)
        return draw(
            cfg.init_mode, cfg.initializer_range, weight.shape, fan_in, fan_out, weight.dtype
        )

    def fill_missing_keys(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add missing weights, as `loading_from_pretrained.fill_missing_keys`."""
        return loading.fill_missing_keys(self, state_dict)

    # Separate keys and values for each query head, in models with grouped-query attention.

    def set_ungroup_grouped_query_attention(self, ungroup_grouped_query_attention: bool) -> None:
        """Set whether each query head has its own key and value in ``hook_k``, ``hook_v``,
        ``hook_k_input``, ...

        If True, the rows of the key and value projections are repeated for each query head of a
        group: the Hugging Face model computes the same, with as many key heads as query heads.
        False restores the projections. Read older caches before the change: their patterns are
        computed on access.

        Raises:
            ValueError: keys and values do not come from separate layers, or the model's output
                would change.
            RuntimeError: hooks are attached; or weights changed in between, which False would
                discard.
        """
        n_kv = self.cfg.n_key_value_heads
        if ungroup_grouped_query_attention and self.grouped is None and n_kv is not None:
            self._check_unheard()
            self._ungroup(n_kv)
        elif not ungroup_grouped_query_attention and self.grouped is not None:
            self._check_unheard()
            self._check_unchanged(self.grouped)
            self._regroup()
        self.cfg.ungroup_grouped_query_attention = ungroup_grouped_query_attention

    def _check_unchanged(self, grouped: list[Replaced]) -> None:
        """Check that no weight of keys and values was changed since they were ungrouped."""
        groups = self.cfg.n_heads // next(old for _, name, old in grouped if name in _COUNTS)
        for holder, name, old in grouped:
            if not isinstance(old, nn.Linear):
                continue
            current = getattr(holder, name)
            old.to(current.weight)  # if the model was moved since, in its dtype
            if not _same(current, _repeated(old, groups, self.cfg)):
                raise RuntimeError(
                    f"{name} was changed since keys and values were ungrouped: that would be lost"
                )

    def _check_unheard(self) -> None:
        if self.spliced:
            raise RuntimeError(
                f"a module is spliced in at {', '.join(self.spliced)}, which would be lost: put a"
                " bare HookPoint() there first"
            )
        if self.wiring.listening:
            raise RuntimeError(
                "hooks are attached, which would be lost: reset_hooks(including_permanent=True)"
                " first"
            )

    def _ungroup(self, n_kv: int) -> None:
        """Repeat the rows of the projections; undo it if the model's output changes."""
        replaced = [
            entry for path in self.block_paths for entry in self._grouped_in_block(path, n_kv)
        ]
        config = self.core.config.get_text_config()
        for name in (*_COUNTS, "n_key_value_heads"):
            if hasattr(config, name):
                replaced.append((config, name, n_kv))
        groups = self.cfg.n_heads // n_kv
        before = self._probe()
        self.grouped = replaced
        try:
            for holder, name, old in replaced:
                new: Any = 1 if name == "num_key_value_groups" else self.cfg.n_heads
                if isinstance(old, nn.Linear):
                    new = _repeated(old, groups, self.cfg)
                setattr(holder, name, new)
            self._rewire()
            exact = self.cfg.dtype in (torch.float32, torch.float64)
            if not torch.allclose(self._probe(), before, atol=1e-4 if exact else 0.1):
                raise ValueError(
                    f"keys and values of {self.cfg.model_name} cannot be ungrouped: its output"
                    " would change"
                )
        except BaseException:
            self._regroup()
            raise

    def _grouped_in_block(self, path: str, n_kv: int) -> list[Replaced]:
        """Return the attributes that ungrouping replaces in a block: holder, name, and current
        value."""
        attn = self.architecture.stack.attn
        assert attn
        module = self.original_model.get_submodule(join(path, attn.path))
        width = n_kv * self.cfg.d_head
        grouped: list[Replaced] = []
        for projection in (attn.k, attn.v):
            holder_path, _, name = projection.path.rpartition(".")
            holder = module.get_submodule(holder_path)
            layer = getattr(holder, name)
            if type(layer) is not nn.Linear or layer.out_features != width:
                raise ValueError(
                    f"keys and values of {self.cfg.model_name} cannot be ungrouped:"
                    f" {projection.path} in {join(path, attn.path)} is no linear layer to their"
                    f" {width} dimensions alone"
                )
            grouped.append((holder, name, layer))
        grouped += [(module, name, n_kv) for name in _COUNTS if hasattr(module, name)]
        return [*grouped, (module, "num_key_value_groups", self.cfg.n_heads // n_kv)]

    def _regroup(self) -> None:
        for holder, name, old in self.grouped or ():
            setattr(holder, name, old)
        self.grouped = None
        self._rewire()

    @torch.no_grad()
    def _probe(self) -> Tensor:
        """Return log-probabilities of a few tokens."""
        length = min(6, self.cfg.n_ctx or 6)
        tokens = torch.arange(length, device=self.cfg.device)[None] * 7 % self.cfg.d_vocab
        with evaluating(self.original_model):
            logits: Tensor = self.original_model(input_ids=tokens, use_cache=False).logits
        return logits.float().log_softmax(-1)

    def _rewire(self) -> None:
        """Rebuild the bridge around a changed model."""
        cfg, model, tokenizer, grouped = self.cfg, self.original_model, self.tokenizer, self.grouped
        self.__dict__.pop("_tree", None)
        TransformerBridge.__init__(self, model)  # a user's subclass may have other arguments
        for name in ("n_layers", "n_key_value_heads", "attn_types"):
            setattr(cfg, name, getattr(self.cfg, name))
        self.cfg, self.tokenizer, self.grouped = cfg, tokenizer, grouped


def _repeated(old: nn.Linear, groups: int, cfg: Any) -> nn.Linear:
    new = nn.Linear(old.in_features, old.out_features * groups, old.bias is not None, device="meta")
    for name, values in old.named_parameters():
        heads = values.detach().unflatten(0, (-1, cfg.d_head))
        rows = heads.repeat_interleave(groups, 0).flatten(0, 1)
        setattr(new, name, nn.Parameter(rows, requires_grad=values.requires_grad))
    return new.train(old.training)


def _same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def _nothing_is_drawn(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Skip the random initialisation of a model whose matrices `init_weights` will draw; biases are
    zero.
    """
    # Functions of tensors, and of torch.nn.init.
    if func.__name__ not in ("normal_", "uniform_", "kaiming_uniform_"):
        return func(*args, **kwargs)
    tensor = args[0] if args else kwargs["tensor"]
    with torch.no_grad():
        return tensor.zero_() if tensor.ndim == 1 else tensor


def one_layer_model(cfg: Any, fields: Kwargs, *more: Any, **kwargs: Any) -> HookedTransformer:
    """Return a one-layer model for a part that a user creates from a configuration, such as a
    block."""
    config = HookedTransformerConfig.unwrap(cfg)
    length = kwargs.get("length", more[0] if more and "normalization_type" in fields else None)
    changes: Kwargs = {
        "n_layers": 1,
        "tokenizer_name": None,
        "d_vocab": max(config.d_vocab, 1),
        "seed": None,
        **fields,
        "d_vocab_out": max(config.d_vocab_out, 1),
    }
    if isinstance(length, int):
        changes["d_model"] = length
    return HookedTransformer(replace(config, **changes))
