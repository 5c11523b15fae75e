"""Tiny Hugging Face models with random parameters, and their weights sorted into the parts of
`transformer.Model`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from adapters.imports import clamp_of
from tests.adapters.by_hand.transformer import Model

WORDS = 61
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 20,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPTJ = {
    "vocab_size": WORDS,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 20,
    "rotary_dim": 4,
}
NEO = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "max_position_embeddings": 20,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 3,
}
OPT = {name: value for name, value in SIZES.items() if name != "intermediate_size"} | {
    "ffn_dim": 28
}
ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e5},
    "sliding_attention": {"rope_theta": 100.0},
}
LAYERS = ["sliding_attention", "full_attention"]
WINDOWED = SIZES | {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 3,
    "layer_types": LAYERS,
}
GEMMA3 = WINDOWED | {
    "query_pre_attn_scalar": 5,
    "rope_parameters": {kind: {"rope_type": "default", **values} for kind, values in ROPE.items()},
}

UP_DOWN = ("gate_up_proj", "down_proj")
EXPERTS = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}

#: By name: the class of the model, and what its configuration says.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neo": ("GPTNeo", NEO),
    "gpt_neo-wide-untied": (
        "GPTNeo",
        NEO | {"intermediate_size": 20, "tie_word_embeddings": False},
    ),
    "gptj": ("GPTJ", GPTJ),
    "gptj-tied-all-rotated": (
        "GPTJ",
        GPTJ | {"tie_word_embeddings": True, "rotary_dim": 8, "n_inner": 20},
    ),
    "phi": ("Phi", SIZES),
    "phi-gqa-normed": ("Phi", SIZES | {"num_key_value_heads": 2, "qk_layernorm": True}),
    "phi-mqa-quarter-rotated": (
        "Phi",
        SIZES
        | {"num_key_value_heads": 1, "tie_word_embeddings": True}
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 300.0,
                "partial_rotary_factor": 0.25,
            }
        },
    ),
    "gemma-mqa": ("Gemma", SIZES | {"num_key_value_heads": 1, "head_dim": 8}),
    "gemma-mha-bias-untied": (
        "Gemma",
        SIZES
        | {
            "num_key_value_heads": 4,
            "head_dim": 4,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma2-mha-bias": (
        "Gemma2",
        SIZES
        | {
            "num_key_value_heads": 4,
            "head_dim": 8,
            "attention_bias": True,
            "attn_logit_softcapping": None,
        }
        | {"final_logit_softcapping": 2.0, "sliding_window": 3, "query_pre_attn_scalar": 3},
    ),
    "gemma3-gqa": ("Gemma3", GEMMA3),
    "gemma3-mqa-bias-untied": (
        "Gemma3",
        GEMMA3 | {"num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "mixtral-gqa": ("Mixtral", SIZES | {"num_key_value_heads": 2, "num_local_experts": 4}),
    "mixtral-mha-window": (
        "Mixtral",
        SIZES | {"num_key_value_heads": 4, "num_local_experts": 3, "sliding_window": 3},
    ),
    "gpt_oss-gqa": (
        "GptOss",
        WINDOWED
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "swiglu_limit": 1.5,
            "swiglu_alpha": 1.3,
        }
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    ),
    "gpt_oss-mha-no-bias-tied": (
        "GptOss",
        WINDOWED
        | {
            "num_key_value_heads": 4,
            "num_local_experts": 3,
            "num_experts_per_tok": 1,
            "attention_bias": False,
        }
        | {
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
            "tie_word_embeddings": True,
        },
    ),
    "qwen2_moe-gqa": (
        "Qwen2Moe",
        EXPERTS
        | {
            "num_key_value_heads": 2,
            "shared_expert_intermediate_size": 20,
            "norm_topk_prob": True,
        },
    ),
    "qwen2_moe-dense-window": (
        "Qwen2Moe",
        EXPERTS
        | {"num_key_value_heads": 4, "shared_expert_intermediate_size": 20, "mlp_only_layers": [0]}
        | {
            "use_sliding_window": True,
            "sliding_window": 3,
            "qkv_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2_moe-equal-widths": (
        "Qwen2Moe",
        EXPERTS
        | {"num_key_value_heads": 1, "decoder_sparse_step": 2, "intermediate_size": 32}
        | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    ),
    "qwen3_moe-gqa": (
        "Qwen3Moe",
        EXPERTS | {"num_key_value_heads": 2, "head_dim": 6, "mlp_only_layers": [1]},
    ),
    "phi3-gqa": (
        "Phi3",
        SIZES
        | {"num_key_value_heads": 2, "pad_token_id": 0, "sliding_window": 4}
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 200.0,
                "partial_rotary_factor": 0.5,
            }
        },
    ),
    "qwen3-mha-bias": (
        "Qwen3",
        SIZES | {"num_key_value_heads": 4, "head_dim": 8, "attention_bias": True},
    ),
    "cwm-gqa": (
        "Cwm",
        WINDOWED | {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    ),
    "ministral-gqa": ("Ministral", WINDOWED),
    "seed_oss-gqa": ("SeedOss", SIZES | {"num_key_value_heads": 2, "head_dim": 6}),
    "smollm3-gqa": (
        "SmolLM3",
        SIZES | {"num_key_value_heads": 2, "pad_token_id": 0, "no_rope_layers": [1, 1]},
    ),
    "helium-gqa": ("Helium", SIZES | {"num_key_value_heads": 2, "head_dim": 8}),
    "ernie4_5-gqa": (
        "Ernie4_5",
        SIZES | {"num_key_value_heads": 2, "head_dim": 8, "use_bias": True},
    ),
    "opt-no-bias": ("OPT", OPT | {"enable_bias": False, "word_embed_proj_dim": 32, "dropout": 0.0}),
}


def tiny(case: str) -> PreTrainedModel:
    """The model of a case, in evaluation mode, with no parameter left at a trivial value."""
    family, fields = CASES[case]
    config = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    with torch.random.fork_rng():
        torch.manual_seed(len(case))
        model = getattr(transformers, f"{family}ForCausalLM")(
            getattr(transformers, config)(**fields)
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(0.0, 0.3)
                if parameter.ndim == 1 and "bias" not in name and "Gemma" not in family:
                    parameter.add_(1.0)
    return model.eval()


def by_hand(case: str, hf: PreTrainedModel) -> Model:
    """The same weights in float64, to be computed with by hand."""
    config, family = hf.config, CASES[case][0]
    weights = {name: value.double() for name, value in hf.state_dict().items()}
    layout: dict[str, Callable[[Sorter], None]] = {
        "GPTNeo": gpt_neo,
        "GPTJ": gptj,
        "Phi": phi,
        "OPT": opt,
    }
    heads = config.num_attention_heads
    d_head = getattr(config, "head_dim", None) or config.hidden_size // heads
    sort = Sorter(
        weights,
        heads,
        getattr(config, "num_key_value_heads", None) or heads,
        offset="Gemma" in family,
    )
    layout.get(family, llama)(sort)
    sizes = {"heads": heads, "kv_heads": sort.kv_heads, "layers": 2, "eps": 1e-5, "centered": True}
    model = Model(sort.linear, sort.norm, act=new_gelu, scale=math.sqrt(d_head), **sizes)
    if family == "GPTNeo":
        model.scale, model.windows = 1.0, [None, 3]
    elif family == "GPTJ":
        model.rotary, model.adjacent, model.parallel = (config.rotary_dim, [1e4, 1e4]), True, True
    elif family == "Phi":
        rope = config.rope_parameters
        dims = int(d_head * rope["partial_rotary_factor"])
        model.rotary, model.parallel = (dims, [rope["rope_theta"]] * 2), True
    elif family == "OPT":
        model.act = F.relu
    else:
        model.centered, model.eps = False, config.rms_norm_eps
        model.act = new_gelu if "Gemma" in family else F.silu
        if "Gemma" not in family and getattr(config, "sliding_window", None):
            kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * 2
            model.windows = [
                config.sliding_window if kind == "sliding_attention" else None for kind in kinds
            ]
    if family in ("Gemma2", "Gemma3"):
        model.scale, model.windows = math.sqrt(config.query_pre_attn_scalar), [3, None]
        model.logit_cap = config.final_logit_softcapping or 0.0
    if family == "Gemma3":
        model.rotary = (d_head, [100.0, 1e5])
    elif not model.centered:
        dims = int(d_head * config.rope_parameters.get("partial_rotary_factor", 1.0))
        model.rotary = (dims, [config.rope_parameters["rope_theta"]] * 2)
    model.adjacent |= family in ("Helium", "Ernie4_5")
    model.experts = getattr(config, "num_experts_per_tok", 0)
    model.shares_sum_to_one = getattr(config, "norm_topk_prob", True)
    if family == "GptOss":
        model.by_logits, model.gated = True, clamped(*clamp_of(config))
        model.sinks = [weights[f"model.layers.{i}.self_attn.sinks"] for i in range(2)]
    return model


def clamped(limit: float, alpha: float) -> Callable[[Tensor, Tensor], Tensor]:
    """What gpt-oss makes of gate and of what stands beside it."""

    def gated(gate: Tensor, modules_without_points: Tensor) -> Tensor:
        gate = torch.where(gate > limit, limit, gate)
        modules_without_points = torch.where(
            modules_without_points.abs() > limit,
            modules_without_points.sign() * limit,
            modules_without_points,
        )
        return gate / (1 + torch.exp(-alpha * gate)) * (1 + modules_without_points)

    return gated


def new_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


class Sorter:
    """Puts weights where `transformer.Model` wants them."""

    def __init__(self, weights: dict[str, Tensor], heads: int, kv_heads: int, offset: bool) -> None:
        self.weights, self.heads, self.kv_heads, self.offset = weights, heads, kv_heads, offset
        self.linear: dict[str, Any] = {}
        self.norm: dict[str, Any] = {}

    def add_linear(self, name: str, path: str) -> None:
        self.linear[name] = self.weights[f"{path}.weight"], self.weights.get(f"{path}.bias", 0.0)

    def add_norm(self, name: str, path: str) -> None:
        weight = self.weights[f"{path}.weight"]
        self.norm[name] = (
            weight + 1 if self.offset else weight,
            self.weights.get(f"{path}.bias", 0.0),
        )

    def add_heads(self, name: str, weight: Tensor, bias: Tensor | float, heads: int) -> None:
        split = weight.unflatten(0, (heads, -1))
        self.linear[name] = split, bias.view(heads, -1) if isinstance(bias, Tensor) else bias

    def add_attention(self, name: str, path: str, o: str) -> None:
        for letter in "qkv":
            heads = self.heads if letter == "q" else self.kv_heads
            at = f"{path}.{letter}_proj"
            self.add_heads(
                f"{name}.{letter}",
                self.weights[f"{at}.weight"],
                self.weights.get(f"{at}.bias", 0.0),
                heads,
            )
        weight = self.weights[f"{path}.{o}.weight"].unflatten(1, (self.heads, -1))
        self.linear[f"{name}.o"] = weight, self.weights.get(f"{path}.{o}.bias", 0.0)


def gpt_neo(sort: Sorter) -> None:
    sort.add_linear("embed", "transformer.wte")
    sort.add_linear("pos_embed", "transformer.wpe")
    for i in range(2):
        for ours, theirs in (("ln1", "ln_1"), ("ln2", "ln_2")):
            sort.add_norm(f"blocks.{i}.{ours}", f"transformer.h.{i}.{theirs}")
        sort.add_attention(f"blocks.{i}.attn", f"transformer.h.{i}.attn.attention", "out_proj")
        for ours, theirs in (("in", "c_fc"), ("out", "c_proj")):
            sort.add_linear(f"blocks.{i}.mlp.{ours}", f"transformer.h.{i}.mlp.{theirs}")
    sort.add_norm("ln_final", "transformer.ln_f")
    sort.add_linear("unembed", "lm_head")


def gptj(sort: Sorter) -> None:
    sort.add_linear("embed", "transformer.wte")
    for i in range(2):
        for ours in ("ln1", "ln2"):
            sort.add_norm(f"blocks.{i}.{ours}", f"transformer.h.{i}.ln_1")
        sort.add_attention(f"blocks.{i}.attn", f"transformer.h.{i}.attn", "out_proj")
        for ours in ("in", "out"):
            sort.add_linear(f"blocks.{i}.mlp.{ours}", f"transformer.h.{i}.mlp.fc_{ours}")
    sort.add_norm("ln_final", "transformer.ln_f")
    sort.add_linear("unembed", "lm_head")


def phi(sort: Sorter) -> None:
    sort.add_linear("embed", "model.embed_tokens")
    for i in range(2):
        at = f"model.layers.{i}"
        for ours in ("ln1", "ln2"):
            sort.add_norm(f"blocks.{i}.{ours}", f"{at}.input_layernorm")
        sort.add_attention(f"blocks.{i}.attn", f"{at}.self_attn", "dense")
        for letter in "qk":
            if f"{at}.self_attn.{letter}_layernorm.weight" in sort.weights:
                sort.add_norm(
                    f"blocks.{i}.attn.{letter}_norm", f"{at}.self_attn.{letter}_layernorm"
                )
        for ours, theirs in (("in", "fc1"), ("out", "fc2")):
            sort.add_linear(f"blocks.{i}.mlp.{ours}", f"{at}.mlp.{theirs}")
    sort.add_norm("ln_final", "model.final_layernorm")
    sort.add_linear("unembed", "lm_head")


def opt(sort: Sorter) -> None:
    sort.add_linear("embed", "model.decoder.embed_tokens")
    sort.linear["pos_embed"] = sort.weights["model.decoder.embed_positions.weight"][2:], 0.0
    for i in range(2):
        at = f"model.decoder.layers.{i}"
        for ours, theirs in (("ln1", "self_attn_layer_norm"), ("ln2", "final_layer_norm")):
            sort.add_norm(f"blocks.{i}.{ours}", f"{at}.{theirs}")
        sort.add_attention(f"blocks.{i}.attn", f"{at}.self_attn", "out_proj")
        for ours, theirs in (("in", "fc1"), ("out", "fc2")):
            sort.add_linear(f"blocks.{i}.mlp.{ours}", f"{at}.{theirs}")
    sort.add_norm("ln_final", "model.decoder.final_layer_norm")
    sort.add_linear("unembed", "lm_head")


def llama(sort: Sorter) -> None:
    """All that have its shape, and Gemma, gpt-oss, Mixtral, Phi-3 and Qwen."""
    weights = sort.weights
    table = weights["model.embed_tokens.weight"]
    sort.linear["embed"] = table * (math.sqrt(table.shape[1]) if sort.offset else 1.0), 0.0
    for i in range(2):
        at, block = f"model.layers.{i}", f"blocks.{i}"
        fused = weights.pop(f"{at}.self_attn.qkv_proj.weight", None)
        if fused is not None:
            d_head = len(fused) // (sort.heads + 2 * sort.kv_heads)
            parts = fused.split(
                [sort.heads * d_head, sort.kv_heads * d_head, sort.kv_heads * d_head]
            )
            weights |= {
                f"{at}.self_attn.{x}_proj.weight": part
                for x, part in zip("qkv", parts, strict=True)
            }
            gate, up = weights[f"{at}.mlp.gate_up_proj.weight"].chunk(2)
            weights |= {f"{at}.mlp.gate_proj.weight": gate, f"{at}.mlp.up_proj.weight": up}
        sort.add_attention(f"{block}.attn", f"{at}.self_attn", "o_proj")
        both_sides = f"{at}.pre_feedforward_layernorm.weight" in weights
        norms = {"ln1": "input_layernorm", "ln2": "post_attention_layernorm"}
        if both_sides:
            norms |= {"ln1_post": "post_attention_layernorm", "ln2": "pre_feedforward_layernorm"}
            norms |= {"ln2_post": "post_feedforward_layernorm"}
        if f"{at}.self_attn.q_norm.weight" in weights:
            norms |= {"attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm"}
        for ours, theirs in norms.items():
            sort.add_norm(f"{block}.{ours}", f"{at}.{theirs}")
        if f"{at}.mlp.gate.weight" in weights:
            experts(sort, f"{block}.mlp", f"{at}.mlp")
        elif f"{at}.mlp.router.weight" in weights:
            gpt_oss_experts(sort, f"{block}.mlp", f"{at}.mlp")
        else:
            for ours, theirs in (("gate", "gate_proj"), ("in", "up_proj"), ("out", "down_proj")):
                sort.add_linear(f"{block}.mlp.{ours}", f"{at}.mlp.{theirs}")
    sort.add_norm("ln_final", "model.norm")
    sort.add_linear("unembed", "lm_head")


def experts(sort: Sorter, name: str, path: str) -> None:
    sort.add_linear(f"{name}.router", f"{path}.gate")
    down = sort.weights[f"{path}.experts.down_proj"]
    for expert, both in enumerate(sort.weights[f"{path}.experts.gate_up_proj"]):
        gate, up = both.chunk(2)
        parts = {"gate": gate, "in": up, "out": down[expert]}
        sort.linear |= {
            f"{name}.experts.{expert}.{part}": (weight, 0.0) for part, weight in parts.items()
        }
    if f"{path}.shared_expert_gate.weight" in sort.weights:
        sort.add_linear(f"{name}.shared_expert_gate", f"{path}.shared_expert_gate")
        for ours, theirs in (("gate", "gate_proj"), ("in", "up_proj"), ("out", "down_proj")):
            sort.add_linear(f"{name}.shared_expert.{ours}", f"{path}.shared_expert.{theirs}")


def gpt_oss_experts(sort: Sorter, name: str, path: str) -> None:
    """Gate and up in turn, inputs before outputs, with biases."""
    sort.add_linear(f"{name}.router", f"{path}.router")
    up, down = (
        (sort.weights[f"{path}.experts.{at}"], sort.weights[f"{path}.experts.{at}_bias"])
        for at in UP_DOWN
    )
    for expert in range(len(up[0])):
        at = f"{name}.experts.{expert}"
        for start, part in enumerate(("gate", "in")):
            sort.linear[f"{at}.{part}"] = up[0][expert, :, start::2].T, up[1][expert, start::2]
        sort.linear[f"{at}.out"] = down[0][expert].T, down[1][expert]
