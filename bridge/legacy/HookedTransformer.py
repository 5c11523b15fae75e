"""`HookedTransformer`: a bridge that is made and called as HookedTransformer is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import bridge.legacy.loading_from_pretrained as loading
from bridge.legacy.HookedTransformerConfig import HookedTransformerConfig
from bridge.legacy.loading_from_pretrained import (
    LegacyLoading,
    Made,
    as_type,
    copied_tokenizer,
    get_official_model_name,
    load_own_format,
    own_format,
    starts_with_bos,
)
from bridge.legacy.reweighing import TRANSFORMS, Ungrouping
from bridge.legacy.table import named
from bridge.legacy.utilities import draw
from bridge.loading.loading import context_fields
from bridge.native import NativeConfig, NativeModel

__getattr__ = named(__name__)
SingleLoss = Float[Tensor, ""]
LossPerToken = Float[Tensor, "batch pos-1"]
Loss = SingleLoss | LossPerToken

Side = Literal["left", "right"]
#: Fields of a configuration that say nothing of the weights, and that the model's keeps.
_KEPT = {
    "init_mode", "initializer_range", "init_weights", "use_hook_tokens", "trust_remote_code", "seed",
    "use_NTK_by_parts_rope", "NTK_by_parts_low_freq_factor",
    "NTK_by_parts_high_freq_factor", "NTK_by_parts_factor", "NTK_original_ctx_len",
}  # fmt: skip


class HookedTransformer(Ungrouping, LegacyLoading):
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
            with _NothingIsDrawn():
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
        own = own_format(get_official_model_name(model_name), from_pretrained_kwargs)
        if own is not None and hf_model is None:
            config = loading.get_pretrained_model_config(
                model_name, device=device, dtype=as_type(dtype), first_n_layers=first_n_layers,
                default_prepend_bos=default_prepend_bos, checkpoint_index=checkpoint_index,
                checkpoint_value=checkpoint_value, n_ctx=n_ctx, **own.hub,
            )  # fmt: skip
            bridge: Any = cls(config, tokenizer, move_to_device, default_padding_side)
            load_own_format(bridge, own, config)
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
        cfg.default_prepend_bos = starts_with_bos(cfg, default_prepend_bos)
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
        self.tokenizer = tokenizer = copied_tokenizer(tokenizer, default_padding_side)
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


class _NothingIsDrawn(TorchFunctionMode):
    """While a model is made whose matrices `init_weights` draws at once: they are left empty, and biases are zero."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in ("normal_", "uniform_", "kaiming_uniform_"):  # of tensors, and of torch.nn.init
            return func(*args, **(kwargs or {}))
        tensor = args[0] if args else (kwargs or {})["tensor"]
        with torch.no_grad():
            return tensor.zero_() if tensor.ndim == 1 else tensor


def one_layer_model(cfg: Any, fields: dict[str, Any], *more: Any, **kwargs: Any) -> HookedTransformer:
    """A model around a part that is made from a configuration."""
    config = HookedTransformerConfig.unwrap(cfg)
    length = kwargs.get("length", more[0] if more and "normalization_type" in fields else None)
    changes = {"n_layers": 1, "tokenizer_name": None, "d_vocab": max(config.d_vocab, 1), "seed": None} | fields
    changes |= {"d_vocab_out": max(config.d_vocab_out, 1)} | ({"d_model": length} if isinstance(length, int) else {})
    return HookedTransformer(replace(config, **changes))
