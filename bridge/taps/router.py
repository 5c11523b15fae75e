"""The steps by which a router chooses experts, and the tap that shows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from adapters.observe.functions import CHOICES, LINEAR_PRODUCTS
from adapters.views import Args, Call, Kwargs
from bridge.taps.tap import RunCall, Tap, TappedCall, Watch


class RouterWatch(Watch):
    """Shows what one call of a router computes that chooses experts by logits.

    Its channels are ``product``, what its matrix makes of its input, ``logits``, what the experts are chosen by, and
    ``weights``, what their outputs are multiplied with (zero for those that are not chosen), for routers that return
    the weights and indices of the chosen ones: all ``[row, n_experts]``; and ``indices``, those of the chosen ones, for
    routers that do not return them.
    """

    def __init__(self, shown: TappedCall) -> None:
        super().__init__(shown)
        self._multiplied = self._chosen = False
        self._n_experts = 0

    def call(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Calls a torch function of the router's: the first product and the first choice of the best are shown."""
        if func in LINEAR_PRODUCTS and not self._multiplied:
            self._multiplied = True
            made = func(*args, **kwargs)
            self._n_experts = made.shape[-1]
            return self.shown.show("product", made)
        if self._chosen or func not in CHOICES:
            return func(*args, **kwargs)
        self._chosen = True
        given = args[0] if args else kwargs.pop("input")
        logits = self.shown.show("logits", given)
        best = func(logits, *args[1:], **kwargs)
        chosen = best.indices
        indices = self.shown.show("indices", chosen)
        return best if indices is chosen else torch.return_types.topk((logits.gather(-1, indices), indices))

    def output_of(self, run: Callable[[], Any]) -> Any:
        """What the router returns, with the weights that are made of those of all experts.

        Args:
            run: its forward.
        """
        with self:
            output = run()
        if not self.shown.active_points(("weights",)):
            return output
        whole = [place for place, x in enumerate(output) if not x.is_floating_point()]
        of_chosen = [(abs(place - at), place, at) for at in whole for place, x in enumerate(output)
                     if place not in whole and x.shape == output[at].shape]  # fmt: skip
        if not of_chosen:
            raise RuntimeError(f"{type(self.shown.module).__name__} returns no weights and indices of chosen experts")
        _, place, at = min(of_chosen)  # they are given together
        indices = output[at]
        chosen = output[place]
        everyone = chosen.new_zeros(*chosen.shape[:-1], self._n_experts).scatter(-1, indices, chosen)
        shown = self.shown.show("weights", everyone).gather(-1, indices)
        return type(output)((*output[:place], shown, *output[place + 1 :]))


class RouterTap(Tap):
    """For routers. Its channels are those of `RouterWatch`."""

    def watched(self, *args: object, **kwargs: object) -> Any:
        """The module's forward when somebody listens."""
        watch = RouterWatch(RunCall(self, Call(self.module, args, kwargs)))
        return watch.output_of(lambda: self.original(*args, **kwargs))
