"""What a trace keeps ready while the model runs, for what its body may ask for next."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

from bridge.hooks.listener import Scope
from bridge.taps.tap import Tap, noop_hook
from bridge.taps.taps import tap_on
from bridge.wiring.site import SiteHook
from bridge.wiring.torch_hooks import add_forward_hook, remove_forward_hook

if TYPE_CHECKING:
    from bridge.wiring.wiring import Wiring


class TraceOpenings:
    """Modules that take notice of hooks which come while they run, and sites that are watched before anyone listens.

    torch looks for hooks once, when a module is called, and a tap wraps its module's forward. A view that needs
    what is seen elsewhere in its block needs it seen before somebody asks for that view.

    Args:
        wiring: of the bridge.
        scope: of the trace.
    """

    def __init__(self, wiring: Wiring, scope: Scope) -> None:
        self._wiring, self._scope = wiring, scope
        self._paths: set[str] = set()
        self._modules: list[nn.Module] = []
        self._taps: list[Tap] = []
        self._watched: dict[SiteHook, None] = {}

    def open(self, path: str) -> None:
        """Lets the scope begin to listen to the modules on a path, and inside them, while they run."""
        if path in self._paths:
            return
        wiring = self._wiring
        with wiring.lock:
            modules = wiring.finder(path).modules_on_path
            while path not in self._paths:
                self._paths.add(path)
                module = modules.pop()
                if type(module).forward is not nn.Module.forward:  # a list of modules is never called
                    add_forward_hook(module, self._scope, noop_hook)
                    self._modules.append(module)
                kind = wiring.tapped.get(path)
                if kind is not None and kind != "experts":  # that tap computes one expert at a time
                    tap = tap_on(kind, module)
                    tap.open(self._scope)
                    self._taps.append(tap)
                path = path.rpartition(".")[0]

    def watch(self, sites: Iterable[SiteHook]) -> None:
        """Keeps what passes some sites, for views that somebody may ask for behind them."""
        with self._wiring.lock:
            for site in sites:
                if site not in self._watched:
                    self._watched[site] = None
                    site.watchers += 1
                    site.update()

    def close(self) -> None:
        """Ends all of it."""
        with self._wiring.lock:
            while self._modules:
                remove_forward_hook(self._modules.pop(), self._scope)
            while self._taps:
                self._taps.pop().close(self._scope)
            while self._watched:
                site, _ = self._watched.popitem()
                site.watchers -= 1
                site.update()
            self._paths.clear()
