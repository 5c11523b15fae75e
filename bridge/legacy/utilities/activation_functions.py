"""Activation functions by HookedTransformer's names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.activations import ACT2FN, XIELUActivation

from bridge.native.native import ACT_FNS, SoLU

#: What an activation function is.
ActivationFunction = Callable[..., Tensor]


#: GPT-2's approximation of GELU; the same with a rounded constant (GPT-J); and as torch computes it.
gelu_new, gelu_fast, gelu_pytorch_tanh = (ACT2FN[name] for name in ("gelu_new", "gelu_fast", "gelu_pytorch_tanh"))
#: ``x * softmax(x)``.
solu = SoLU()


class XIELU(XIELUActivation):
    """xIELU with parameters that are learnt, as Hugging Face computes it, in float32."""

    def __init__(
        self, alpha_p_init: float = 0.8, alpha_n_init: float = 0.8, beta_init: float = 0.5, eps: float = -1e-6
    ) -> None:
        super().__init__(alpha_p_init, alpha_n_init, beta_init, eps, torch.float32)


def xielu(input: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """xIELU with the parameters that it starts training with (Huang and Schlag 2024, "Deriving Activation Functions
    Using Integration"): a parabola above zero, an integrated exponential below. Apertus has learnt parameters."""
    alpha, beta = 0.8, 0.5
    above = alpha * input * input
    below = alpha * (torch.expm1(input.clamp(max=-1e-6)) - input)
    return torch.where(input > 0, above, below) + beta * input


#: The functions by their names in configurations.
SUPPORTED_ACTIVATIONS: dict[str, ActivationFunction] = {
    name: solu if name.startswith("solu") else ACT2FN[name] for name in ACT_FNS
} | {"xielu": xielu}
