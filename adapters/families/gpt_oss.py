"""gpt-oss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from adapters.architecture import Architecture, MoE, architecture_points
from adapters.families.llama import llama_like
from adapters.points import Point
from adapters.registry import UnsupportedModelError, register


@register("GptOssPreTrainedModel")
def gpt_oss(config: Any) -> Architecture:
    """Llama with attention sinks and a mixture of experts, chosen by their logits."""
    facts = {
        "num_experts": config.num_local_experts,
        "experts_per_token": config.num_experts_per_tok,
        "d_expert": config.intermediate_size,
        "gated_mlp": True,
        # Its configuration says silu. What its experts compute is min(gate, limit) * sigmoid(alpha * min(gate, limit)),
        # times the clamped other half plus one.
        "act_fn": "clamped_swiglu",
    }
    moe = MoE("mlp", router="router", chosen_by="logits", out_key=0)
    base = llama_like(config, attn={"sinks": "sinks"}, block={"mlp": moe}, facts=facts)
    return replace(base, points=_points)


def _points(architecture: Architecture, model: nn.Module, cfg: Any) -> list[Point]:
    packed = [name for name, module in model.named_modules() if type(module).__name__ == "Mxfp4GptOssMLP"]
    if packed:
        raise UnsupportedModelError(
            f"{packed[0]} is packed in MXFP4, and computes its routing where no hook can stand; load the model with "
            "quantization_config=transformers.Mxfp4Config(dequantize=True)"
        )
    return architecture_points(architecture, model, cfg)
