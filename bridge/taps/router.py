"""The steps by which a router chooses experts, and the tap that shows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adapters.views import Args, Call, Kwargs
from bridge.taps.tap import LINEAR_PRODUCTS, Tap, Watch

_CHOICES = {torch.topk, Tensor.topk}


class RouterSteps:
    """One call of a router that chooses experts by logits, and returns these, and the weights and indices it chose.

    Its channels are ``product``, what its matrix makes of its input, ``logits``, what the experts are chosen by, and
    ``weights``, what their outputs are multiplied with (zero for those that are not chosen): all ``[row, n_experts]``;
    and ``indices``, those of the chosen ones, for routers that do not return them.

    Args:
        show: shows a tensor to the hook points of a channel, and returns what they make of it.
    """

    def __init__(self, show: Callable[[str, Tensor], Tensor]) -> None:
        self._show, self._multiplied, self._chosen = show, False, False

    def call(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Calls a torch function of the router's: the first product and the first choice of the best are shown."""
        if func in LINEAR_PRODUCTS and not self._multiplied:
            self._multiplied = True
            return self._show("product", func(*args, **kwargs))
        if self._chosen or func not in _CHOICES:
            return func(*args, **kwargs)
        self._chosen = True
        given = args[0] if args else kwargs.pop("input")
        logits = self._show("logits", given)
        best = func(logits, *args[1:], **kwargs)
        made = best.indices
        indices = self._show("indices", made)
        return best if indices is made else torch.return_types.topk((logits.gather(-1, indices), indices))

    def with_weights(self, output: Any) -> Any:
        """What the router returns, with the weights that are made of those of all experts."""
        logits, chosen, indices = output
        everyone = torch.zeros_like(logits).scatter(-1, indices, chosen)
        return logits, self._show("weights", everyone).gather(-1, indices), indices


class RouterTap(Tap):
    """For routers. Its channels are those of `RouterSteps`."""

    def watched(self, *args: object, **kwargs: object) -> Any:
        """The module's forward when somebody listens."""
        call = Call(self.module, args, kwargs)
        steps = RouterSteps(lambda channel, x: self.show(channel, x, call))
        with _RouterWatch(steps):
            output = self.original(*args, **kwargs)
        return steps.with_weights(output) if self.heard(("weights",)) else output


class _RouterWatch(Watch):
    """Shows what one call of a router computes."""

    def __init__(self, steps: RouterSteps) -> None:
        super().__init__()
        self._steps = steps

    def call(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Shows the router's product and its choice."""
        return self._steps.call(func, args, kwargs)
