"""Parameters that are spread over processes: put together while a transform writes to them, and cut again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor


def held_here(parameter: Tensor) -> Tensor:
    """What this process has of a parameter: all of it, or its part."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def is_spread(model: nn.Module) -> bool:
    """Whether processes have parts of its parameters."""
    return is_sharded(model) or any(isinstance(parameter, DTensor) for parameter in model.parameters())


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 has made a plan of the parameters, in which others have no place."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


@contextmanager
def put_together(model: nn.Module, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Puts the parameters of modules together, and writes what became of them to the parts. All processes have to ask.

    A bias that a layer is given meanwhile is spread as its weight is.

    Args:
        model: that they are of.
        modules: with those inside of them.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # what FSDP2 has put together for a run is dropped behind it, with what is written there
    inside = dict.fromkeys(module for each in modules for module in each.modules())
    spread = [module for module in inside if any(isinstance(p, DTensor) for p in module._parameters.values())]
    parts = {module: dict(module._parameters) for module in spread}
    together: dict[nn.Parameter, nn.Parameter] = {}
    with torch.no_grad():
        for module in spread:
            for name, part in parts[module].items():
                if isinstance(part, DTensor):
                    if part not in together:
                        together[part] = nn.Parameter(part.full_tensor(), requires_grad=part.requires_grad)
                    module._parameters[name] = together[part]
    try:
        yield
    finally:
        with torch.no_grad():
            for part, full in together.items():
                assert isinstance(part, DTensor)
                part.to_local().copy_(_part(full.detach(), part, part.placements))
            for module in spread:
                bias = module._parameters.get("bias")
                module._parameters.update(parts[module])
                weight = module._parameters.get("weight")
                if bias is not None and parts[module].get("bias") is None and isinstance(weight, DTensor):
                    place = [Shard(0) if there == Shard(0) else Replicate() for there in weight.placements]
                    new = _part(bias.detach(), weight, place)
                    whole = DTensor.from_local(
                        new, weight.device_mesh, place, run_check=False, shape=bias.shape, stride=(1,)
                    )
                    module._parameters["bias"] = nn.Parameter(whole, requires_grad=bias.requires_grad)


def _part(full: Tensor, of: DTensor, placements: Sequence[Placement]) -> Tensor:
    """What this process has of a tensor that is cut over the processes of a parameter."""
    return distribute_tensor(full, of.device_mesh, placements, src_data_rank=None).to_local()
