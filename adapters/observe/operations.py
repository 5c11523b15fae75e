"""Read how a recorded tensor was computed from autograd's graph."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adapters.views import Affine, Chain, times
from adapters.views.views import constant_of

#: An operation in autograd's graph.
Node = Any
#: Operations that only change the shape, dtype or order of numbers.
SAME = (
    "View",
    "UnsafeView",
    "ReshapeAlias",
    "ToCopy",
    "Clone",
    "Expand",
    "Squeeze",
    "Unsqueeze",
    "Alias",
    "Transpose",
    "Permute",
    "MaskedFill",
)
#: Operations that select, repeat or clamp numbers. A cache appends keys to its empty tensor.
SELECTING = (
    *SAME,
    "Cat",
    "Clamp",
    "IndexSelect",
    "Repeat",
    "Select",
    "Slice",
    "Split",
    "SplitWithSizes",
    "Unbind",
)


def is_operation(node: Node, *names: str) -> bool:
    """Tell whether an operation has one of these names."""
    kind = type(node).__name__.partition("Backward")[0]
    return kind in names


def operands(node: Node) -> list[Node]:
    """Return the operations that computed the operands of an operation; constants are excluded."""
    return [operand for operand, _ in node.next_functions if operand is not None]


def not_followed(node: Node, start: Node) -> str | None:
    """Name the first operation before a tensor whose internal steps autograd does not record.

    Args:
        node: the operation that made the tensor; None: there is no graph.
        start: where the search ends.

    Returns:
        A custom autograd function, or code without a graph (`torch.no_grad`, or code that runs
        inside a custom autograd function); None if all of it is recorded.
    """
    if node is None:
        return "code outside of autograd's graph"
    for operation in operations_before(node, {start}):
        if isinstance(operation, torch.autograd.function.BackwardCFunction):
            name = type(operation).__name__.removesuffix("Backward")
            return f"the autograd function {name}"
    return None


def operations_before(node: Node, stops: Collection[Node]) -> Iterator[Node]:
    """Yield the operations that a tensor is computed by.

    Args:
        node: the operation that made the tensor.
        stops: operations where the search ends; they are not yielded.
    """
    visited = {None, *stops}
    pending = [node]
    while pending:
        operation = pending.pop()
        if operation not in visited:
            visited.add(operation)
            yield operation
            pending += operands(operation)


def clamp_before(node: Node, stops: Collection[Node]) -> float | None:
    """Return the limit to which numbers are clamped on the way to a tensor, or None; the arguments
    are those of `operations_before`.
    """
    for operation in operations_before(node, stops):
        if is_operation(operation, "Clamp"):
            low, high = (getattr(operation, name) for name in ("_saved_min", "_saved_max"))
            if low is not None and high == -low:
                return float(high)
    return None


def selected_from(node: Node) -> Node:
    """Return the operation of the tensor from which numbers are selected, repeated or clamped."""
    while is_operation(node, *SELECTING):
        sources = operands(node)
        if len(sources) != 1:
            break
        node = sources[0]
    return node


def behind(node: Node) -> Node:
    """Return the operation that computed the numbers, skipping operations that only change the
    shape.
    """
    while is_operation(node, *SAME) and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return node


def parameter(node: Node, names: Mapping[int, str]) -> str | None:
    """Return the parameter name of a tensor; None if it is not a parameter.

    Args:
        node: its operation.
        names: parameter names, by data pointer.
    """
    node = behind(node)
    if is_operation(node, "AccumulateGrad"):
        return names.get(node.variable.data_ptr())
    return None


def factor(node: Node, names: Mapping[int, str]) -> tuple[Node, Chain] | None:
    """Return the other operand of a product with a constant or a parameter, and the factor; None
    for anything else.
    """
    if not is_operation(node, "Mul", "Div"):
        return None
    (x, _), (y, _) = (*node.next_functions, (None, 0))[:2]
    divides = is_operation(node, "Div")
    for of, by, saved in ((x, y, "_saved_other"), (y, x, "_saved_self"))[: 1 if divides else 2]:
        if of is None:
            continue
        squashed = is_operation(by, "Tanh")
        if name := parameter(by.next_functions[0][0] if squashed else by, names):
            return of, (Affine(weight=name, squashed=squashed),)
        constant = getattr(node, saved, None) if by is None else None
        if isinstance(constant, Tensor) and bool((constant == constant.flatten()[0]).all()):
            number = float(constant.flatten()[0])
            return of, times(float(f"{1 / number if divides else number:.8g}"))
    return None


class Between(NamedTuple):
    """Operations between two tensors: ``cap * tanh(factor * x / cap)``, or ``factor * x`` plus a
    term.

    Attributes:
        factor, cap: the numbers of the formula; `cap` is None without a soft cap.
        adds: whether a term is added.
        start: the operation after which they begin.
    """

    factor: float
    cap: float | None
    adds: bool
    start: Node


def between(node: Node, start: Node = None) -> Between:
    """Return the operations between two tensors, or between the last matrix product and a tensor.

    Args:
        node: the operation that computed the last tensor.
        start: the operation that computed the first; None: the first operation of another kind.
    """
    total = 1.0
    cap = None
    adds = False
    while (node := behind(node)) is not start:
        product = factor(node, {})
        constant = None if product is None else constant_of(product[1])
        if product is not None and constant is not None:
            node = product[0]
            total *= constant
        elif is_operation(node, "Tanh") and cap is None:
            node = node.next_functions[0][0]
            cap = total
            total = 1.0
        elif is_operation(node, "Add"):
            terms = (term for term, _ in node.next_functions)
            node = next(term for term in terms if not is_operation(term, "AccumulateGrad"))
            adds = True
        elif is_operation(node, "Slice"):
            node = node.next_functions[0][0]
        else:
            break
    return Between(total if cap is None else total * cap, cap, adds, node)
