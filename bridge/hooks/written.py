"""Whether a module computes with the weights that it did, as far as torch counts what is written to them."""

from __future__ import annotations

from torch import nn

#: For each parameter of a module, which one it is and how often it was written to; which adapters of PEFT are at work.
Written = tuple[tuple[object, ...], ...]


def written_to(module: nn.Module) -> Written:
    """What changes when a module computes with other weights: these are exchanged or written to, or PEFT's adapters
    inside of it are switched or scaled. (What is written through ``weight.data`` torch does not count.)

    Args:
        module: any module. Parameters on no device, which are loaded when they are needed, do not count.

    Example:
        >>> import torch
        >>> from bridge.hooks.written import written_to
        >>> layer = torch.nn.Linear(2, 2)
        >>> before = written_to(layer)
        >>> with torch.no_grad():
        ...     _ = layer.weight.mul_(2)
        >>> written_to(layer) == before
        False
    """
    # A plain layer is asked alone: to go through modules takes longer than all else here.
    own = module.parameters() if module._modules else module._parameters.values()
    written: list[tuple[object, ...]] = [
        (id(x), 0 if x.is_inference() else x._version) for x in own if x is not None and not x.is_meta
    ]
    return (*written, *adapters_at_work(module)) if module._modules else tuple(written)


def adapters_at_work(module: nn.Module) -> tuple[tuple[object, ...], ...]:
    """Of each layer of PEFT's inside of a module, in order: which adapters are at work, and how much each counts.

    Args:
        module: any module.
    """
    found = []
    for part in module.modules():
        active, disabled = getattr(part, "active_adapters", None), getattr(part, "disable_adapters", None)
        if isinstance(active, list) and isinstance(disabled, bool):  # of a whole model they are methods
            scaling = getattr(part, "scaling", None)
            found.append((*active, disabled, *(scaling.items() if isinstance(scaling, dict) else ())))
    return tuple(found)
