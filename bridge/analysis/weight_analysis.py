"""What a model's weights say over all layers: the biases that it adds up, the names of its heads."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from bridge.analysis.layer_outputs import bias_written
from bridge.analysis.requirements import AnalysedModel, layer_of, refuse_no_sum
from bridge.hooks.shapes import heads_shown


class Labels(list[str]):
    """A list of names; calling it gives itself. HookedTransformer has a method, TransformerLens 3 a property."""

    def __call__(self) -> Labels:
        return self


def accumulated_bias(
    model: AnalysedModel, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
) -> Float[Tensor, " d_model"]:
    """The sum of the output biases of all layers before one; see `TransformerBridge.accumulated_bias`.

    Args:
        model: the bridge.
        layer, mlp_input, include_mlp_biases: as there.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.weight_analysis import accumulated_bias
        >>> accumulated_bias(TransformerBridge.boot_embedded(), 2).shape
        torch.Size([128])
    """
    layer = layer_of(model, layer, mlp_input)
    refuse_no_sum(model, of_normed=True)
    total = torch.zeros(model.cfg.d_model, device=model.cfg.device, dtype=model.cfg.dtype)
    for index in range(layer + mlp_input):
        parts: tuple[Literal["attn", "mlp"], ...] = ("attn", "mlp") if index < layer else ("attn",)
        for part in parts if include_mlp_biases else parts[:1]:
            bias = bias_written(model, index, part)
            total = total if bias is None else total + bias.to(total.device)
    return total


def head_labels(model: AnalysedModel) -> Labels:
    """The names of all heads; see `TransformerBridge.all_head_labels`.

    Args:
        model: the bridge.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.weight_analysis import head_labels
        >>> head_labels(TransformerBridge.boot_embedded())[3:6]
        ['L0H3', 'L1H0', 'L1H1']
    """
    names, hooks = {"blocks": "", "encoder": "E", "decoder": "D"}, model.hook_dict
    layers = {
        f"{letter}L{i}": hooks[name].point.axes
        for stack, letter in names.items()
        for i in range(len(hooks))
        if (name := f"{stack}.{i}.attn.hook_z") in hooks
    }
    return Labels(f"{layer}H{head}" for layer, axes in layers.items() for head in range(heads_shown(model.cfg, axes)))
