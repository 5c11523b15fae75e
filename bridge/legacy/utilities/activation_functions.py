"""Activation functions by HookedTransformer's names."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.activations import XIELUActivation

#: What an activation function is.
ActivationFunction = Callable[..., Tensor]


def gelu_new(input: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """GPT-2's approximation of GELU."""
    return 0.5 * input * (1 + torch.tanh(math.sqrt(2 / math.pi) * (input + 0.044715 * input**3)))


def gelu_fast(input: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The same approximation with a rounded constant (GPT-J)."""
    return 0.5 * input * (1 + torch.tanh(input * 0.7978845608 * (1 + 0.044715 * input * input)))


def gelu_pytorch_tanh(input: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The same approximation as torch computes it."""
    return nn.functional.gelu(input, approximate="tanh")


def solu(input: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """``x * softmax(x)``."""
    return input * input.softmax(-1)


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
    "solu": solu, "solu_ln": solu, "gelu_new": gelu_new, "gelu_fast": gelu_fast, "silu": nn.functional.silu,
    "relu": nn.functional.relu, "gelu": nn.functional.gelu, "gelu_pytorch_tanh": gelu_pytorch_tanh, "xielu": xielu,
}  # fmt: skip
