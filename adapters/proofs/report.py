"""What a verification found: a check for each claim, with what was seen where it failed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from adapters.observe.errors import WRONG, one_line


@dataclass(frozen=True)
class Check:
    """One claim: its name, whether it holds, and what was found."""

    name: str
    passed: bool
    detail: str = ""


@dataclass
class Report:
    """What `verify` found.

    Attributes:
        model: the model's name.
        checks: in the order they were made.
    """

    model: str
    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every claim holds."""
        return all(check.passed for check in self.checks)

    @property
    def failed(self) -> list[Check]:
        """The claims that do not hold."""
        return [check for check in self.checks if not check.passed]

    def __str__(self) -> str:
        width = max(len(check.name) for check in self.checks)
        lines = [f"{self.model}: {'verified' if self.passed else 'NOT verified'}"]
        lines += [f"  {'ok  ' if c.passed else 'FAIL'}  {c.name:<{width}}  {c.detail}".rstrip() for c in self.checks]
        return "\n".join(lines)


@dataclass
class _Claim:
    compared: int = 0
    worst: tuple[float, str] = (0.0, "")
    wrong: list[str] = field(default_factory=list)
    inconclusive: list[str] = field(default_factory=list)


class Findings:
    """Collects what is seen of each claim, at each of its places.

    Args:
        tolerance: what two results of the same sum may differ by, relative to the largest number in it.
        angles: what the angles of a rotation may differ by: a model in half precision may have rounded its speeds.
    """

    def __init__(self, tolerance: float, angles: float = 1e-4) -> None:
        self.tolerance, self.angles = tolerance, angles
        self._claims: dict[str, _Claim] = {}

    def claim(self, name: str) -> None:
        """Says that a claim is looked at, so that it is in the report where it has no place in the model."""
        self._claims.setdefault(name, _Claim())

    def holds(self, claim: str, place: str, ok: bool, seen: str = "") -> bool:
        """Whether a claim holds at a place.

        Args:
            claim: its name.
            place: where in the model.
            ok: whether it does.
            seen: what was seen instead.
        """
        entry = self._claims.setdefault(claim, _Claim())
        entry.compared += 1
        if not ok:
            entry.wrong.append(f"{place}: {seen}" if seen else place)
        return ok

    def equal(
        self, claim: str, place: str, seen: Tensor | None, expected: Tensor | None, size: float | None = None
    ) -> bool:
        """Whether two tensors agree.

        Args:
            claim, place: as for `holds`.
            seen: what the model computes.
            expected: what it is by the declaration; anything that broadcasts is no excuse: the shapes must agree.
            size: of the numbers that both are made from; None: of the larger.
        """
        if seen is None or expected is None:
            return self.holds(claim, place, False, "it did not run")
        if seen.shape != expected.shape:
            return self.holds(claim, place, False, f"shape {list(seen.shape)} for {list(expected.shape)}")
        if not seen.numel():
            return self.holds(claim, place, True)
        wide = torch.float64 if torch.float64 in (seen.dtype, expected.dtype) else torch.float32
        a, b = seen.detach().to(wide), expected.detach().to(wide)
        worst, most = float((a - b).abs().max()), max(float(a.abs().max()), float(b.abs().max()))
        if not (math.isfinite(worst) and math.isfinite(most)):
            both = torch.isfinite(a) & torch.isfinite(b)
            if not bool((both | (a == b)).all()):
                return self.holds(claim, place, False, "one is infinite where the other is not")
            a, b = (torch.where(both, x, 0.0) for x in (a, b))
            worst, most = float((a - b).abs().max()), max(float(a.abs().max()), float(b.abs().max()))
        relative = worst / max(most if size is None else size, 1e-30)
        entry = self._claims.setdefault(claim, _Claim())
        entry.worst = max(entry.worst, (relative, place))
        return self.holds(claim, place, relative <= self.tolerance, f"differs by {relative:.1e}, relatively")

    def attempt(self, claim: str, prove: Callable[[], None]) -> None:
        """Tries a proof; what it raises says that its claim does not hold.

        Args:
            claim: what the proof is of.
            prove: adds what it finds.
        """
        try:
            prove()
        except WRONG as error:
            self.holds(claim, "a run", False, one_line(error))

    def inconclusive(self, claim: str, reason: str) -> None:
        """Says that a claim could not be told from another one, and why."""
        entry = self._claims.setdefault(claim, _Claim())
        if reason not in entry.inconclusive:
            entry.inconclusive.append(reason)

    def checks(self) -> Iterator[Check]:
        """A check for each claim, in the order in which they were first looked at."""
        for name, entry in self._claims.items():
            if entry.wrong:
                more = f" (and at {len(entry.wrong) - 3} more places)" if len(entry.wrong) > 3 else ""
                detail = "; ".join(entry.wrong[:3]) + more
            elif not entry.compared:
                detail = "does not apply"
            else:
                where = f", worst {entry.worst[0]:.1e} at {entry.worst[1]}" if entry.worst[1] else ""
                detail = f"{entry.compared} compared{where}"
            if entry.inconclusive:
                detail = "; ".join([detail, *(f"inconclusive: {reason}" for reason in entry.inconclusive)])
            yield Check(name, not entry.wrong, detail)
