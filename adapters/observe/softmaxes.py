"""Softmaxes that are no call of a softmax: ``exp(x - max) / sum``, and the exponential of a ``log_softmax``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_LOGARITHMS = {torch.log_softmax, torch.nn.functional.log_softmax, Tensor.log_softmax}
_MAXIMA = {torch.max, Tensor.max, torch.amax, Tensor.amax}
_DIFFERENCES = {torch.sub, Tensor.sub, Tensor.__sub__}
_EXPONENTIALS = {torch.exp, Tensor.exp}
_SUMS = {torch.sum, Tensor.sum}
_QUOTIENTS = {torch.div, Tensor.div, Tensor.__truediv__, torch.true_divide, Tensor.true_divide}
#: The functions that a softmax by hand is made of.
STEPS = _LOGARITHMS | _MAXIMA | _DIFFERENCES | _EXPONENTIALS | _SUMS | _QUOTIENTS


def may_be_step(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a function may be a step of a softmax: one of rows of a tensor of three axes or more."""
    return func in STEPS and bool(args) and isinstance(args[0], Tensor) and args[0].ndim > 2


@dataclass
class SoftmaxByHand:
    """Follows the torch functions of a module from one to the next, and finds the softmax among them."""

    _kept: list[Tensor] = field(default_factory=list)  # so that no other tensor takes the place of one
    _maxima: dict[int, Tensor] = field(default_factory=dict)
    _exponents: dict[int, Tensor] = field(default_factory=dict)
    _logarithms: dict[int, Tensor] = field(default_factory=dict)
    _shares: dict[int, Tensor] = field(default_factory=dict)
    _totals: dict[int, Tensor] = field(default_factory=dict)

    def step(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        begins: Callable[[Tensor], Tensor],
        ends: Callable[[Tensor, Tensor], Tensor],
    ) -> Any:
        """Calls a function that may be a step.

        Args:
            func, args, kwargs: the function, and what it is given.
            begins: called with the scores, before they become shares (a difference from the largest may be for
                something else); it returns what the model goes on with.
            ends: called with the scores and the pattern behind the last step; likewise.
        """
        x: Tensor = args[0]
        other = args[1] if len(args) > 1 else None
        if func in _LOGARITHMS:
            x = begins(x)
            made = func(x, *args[1:], **kwargs)
            return self._keep(self._logarithms, made, x)
        if func in _DIFFERENCES and isinstance(other, Tensor) and self._maxima.get(id(other)) is x:
            return self._keep(self._exponents, func(*args, **kwargs), x)
        if func in _QUOTIENTS and isinstance(other, Tensor) and self._totals.get(id(other)) is x:
            return ends(self._shares[id(x)], func(*args, **kwargs))
        if func in _EXPONENTIALS:
            if id(x) in self._logarithms:
                return ends(self._logarithms[id(x)], func(*args, **kwargs))
            scores = self._exponents.get(id(x))
            if scores is not None:
                new = begins(scores)
                x = x if new is scores else new - new.amax(-1, keepdim=True)
                return self._keep(self._shares, func(x, *args[1:], **kwargs), new)
        made = func(*args, **kwargs)
        if func in _MAXIMA:
            found = made if isinstance(made, Tensor) else made[0]
            if found.ndim == x.ndim and found.shape[-1] == 1:
                self._keep(self._maxima, found, x)
        elif func in _SUMS and id(x) in self._shares and made.ndim == x.ndim:
            self._keep(self._totals, made, x)
        return made

    def _keep(self, known: dict[int, Tensor], made: Tensor, of: Tensor) -> Tensor:
        self._kept += [made, of]
        known[id(made)] = of
        return made
