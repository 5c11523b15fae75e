"""The matrix: (family) x (surrounding) x (operation), at activations, scores and patterns, and in
generation.

`MATRIX=all` in the environment runs every case; by default each (family, surrounding) takes a part
of the operations, another part than its neighbours, so that every pair of the three is met.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import torch_hooks
from tests.hooks.matrix.places import PLACES, keys_of, name_of, place_of, same
from tests.hooks.matrix.surroundings import GENERATES, NO_GENERATION, SKIPPED, SURROUNDINGS, Setting

#: One in so many of the cases is run by default.
SHARE = 1 if os.environ.get("MATRIX") == "all" else 12
WITHOUT_GRAD = ("inference-mode", "no-grad")


def second_row(x: Tensor) -> Tensor:
    new = x.clone()
    new[-1] = new[-1] * -0.5
    return new


def in_place(x: Tensor) -> None:
    x[:, -1] = 0


EDITS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "halve": lambda x: x * 0.5,
    "shift": lambda x: x + 0.25,
    "rows": lambda x: x.flip(0),
    "one-row": second_row,
    "in-place": in_place,
}
#: Edits of one head inside attention, and what they are to its z: the pattern is a factor of it,
#: and a query that may attend to nothing attends to nothing.
INSIDE = {"pattern": 0.5, "scores": 0.0}
OPERATIONS = [
    "read",
    "read-all",
    "gradient",
    *(f"edit-{name}" for name in EDITS),
    "edit-twice",
    "edit-gradient",
]


def cases(family: str, surrounding: str) -> Iterator[tuple[str, int, str]]:
    """Activation, layer, operation."""
    every = [(key, layer, op) for key in keys_of(family) for layer in (0, 1) for op in OPERATIONS]
    if surrounding in WITHOUT_GRAD:
        every = [case for case in every if "gradient" not in case[2]]
    start = zlib.crc32(f"{family} {surrounding}".encode()) % SHARE
    yield from every[start::SHARE]
    inside = [(key, layer, "inside") for key in INSIDE for layer in (0, 1)]
    yield from inside if SHARE == 1 else [inside[start % 4]]
    if surrounding in GENERATES and family not in NO_GENERATION:
        whole = [(key, layer, "generate") for key in keys_of(family) for layer in (0, 1)]
        yield from whole if SHARE == 1 else whole[start : start + (start % 3 == 0)]


class Compared:
    """Runs an operation through the bridge, and with plain torch hooks."""

    def __init__(self, setting: Setting, family: str) -> None:
        self.setting, self.family = setting, family
        self.expected = setting.run_plain()
        self.changes = 0

    def plainly(
        self, key: str, layer: int, fn: Callable[[Tensor], Tensor | None], times: int = 1
    ) -> Tensor:
        place = place_of(self.setting.core, self.family, key, layer)
        handles = [place.edit(fn) for _ in range(times)]
        try:
            return self.setting.run_plain()
        finally:
            for handle in handles:
                handle.remove()

    def differs(self, key: str, layer: int, op: str) -> str:
        return getattr(self, "_" + op.split("-")[0])(key, layer, op)

    def _read(self, key: str, layer: int, op: str) -> str:
        seen: list[Tensor] = []
        self.plainly(key, layer, lambda x: seen.append(x.detach().clone()))
        name = name_of(self.family, key, layer)
        run = self.setting.bridge.run_with_cache
        logits, cache = self.setting.run(run, **{} if op == "read-all" else {"names_filter": name})
        return same(logits, self.expected, True, 0) or same(cache[name], seen[0], True, 0)

    def _edit(self, key: str, layer: int, op: str) -> str:
        kind = op.removeprefix("edit-")
        if kind == "gradient":
            return self._gradient(key, layer, op)
        times = 2 if kind == "twice" else 1
        fn = EDITS["halve" if kind == "twice" else kind]

        def by_hand(x: Tensor) -> Tensor:
            rows = x if x.ndim == 3 else x.unflatten(0, (self.expected.shape[0], -1))
            given = rows.clone()
            new = fn(given)
            return (given if new is None else new).reshape(x.shape)

        expected = self.plainly(key, layer, by_hand, times)
        hooks = [(name_of(self.family, key, layer), lambda x, hook: fn(x))] * times
        logits = self.setting.run(self.setting.bridge.run_with_hooks, fwd_hooks=hooks)
        self.changes += not torch.equal(expected, self.expected)
        return same(logits, expected, False, self.setting.tolerance)

    def _inside(self, key: str, layer: int, op: str) -> str:
        factor = INSIDE[key]
        n = self.setting.bridge.cfg.n_heads
        head = n - 1 if factor else 0

        def by_hand(z: Tensor) -> Tensor:
            new = z.clone()
            new.unflatten(-1, (n, -1))[..., head, :] *= factor
            return new

        def ours(x: Tensor, hook: Any) -> None:
            x[:, head] = x[:, head] * factor if factor else -torch.inf

        expected = self.plainly("z", layer, by_hand)
        run = self.setting.bridge.run_with_hooks
        logits = self.setting.run(run, fwd_hooks=[(name_of(self.family, key, layer), ours)])
        mask = self.setting.plain().get("attention_mask")
        if mask is not None and not self.setting.bridge.core.config.is_encoder_decoder:
            # A query of padding may attend to nothing before the edit either, and the model gives
            # it what it likes.
            expected, logits, clean = (x[mask.bool()] for x in (expected, logits, self.expected))
            self.changes += not torch.equal(expected, clean)
            return same(logits, expected, False, self.setting.tolerance)
        self.changes += not torch.equal(expected, self.expected)
        return same(logits, expected, False, self.setting.tolerance)

    def _generate(self, key: str, layer: int, op: str) -> str:
        place = place_of(self.setting.core, self.family, key, layer)

        def halve(x: Tensor) -> Tensor:
            return x * 0.5

        handle = place.edit(halve)
        try:
            expected = self.setting.generate_plain()
        finally:
            handle.remove()
        logits = self.setting.generate(
            [(name_of(self.family, key, layer), lambda x, hook: halve(x))]
        )
        return same(logits, expected, False, self.setting.tolerance)

    def _gradient(self, key: str, layer: int, op: str) -> str:
        seen: dict[str, Tensor] = {}
        edited = op == "edit-gradient"
        weights = torch.linspace(-1, 1, self.expected.shape[-1], dtype=self.expected.dtype)

        def plain(x: Tensor) -> Tensor:
            x = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()

            def keep(gradient: Tensor) -> Tensor | None:
                seen["plain"] = gradient.clone()
                return gradient * 0.5 if edited else None

            x.register_hook(keep)
            return x

        def ours(gradient: Tensor, hook: Any) -> Tensor | None:
            seen["ours"] = gradient.clone()
            return gradient * 0.5 if edited else None

        first = "resid_pre" if key != "resid_pre" or layer else key
        start: dict[str, Tensor] = {}

        def leaf(which: str) -> Callable[..., Tensor]:
            def begin(x: Tensor, hook: Any = None) -> Tensor:
                start[which] = x.detach().clone().requires_grad_()
                return start[which] * 1

            return begin

        begin = place_of(self.setting.core, self.family, first, 0).edit(leaf("plain"))
        try:
            (self.plainly(key, layer, plain) * weights).sum().backward()
        finally:
            begin.remove()
        begin = place_of(self.setting.core, self.family, first, 0).edit(leaf("ours"))
        try:
            run = self.setting.bridge.run_with_hooks
            logits = self.setting.run(run, bwd_hooks=[(name_of(self.family, key, layer), ours)])
            (logits * weights).sum().backward()
        finally:
            begin.remove()
        for parameter in self.setting.core.parameters():
            parameter.grad = None
        scale = max(1.0, seen["plain"].abs().max().item())
        found = same(seen["ours"], seen["plain"], False, self.setting.tolerance * scale)
        beginning, expected = start["ours"].grad, start["plain"].grad
        if beginning is None or expected is None:
            return found or ("" if beginning is expected else "a gradient is missing")
        scale = max(1.0, expected.abs().max().item())
        return found or same(beginning, expected, False, self.setting.tolerance * scale)


UNCHECKED = ("compiled",)  # the checks of annotations are no code that torch compiles


@pytest.mark.filterwarnings("ignore:Dynamo:UserWarning")  # it says what it leaves to Python
@pytest.mark.parametrize(
    "surrounding",
    [
        pytest.param(name, marks=[pytest.mark.unchecked] if name in UNCHECKED else [])
        for name in SURROUNDINGS
    ],
)
@pytest.mark.parametrize("family", PLACES)
def test_matrix(family: str, surrounding: str):
    if reason := SKIPPED.get((family, surrounding)):
        pytest.skip(reason)
    setting = SURROUNDINGS[surrounding](family)
    before = torch_hooks(setting.bridge.original_model)
    compared = Compared(setting, family)
    wrong = []
    for key, layer, op in cases(family, surrounding):
        if found := compared.differs(key, layer, op):
            wrong.append(f"{name_of(family, key, layer)}, {op}: {found}")
    assert not wrong, "\n".join([f"{family}, {surrounding}:", *wrong])
    assert torch_hooks(setting.bridge.original_model) == before
    assert compared.changes  # a norm may undo one edit or the other, and not all of them


def test_how_many():
    """A few thousand cases, and of every pair of family, surrounding and operation at least one."""
    every = [
        (family, surrounding, op)
        for family in PLACES
        for surrounding in SURROUNDINGS
        if (family, surrounding) not in SKIPPED
        for _, _, op in cases(family, surrounding)
    ]
    assert len(every) > 4000
    pairs = {(surrounding, op) for _, surrounding, op in every}
    missing = {(s, op) for s in SURROUNDINGS for op in OPERATIONS} - pairs
    assert missing == {(s, op) for s in WITHOUT_GRAD for op in ("gradient", "edit-gradient")}
    assert {(family, op) for family, _, op in every} >= {
        (f, op) for f in PLACES for op in (*OPERATIONS, "inside")
    }
    assert {family for family, _, op in every if op == "generate"} == set(PLACES) - set(
        NO_GENERATION
    )
    assert {surrounding for _, surrounding, op in every if op == "generate"} == set(GENERATES)
