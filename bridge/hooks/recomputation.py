"""Parts of a program that backward computes again: their hooks are those of the first computation.

Such a part is a *region*. There are two kinds, and torch keeps an object for each, which is the
same in both computations:

1. `torch.utils.checkpoint.checkpoint` and ``torch.distributed._composable.checkpoint`` install
   hooks for saved tensors, which hold the region's frame;
2. an `autograd.Function` (the reentrant checkpoint is one, and so is recomputation by hand) has
   the ``ctx`` of its ``forward`` and ``backward``.

A run of the bridge inside a region notes there which hooks it saw from outside of the region
(`bridge.wiring.repeated`). The second computation sees these, and the hooks that it opens itself;
hooks that are only around ``backward`` do not reach it. If the region is smaller than a run (a
block that is checkpointed by other means than the model's own), nothing would bring its hooks back,
and `refuse_unknown_recomputation` raises an error.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, Function
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from adapters.imports import check_checkpointed_gradients
from bridge.hooks.context import Scope

# --------------------------------------------------------------------------------------------------
# The regions around the present code.
# --------------------------------------------------------------------------------------------------


@dataclass
class NotedRun:
    """The hooks that a run saw in the first computation of a region.

    Attributes:
        owner: the registry of its bridge's hooks.
        scopes: the visible scopes that were opened outside the region; None represents added hooks.
        changes: the number of times that hooks had been added or removed.
    """

    owner: object
    scopes: frozenset[Scope | None]
    changes: int


@dataclass
class CheckpointRegion:
    """A part of a program that backward may recompute.

    Attributes:
        number: a unique number.
        notes: whether its first computation records its runs.
        runs: the runs in its first computation, in order.
        repeated: the number of these runs that each backward pass has repeated, by the pass's
            number and the owner.
    """

    number: int
    notes: bool = True
    runs: list[NotedRun] = field(default_factory=list)
    repeated: dict[tuple[int, int], int] = field(default_factory=dict)


_NUMBERS = itertools.count()
_FIELD = "_transformer_bridge_region"


def _region_of(owner: Any) -> CheckpointRegion:
    """Return the region that belongs to one of torch's objects."""
    region: CheckpointRegion | None = getattr(owner, _FIELD, None)
    if region is None:
        region = CheckpointRegion(next(_NUMBERS))
        setattr(owner, _FIELD, region)
    return region


@dataclass
class Regions:
    """The regions around the current code, out to the one that is being recomputed.

    Attributes:
        first: the regions that are being computed for the first time, starting with the innermost.
        again: the region that backward is recomputing, if any.
        unbound: the name of an `autograd.Function` without a ``ctx`` in its ``forward``.
    """

    first: list[CheckpointRegion] = field(default_factory=list)
    again: CheckpointRegion | None = None
    unbound: str | None = None


#: torch's functions by which regions are recognised on the stack.
_FUNCTION: CodeType = inspect.unwrap(vars(Function)["apply"].__func__).__code__
_BACKWARD = {
    function.__code__
    for name in ("apply", "apply_boxed")
    if (function := getattr(BackwardCFunction, name, None)) is not None
}
_PACK_FIRST = "_checkpoint_hook."
_PACK_AGAIN = "_recomputation_hook."


def regions() -> Regions:
    """Return the regions around the current code."""
    around = Regions()
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        _add_checkpoints(around)
    in_backward = torch._C._current_graph_task_id() != -1
    # The forward of an `autograd.Function` runs without gradients.
    if in_backward or not torch.is_grad_enabled():
        _add_functions(around)
    return around


def _add_checkpoints(around: Regions) -> None:
    """Add the regions of torch's checkpoints, recognised by their saved-tensor hooks."""
    for pack, _ in reversed(packing_hooks()):
        name = getattr(pack, "__qualname__", "")
        if name.startswith(_PACK_FIRST):
            around.first.append(_region_of(_captured(pack, "frame")))
        elif name.startswith(_PACK_AGAIN):
            around.again = _region_of(_captured(pack, "target_frame_ref")())
            return


#: A pair of functions that pack and unpack the tensors that autograd saves.
Packing = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def packing_hooks() -> tuple[Packing, ...]:
    """Return all saved-tensor hooks of autograd, the innermost last. (Autograd itself exposes only
    the innermost.)"""
    stack: list[Packing] = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(False)) is not None:
        stack.insert(0, top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in stack:
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
    return tuple(stack)


def _captured(function: Callable[..., Any], name: str) -> Any:
    """Return a variable that an inner function captured."""
    inner: Any = inspect.unwrap(function)
    return inner.__closure__[inner.__code__.co_freevars.index(name)].cell_contents


def _add_functions(around: Regions) -> None:
    """Add the regions of each `autograd.Function` on the stack, out to one that is running its
    backward."""
    inner: FrameType | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _FUNCTION:
            ctx = _first_argument(inner)
            if isinstance(ctx, BackwardCFunction):
                around.first.append(_region_of(ctx))
            else:
                around.unbound = frame.f_locals["cls"].__name__
        elif frame.f_code in _BACKWARD:
            if around.again is None:
                ctx = frame.f_locals["self"]
                around.again = _region_of(ctx)
                around.again.notes = not _has_own_setup(ctx)
            return
        inner, frame = frame, frame.f_back


def _has_own_setup(ctx: Any) -> bool:
    """Tell whether the function of a context has a separate `setup_context`, so that its forward
    runs without the context."""
    return ctx._forward_cls.setup_context is not Function.setup_context


def _first_argument(frame: FrameType | None) -> object:
    """Return the first argument of a function that is running."""
    if frame is None or not frame.f_code.co_argcount:
        return None
    return frame.f_locals.get(frame.f_code.co_varnames[0])


def region_numbers() -> frozenset[int]:
    """Return the numbers of the regions around the current code (see `Scope.opened_in`)."""
    around = regions()
    again = [] if around.again is None else [around.again]
    return frozenset([region.number for region in (*around.first, *again)])


# --------------------------------------------------------------------------------------------------
# Hooks that backward would compute a part without.
# --------------------------------------------------------------------------------------------------


def recomputation_frame(
    function: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a function whose hooks are repeated when backward recomputes it: a run, or a block.

    Args:
        function: the function.
        args, kwargs: its arguments.
    """
    innermost = _innermost_checkpoint()  # noqa: F841 - `_region_without_hooks` reads it here
    return function(*args, **kwargs)


def _innermost_checkpoint() -> int | None:
    """Return the number of the torch checkpoint that contains the current code."""
    pair = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if pair is None:
        return None
    around = Regions()
    _add_checkpoints(around)
    if around.first:
        return around.first[0].number
    return None if around.again is None else around.again.number


def refuse_unknown_recomputation(name: str) -> None:
    """Raise an error if a hook would change an activation, or read its gradient, in a checkpointed
    part of a run. After the run, backward would recompute that part without the hook.

    Args:
        name: of the hook point.

    Raises:
        RuntimeError: the hook point is in a checkpointed region that begins inside the run and was
            not created by the model.
    """
    region = _region_without_hooks()
    if region is not None:
        raise RuntimeError(
            f"{name} lies in a part of the model that {region} computes again in"
            " backward, and nothing would bring its hook along: the gradients would be those"
            " of another function. Checkpoint with the model's own"
            " gradient_checkpointing_enable(), or switch checkpointing off in runs with hooks"
        )


def _region_without_hooks() -> str | None:
    """Return the name of a region around the current code that begins inside its run."""
    frame: FrameType | None = sys._getframe(2)
    innermost = _innermost_checkpoint()
    while frame is not None:
        code = frame.f_code
        if code is _REPEATED:
            if innermost is None or innermost == frame.f_locals["innermost"]:
                return None
            return "torch.utils.checkpoint"
        if code is _CHECKPOINT:
            return "torch.utils.checkpoint"
        if code is _FUNCTION and frame.f_locals["cls"] is not CheckpointFunction:
            return f"the autograd.Function {frame.f_locals['cls'].__name__}"
        frame = frame.f_back
    return None if innermost is None else "torch.utils.checkpoint"


def refuse_older_checkpointing() -> None:
    """Raise an error for a gradient hook in a checkpointed block if transformers is too old.

    Raises:
        VersionError: transformers is older than 5.23.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CHECKPOINT:
            check_checkpointed_gradients()
            return
        frame = frame.f_back


_REPEATED: CodeType = inspect.unwrap(recomputation_frame).__code__
_CHECKPOINT: CodeType = inspect.unwrap(checkpoint).__code__
