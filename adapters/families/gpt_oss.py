"""gpt-oss."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from transformers import PreTrainedConfig

from adapters.architecture import Architecture
from adapters.families.shapes.llama import ATTENTION
from adapters.families.shapes.mixture import mixture_like
from adapters.feed_forward import MoE
from adapters.registry import UnsupportedModelError, register
from adapters.views import MaskedScores, SinkScores


def _refuse_packed(model: nn.Module) -> None:
    packed = [name for name, module in model.named_modules() if type(module).__name__ == "Mxfp4GptOssMLP"]
    if packed:
        raise UnsupportedModelError(
            f"{packed[0]} is packed in MXFP4, and computes its routing where no hook can stand; load the model with "
            "quantization_config=transformers.Mxfp4Config(dequantize=True)"
        )


@register(check=_refuse_packed)
def gpt_oss(config: PreTrainedConfig) -> Architecture:
    """Llama with attention sinks and a mixture of experts, chosen by their logits."""
    # Its configuration says silu. What its experts compute is min(gate, limit) * sigmoid(alpha * min(gate, limit)),
    # times the clamped other half plus one.
    values = {"act_fn": "clamped_swiglu"}
    moe = MoE("mlp", router="router", chosen_by="logits")
    n, width, attn = (
        config.num_local_experts,
        config.intermediate_size,
        replace(ATTENTION, scores=SinkScores(MaskedScores(), "sinks")),
    )
    return mixture_like(config, moe, n, width, attn=attn, config_values=values)
