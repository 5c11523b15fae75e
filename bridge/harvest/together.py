"""A harvest of a model that several processes share: the first does it, and all take part in its runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from bridge.bridge import TransformerBridge
from bridge.harvest.capture import run
from bridge.harvest.errors import HarvestError
from bridge.harvest.fingerprint import of_model
from bridge.harvest.progress import Report
from bridge.hooks.listener import HookFunction


class Together:
    """What the first process tells the others that share its model.

    Args:
        group: the processes.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._first = group, dist.get_global_rank(group, 0)

    @property
    def leads(self) -> bool:
        """Whether this is the first."""
        return self._group.rank() == 0

    def tell(self, what: str, *given: object) -> None:
        """Tells the others what to do next, all together.

        Args:
            what: ``"weights"``, ``"run"``, ``"done"`` or ``"failed"``.
            given: what they need for it.
        """
        dist.broadcast_object_list([what, given], src=self._first, group=self._group)

    def lead(self, harvest: Callable[[], Report]) -> Report:
        """Harvests, and tells the others how it went.

        Args:
            harvest: does all of it, in this process.
        """
        try:
            report = harvest()
        except BaseException as error:
            self.tell("failed", f"{type(error).__name__}: {error}")
            raise
        self.tell("done", report)
        return report

    def follow(self, bridge: TransformerBridge, interventions: Sequence[tuple[str, HookFunction]]) -> Report:
        """Takes part in the first process's harvest, and returns what it made.

        Args:
            bridge: of the shared model.
            interventions: as there.

        Raises:
            HarvestError: it failed.
        """
        wrong: BaseException | None = None
        while True:
            told: list[Any] = [None, None]
            dist.broadcast_object_list(told, src=self._first, group=self._group)
            what, given = told
            if what == "done":
                report: Report = given[0]
                return report
            if what == "failed":
                raise HarvestError(f"the harvest failed on the first process: {given[0]}") from wrong
            if wrong is not None:
                raise wrong
            try:
                if what == "weights":
                    of_model(bridge)
                else:
                    self._run(bridge, interventions, *given)
            except Exception as error:  # noqa: BLE001 - raised above, when the first process has said how it goes on there
                wrong = error

    @staticmethod
    def _run(
        bridge: TransformerBridge, interventions: Sequence[tuple[str, HookFunction]], tokens: Tensor,
        mask: Tensor | None, points: Sequence[str], stop: int | None, arguments: dict[str, Any],
    ) -> None:  # fmt: skip
        hooks = [bridge.names.find(name) for name in points]
        edits = [(bridge.names.find(name).name, fn) for name, fn in interventions]
        run(bridge, tokens, mask, hooks, edits, stop, arguments, _nothing)


def _nothing(name: str, activation: Tensor) -> None:
    """The first process keeps what there is."""
