"""The modes that a model is observed in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside a ``with`` statement; afterwards every module is in the mode in which it was.

    Args:
        model: the model.

    Example:
        >>> from torch import nn
        >>> from adapters.observe.modes import evaluating
        >>> with evaluating(model := nn.Dropout()):
        ...     inside = model.training
        >>> inside, model.training
        (False, True)
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def outside_of_modes(model: nn.Module) -> Iterator[None]:
    """Gradients, no inference mode and no autocast inside a ``with`` statement, wherever that stands.

    Args:
        model: the model, whose devices say which autocast it is.

    Example:
        >>> import torch
        >>> from adapters.observe.modes import outside_of_modes
        >>> with torch.inference_mode(), outside_of_modes(torch.nn.Linear(2, 2)):
        ...     torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        (True, False)
    """
    kinds = {parameter.device.type for parameter in model.parameters()}
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in filter(torch.amp.is_autocast_available, sorted(kinds)):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield
