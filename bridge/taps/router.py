"""The steps by which a router chooses experts, and the tap that shows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from adapters.observe.functions import CHOICES, LINEAR_PRODUCTS
from adapters.views import Args, Call, Kwargs
from bridge.taps.tap import RunCall, Tap, TappedCall, Watch


class RouterWatch(Watch):
    """Shows what one call of a router computes that chooses experts by logits, and returns these, and the weights and
    indices it chose.

    Its channels are ``product``, what its matrix makes of its input, ``logits``, what the experts are chosen by, and
    ``weights``, what their outputs are multiplied with (zero for those that are not chosen): all ``[row, n_experts]``;
    and ``indices``, those of the chosen ones, for routers that do not return them.
    """

    def __init__(self, shown: TappedCall) -> None:
        super().__init__(shown)
        self._multiplied = self._chosen = False

    def call(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Calls a torch function of the router's: the first product and the first choice of the best are shown."""
        if func in LINEAR_PRODUCTS and not self._multiplied:
            self._multiplied = True
            return self.shown.show("product", func(*args, **kwargs))
        if self._chosen or func not in CHOICES:
            return func(*args, **kwargs)
        self._chosen = True
        given = args[0] if args else kwargs.pop("input")
        logits = self.shown.show("logits", given)
        best = func(logits, *args[1:], **kwargs)
        made = best.indices
        indices = self.shown.show("indices", made)
        return best if indices is made else torch.return_types.topk((logits.gather(-1, indices), indices))

    def output_of(self, run: Callable[[], Any]) -> Any:
        """What the router returns, with the weights that are made of those of all experts.

        Args:
            run: its forward.
        """
        with self:
            output = run()
        if not self.shown.active_points(("weights",)):
            return output
        logits, chosen, indices = output
        everyone = torch.zeros_like(logits, dtype=chosen.dtype).scatter(-1, indices, chosen)
        return logits, self.shown.show("weights", everyone).gather(-1, indices), indices


class RouterTap(Tap):
    """For routers. Its channels are those of `RouterWatch`."""

    def watched(self, *args: object, **kwargs: object) -> Any:
        """The module's forward when somebody listens."""
        watch = RouterWatch(RunCall(self, Call(self.module, args, kwargs)))
        return watch.output_of(lambda: self.original(*args, **kwargs))
