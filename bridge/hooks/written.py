"""Whether the parameters of a module are those that they were, as far as torch counts what is written to them."""

from __future__ import annotations

from torch import nn

#: For each parameter of a module, which one it is and how often it was written to.
Written = tuple[tuple[int, int], ...]


def written_to(module: nn.Module) -> Written:
    """What changes when a module's parameters are exchanged or written to (but not through ``weight.data``).

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
    return tuple([(id(x), 0 if x.is_inference() else x._version) for x in own if x is not None and not x.is_meta])
