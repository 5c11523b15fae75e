"""Experts that several processes share by number (expert parallelism), seen on all of them.

Each process goes through all experts, in the model's own forward. An expert's products are made by the process that has
its weights, and sent to the others: so all show the same rows of the same expert, and gradients are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from adapters.gathering import Summed, SummedGradients
from adapters.observe.functions import LINEAR_PRODUCTS
from adapters.views import Call, Kwargs
from bridge.taps.experts_watch import ExpertsWatch
from bridge.taps.tap import Tap


def is_spread(module: nn.Module) -> bool:
    """Whether each process has some of the experts that a module holds."""
    held = module._parameters.get("down_proj")
    return isinstance(held, DTensor) and held.placements == (Shard(0),)


@contextmanager
def all_numbered(module: Any) -> Iterator[None]:
    """Lets the module's forward number the experts of all processes, not its own alone."""
    own = module.num_experts
    module.num_experts = module.down_proj.shape[0]
    try:
        yield
    finally:
        module.num_experts = own


class SpreadExpertsWatch(ExpertsWatch):
    """As `ExpertsWatch`, of experts that processes share."""

    def __init__(self, tap: Tap, call: Call) -> None:
        super().__init__(tap, call)
        held = tap.module._parameters["down_proj"]
        assert isinstance(held, DTensor)
        self._held: dict[str, DTensor] = {
            name: each for name, each in tap.module._parameters.items() if isinstance(each, DTensor)
        }
        group = held.device_mesh.get_group()
        self._sum: Summed = Summed(-1, group)
        self._gradients: SummedGradients = SummedGradients(-1, group)
        self._each: int = len(held) // group.size()
        self._first_here: int = self._each * group.rank()
        #: What the forward has taken out of the parameters: the tensor, the parameter's name, the expert.
        self._taken: dict[int, tuple[Tensor, str, int]] = {}

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> Any:
        """Takes one expert's part of a parameter, or shows what enters and leaves a projection."""
        if func is Tensor.__getitem__:
            for name, held in self._held.items():
                if args[0] is held:
                    return self._take(name, held, int(args[1]))
        return super().call(func, args, kwargs)

    def _take(self, name: str, held: DTensor, expert: int) -> Tensor:
        local, index = held.to_local(), expert - self._first_here
        here = 0 <= index < self._each
        part = (
            local[index]
            if here
            else local.new_empty(local.shape[1:], device=local.device if local.ndim == 2 else "meta")
        )
        if local.ndim == 2:  # a bias: it is added to rows that all have
            part = self._sum.whole(part if here else part.zero_())
        self._taken[id(part)] = part, name, expert
        return part

    def which(self, weight: Any, name: str) -> int | None:
        """Which expert's part of a parameter this is; None where it is none."""
        taken = self._taken.get(id(weight))
        return None if taken is None or taken[1] != name else taken[2]

    def made(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs) -> Any:
        """What a product or a sum is: a product, as the process makes it that has the expert."""
        weight = next((x for x in (*args, *kwargs.values()) if id(x) in self._taken), None)
        if weight is None or func not in LINEAR_PRODUCTS:
            return func(*args, **kwargs)
        x = self._gradients.part(args[0] if args else kwargs["input"])
        if not weight.is_meta:
            made = func(x, *args[1:], **kwargs) if args else func(**{**kwargs, "input": x})
        else:
            size = func(x.detach().to("meta"), *args[1:], **kwargs).shape[-1]
            nothing = torch.ones((), dtype=torch.bool, device=x.device)
            made = x[:, :1].masked_fill(nothing, 0.0).expand(-1, size)  # gradients come back here all the same
        return self._sum.whole(made)
