"""Where images, or sound, stand among the tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from adapters.inputs.arguments import argument_names
from adapters.inputs.made import Given
from adapters.views import Args, Kwargs


def others_of(arguments: Given) -> dict[str, Tensor]:
    """Other images, or another sound, in the place of what is given."""
    return {name: x.flip(-1) * -1.5 for name, x in arguments.items() if x.is_floating_point()}


def unchanged(before: Tensor, after: Tensor) -> Tensor | None:
    """The places at which two streams are the same, ``[batch, pos]``; None where that says nothing.

    Args:
        before, after: ``[batch, pos, d_model]``, of runs with different images.
    """
    same = (before == after).all(-1)
    return None if bool(same.all()) or not bool(same.any()) else same


def text_places(model: nn.Module, arguments: Given, first: nn.Module, stream: Tensor) -> Tensor | None:
    """The places whose first stream images have no part in, ``[batch, pos]``; None where all, or none, are such.

    Args:
        model: a Hugging Face model.
        arguments: what it was run on.
        first: the first block.
        stream: what entered it in that run.
    """
    others = others_of(arguments)
    if not others:
        return None
    seen: list[Tensor] = []
    name = next(iter(argument_names(first)), "")

    def enters(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        seen.append((args[0] if args else kwargs[name]).detach().clone())

    with torch.no_grad(), first.register_forward_pre_hook(enters, with_kwargs=True):
        model(**{**arguments, **others})
    return unchanged(stream, seen[0]) if len(seen) == 1 and seen[0].shape == stream.shape else None
