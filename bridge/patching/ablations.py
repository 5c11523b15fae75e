"""Ablations: what an activation is replaced by. One table for patching, circuits and features."""

from __future__ import annotations

import functools
import math
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from adapters.norms import at_least_float32
from bridge.arguments import check_choice
from bridge.interventions.operations import mean

P = ParamSpec("P")
T = TypeVar("T")

#: Each kind of ablation, the value of an argument `ablation`, and its replacement of an activation.
ABLATIONS = {
    "zero": "zeros",
    "mean": "the mean over prompts, position by position",
    "resample": "the activation of another prompt",
    "optimal": "a constant, trained such that one circuit loses least (`Circuit.evaluate` only)",
    "noise": "the activation plus Gaussian noise: `Noise`, or its defaults",
}


@dataclass(frozen=True)
class Noise:
    """Gaussian noise added to an activation: the corruption of causal tracing (Meng et al. 2022,
    "Locating and Editing Factual Associations in GPT").

    The noise at a position has `scale` times the standard deviation of the activation's entries
    there. Every row of a batch gets the same draws, so a row's result does not depend on the other
    rows, nor on right padding; average over seeds for more than one sample. The draws depend on the
    seed and the activation's name. torch's global random state is neither used nor changed.

    Attributes:
        scale: the standard deviation of the noise, in units of the activation's own; 0: no noise.
        seed: the random seed.

    Raises:
        ValueError: a scale that is negative or not finite.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.patching import Noise, ablated
        >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and John")
        >>> noisy = ablated(cache, Noise(scale=0.5, seed=1))["hook_embed"]
        >>> change = noisy - cache["hook_embed"]
        >>> bool((change.std() / cache["hook_embed"].std() - 0.5).abs() < 0.1)
        True
    """

    scale: float = 3.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.scale < math.inf:
            raise ValueError(f"scale is {self.scale}; it must be 0 or more, and finite")

    def added_to(
        self, activation: Float[Tensor, "batch pos *axes"], name: str
    ) -> Float[Tensor, "batch pos *axes"]:
        """Return an activation with noise.

        Args:
            activation: the activation.
            name: its hook point or sender, so that each has noise of its own.

        Raises:
            ValueError: the activation has no axes besides batch and position.
        """
        if activation.ndim < 3:
            raise ValueError(
                f"noise needs an activation [batch, pos, ...]; {name} has shape"
                f" {list(activation.shape)}"
            )
        if not self.scale:
            return activation
        precise = at_least_float32(activation)
        spread = precise.flatten(2).std(-1, correction=0)
        spread = spread.view(*spread.shape, *[1] * (activation.ndim - 2))
        noise = self._draws(activation.shape[1:], name).to(precise)
        return (precise + self.scale * spread * noise).to(activation.dtype)

    def _draws(self, shape: torch.Size, name: str) -> Float[Tensor, "pos *axes"]:
        """Return standard normal numbers, drawn position by position, so that a longer prompt
        begins with the same numbers.
        """
        # On the CPU, a generator uses 32 bits of its seed.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        draws = [
            torch.randn(shape[1:], generator=generator, dtype=torch.float32, device="cpu")
            for _ in range(shape[0])
        ]
        return torch.stack(draws)


def kind_of(ablation: str | Noise) -> str:
    """Return the kind of an ablation, for a function that has no circuit to train constants for.

    Args:
        ablation: the argument.

    Raises:
        ValueError: an unknown kind, or ``"optimal"``.
    """
    kind = "noise" if isinstance(ablation, Noise) else ablation
    check_choice("ablation", kind, [name for name in ABLATIONS if name != "optimal"])
    return kind


def noise_of(ablation: str | Noise, seed: int = 0) -> Noise:
    """Return the noise of an ablation of kind ``"noise"``.

    Args:
        ablation: the argument.
        seed: the seed if the argument is the word alone.
    """
    return ablation if isinstance(ablation, Noise) else Noise(seed=seed)


def takes_how(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that also accepts its argument `ablation` by the former name, `how`.

    Args:
        function: the function.
    """

    @functools.wraps(function)
    def renamed(*args: P.args, **kwargs: P.kwargs) -> T:
        if "how" in kwargs:
            warnings.warn(
                f"{function.__name__}(how=...) is called {function.__name__}(ablation=...) now",
                DeprecationWarning,
                stacklevel=2,
            )
            if "ablation" in kwargs:
                raise TypeError(f"{function.__name__} got ablation and its former name how")
            kwargs["ablation"] = kwargs.pop("how")
        return function(*args, **kwargs)

    return renamed


def mean_of_tokens(
    activation: Float[Tensor, "batch pos *axes"], mask: Tensor | None
) -> Float[Tensor, "one pos *axes"]:
    """Return the mean over the rows that have a token at a position; zero where none has one.

    Args:
        activation: the activation.
        mask: ``[batch, pos]``, 1 for tokens and 0 for padding; None: there is no padding.
    """
    if mask is None:
        return mean(activation, 0)
    tokens = mask.bool().to(activation.device)
    tokens = tokens.reshape(*tokens.shape, *(1 for _ in activation.shape[2:]))
    total = at_least_float32(activation).where(tokens, 0).sum(0, keepdim=True)
    return (total / tokens.sum(0, keepdim=True).clamp(min=1)).to(activation.dtype)
