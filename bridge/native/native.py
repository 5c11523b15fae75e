"""`NativeModel`: a small transformer, written as Hugging Face's own are, so that whatever works on them works on it."""

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
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralSparseMoeBlock, MixtralTopKRouter
from transformers.utils.output_capturing import capture_outputs

from adapters.attention import result_of, scores_of
from adapters.config import ModelFields
from adapters.inputs import PAST, with_past_named
from bridge.hooks.names import suggestion

# ----------------------------------------------------------------------------------------------------------------------
# `NativeConfig`: what a native model is made of, in HookedTransformer's field names.
# ----------------------------------------------------------------------------------------------------------------------


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
    "n_layers": 0, "d_model": 1, "n_ctx": 1, "d_vocab": 0, "d_vocab_out": 0, "n_heads": 1, "d_head": 1,
    "n_key_value_heads": 1, "d_mlp": 1, "rotary_dim": 2, "window_size": 1, "num_experts": 1, "experts_per_token": 1,
}  # fmt: skip
_NUMBERS = (
    "eps", "attn_scale", "rotary_base", "initializer_range", "attn_scores_soft_cap", "output_logits_soft_cap",
    "NTK_by_parts_low_freq_factor", "NTK_by_parts_high_freq_factor", "NTK_by_parts_factor", "NTK_original_ctx_len",
)  # fmt: skip
_FLAGS = (
    "attn_only", "gated_mlp", "parallel_attn_mlp", "final_rms", "use_attn_scale", "scale_attn_by_inverse_layer_idx",
    "use_local_attn", "use_qk_norm", "use_normalization_before_and_after", "use_NTK_by_parts_rope",
    "init_weights", "default_prepend_bos", "use_attn_result", "use_split_qkv_input", "use_attn_in", "use_hook_mlp_in",
)  # fmt: skip
_NOT_SET = -1  # HookedTransformerConfig's own sign for it
_REQUIRED = ("n_layers", "d_model", "n_ctx", "d_vocab")
#: HookedTransformerConfig's fields that have no place here, and why.
_ELSEWHERE = {
    "use_hook_tokens": "the hook point embed.hook_in always shows the tokens",
    "n_devices": "move the model with `to`",
    "n_params": "it is counted: see the bridge's cfg.n_params",
}


@no_type_check  # transformers makes a dataclass of it whose constructor takes more than its fields
class NativeConfig(PreTrainedConfig, ModelFields):
    """What a native model is made of. All fields are given by name, and completed when the configuration is made.

    Args:
        n_layers, d_model, n_ctx, d_vocab: required: the number of blocks, the width of the residual stream, the
            longest input, and the number of tokens. Without learned positions, `n_ctx` limits the bridge only.
        n_heads, d_head: one of them is required; the other is ``d_model`` divided by it unless given.
        n_key_value_heads: for grouped queries, a divisor of `n_heads`; None: as many as heads.
        d_mlp: by default ``4 * d_model``; there is none with `attn_only`.
        act_fn: one of ``relu``, ``gelu``, ``gelu_new``, ``gelu_fast``, ``gelu_pytorch_tanh``, ``silu``, ``solu``, and
            ``solu_ln`` (SoLU with a layer norm after it); required unless `attn_only`.
        d_vocab_out: the number of outputs, by default `d_vocab`.
        eps: the norms' epsilon.
        attn_only: no MLPs.
        gated_mlp: ``act_fn(gate) * up``. As in Llama, neither of the two projections has a bias.
        parallel_attn_mlp: attention and MLP both read the block's input, each through its own norm.
        normalization_type: None, ``LN``, ``RMS``, or the same with ``Pre`` appended: without weights.
        final_rms: the last norm is an RMS norm, whatever the others are.
        positional_embedding_type: ``standard``: learned, added to the residual stream. ``shortformer``: learned, added
            to what queries and keys read. ``rotary``: element i of a head is rotated with element ``i + rotary_dim /
            2``, as in GPT-NeoX and Llama. ``none``.
        rotary_dim, rotary_base: how many elements of each head are rotated (all), and the base (10000).
        attention_dir: ``causal`` or ``bidirectional``.
        use_attn_scale, attn_scale: whether scores are divided, and by what (the root of `d_head`).
        scale_attn_by_inverse_layer_idx: divide them by ``layer + 1`` as well.
        use_local_attn, window_size, attn_types: a window for layers whose type is ``local``; others are ``global``.
        use_qk_norm: an RMS norm over each head's queries, and one over its keys.
        use_normalization_before_and_after: what attention and MLP write goes through a norm, too, as in Gemma 2.
        attn_scores_soft_cap, output_logits_soft_cap: ``cap * tanh(x / cap)`` of scores, and of logits; -1: none.
        num_experts, experts_per_token: mixtures of gated experts in place of MLPs, as in Mixtral.
        use_NTK_by_parts_rope: low frequencies of the rotation are divided by ``NTK_by_parts_factor``, as in Llama 3.1;
            the other fields of that name say which are low.
        init_weights: False leaves the weights as torch makes them.
        init_mode: ``gpt2``: normal; or ``xavier_...``, ``kaiming_...`` followed by ``uniform`` or ``normal``. Biases
            are zero.
        initializer_range: for ``gpt2`` the standard deviation, by default ``0.8 / sqrt(d_model)``; for the others a
            factor, by default 1.
        seed: makes the weights the same each time, and leaves the random state of the caller alone; None: the weights
            are drawn from that state.
        dtype, device: of the weights; None: torch's own default. A saved model is loaded to wherever Hugging Face
            puts it.
        model_name, tokenizer_name, default_prepend_bos: see `ModelConfig`.
        use_attn_result, use_split_qkv_input, use_attn_in, use_hook_mlp_in: which heavy hook points an unfiltered cache
            holds from the start.

    Raises:
        TypeError: a field that does not exist, or that is missing, or whose value has the wrong type.
        ValueError: a value out of range, or fields that contradict each other.

    Example:
        >>> from bridge import NativeConfig
        >>> cfg = NativeConfig(n_layers=2, d_model=64, n_heads=4, d_vocab=50, n_ctx=32, attn_only=True)
        >>> cfg.d_head, cfg.initializer_range
        (16, 0.1)
    """

    model_type = "transformer_bridge_native"
    #: Until 5.19 transformers makes a configuration without arguments when one is saved, unless this is true.
    has_no_defaults_at_init: ClassVar[bool] = True
    # What transformers' own code (caches, masks, generation) asks for.
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
        """Which layers have a window."""
        types = (self.attn_types or []) if self.use_local_attn else []
        return [i < len(types) and types[i] == "local" for i in range(self.n_layers)]

    def __post_init__(self, **kwargs: Any) -> None:
        _check_names(type(self), kwargs)
        _check_values(self)
        _complete(self)
        for breaks, said in _RULES:
            if found := breaks(self):
                raise ValueError(said.format(self, found))
        super().__post_init__(**kwargs)


# What Hugging Face passes besides the fields, when it reads config.json, and what processing notes there.
_FROM_HUGGING_FACE = {
    "model_type", "name_or_path", "attn_implementation", "experts_implementation", "output_attentions", "torch_dtype",
    "num_labels", "_commit_hash", "transformer_bridge_processed", "layer_types", "router_jitter_noise",
    "rope_parameters",
}  # fmt: skip


def _check_names(cls: type[NativeConfig], given: dict[str, Any]) -> None:
    for name in given:
        if name in _ELSEWHERE:
            raise TypeError(f"{name} is no field of NativeConfig: {_ELSEWHERE[name]}")
        if name not in _FROM_HUGGING_FACE:
            standard = {f.name for f in fields(PreTrainedConfig)}
            known = [f.name for f in fields(cls) if f.name not in standard] + ["dtype"]
            meant = cls.attribute_map.get(name)
            hint = f" Here it is called {meant}." if meant else suggestion(name, known)
            raise TypeError(f"{name!r} is no field of NativeConfig.{hint}")


def _check_values(cfg: NativeConfig) -> None:
    """Each field by itself."""
    if missing := [name for name in _REQUIRED if getattr(cfg, name) in (None, _NOT_SET)]:
        raise TypeError(f"NativeConfig needs {', '.join(missing)}")
    for name, least in _LEAST.items():
        _check_count(cfg, name, least)
    for name, choices in _CHOICES.items():
        value = getattr(cfg, name)
        if value not in choices:
            hint = suggestion(str(value), [choice for choice in choices if choice])
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}.{hint}")
    for name in _FLAGS:
        if not isinstance(getattr(cfg, name), bool):
            raise TypeError(f"{name} is {getattr(cfg, name)!r}; it must be True or False")
    for name in _NUMBERS:
        _check_number(cfg, name)
    if cfg.seed is not None and type(cfg.seed) is not int:
        raise TypeError(f"seed is {cfg.seed!r}; it must be a whole number or None")
    if cfg.tie_word_embeddings is not False:
        raise ValueError("tie_word_embeddings is not available: a native model unembeds with weights of its own")
    _check_torch(cfg)


def _check_count(cfg: NativeConfig, name: str, least: int) -> None:
    """A field that is a whole number, if it is set."""
    value = getattr(cfg, name)
    if value is None or value == _NOT_SET:
        return
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is {value!r}; it must be a whole number")
    setattr(cfg, name, operator.index(value))
    if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")


def _check_number(cfg: NativeConfig, name: str) -> None:
    """A field that is a number, if it is set."""
    value = getattr(cfg, name)
    if value is None or (value == _NOT_SET and name != "eps"):
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}; it must be a number")
    if not 0 < value < math.inf and not (value == 0 and name in ("eps", "initializer_range")):
        raise ValueError(f"{name} is {value}; it must be positive")


def _check_torch(cfg: NativeConfig) -> None:
    dtype = getattr(torch, cfg.dtype.removeprefix("torch."), None) if isinstance(cfg.dtype, str) else cfg.dtype
    if cfg.dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype is {cfg.dtype!r}; it must be a floating-point type such as torch.float32")
    cfg.dtype = dtype
    if cfg.device is not None:
        try:
            cfg.device = str(torch.device(cfg.device))  # a string can be saved
        except RuntimeError as error:
            raise ValueError(f"device is {cfg.device!r}, which torch does not know") from error


def _complete(cfg: NativeConfig) -> None:
    """Fills in what follows from the other fields."""
    _complete_heads(cfg)
    wide = 0.8 / math.sqrt(cfg.d_model) if cfg.init_mode == "gpt2" else 1.0
    follows = {"d_vocab_out": cfg.d_vocab, "initializer_range": wide}  # how widely weights are drawn
    for name in ("n_key_value_heads", "d_mlp", "rotary_dim", "attn_scale", *follows):
        if getattr(cfg, name) == _NOT_SET:
            setattr(cfg, name, follows.get(name))
    if cfg.d_mlp is None and not cfg.attn_only:
        cfg.d_mlp = 4 * cfg.d_model
    if cfg.attn_scale is None and cfg.use_attn_scale:
        cfg.attn_scale = math.sqrt(cfg.d_head)
    _complete_for_transformers(cfg)
    if cfg.positional_embedding_type == "rotary":
        cfg.rotary_dim = cfg.d_head if cfg.rotary_dim is None else cfg.rotary_dim
        cfg.rotary_base = 10000.0 if cfg.rotary_base is None else float(cfg.rotary_base)


def _complete_heads(cfg: NativeConfig) -> None:
    """The number of heads says how wide each is, or the other way round."""
    if cfg.n_heads == _NOT_SET and cfg.d_head == _NOT_SET:
        raise TypeError("NativeConfig needs n_heads or d_head")
    for name, other in (("d_head", "n_heads"), ("n_heads", "d_head")):
        if getattr(cfg, name) == _NOT_SET:
            count = getattr(cfg, other)
            if cfg.d_model % count:
                raise ValueError(f"d_model={cfg.d_model} is not divisible by {other}={count}: give {name} as well")
            setattr(cfg, name, cfg.d_model // count)


def _complete_for_transformers(cfg: NativeConfig) -> None:
    """What transformers' caches, masks and mixtures ask for."""
    if cfg.use_local_attn and isinstance(cfg.attn_types, list):
        cfg.layer_types = ["sliding_attention" if kind == "local" else "full_attention" for kind in cfg.attn_types]
    cfg.router_jitter_noise = 0.0
    if cfg.use_NTK_by_parts_rope:
        cfg.rope_parameters = {
            "rope_type": "llama3", "rope_theta": float(cfg.rotary_base or 10000.0), "factor": cfg.NTK_by_parts_factor,
            "low_freq_factor": cfg.NTK_by_parts_low_freq_factor, "high_freq_factor": cfg.NTK_by_parts_high_freq_factor,
            "original_max_position_embeddings": cfg.NTK_original_ctx_len,
        }  # fmt: skip


def _lacks_windows(cfg: NativeConfig) -> bool:
    """Whether local attention is asked for, and not all that it needs."""
    types = cfg.attn_types if isinstance(cfg.attn_types, list) else []
    whole = cfg.window_size is not None and len(types) >= cfg.n_layers and {*types} <= {"local", "global"}
    return cfg.use_local_attn and not whole


def _lacks_experts(cfg: NativeConfig) -> bool:
    """Whether experts are asked for that cannot be."""
    no_experts = cfg.attn_only or str(cfg.act_fn).startswith("solu")
    return cfg.num_experts is not None and (no_experts or (cfg.experts_per_token or 0) > cfg.num_experts)


def _idle(cfg: NativeConfig) -> str:
    """What says how an MLP is to be where there is none. (An act_fn says how one works, not that there is one.)"""
    return ", ".join(
        name for name in ("d_mlp", "gated_mlp", "parallel_attn_mlp") if cfg.attn_only and getattr(cfg, name)
    )


#: What fields may not say together, and what is said of it.
_RULES: tuple[tuple[Callable[[NativeConfig], object], str], ...] = (
    (_lacks_windows, "use_local_attn=True needs window_size and attn_types, a list of 'local' and 'global' for "
     "{0.n_layers} layers; they are {0.window_size!r} and {0.attn_types!r}"),
    (lambda c: c.use_local_attn and c.attention_dir != "causal", "use_local_attn=True is for attention_dir='causal'"),
    (lambda c: not c.use_local_attn and (c.window_size is not None or c.attn_types is not None),
     "window_size and attn_types are for use_local_attn=True"),
    (lambda c: (c.num_experts is None) != (c.experts_per_token is None),
     "num_experts and experts_per_token go together: give both or neither"),
    (_lacks_experts, "experts_per_token={0.experts_per_token} of num_experts={0.num_experts}, act_fn={0.act_fn!r} "
     "and attn_only={0.attn_only} exclude each other"),
    (lambda c: c.use_normalization_before_and_after and (c.normalization_type is None or c.parallel_attn_mlp),
     "use_normalization_before_and_after=True needs norms, and attention and MLP one after the other"),
    (lambda c: c.use_NTK_by_parts_rope and c.positional_embedding_type != "rotary",
     "use_NTK_by_parts_rope=True is for positional_embedding_type='rotary'"),
    (lambda c: c.n_key_value_heads is not None and c.n_heads % c.n_key_value_heads,
     "n_heads={0.n_heads} is not divisible by n_key_value_heads={0.n_key_value_heads}"),
    (_idle, "attn_only=True means that there is no MLP, but {1} says how it is to be"),
    (lambda c: not c.attn_only and c.act_fn is None,
     f"act_fn is needed for the MLPs: one of {', '.join(ACT_FNS)}; or set attn_only=True"),
    (lambda c: c.gated_mlp and c.act_fn == "solu_ln",
     "gated_mlp=True and act_fn='solu_ln' exclude each other; act_fn='solu' can be gated"),
    (lambda c: c.final_rms and c.normalization_type is None,
     "final_rms=True asks for a last norm, but normalization_type=None for no norms at all"),
    (lambda c: not c.use_attn_scale and c.attn_scale is not None,
     "use_attn_scale=False and attn_scale={0.attn_scale} exclude each other"),
    (lambda c: c.positional_embedding_type == "rotary" and (c.rotary_dim or 0) not in range(0, c.d_head + 1, 2),
     "rotary_dim={0.rotary_dim} must be even and at most d_head={0.d_head}"),
    (lambda c: c.positional_embedding_type != "rotary" and c.rotary_dim is not None,
     "rotary_dim={0.rotary_dim} is for positional_embedding_type='rotary', not {0.positional_embedding_type!r}"),
    (lambda c: c.positional_embedding_type != "rotary" and c.rotary_base is not None,
     "rotary_base={0.rotary_base} is for positional_embedding_type='rotary', not {0.positional_embedding_type!r}"),
)  # fmt: skip


#: Cosines and sines, ``[batch, 1, pos, rotary_dim]`` each.
Rotation = tuple[Tensor, Tensor]


def eager_attention_forward(
    module: NativeAttention,
    query: Float[Tensor, "batch n_heads pos d_head"],
    key: Float[Tensor, "batch n_key_value_heads key_pos d_head"],
    value: Float[Tensor, "batch n_key_value_heads key_pos d_head"],
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Float[Tensor, "batch pos n_heads d_head"], Float[Tensor, "batch n_heads pos key_pos"]]:
    """Attention with its scores and pattern in full; what transformers calls "eager"."""
    cap = module.config.attn_scores_soft_cap
    scores = scores_of(query, key, scaling, cap if cap > 0 else None, attention_mask)
    pattern = torch.softmax(scores, dim=-1)
    return result_of(pattern, value).transpose(1, 2), pattern


def rotation(positions: Int[Tensor, "batch pos"], cfg: NativeConfig, dtype: torch.dtype) -> Rotation:
    """The cosines and sines that rotate each position."""
    assert cfg.rotary_dim is not None
    assert cfg.rotary_base is not None
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    powers = torch.arange(0, cfg.rotary_dim, 2, dtype=exact, device=positions.device) / cfg.rotary_dim
    frequencies = cfg.rotary_base**-powers
    if cfg.use_NTK_by_parts_rope:
        frequencies = by_parts(frequencies, cfg)
    angles = positions[:, None, :, None].to(exact) * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def by_parts(frequencies: Float[Tensor, " pair"], cfg: NativeConfig) -> Float[Tensor, " pair"]:
    """Low frequencies divided by a factor, high ones as they are, and those between in steps (Peng et al. 2023, "YaRN",
    section 3.2, as Llama 3.1 has it)."""
    low, high = cfg.NTK_by_parts_low_freq_factor, cfg.NTK_by_parts_high_freq_factor
    turns = cfg.NTK_original_ctx_len * frequencies / (2 * math.pi)  # in a context of the original length
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / cfg.NTK_by_parts_factor)


def rotate(x: Float[Tensor, "batch heads pos d_head"], by: Rotation) -> Float[Tensor, "batch heads pos d_head"]:
    """Rotates the first elements of each head, element i with the one half of `rotary_dim` after it."""
    cos, sin = by
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned, rest], dim=-1)


class SoLU(nn.Module):
    """``x * softmax(x)``."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states * hidden_states.softmax(-1)


def norm(cfg: NativeConfig, final: bool = False) -> nn.Module:
    """A norm of the residual stream. Where there is none, the identity: a place for hook points to stand on."""
    kind = cfg.normalization_type
    if kind is None:
        return nn.Identity()
    cls = nn.RMSNorm if kind.startswith("RMS") or (final and cfg.final_rms) else nn.LayerNorm
    return cls(cfg.d_model, eps=cfg.eps, elementwise_affine=not kind.endswith("Pre"))


class NativeAttention(nn.Module):
    """Multi-head attention.

    Args:
        config: the model's.
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
        self.scaling = 1.0 / (divisor * (layer_idx + 1 if config.scale_attn_by_inverse_layer_idx else 1))
        self.q = nn.Linear(config.d_model, config.n_heads * config.d_head)
        self.k = nn.Linear(config.d_model, kv_heads * config.d_head)
        self.v = nn.Linear(config.d_model, kv_heads * config.d_head)
        self.o = nn.Linear(config.n_heads * config.d_head, config.d_model)
        if config.use_qk_norm:
            self.q_norm, self.k_norm = (nn.RMSNorm(config.d_head, eps=config.eps) for _ in "qk")
        self.sliding_window = config.window_size if config.local_layers[layer_idx] else None

    def forward(
        self,
        hidden_states: Float[Tensor, "batch pos d_model"],
        attention_mask: Any = None,
        rotated: Rotation | None = None,
        shift: Float[Tensor, "#batch pos d_model"] | None = None,
        past_key_values: Cache | None = None,
    ) -> tuple[Float[Tensor, "batch pos d_model"], Tensor | None]:
        """The output, and the pattern where the attention implementation makes one."""
        # Shortformer: queries and keys know where they are, values do not.
        placed = hidden_states if shift is None else hidden_states + shift
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim))
            for projection, x in ((self.q, placed), (self.k, placed), (self.v, hidden_states))
        )
        if self.config.use_qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if rotated is not None:
            query, key = rotate(query, rotated), rotate(key, rotated)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        window = {} if self.sliding_window is None else {"sliding_window": self.sliding_window}
        z, pattern = attend(self, query, key, value, attention_mask, scaling=self.scaling, dropout=0.0, **window)
        return self.o(z.flatten(-2)), pattern


class NativeMLP(nn.Module):
    """A feed-forward layer.

    Args:
        config: the model's.
    """

    def __init__(self, config: NativeConfig) -> None:
        super().__init__()
        assert config.d_mlp is not None
        assert config.act_fn is not None
        # A bias of the gated value would do what the output's own does already: HookedTransformer adds it after the
        # product, Hugging Face before it. Without one, both agree.
        self.gate = nn.Linear(config.d_model, config.d_mlp, bias=False) if config.gated_mlp else None
        self.up = nn.Linear(config.d_model, config.d_mlp, bias=not config.gated_mlp)
        self.act = SoLU() if config.act_fn.startswith("solu") else ACT2FN[config.act_fn]
        # As in HookedTransformer, a layer norm whatever the other norms are; with weights where they are of type LN.
        affine = config.normalization_type == "LN"
        self.ln = nn.LayerNorm(config.d_mlp, config.eps, affine) if config.act_fn == "solu_ln" else None
        self.down = nn.Linear(config.d_mlp, config.d_model)

    def forward(self, hidden_states: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        up = self.up(hidden_states)
        post = self.act(up) if self.gate is None else self.act(self.gate(hidden_states)) * up
        return self.down(post if self.ln is None else self.ln(post))


class NativeBlock(GradientCheckpointingLayer):
    """One layer.

    Args:
        config: the model's.
        layer_idx: its index.
    """

    def __init__(self, config: NativeConfig, layer_idx: int) -> None:
        super().__init__()
        self.parallel = config.parallel_attn_mlp
        self.ln1 = norm(config)
        self.attn = NativeAttention(config, layer_idx)
        if not config.attn_only:
            self.ln2 = norm(config)
        mixture = config.num_experts is not None
        self.mlp = None if config.attn_only else MixtralSparseMoeBlock(config) if mixture else NativeMLP(config)
        if config.use_normalization_before_and_after:
            self.ln1_post = norm(config)
            if self.mlp is not None:
                self.ln2_post = norm(config)
        self.after = config.use_normalization_before_and_after

    def forward(
        self, hidden_states: Float[Tensor, "batch pos d_model"], **kwargs: Any
    ) -> Float[Tensor, "batch pos d_model"]:
        attended = self.attn(self.ln1(hidden_states), **kwargs)[0]
        after = hidden_states + (self.ln1_post(attended) if self.after else attended)
        if self.mlp is None:
            return after
        made = self.mlp(self.ln2(hidden_states if self.parallel else after))
        return after + (self.ln2_post(made) if self.after else made)


class NativeModel(PreTrainedModel, GenerationMixin):
    """A transformer language model with random weights.

    Args:
        config: what it is made of.

    Example:
        >>> import torch
        >>> from bridge.native import NativeConfig, NativeModel
        >>> model = NativeModel(NativeConfig(n_layers=1, d_model=8, n_heads=2, d_vocab=10, n_ctx=5, attn_only=True))
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
    _can_record_outputs = {"hidden_states": NativeBlock, "attentions": NativeAttention}  # noqa: RUF012

    def __init__(self, config: NativeConfig) -> None:
        super().__init__(config)
        if config.attn_scores_soft_cap > 0:  # no other kernel has it
            config._attn_implementation = "eager"
        with _seeded(config.seed):
            self.embed = nn.Embedding(config.d_vocab, config.d_model)
            learned = config.positional_embedding_type in ("standard", "shortformer")
            self.pos_embed = nn.Embedding(config.n_ctx, config.d_model) if learned else None
            self.blocks = nn.ModuleList(NativeBlock(config, index) for index in range(config.n_layers))
            self.ln_final = norm(config, final=True)
            self.unembed = nn.Linear(config.d_model, config.d_vocab_out)
            self.post_init()
        # `from_pretrained` makes the model on the meta device, and sees to both itself.
        if self.embed.weight.device.type != "meta":
            self.to(device=config.device, dtype=config.dtype)  # type: ignore[call-arg]

    def get_output_embeddings(self) -> nn.Module:
        """The output layer."""
        return self.unembed

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replaces the output layer."""
        self.unembed = new_embeddings

    def init_weights(self) -> None:
        """Draws the weights, unless the configuration says to leave them as torch makes them."""
        if self.config.init_weights:
            super().init_weights()

    def draw_weights(self) -> None:
        """Draws all weights anew, as the configuration says."""
        with _seeded(self.config.seed):
            self.apply(self._init_weights)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            out, into = module.weight.shape if isinstance(module, nn.Linear) else module.weight.shape[::-1]
            init.copy_(module.weight, _draw(self.config, module.weight.shape, fan_in=into, fan_out=out))
        elif isinstance(module, MixtralTopKRouter | MixtralExperts):
            for matrix in module.parameters():
                drawn = _draw(self.config, matrix.shape, fan_in=matrix.shape[-1], fan_out=matrix.shape[-2])
                init.copy_(matrix, drawn)
        elif isinstance(weight := getattr(module, "weight", None), Tensor):
            init.ones_(weight)
        if isinstance(bias := getattr(module, "bias", None), Tensor):
            init.zeros_(bias)

    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        input_ids: Int[Tensor, "batch pos"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "#batch pos"] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Float[Tensor, "batch pos d_model"] | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        cache: Cache | None = None,
    ) -> CausalLMOutputWithPast:
        """Runs the model.

        Args:
            input_ids: tokens.
            attention_mask: ``[batch, pos]``, 1 for tokens and 0 for padding; past positions come first.
            position_ids: by default counted from the first position of the cache.
            past_key_values, cache: keys and values of earlier positions; those of this run are added. (transformers
                gives them the second name from 5.24 on.)
            inputs_embeds: token embeddings in place of tokens.
            use_cache: make a cache where none is given. None does not.
            output_attentions, output_hidden_states: also return each layer's pattern (with eager attention), and the
                residual stream before each layer and after the last.

        Raises:
            ValueError: both or neither of tokens and embeddings; too many positions for the learned embeddings; a
                cache for a model that attends in both directions.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if past_key_values is not None and cache is not None:
            raise ValueError("past_key_values and cache are two names of one argument: give one of them")
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._cache(past_key_values if cache is None else cache, use_cache)
        position_ids = self._positions(x, position_ids, cache)
        mask, local = self._masks(x, attention_mask, cache, position_ids)
        kwargs: dict[str, Any] = {"past_key_values": cache}
        if self.pos_embed is not None:
            positions = self.pos_embed(position_ids)
            if self.config.positional_embedding_type == "shortformer":
                kwargs["shift"] = positions
            else:
                x = x + positions
        elif self.config.rotary_dim is not None:
            kwargs["rotated"] = rotation(position_ids, self.config, x.dtype)
        for block, is_local in zip(self.blocks, self.config.local_layers, strict=True):
            x = block(x, attention_mask=local if is_local else mask, **kwargs)
        logits = self.unembed(self.ln_final(x))
        if (cap := self.config.output_logits_soft_cap) > 0:
            logits = cap * torch.tanh(logits / cap)
        made = {"logits": logits, "past_key_values": cache}
        return CausalLMOutputWithPast(**with_past_named(made, CausalLMOutputWithPast.__dataclass_fields__))

    def _cache(self, given: Cache | None, wanted: bool | None) -> Cache | None:
        """The cache that keys and values go to."""
        if self.config.attention_dir != "causal" and (wanted or given is not None):
            raise ValueError(
                "a model that attends in both directions cannot use a cache: every position changes with each new one; "
                "pass use_cache=False"
            )
        return DynamicCache(config=self.config) if wanted and given is None else given

    def _positions(self, x: Tensor, given: Tensor | None, past: Cache | None) -> Tensor:
        """Where the positions stand, of which learned embeddings have a certain number."""
        before = 0 if past is None else past.get_seq_length()
        if self.pos_embed is not None and before + x.shape[1] > self.config.n_ctx:
            raise ValueError(
                f"{before + x.shape[1]} positions are more than the n_ctx={self.config.n_ctx} learned ones"
            )
        return (torch.arange(x.shape[1], device=x.device) + before).unsqueeze(0) if given is None else given

    def _masks(self, x: Tensor, given: Tensor | None, past: Cache | None, positions: Tensor) -> tuple[Any, Any]:
        """What positions see, and what they see in a local layer."""
        if self.config.attention_dir != "causal":
            mask = create_bidirectional_mask(self.config, x, given)
            return mask, mask
        mask = create_causal_mask(self.config, x, given, past, positions)
        if not self.config.use_local_attn:
            return mask, mask
        return mask, create_sliding_window_causal_mask(self.config, x, given, past, positions)


def _draw(cfg: NativeConfig, shape: torch.Size, fan_in: int, fan_out: int) -> Tensor:
    """Random weights. They are drawn in float32 on the CPU, so that they are the same for every type and device."""
    kind, _, shape_of = cfg.init_mode.partition("_")
    std = cfg.initializer_range
    if kind == "xavier":
        std *= math.sqrt(2 / (fan_in + fan_out))
    elif kind == "kaiming":
        std *= math.sqrt(2 / fan_in)
    empty = torch.empty(shape, dtype=torch.float32, device="cpu")
    if shape_of == "uniform":
        bound = std * math.sqrt(3)
        return empty.uniform_(-bound, bound)
    return empty.normal_(0, std)


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Random numbers from a seed, after which the caller's go on as if nothing had been drawn."""
    if seed is None:
        yield
        return
    # Torch's own layers draw where they are made, which a default device can set to an accelerator.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=list(devices)):
        torch.default_generator.manual_seed(seed)
        yield
