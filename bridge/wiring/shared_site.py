"""The torch hook at a site of a model that several processes share."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from adapters.gathering import Alike
from adapters.layout import Layout
from adapters.offloaded import materialized
from adapters.paths import module_path
from adapters.points import Site
from adapters.views import Args, Kwargs
from bridge.hooks.modules import Finder
from bridge.hooks.over_processes import agreed_part
from bridge.wiring.site import SiteHook


class SharedSite(SiteHook):
    """Shows the whole of a tensor of which each process has a part, and cuts again what hooks make of it.

    Args:
        site, find, attached: as for `SiteHook`.
        layout: how the model is spread.
    """

    __slots__ = ("_cut", "_given", "_layout", "reads_plainly")

    def __init__(self, site: Site, find: Finder, attached: dict[SiteHook, None], layout: Layout) -> None:
        super().__init__(site, find, attached)
        self._cut = layout.cut(site)
        inside = module_path(site.path) in layout.styles
        given = layout.cut(Site(site.path, "input")) if inside else None
        self._given = None if isinstance(given, Alike) else given
        self._layout = layout
        self.reads_plainly = isinstance(self._cut, Alike) and not inside

    def see(self, x: Tensor, module: nn.Module, args: Args, kwargs: Kwargs) -> Tensor:
        """Runs the points in turn, on the whole."""
        active = [point for point in self.points if point.has_visible_listeners]
        if not (active or self.watchers or self.readers):
            return x
        self._layout.check_in_place(self.site.path, module)
        # What is read separately, and some views, are computed from the module and its input.
        if self.readers or any(point.view.contextual for point in active):
            module = _whole(module)
            args = (self._given.whole(args[0]), *args[1:]) if self._given is not None and args else args
        see = super().see
        assert self._cut is not None
        return agreed_part(x, self._cut, active, lambda all_: see(all_, module, args, kwargs))


def _whole(module: nn.Module) -> nn.Module:
    """A linear layer with its weights put together; any other module as it is."""
    if type(module) is not nn.Linear or not isinstance(module.weight, DTensor):
        return module
    new = nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
    for name in dict(new.named_parameters()):
        del new._parameters[name]
        new.__dict__[name] = materialized(module, name)  # no parameter: gradients go on to the module's own
    return new
