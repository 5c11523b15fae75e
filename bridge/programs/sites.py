"""What is at a module's input or output in a program: a torch hook on a shell, put there once."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import Tensor, nn

from adapters.points import Site
from adapters.views import Args, Call, Kwargs
from bridge.programs.program_pass import current
from bridge.programs.steps import LoweredPoint
from bridge.wiring.site import SiteHandler


class LoweredSite(SiteHandler):
    """One site.

    Args:
        site: the site.
        module: the shell that it is on.
        steps: the hook points that stand here, in the order of their declaration.
        is_source: views elsewhere need what passes here.
        here: finds the pass that is under way.
    """

    def __init__(
        self, site: Site, module: nn.Module, steps: Sequence[LoweredPoint], is_source: bool, here: threading.local
    ) -> None:
        self.site, self.steps, self.is_source, self._here = site, tuple(steps), is_source, here
        writers = [step.changes and step.hook.view.writes_through for step in self.steps]
        for index, step in enumerate(self.steps):
            step.copies = any(writers[index + 1 :])
        if site.kind == "input":
            module.register_forward_pre_hook(self.on_input, with_kwargs=True)
        else:
            module.register_forward_hook(self.on_output)

    def see(self, x: Tensor, module: nn.Module, args: Args, kwargs: Kwargs) -> Tensor:
        """Runs the steps in turn, and keeps the tensor for those who need it elsewhere."""
        program_pass = current(self._here)
        call = Call(module, args, kwargs)
        for step in self.steps:
            x = step.apply(x, call, program_pass)
        if self.is_source:
            program_pass.sources[self.site] = (module, x)
        return x
