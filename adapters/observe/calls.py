"""What a recording is made of: the calls of modules, the softmaxes, and the tensors at the borders of modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from adapters.inputs.arguments import argument_names
from adapters.paths import is_inside

#: What two tensors of the same numbers share, whatever their shapes.
Mark = tuple[int, int]


def mark(x: Tensor) -> Mark:
    """The numbers of a tensor in a few bytes."""
    data = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return x.numel(), hash(data.numpy().tobytes())


@dataclass(eq=False)
class BorderTensor:
    """A tensor at the border of a module.

    Attributes:
        key: which element of the output it is (None: the output itself, or the input).
        live: the tensor, in the graph.
        value: its numbers at that time.
        mark: see `mark`.
    """

    key: int | None
    live: Tensor
    value: Tensor
    mark: Mark

    def transposed(self) -> BorderTensor:
        """The same with its first two axes exchanged."""
        value = self.value.transpose(0, 1).contiguous()
        return BorderTensor(self.key, self.live.transpose(0, 1), value, mark(value))


def elements_of(output: Any) -> list[Any]:
    """The elements of what a module returned, by position."""
    if isinstance(output, tuple | list):
        return list(output)
    return list(output.values()) if isinstance(output, Mapping) else []


def _tensors(x: object) -> Iterator[Tensor]:
    yield from (value for value in ([x] if isinstance(x, Tensor) else elements_of(x)) if isinstance(value, Tensor))


@dataclass(eq=False)
class ModuleCall:
    """One call of a module.

    Attributes:
        path, module: which.
        args, kwargs: what it was called with.
        output: what it returned.
        start, end: when, in events of the run.
        entered: its first argument, where that is a tensor of numbers and the graph is recorded.
        left: likewise the tensors of numbers that it returned.
        changed: what entered it (``input``), or left it (``output``), was written over in place afterwards.
    """

    path: str
    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    output: Any = None
    start: int = 0
    end: int = -1
    entered: BorderTensor | None = None
    left: list[BorderTensor] = field(default_factory=list)
    changed: tuple[Literal["input", "output"], ...] = ()

    @property
    def input(self) -> Tensor | None:
        """The first tensor that it was given."""
        return next((x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Tensor)), None)

    @property
    def result(self) -> Tensor | None:
        """What it returned, or the first tensor of a tuple."""
        return next(_tensors(self.output), None)

    @property
    def given(self) -> dict[str, Tensor]:
        """The tensors among its arguments, by name."""
        named = dict(zip(argument_names(self.module), self.args, strict=False)) | self.kwargs
        return {name: x for name, x in named.items() if isinstance(x, Tensor)}

    @property
    def alone(self) -> bool:
        """Whether it was given one argument."""
        return len(self.args) + len(self.kwargs) == 1 and "forward" not in self.module.__dict__

    @property
    def n_left(self) -> int:
        """How many elements its output has."""
        return 1 if isinstance(self.output, Tensor) else len(elements_of(self.output))

    @property
    def indices(self) -> list[int]:
        """Which elements of its output are tensors of integers."""
        elements = [self.output] if isinstance(self.output, Tensor) else elements_of(self.output)
        return [key for key, x in enumerate(elements) if isinstance(x, Tensor) and not x.is_floating_point()]

    @property
    def indices_seen(self) -> Tensor:
        """The last tensor of integers that it returned."""
        return [x for x in _tensors(self.output) if not x.is_floating_point()][-1]

    @property
    def is_leaf(self) -> bool:
        return hasattr(self.module, "base_layer") or not any(True for _ in self.module.children())

    @property
    def is_linear(self) -> bool:
        """It multiplies with a matrix."""
        inner = getattr(self.module, "base_layer", self.module)
        weight = getattr(inner, "weight", None)
        if not (self.is_leaf and isinstance(weight, Tensor) and weight.ndim == 2):
            return False
        return not isinstance(inner, nn.Embedding) and not self._weighs_heads(weight)

    def _weighs_heads(self, weight: Tensor) -> bool:
        """A weight is a number for each column of each head, as in a norm (Cohere)."""
        x = self.entered.value.shape if self.entered else ()
        return x[-2:] == weight.shape and len(self.left) == 1 and self.left[0].value.shape == x

    def reads(self, mark: Mark) -> bool:
        """Its first argument has these numbers."""
        return self.entered is not None and self.entered.mark == mark

    @property
    def whole(self) -> BorderTensor | None:
        """The tensor of numbers that it returned, where that is all it did."""
        return self.left[0] if self.n_left == 1 and self.left and self.left[0].key is None else None

    def holds(self, other: ModuleCall) -> bool:
        """The other one was made while this one ran."""
        return self.start <= other.start and other.end <= self.end

    def element(self, key: int | None) -> BorderTensor:
        """The tensor of numbers at a place of its output."""
        return next(seen for seen in self.left if seen.key == key)


def tightest(around: Iterable[ModuleCall]) -> ModuleCall | None:
    """Of calls around the same, the innermost; None of none."""
    return min(around, key=lambda call: call.end - call.start, default=None)


#: The calls of each module, by its path.
Calls = dict[str, list[ModuleCall]]


@dataclass(eq=False)
class Softmax:
    """One softmax.

    Attributes:
        time: when.
        path: the innermost module that ran.
        scores: what entered it, in the graph.
        pattern: what left it.
        query, key: the factors of the product that the scores are made from, ``[batch, head, pos, d]``, where seen.
        fused: it was inside of `scaled_dot_product_attention`.
    """

    time: int
    path: str
    scores: Tensor
    pattern: Tensor
    query: Tensor | None
    key: Tensor | None
    fused: bool


@dataclass(eq=False)
class Recording:
    """What one run was made of.

    Attributes:
        batch, pos: the shape of the tokens; -1 where it is not known.
        lengths: of the rows of tokens that it was given.
        calls: of modules, by the time at which they began.
        by_path: the same, by the path of the module.
        softmaxes: in order.
        choices: the times at which the best of something were chosen (`topk`).
    """

    batch: int = -1
    pos: int = -1
    lengths: tuple[int, ...] = ()
    calls: list[ModuleCall] = field(default_factory=list)
    by_path: Calls = field(default_factory=dict)
    softmaxes: list[Softmax] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)

    def add(self, call: ModuleCall) -> None:
        """Adds a call that begins."""
        self.calls.append(call)
        self.by_path.setdefault(call.path, []).append(call)

    def turned(self, x: Tensor) -> bool:
        """Whether a tensor is ``[pos, batch, ...]``, of positions of a row of tokens that it was given."""
        return x.ndim > 1 and x.shape[0] in self.lengths and x.shape[1] == self.batch != x.shape[0]

    def of(self, path: str) -> list[ModuleCall]:
        """The calls of a module."""
        return self.by_path.get(path, [])

    def numbered(self, call: ModuleCall) -> str:
        """The path of a call, with its number where its module runs several times."""
        calls = [other for other in self.calls if other.module is call.module]
        return call.path if len(calls) == 1 or "@" in call.path else f"{call.path}@{calls.index(call)}"

    def rename(self, call: ModuleCall, path: str) -> None:
        """Gives a call, and those inside of it, another path."""
        before = call.path
        for each in self.calls:
            if call.holds(each) and is_inside(each.path, before):
                each.path = path + each.path[len(before) :]
        for softmax in self.softmaxes:
            if call.start < softmax.time < call.end and is_inside(softmax.path, before):
                softmax.path = path + softmax.path[len(before) :]
        self.by_path.clear()
        for each in self.calls:
            self.by_path.setdefault(each.path, []).append(each)

    def between(self, start: int, end: int) -> list[ModuleCall]:
        """The calls that began and ended between two times."""
        return [call for call in self.calls if start < call.start and call.end <= end]

    def softmaxes_between(self, start: int, end: int) -> list[Softmax]:
        """The softmaxes of rows between two times: not those of a few parameters."""
        return [each for each in self.softmaxes if start < each.time < end and each.scores.ndim > 1]
