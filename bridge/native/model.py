"""`NativeModel`: a small transformer, written as Hugging Face's own are, so that whatever works on them works on it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
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
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralSparseMoeBlock, MixtralTopKRouter
from transformers.utils.output_capturing import capture_outputs

from bridge.native.config import NativeConfig

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
    groups = module.num_key_value_groups
    key, value = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (key, value))
    scores = query @ key.transpose(-1, -2) * scaling
    if (cap := module.config.attn_scores_soft_cap) > 0:
        scores = cap * torch.tanh(scores / cap)
    if attention_mask is not None:
        scores = scores + attention_mask
    pattern = torch.softmax(scores, dim=-1)
    return (pattern @ value).transpose(1, 2), pattern


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
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
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
    ) -> CausalLMOutputWithPast:
        """Runs the model.

        Args:
            input_ids: tokens.
            attention_mask: ``[batch, pos]``, 1 for tokens and 0 for padding; past positions come first.
            position_ids: by default counted from the first position of the cache.
            past_key_values: keys and values of earlier positions; those of this run are added.
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
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._cache(past_key_values, use_cache)
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
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)

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
