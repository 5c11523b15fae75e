"""What stands at a module's input or output in a program: a torch hook on a shell, put there once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from adapters.points import Site
from adapters.views import Args, Call, Kwargs
from bridge.hooks.modules import argument, with_argument
from bridge.programs.one_pass import current
from bridge.programs.steps import Step


class LoweredSite:
    """One site.

    Args:
        site: the site.
        module: the shell that it is on.
        steps: the hook points that stand here, in the order of their declaration.
        is_source: views elsewhere need what passes here.
        here: finds the pass that is under way.
    """

    def __init__(
        self, site: Site, module: nn.Module, steps: Sequence[Step], is_source: bool, here: threading.local
    ) -> None:
        self.site, self.steps, self.is_source, self._here = site, tuple(steps), is_source, here
        self._needs_call = any(step.hook.view.contextual or step.hook.point.sources for step in self.steps)
        writers = [step.changes and step.hook.view.writes_through for step in self.steps]
        for index, step in enumerate(self.steps):
            step.copies = any(writers[index + 1 :])
        if site.kind == "input":
            module.register_forward_pre_hook(self.on_input, with_kwargs=True)
        else:
            module.register_forward_hook(self.on_output)

    def _see(self, x: Tensor, module: nn.Module, args: Args, kwargs: Kwargs) -> Tensor:
        one_pass = current(self._here)
        call = Call(module, args, kwargs)
        for step in self.steps:
            x = step.apply(x, call, one_pass)
        if self.is_source:
            one_pass.sources[self.site] = (module, x)
        return x

    def on_input(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        """The forward pre-hook."""
        x, place = argument(module, args, kwargs, self.site.key)
        new = self._see(x, module, args, kwargs)
        return None if new is x else with_argument(args, kwargs, place, new)

    def on_output(self, module: nn.Module, args: Args, output: Any) -> object:
        """The forward hook."""
        if isinstance(output, Tensor):
            new = self._see(output, module, args, {})
            return None if new is output else new
        index = int(self.site.key or 0)
        new = self._see(output[index], module, args, {})
        return None if new is output[index] else type(output)((*output[:index], new, *output[index + 1 :]))
