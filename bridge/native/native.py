"""`NativeModel`: a small transformer in the style of Hugging Face's own models."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, ClassVar, no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    create_sliding_window_causal_mask,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mixtral.modeling_mixtral import (
    MixtralExperts,
    MixtralSparseMoeBlock,
    MixtralTopKRouter,
)
from transformers.utils.output_capturing import capture_outputs

from adapters.attention import result_of, scores_of
from adapters.config import ModelFields
from adapters.inputs import PAST, with_past_named
from bridge.hooks.names import suggestion

# --------------------------------------------------------------------------------------------------
# `NativeConfig`: the configuration of a native model, with HookedTransformer's field names.
# --------------------------------------------------------------------------------------------------


ACT_FNS = ("relu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "silu", "solu", "solu_ln")
INIT_MODES = ("gpt2", "xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal")

_CHOICES: dict[str, tuple[Any, ...]] = {
    "act_fn": (None, *ACT_FNS),
    "normalization_type": (None, "LN", "LNPre", "RMS", "RMSPre"),
    "positional_embedding_type": ("standard", "rotary", "shortformer", "none"),
    "attention_dir": ("causal", "bidirectional"),
    "init_mode": INIT_MODES,
}
_LEAST = {
    "n_layers": 0,
    "d_model": 1,
    "n_ctx": 1,
    "d_vocab": 0,
    "d_vocab_out": 0,
    "n_heads": 1,
    "d_head": 1,
    "n_key_value_heads": 1,
    "d_mlp": 1,
    "rotary_dim": 2,
    "window_size": 1,
    "num_experts": 1,
    "experts_per_token": 1,
}
_NUMBERS = (
    "eps",
    "attn_scale",
    "rotary_base",
    "initializer_range",
    "attn_scores_soft_cap",
    "output_logits_soft_cap",
    "NTK_by_parts_low_freq_factor",
    "NTK_by_parts_high_freq_factor",
    "NTK_by_parts_factor",
    "NTK_original_ctx_len",
)
_FLAGS = (
    "attn_only",
    "gated_mlp",
    "parallel_attn_mlp",
    "final_rms",
    "use_attn_scale",
    "scale_attn_by_inverse_layer_idx",
    "use_local_attn",
    "use_qk_norm",
    "use_normalization_before_and_after",
    "use_NTK_by_parts_rope",
    "init_weights",
    "default_prepend_bos",
    "use_attn_result",
    "use_split_qkv_input",
    "use_attn_in",
    "use_hook_mlp_in",
)
_NOT_SET = -1  # HookedTransformerConfig's own default
_REQUIRED = ("n_layers", "d_model", "n_ctx", "d_vocab")
#: HookedTransformerConfig's fields that are not supported here, with the reasons.
_ELSEWHERE = {
    "use_hook_tokens": "the hook point embed.hook_in always shows the tokens",
    "n_devices": "move the model with `to`",
    "n_params": "it is counted: see the bridge's cfg.n_params",
}


# Transformers turns it into a dataclass whose constructor accepts more than its fields
@no_type_check
class NativeConfig(PreTrainedConfig, ModelFields):
    """The configuration of a native model. All fields are keyword arguments; the remaining ones are
    computed when the configuration is made.

    Args:
        n_layers, d_model, n_ctx, d_vocab: required: the number of blocks, the width of the residual
            stream, the longest input, and the number of tokens. Without learned positions, `n_ctx`
            limits only the bridge.
        n_heads, d_head: at least one is required; by default, the other is ``d_model`` divided by
            it.
        n_key_value_heads: for grouped queries, a divisor of `n_heads`; None: the same as `n_heads`.
        d_mlp: by default ``4 * d_model``; there is none with `attn_only`.
        act_fn: one of ``relu``, ``gelu``, ``gelu_new``, ``gelu_fast``, ``gelu_pytorch_tanh``,
            ``silu``, ``solu``, and ``solu_ln`` (SoLU with a layer norm after it); required unless
            `attn_only`.
        d_vocab_out: the number of outputs, by default `d_vocab`.
        eps: the epsilon of the norms.
        attn_only: no MLPs.
        gated_mlp: ``act_fn(gate) * up``. As in Llama, neither of the two projections has a bias.
        parallel_attn_mlp: attention and MLP both read the block's input, each through its own norm.
        normalization_type: None, ``LN``, ``RMS``, or ``LNPre`` and ``RMSPre``, which have no
            weights.
        final_rms: the last norm is an RMS norm, regardless of the others.
        positional_embedding_type: ``standard``: learned, added to the residual stream.
            ``shortformer``: learned, added to the inputs of queries and keys. ``rotary``: element i
            of a head is rotated with element ``i + rotary_dim / 2``, as in GPT-NeoX and Llama.
            ``none``.
        rotary_dim, rotary_base: the number of rotated elements of each head (all), and the base
            (10000).
        attention_dir: ``causal`` or ``bidirectional``.
        use_attn_scale, attn_scale: whether scores are divided, and by what (the root of `d_head`).
        scale_attn_by_inverse_layer_idx: divide scores by ``layer + 1`` as well.
        use_local_attn, window_size, attn_types: a window for layers whose type is ``local``; others
            are ``global``.
        use_qk_norm: an RMS norm over each head's queries, and one over its keys.
        use_normalization_before_and_after: also norms on the outputs of attention and MLP, as in
            Gemma 2.
        attn_scores_soft_cap, output_logits_soft_cap: ``cap * tanh(x / cap)`` of scores, and of
            logits; -1: none.
        num_experts, experts_per_token: mixtures of gated experts in place of MLPs, as in Mixtral.
        use_NTK_by_parts_rope: low frequencies of the rotation are divided by
            ``NTK_by_parts_factor``, as in Llama 3.1; the other fields with this prefix define which
            are low.
        init_weights: False keeps torch's initial weights.
        init_mode: ``gpt2``: normal; or ``xavier_...``, ``kaiming_...`` followed by ``uniform`` or
            ``normal``. Biases are zero.
        initializer_range: for ``gpt2`` the standard deviation, by default ``0.8 / sqrt(d_model)``;
            for the others a factor, by default 1.
        seed: draw the same weights each time, without changing the caller's random state; None:
            draw from that state.
        dtype, device: the dtype and device of the weights; None: torch's default. They do not
            affect how a saved model is loaded.
        model_name, tokenizer_name, default_prepend_bos: see `ModelConfig`.
        use_attn_result, use_split_qkv_input, use_attn_in, use_hook_mlp_in: the expensive hook
            points that an unfiltered cache contains from the start.

    Raises:
        TypeError: an unknown or missing field, or a value of the wrong type.
        ValueError: a value out of range, or fields that contradict each other.

    Example:
        >>> from bridge import NativeConfig
        >>> cfg = NativeConfig(
        ...     n_layers=2, d_model=64, n_heads=4, d_vocab=50, n_ctx=32, attn_only=True
        ... )
        >>> cfg.d_head, cfg.initializer_range
        (16, 0.1)
    """

    model_type = "transformer_bridge_native"
    #: Until 5.19, transformers makes a configuration without arguments when one is saved, unless
    #: this is true.
    has_no_defaults_at_init: ClassVar[bool] = True
    # Required by transformers' own code (caches, masks, generation).
    attribute_map = {  # noqa: RUF012 - the base class declares it
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_key_value_heads",
        "head_dim": "d_head",
        "intermediate_size": "d_mlp",
        "hidden_act": "act_fn",
        "vocab_size": "d_vocab",
        "max_position_embeddings": "n_ctx",
        "sliding_window": "window_size",
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
    }

    n_layers: int = _NOT_SET
    d_model: int = _NOT_SET
    n_ctx: int = _NOT_SET
    d_vocab: int = _NOT_SET
    n_heads: int = _NOT_SET
    d_head: int = _NOT_SET
    d_mlp: int | None = None
    act_fn: str | None = None
    d_vocab_out: int = _NOT_SET
    eps: int | float = 1e-5
    normalization_type: str | None = "LN"
    positional_embedding_type: str = "standard"
    rotary_base: int | float | None = None
    attn_scale: int | float | None = None
    use_NTK_by_parts_rope: bool = False
    NTK_by_parts_low_freq_factor: int | float = 1.0
    NTK_by_parts_high_freq_factor: int | float = 4.0
    NTK_by_parts_factor: int | float = 8.0
    NTK_original_ctx_len: int = 8192
    init_weights: bool = True
    init_mode: str = "gpt2"
    initializer_range: int | float = _NOT_SET
    device: str | torch.device | None = None
    model_name: str = "native"

    @property
    def local_layers(self) -> list[bool]:
        """Return which layers have local attention."""
        types = (self.attn_types or []) if self.use_local_attn else []
        local = [kind == "local" for kind in types[: self.n_layers]]
        return local + [False] * (self.n_layers - len(local))

    def __post_init__(self, **kwargs: Any) -> None:
        _check_names(type(self), kwargs)
        _check_values(self)
        _complete(self)
        for breaks, message in _RULES:
            conflict = breaks(self)
            if conflict:
                raise ValueError(message.format(self, conflict))
        super().__post_init__(**kwargs)


# Entries besides the fields: keys of config.json that Hugging Face passes, and keys that weight
# processing adds.
_FROM_HUGGING_FACE = {
    "model_type",
    "name_or_path",
    "attn_implementation",
    "experts_implementation",
    "output_attentions",
    "torch_dtype",
    "num_labels",
    "_commit_hash",
    "transformer_bridge_processed",
    "layer_types",
    "router_jitter_noise",
    "rope_parameters",
}


def _check_names(cls: type[NativeConfig], arguments: dict[str, Any]) -> None:
    for name in arguments:
        if name in _ELSEWHERE:
            raise TypeError(f"NativeConfig has no field {name}: {_ELSEWHERE[name]}")
        if name not in _FROM_HUGGING_FACE:
            standard = {f.name for f in fields(PreTrainedConfig)}
            known = [f.name for f in fields(cls) if f.name not in standard] + ["dtype"]
            meant = cls.attribute_map.get(name)
            hint = f" Here it is called {meant}." if meant else suggestion(name, known)
            raise TypeError(f"NativeConfig has no field {name!r}.{hint}")


def _check_values(cfg: NativeConfig) -> None:
    """Check each field on its own."""
    missing = [name for name in _REQUIRED if getattr(cfg, name) in (None, _NOT_SET)]
    if missing:
        raise TypeError(f"NativeConfig needs {', '.join(missing)}")
    for name, least in _LEAST.items():
        _check_count(cfg, name, least)
    for name, choices in _CHOICES.items():
        value = getattr(cfg, name)
        if value not in choices:
            hint = suggestion(str(value), [choice for choice in choices if choice])
            raise ValueError(
                f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}.{hint}"
            )
    for name in _FLAGS:
        if not isinstance(getattr(cfg, name), bool):
            raise TypeError(f"{name} is {getattr(cfg, name)!r}; it must be True or False")
    for name in _NUMBERS:
        _check_number(cfg, name)
    if cfg.seed is not None and type(cfg.seed) is not int:
        raise TypeError(f"seed is {cfg.seed!r}; it must be a whole number or None")
    if cfg.tie_word_embeddings is not False:
        raise ValueError(
            "tie_word_embeddings is not available: a native model unembeds with weights of its own"
        )
    _check_torch(cfg)


def _check_count(cfg: NativeConfig, name: str, least: int) -> None:
    """Check a field that must be an integer, if it is set."""
    value = getattr(cfg, name)
    if value is None or value == _NOT_SET:
        return
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is {value!r}; it must be a whole number")
    setattr(cfg, name, operator.index(value))
    if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")


def _check_number(cfg: NativeConfig, name: str) -> None:
    """Check a field that must be a number, if it is set."""
    value = getattr(cfg, name)
    if value is None or (value == _NOT_SET and name != "eps"):
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}; it must be a number")
    may_be_zero = name in ("eps", "initializer_range")
    if not 0 < value < math.inf and not (value == 0 and may_be_zero):
        raise ValueError(f"{name} is {value}; it must be positive")


def _check_torch(cfg: NativeConfig) -> None:
    dtype: Any = cfg.dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), None)
    is_float = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    if cfg.dtype is not None and not is_float:
        raise ValueError(
            f"dtype is {cfg.dtype!r}; it must be a floating-point type such as torch.float32"
        )
    cfg.dtype = dtype
    if cfg.device is not None:
        try:
            cfg.device = str(torch.device(cfg.device))  # strings can be saved
        except RuntimeError as error:
            raise ValueError(f"device is {cfg.device!r}, which torch does not know") from error


def _complete(cfg: NativeConfig) -> None:
    """Compute the fields that are determined by others."""
    _complete_heads(cfg)
    if cfg.d_vocab_out == _NOT_SET:
        cfg.d_vocab_out = cfg.d_vocab
    if cfg.initializer_range == _NOT_SET:
        gpt2 = cfg.init_mode == "gpt2"
        cfg.initializer_range = 0.8 / math.sqrt(cfg.d_model) if gpt2 else 1.0
    for name in ("n_key_value_heads", "d_mlp", "rotary_dim", "attn_scale"):
        if getattr(cfg, name) == _NOT_SET:
            setattr(cfg, name, None)
    if cfg.d_mlp is None and not cfg.attn_only:
        cfg.d_mlp = 4 * cfg.d_model
    if cfg.attn_scale is None and cfg.use_attn_scale:
        cfg.attn_scale = math.sqrt(cfg.d_head)
    _complete_for_transformers(cfg)
    if cfg.positional_embedding_type == "rotary":
        cfg.rotary_dim = cfg.d_head if cfg.rotary_dim is None else cfg.rotary_dim
        cfg.rotary_base = 10000.0 if cfg.rotary_base is None else float(cfg.rotary_base)


def _complete_heads(cfg: NativeConfig) -> None:
    """Compute the number of heads from their width, or the width from the number."""
    if cfg.n_heads == _NOT_SET and cfg.d_head == _NOT_SET:
        raise TypeError("NativeConfig needs n_heads or d_head")
    for name, other in (("d_head", "n_heads"), ("n_heads", "d_head")):
        if getattr(cfg, name) == _NOT_SET:
            count = getattr(cfg, other)
            if cfg.d_model % count:
                raise ValueError(
                    f"d_model={cfg.d_model} is not divisible by {other}={count}: give {name} as"
                    " well"
                )
            setattr(cfg, name, cfg.d_model // count)


def _complete_for_transformers(cfg: NativeConfig) -> None:
    """Set the fields that transformers' caches, masks and mixtures need."""
    if cfg.use_local_attn and isinstance(cfg.attn_types, list):
        cfg.layer_types = [
            "sliding_attention" if kind == "local" else "full_attention" for kind in cfg.attn_types
        ]
    cfg.router_jitter_noise = 0.0
    if cfg.use_NTK_by_parts_rope:
        cfg.rope_parameters = {
            "rope_type": "llama3",
            "rope_theta": float(cfg.rotary_base or 10000.0),
            "factor": cfg.NTK_by_parts_factor,
            "low_freq_factor": cfg.NTK_by_parts_low_freq_factor,
            "high_freq_factor": cfg.NTK_by_parts_high_freq_factor,
            "original_max_position_embeddings": cfg.NTK_original_ctx_len,
        }


def _lacks_windows(cfg: NativeConfig) -> bool:
    """Tell whether local attention is requested but incompletely specified."""
    if not cfg.use_local_attn:
        return False
    types = cfg.attn_types if isinstance(cfg.attn_types, list) else []
    known = {*types} <= {"local", "global"}
    return cfg.window_size is None or len(types) < cfg.n_layers or not known


def _lacks_experts(cfg: NativeConfig) -> bool:
    """Tell whether experts are requested with invalid numbers."""
    if cfg.num_experts is None:
        return False
    no_experts = cfg.attn_only or str(cfg.act_fn).startswith("solu")
    return no_experts or (cfg.experts_per_token or 0) > cfg.num_experts


def _idle(cfg: NativeConfig) -> str:
    """Return the name of a field that describes an MLP although there is none; "" if there is none.
    (`act_fn` describes an MLP but does not request one.)
    """
    if not cfg.attn_only:
        return ""
    names = ("d_mlp", "gated_mlp", "parallel_attn_mlp")
    return ", ".join(name for name in names if getattr(cfg, name))


#: Conflicts between fields, with their error messages.
_RULES: tuple[tuple[Callable[[NativeConfig], object], str], ...] = (
    (
        _lacks_windows,
        (
            "use_local_attn=True needs window_size and attn_types, a list of 'local' and 'global'"
            " for {0.n_layers} layers; they are {0.window_size!r} and {0.attn_types!r}"
        ),
    ),
    (
        lambda c: c.use_local_attn and c.attention_dir != "causal",
        "use_local_attn=True is for attention_dir='causal'",
    ),
    (
        lambda c: not c.use_local_attn and (c.window_size is not None or c.attn_types is not None),
        "window_size and attn_types are for use_local_attn=True",
    ),
    (
        lambda c: (c.num_experts is None) != (c.experts_per_token is None),
        "num_experts and experts_per_token go together: give both or neither",
    ),
    (
        _lacks_experts,
        (
            "experts_per_token={0.experts_per_token} of num_experts={0.num_experts},"
            " act_fn={0.act_fn!r} and attn_only={0.attn_only} exclude each other"
        ),
    ),
    (
        lambda c: (
            c.use_normalization_before_and_after
            and (c.normalization_type is None or c.parallel_attn_mlp)
        ),
        (
            "use_normalization_before_and_after=True needs norms, and attention and MLP one after"
            " the other"
        ),
    ),
    (
        lambda c: c.use_NTK_by_parts_rope and c.positional_embedding_type != "rotary",
        "use_NTK_by_parts_rope=True is for positional_embedding_type='rotary'",
    ),
    (
        lambda c: c.n_key_value_heads is not None and c.n_heads % c.n_key_value_heads,
        "n_heads={0.n_heads} is not divisible by n_key_value_heads={0.n_key_value_heads}",
    ),
    (_idle, "attn_only=True means that there is no MLP, but {1} says how it is to be"),
    (
        lambda c: not c.attn_only and c.act_fn is None,
        f"act_fn is needed for the MLPs: one of {', '.join(ACT_FNS)}; or set attn_only=True",
    ),
    (
        lambda c: c.gated_mlp and c.act_fn == "solu_ln",
        "gated_mlp=True and act_fn='solu_ln' exclude each other; act_fn='solu' can be gated",
    ),
    (
        lambda c: c.final_rms and c.normalization_type is None,
        "final_rms=True asks for a last norm, but normalization_type=None for no norms at all",
    ),
    (
        lambda c: not c.use_attn_scale and c.attn_scale is not None,
        "use_attn_scale=False and attn_scale={0.attn_scale} exclude each other",
    ),
    (
        lambda c: (
            c.positional_embedding_type == "rotary"
            and (c.rotary_dim or 0) not in range(0, c.d_head + 1, 2)
        ),
        "rotary_dim={0.rotary_dim} must be even and at most d_head={0.d_head}",
    ),
    (
        lambda c: c.positional_embedding_type != "rotary" and c.rotary_dim is not None,
        (
            "rotary_dim={0.rotary_dim} is for positional_embedding_type='rotary', not"
            " {0.positional_embedding_type!r}"
        ),
    ),
    (
        lambda c: c.positional_embedding_type != "rotary" and c.rotary_base is not None,
        (
            "rotary_base={0.rotary_base} is for positional_embedding_type='rotary', not"
            " {0.positional_embedding_type!r}"
        ),
    ),
)


#: The residual stream.
Stream = Float[Tensor, "batch pos d_model"]
#: Cosines and sines, ``[batch, 1, pos, rotary_dim]`` each.
Rotation = tuple[Tensor, Tensor]


def eager_attention_forward(
    module: _NativeAttention,
    query: Float[Tensor, "batch n_heads pos d_head"],
    key: Float[Tensor, "batch n_key_value_heads key_pos d_head"],
    value: Float[Tensor, "batch n_key_value_heads key_pos d_head"],
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Float[Tensor, "batch pos n_heads d_head"], Float[Tensor, "batch n_heads pos key_pos"]]:
    """Compute attention with explicit scores and pattern; transformers calls this "eager"."""
    cap = module.config.attn_scores_soft_cap
    scores = scores_of(query, key, scaling, cap if cap > 0 else None, attention_mask)
    pattern = torch.softmax(scores, dim=-1)
    return result_of(pattern, value).transpose(1, 2), pattern


def rotation(
    positions: Int[Tensor, "batch pos"], cfg: NativeConfig, dtype: torch.dtype
) -> Rotation:
    """Return the cosines and sines that rotate each position."""
    assert cfg.rotary_dim is not None
    assert cfg.rotary_base is not None
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    elements = torch.arange(0, cfg.rotary_dim, 2, dtype=exact, device=positions.device)
    frequencies = cfg.rotary_base ** -(elements / cfg.rotary_dim)
    if cfg.use_NTK_by_parts_rope:
        frequencies = by_parts(frequencies, cfg)
    angles = positions[:, None, :, None].to(exact) * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def by_parts(frequencies: Float[Tensor, " pair"], cfg: NativeConfig) -> Float[Tensor, " pair"]:
    """Scale frequencies by parts: divide low ones by a factor, keep high ones, and interpolate
    between (Peng et al. 2023, "YaRN", section 3.2, as in Llama 3.1).
    """
    low, high = cfg.NTK_by_parts_low_freq_factor, cfg.NTK_by_parts_high_freq_factor
    # Rotations within the original context length.
    turns = cfg.NTK_original_ctx_len * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / cfg.NTK_by_parts_factor)


def rotate(
    x: Float[Tensor, "batch heads pos d_head"], rotated: Rotation
) -> Float[Tensor, "batch heads pos d_head"]:
    """Rotate the first elements of each head: element i with element i + `rotary_dim` / 2."""
    cos, sin = rotated
    n = cos.shape[-1]
    turned, rest = x[..., :n], x[..., n:]
    first, second = turned.chunk(2, dim=-1)
    turned_by_quarter = torch.cat([-second, first], dim=-1)
    turned = turned * cos + turned_by_quarter * sin
    return torch.cat([turned, rest], dim=-1)


class SoLU(nn.Module):
    """The activation ``x * softmax(x)``."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states * hidden_states.softmax(-1)


def norm(cfg: NativeConfig, final: bool = False) -> nn.Module:
    """Return a norm of the residual stream; an identity without one, so that its hook points
    exist.
    """
    kind = cfg.normalization_type
    if kind is None:
        return nn.Identity()
    is_rms = kind.startswith("RMS") or (final and cfg.final_rms)
    cls = nn.RMSNorm if is_rms else nn.LayerNorm
    return cls(cfg.d_model, eps=cfg.eps, elementwise_affine=not kind.endswith("Pre"))


class _NativeAttention(nn.Module):
    """Multi-head attention.

    Args:
        config: the model's configuration.
        layer_idx: the block's index.
    """

    def __init__(self, config: NativeConfig, layer_idx: int) -> None:
        super().__init__()
        kv_heads = config.n_key_value_heads or config.n_heads
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.d_head
        self.num_key_value_groups = config.n_heads // kv_heads
        self.is_causal = config.attention_dir == "causal"
        divisor = (config.attn_scale or 1.0) if config.use_attn_scale else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            divisor *= layer_idx + 1
        self.scaling = 1.0 / divisor
        width, kv_width = config.n_heads * config.d_head, kv_heads * config.d_head
        self.q = nn.Linear(config.d_model, width)
        self.k = nn.Linear(config.d_model, kv_width)
        self.v = nn.Linear(config.d_model, kv_width)
        self.o = nn.Linear(width, config.d_model)
        if config.use_qk_norm:
            self.q_norm = nn.RMSNorm(config.d_head, eps=config.eps)
            self.k_norm = nn.RMSNorm(config.d_head, eps=config.eps)
        self.sliding_window = config.window_size if config.local_layers[layer_idx] else None

    def forward(
        self,
        hidden_states: Stream,
        attention_mask: Any = None,
        rotated: Rotation | None = None,
        shift: Float[Tensor, "#batch pos d_model"] | None = None,
        past_key_values: Cache | None = None,
    ) -> tuple[Stream, Tensor | None]:
        """Return the output, and the pattern if the attention implementation computes one."""
        # Shortformer: queries and keys include positions, values do not.
        placed = hidden_states if shift is None else hidden_states + shift
        projected = (self.q(placed), self.k(placed), self.v(hidden_states))
        query, key, value = (x.unflatten(-1, (-1, self.head_dim)) for x in projected)
        if self.config.use_qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if rotated is not None:
            query, key = rotate(query, rotated), rotate(key, rotated)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        window = {} if self.sliding_window is None else {"sliding_window": self.sliding_window}
        z, pattern = attend(
            self, query, key, value, attention_mask, scaling=self.scaling, dropout=0.0, **window
        )
        return self.o(z.flatten(-2)), pattern


class _NativeMLP(nn.Module):
    """A feed-forward layer.

    Args:
        config: the model's configuration.
    """

    def __init__(self, config: NativeConfig) -> None:
        super().__init__()
        assert config.d_mlp is not None
        assert config.act_fn is not None
        # A bias on the gated value would duplicate the output's bias: HookedTransformer adds it
        # after the product, Hugging Face before it. Without one, both agree.
        self.gate: nn.Linear | None = None
        if config.gated_mlp:
            self.gate = nn.Linear(config.d_model, config.d_mlp, bias=False)
        self.up = nn.Linear(config.d_model, config.d_mlp, bias=not config.gated_mlp)
        self.act = SoLU() if config.act_fn.startswith("solu") else ACT2FN[config.act_fn]
        # As in HookedTransformer, this is a layer norm regardless of the other norms; with weights
        # if they are of type LN.
        self.ln: nn.LayerNorm | None = None
        if config.act_fn == "solu_ln":
            affine = config.normalization_type == "LN"
            self.ln = nn.LayerNorm(config.d_mlp, config.eps, affine)
        self.down = nn.Linear(config.d_mlp, config.d_model)

    def forward(self, hidden_states: Stream) -> Stream:
        up = self.up(hidden_states)
        if self.gate is None:
            post = self.act(up)
        else:
            post = self.act(self.gate(hidden_states)) * up
        return self.down(post if self.ln is None else self.ln(post))


class NativeBlock(GradientCheckpointingLayer):
    """A layer.

    Args:
        config: the model's configuration.
        layer_idx: its index.
    """

    def __init__(self, config: NativeConfig, layer_idx: int) -> None:
        super().__init__()
        self.parallel = config.parallel_attn_mlp
        self.ln1 = norm(config)
        self.attn = _NativeAttention(config, layer_idx)
        if not config.attn_only:
            self.ln2 = norm(config)
        self.mlp: nn.Module | None = None
        if not config.attn_only:
            mixture = config.num_experts is not None
            self.mlp = MixtralSparseMoeBlock(config) if mixture else _NativeMLP(config)
        if config.use_normalization_before_and_after:
            self.ln1_post = norm(config)
            if self.mlp is not None:
                self.ln2_post = norm(config)
        self.after = config.use_normalization_before_and_after

    def forward(self, hidden_states: Stream, **kwargs: Any) -> Stream:
        attended = self.attn(self.ln1(hidden_states), **kwargs)[0]
        after = hidden_states + (self.ln1_post(attended) if self.after else attended)
        if self.mlp is None:
            return after
        output = self.mlp(self.ln2(hidden_states if self.parallel else after))
        return after + (self.ln2_post(output) if self.after else output)


class NativeModel(PreTrainedModel, GenerationMixin):
    """A transformer language model with random weights.

    Args:
        config: its configuration.

    Example:
        >>> import torch
        >>> from bridge.native import NativeConfig, NativeModel
        >>> model = NativeModel(
        ...     NativeConfig(n_layers=1, d_model=8, n_heads=2, d_vocab=10, n_ctx=5, attn_only=True)
        ... )
        >>> model(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 10])
    """

    config_class = NativeConfig
    config: NativeConfig
    _input_embed_layer = "embed"
    _no_split_modules = ["NativeBlock"]  # noqa: RUF012 - as the base class declares it
    _skip_keys_device_placement = list(PAST)  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    supports_gradient_checkpointing = True
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": NativeBlock,
        "attentions": _NativeAttention,
    }

    def __init__(self, config: NativeConfig) -> None:
        super().__init__(config)
        if config.attn_scores_soft_cap > 0:  # other kernels do not support it
            config._attn_implementation = "eager"
        with _seeded(config.seed):
            self.embed = nn.Embedding(config.d_vocab, config.d_model)
            learned = config.positional_embedding_type in ("standard", "shortformer")
            self.pos_embed = nn.Embedding(config.n_ctx, config.d_model) if learned else None
            blocks = [NativeBlock(config, index) for index in range(config.n_layers)]
            self.blocks = nn.ModuleList(blocks)
            self.ln_final = norm(config, final=True)
            self.unembed = nn.Linear(config.d_model, config.d_vocab_out)
            self.post_init()
        # `from_pretrained` makes the model on the meta device, and handles both itself.
        if self.embed.weight.device.type != "meta":
            self.to(device=config.device, dtype=config.dtype)  # type: ignore[call-arg]

    def get_output_embeddings(self) -> nn.Module:
        """Return the output layer."""
        return self.unembed

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the output layer."""
        self.unembed = new_embeddings

    def init_weights(self) -> None:
        """Draw the weights, unless the configuration keeps torch's own."""
        if self.config.init_weights:
            super().init_weights()

    def draw_weights(self) -> None:
        """Draw all weights again, as configured."""
        with _seeded(self.config.seed):
            self.apply(self._init_weights)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if isinstance(module, nn.Embedding):
            fan_in, fan_out = module.weight.shape
            self._draw(module.weight, fan_in, fan_out)
        elif isinstance(module, nn.Linear | MixtralTopKRouter | MixtralExperts):
            for matrix in module.parameters():
                if matrix is not bias:
                    *_, fan_out, fan_in = matrix.shape
                    self._draw(matrix, fan_in, fan_out)
        elif isinstance(weight, Tensor):
            init.ones_(weight)
        if isinstance(bias, Tensor):
            init.zeros_(bias)

    def _draw(self, matrix: Tensor, fan_in: int, fan_out: int) -> None:
        cfg = self.config
        drawn = draw(cfg.init_mode, cfg.initializer_range, matrix.shape, fan_in, fan_out)
        init.copy_(matrix, drawn)

    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        input_ids: Int[Tensor, "batch pos"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "#batch pos"] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Stream | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        cache: Cache | None = None,
    ) -> CausalLMOutputWithPast:
        """Run the model.

        Args:
            input_ids: tokens.
            attention_mask: ``[batch, pos]``, 1 for tokens and 0 for padding; past positions come
                first.
            position_ids: by default counted from the first position of the cache.
            past_key_values, cache: keys and values of earlier positions; those of this run are
                appended. (transformers uses the second name from 5.24 on.)
            inputs_embeds: token embeddings instead of tokens.
            use_cache: create a cache if none is passed; None: do not.
            output_attentions, output_hidden_states: also return each layer's pattern (with eager
                attention), and the residual stream before each layer and after the last.

        Raises:
            ValueError: both or neither of tokens and embeddings; too many positions for the learned
                embeddings; a cache for a bidirectional model.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if past_key_values is not None and cache is not None:
            raise ValueError(
                "past_key_values and cache are two names of one argument: give one of them"
            )
        config = self.config
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._cache(past_key_values if cache is None else cache, use_cache)
        position_ids = self._positions(x, position_ids, cache)
        mask, local = self._masks(x, attention_mask, cache, position_ids)
        x, kwargs = self._placed(x, position_ids)
        kwargs["past_key_values"] = cache
        for block, is_local in zip(self.blocks, config.local_layers, strict=True):
            x = block(x, attention_mask=local if is_local else mask, **kwargs)
        logits = self.unembed(self.ln_final(x))
        cap = config.output_logits_soft_cap
        if cap > 0:
            logits = cap * torch.tanh(logits / cap)
        output = {"logits": logits, "past_key_values": cache}
        names = CausalLMOutputWithPast.__dataclass_fields__
        return CausalLMOutputWithPast(**with_past_named(output, names))

    def _placed(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Return the embeddings with learned positions, and the rotation or shift that attention
        receives for other kinds of positions."""
        if self.pos_embed is not None:
            positions = self.pos_embed(position_ids)
            if self.config.positional_embedding_type == "shortformer":
                return x, {"shift": positions}
            return x + positions, {}
        if self.config.rotary_dim is not None:
            return x, {"rotated": rotation(position_ids, self.config, x.dtype)}
        return x, {}

    def _cache(self, cache: Cache | None, use_cache: bool | None) -> Cache | None:
        """Return the key-value cache to use."""
        if self.config.attention_dir != "causal" and (use_cache or cache is not None):
            raise ValueError(
                "a model that attends in both directions cannot use a cache: every position changes"
                " with each new one; pass use_cache=False"
            )
        return DynamicCache(config=self.config) if use_cache and cache is None else cache

    def _positions(self, x: Tensor, positions: Tensor | None, past: Cache | None) -> Tensor:
        """Return the position ids; learned embeddings limit their number."""
        before = 0 if past is None else past.get_seq_length()
        n = before + x.shape[1]
        if self.pos_embed is not None and n > self.config.n_ctx:
            raise ValueError(
                f"{n} positions are more than the n_ctx={self.config.n_ctx} learned ones"
            )
        if positions is not None:
            return positions
        places = torch.arange(x.shape[1], device=x.device)
        return (places + before).unsqueeze(0)

    def _masks(
        self, x: Tensor, mask: Tensor | None, past: Cache | None, positions: Tensor
    ) -> tuple[Any, Any]:
        """Return the attention masks of global and of local layers."""
        config = self.config
        if config.attention_dir != "causal":
            everywhere = create_bidirectional_mask(config, x, mask)
            return everywhere, everywhere
        causal = create_causal_mask(config, x, mask, past, positions)
        if not config.use_local_attn:
            return causal, causal
        return causal, create_sliding_window_causal_mask(config, x, mask, past, positions)


def draw(
    init_mode: str,
    initializer_range: float,
    shape: torch.Size,
    fan_in: int,
    fan_out: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Draw random weights on the CPU, so that they are the same on every device.

    Args:
        init_mode, initializer_range: fields of a `NativeConfig`.
        shape, dtype: the shape and dtype of the weights.
        fan_in, fan_out: the numbers of inputs and outputs.
    """
    kind, _, distribution = init_mode.partition("_")
    std = initializer_range
    if kind == "xavier":
        std *= math.sqrt(2 / (fan_in + fan_out))
    elif kind == "kaiming":
        std *= math.sqrt(2 / fan_in)
    empty = torch.empty(shape, dtype=dtype, device="cpu")
    if distribution == "uniform":
        bound = std * math.sqrt(3)
        return empty.uniform_(-bound, bound)
    return empty.normal_(0, std)


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Seed the random generator for a ``with`` statement, and restore the caller's state
    afterwards.
    """
    if seed is None:
        yield
        return
    # Torch's own layers draw on the default device, which may be an accelerator.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=list(devices)):
        torch.default_generator.manual_seed(seed)
        yield
