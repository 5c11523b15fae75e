"""What processes that share a model do together: a bridge of a model in one process has none of it.

How a model is cut, as the model itself says, is a `Layout` (`adapters.spread`), and so is how a part becomes the whole
and the reverse (`Cut`), and how processes ask each other (`Peers`). Here is what hook points need of that, in one
object for each bridge, `Sharing`, which sites, taps and runs ask:

1. a run asks whether all processes do the same: hooks at the same points, the same input (`check_alike`);
2. a site, or a channel of a tap, asks for its `SharedTensor`. When the model comes there, that puts the parts together,
   shows the whole, compares what the hooks made of it with the other processes by checksum, and cuts it again;
3. a hook of gradients is compared likewise (`compared`);
4. experts of which each process holds some are computed where their weights are (`SharedExperts`);
5. processes that have rows of their own, and parameters in parts, make their passes together (`turns`).

What has not been made for such models is refused by name (`refuse`). Nothing here knows what a hook point stands on: it
is given the hook points that look, and a function that shows them a tensor.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from adapters.linear import materialized
from adapters.observe.observe import LINEAR_PRODUCTS
from adapters.points import Site, module_path
from adapters.spread import (
    Cut,
    DifferentEditsError,
    Layout,
    Turns,
    number_of,
    refuse_adapters,
    side_of,
)
from adapters.views import Args, Kwargs
from bridge.hooks.hooks import HookPoint

T = TypeVar("T")


class Sharing:
    """What is asked of the processes that share a model, or hold rows of their own.

    Args:
        layout: how the model is spread over them.
        points: the hook points of the bridge, by name.
        core: the Hugging Face model.

    Attributes:
        said: how the model is spread, in words.
        peers: the processes that share each layer; None where none is shared.
    """

    def __init__(self, layout: Layout, points: Mapping[str, HookPoint], core: nn.Module) -> None:
        self._layout, self._points, self._core = layout, points, core
        self.said, self.peers = layout.said, layout.peers

    @property
    def group(self) -> ProcessGroup | None:
        """The processes that share each layer of the model; None where none do."""
        return None if self.peers is None else self.peers.group

    def tensor_at(self, site: Site) -> SharedTensor | None:
        """How a site's tensor is shared; None where each process has rows of its own."""
        cut = self._layout.cut(site)
        return None if cut is None else SharedTensor(site, cut, self._layout)

    def least(self, number: int) -> int:
        """The smallest that any process has which shares the model, all of which have to ask."""
        return number if self.peers is None else self.peers.least(number)

    def refuse(self, what: str) -> None:
        """Refuses what has not been made for models over several processes.

        Args:
            what: in words.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{what} is for models in one process, and this one is {self.said}")

    def turns(self, join: Callable[[int], object]) -> Turns | None:
        """How processes with rows of their own make their passes together; None where all are given the same rows.

        Args:
            join: see `Turns`.

        Raises:
            ValueError: it is not known which processes these are.
        """
        if self.peers is not None:
            return None
        if not self._layout.rows_of:
            raise ValueError(
                "FSDP2 had put all parameters together when the bridge was made, so that nothing says over which "
                "processes they are sharded: call model.reshard(), and make another bridge"
            )
        return Turns(side_of(self._layout.rows_of), join)

    def meet(self, what: str) -> None:
        """Waits until all processes have come to something (see `Peers.meet`)."""
        if self.peers is not None:
            self._check_plain()
            self.peers.meet(what)

    def _check_plain(self) -> None:
        """Refuses adapters that came when the bridge was there."""
        if hasattr(self._core, "peft_config"):  # PEFT says so on the model, however an adapter came
            refuse_adapters(self._core)

    def compared(self, make: Callable[[], T], given: Tensor, name: str) -> T:
        """What a function makes of a gradient, if processes that share the model make the same of it.

        Args:
            make: calls it.
            given: the gradient, which it may write to.
            name: of the hook point.

        Raises:
            DifferentEditsError: see `Peers.agreed`.
        """
        if self.peers is None:
            return make()
        made: list[T] = []

        def run() -> Tensor:
            made.append(make())
            new = made[0][0] if isinstance(made[0], tuple) else made[0]
            return new if isinstance(new, Tensor) else given

        self.peers.agreed(run, f"the gradient at {name}")
        return made[0]

    def check_alike(self, given: object, random: bool = False) -> None:
        """Looks whether all processes that share the model do the same, all of which have to ask: see `asked_alike`."""
        self.asked_alike(given, random)()

    def asked_alike(self, given: object, random: bool = False) -> Callable[[], None]:
        """Asks whether all processes that share the model do the same, all of which have to.

        Args:
            given: what the model is given.
            random: random numbers are drawn in the run.

        Returns:
            What waits for the answer, before anything of the model is sent. It raises `DifferentEditsError` where
            hooks are at other points, or another input or other random numbers are there.
        """
        if self.peers is None:
            return lambda: None
        self._check_plain()
        listening = [hook for hook in self._points.values() if hook.listeners and hook.has_visible_listeners]
        kinds = [(hook.name, [listener.kind for listener in hook.visible_listeners()]) for hook in listening]
        numbers = [zlib.crc32(repr(kinds).encode()), number_of(given)]
        numbers.append(number_of(torch.get_rng_state()) if random else 0)
        answer = self.peers.agree(numbers)

        def check() -> None:
            same_points, same_input, same_draws = answer()
            if not same_points:
                names = ", ".join(name for name, _ in kinds) or "no hook point"
                raise DifferentEditsError(
                    f"hooks are at {names} here, and at other hook points on other processes that share this model: "
                    "do the same on all"
                )
            if not same_input:
                raise DifferentEditsError(
                    "the processes that share this model are given different inputs (or masks, lengths of the past, "
                    "layers to run): each computes a part of every row, so give all of them the same"
                )
            if not same_draws:
                raise DifferentEditsError(
                    "the processes that share this model would draw different tokens: call torch.manual_seed with the "
                    "same number on all, or give do_sample=False"
                )

        return check


@dataclass(frozen=True)
class SharedTensor:
    """The tensor at a site of which each process has a part, or all of it.

    Attributes:
        site: the site.
        cut: how it is spread.
        layout: of the model.
    """

    site: Site
    cut: Cut
    layout: Layout

    @property
    def parts(self) -> int:
        """How many parts there are."""
        return self.cut.parts

    @property
    def is_plain(self) -> bool:
        """Whether what passes may be shown as it is: all processes have it, and nothing around it is cut."""
        return self.cut.is_whole and module_path(self.site.path) not in self.layout.styles

    def joined(self, x: Tensor, axis: int | None = None) -> Tensor:
        """What the processes have, put together along an axis (None: its own), without a gradient."""
        return (self.cut if None in (axis, self.cut.axis) else replace(self.cut, axis=axis)).joined(x)

    def check_in_place(self, module: nn.Module) -> None:
        """Looks whether what stands there is cut as it was when the bridge was made (see `Layout.check_in_place`)."""
        self.layout.check_in_place(self.site.path, module)

    def whole_call(self, module: nn.Module, args: Args) -> tuple[nn.Module, Args]:
        """The module with its weights put together, and what it is given, for views that compute with them."""
        given = (
            self.layout.cut(Site(self.site.path, "input"))
            if module_path(self.site.path) in self.layout.styles
            else None
        )
        if args and given is not None and not given.is_whole:
            args = (given.whole(args[0]), *args[1:])
        return _whole(module), args

    def agreed(self, x: Tensor, points: Sequence[HookPoint], see: Callable[[Tensor], Tensor]) -> Tensor:
        """What hooks make of the tensor, as the part of it that this process is to go on with.

        Args:
            x: the part of this process, or all of it.
            points: the hook points that are shown it.
            see: shows them the whole, and returns what they make of it.

        Raises:
            DifferentEditsError: they make something else on another process, or failed there.
        """
        peers = self.cut.peers
        assert peers is not None
        kinds = {point.name: {listener.kind for listener in point.visible_listeners()} for point in points}
        editors = [name for name, found in kinds.items() if not found <= {"read"}]
        followed = [name for name, found in kinds.items() if "follow" in found]
        if followed:  # a trace may ask on one process alone
            peers.meet(followed[0])
        everything = self.cut.whole(x)
        new = peers.agreed(lambda: see(everything), editors[0]) if editors else see(everything)
        return x if new is everything and not (editors and torch.is_grad_enabled()) else self.cut.part(new)


def _whole(module: nn.Module) -> nn.Module:
    """A linear layer with its weights put together; any other module as it is."""
    if type(module) is not nn.Linear or not isinstance(module.weight, DTensor):
        return module
    new = nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
    for name in dict(new.named_parameters()):
        del new._parameters[name]
        new.__dict__[name] = materialized(module, name)  # no parameter: gradients go on to the module's own
    return new


# ----------------------------------------------------------------------------------------------------------------------
# Experts that several processes share by number (expert parallelism), seen on all of them.
#
# Each process goes through all experts, in the model's own forward. An expert's products are made by the process that
# has its weights, and sent to the others: so all show the same rows of the same expert, and gradients are whole.
# ----------------------------------------------------------------------------------------------------------------------


class SharedExperts:
    """The experts of one module, of which each process has some, during one call.

    Args:
        module: holds those of this process.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        everything: Mapping[str, object] = module._parameters
        self._held = {name: each for name, each in everything.items() if isinstance(each, DTensor)}
        held = self._held["down_proj"]
        group = held.device_mesh.get_group()
        self._sum, self._gradients = Cut(group, sums="tensor"), Cut(group, sums="gradient")
        self._each: int = len(held) // group.size()
        self._first_here: int = self._each * group.rank()
        #: What the forward has taken out of the parameters: the tensor, the parameter's name, the expert.
        self._taken: dict[int, tuple[Tensor, str, int]] = {}

    @classmethod
    def of(cls, module: nn.Module) -> SharedExperts | None:
        """Those of a module; None where this process has all of them."""
        held = module._parameters.get("down_proj")
        return cls(module) if isinstance(held, DTensor) and held.placements == (Shard(0),) else None

    @contextmanager
    def all_numbered(self) -> Iterator[None]:
        """Lets the module's forward number the experts of all processes, not its own alone."""
        own = self._module.num_experts
        self._module.num_experts = self._module.down_proj.shape[0]
        try:
            yield
        finally:
            self._module.num_experts = own

    def taken(self, func: Callable[..., Any], args: Args) -> Tensor | None:
        """One expert's part of a parameter, where that is what a function takes; None where it takes something else."""
        if func is not Tensor.__getitem__:
            return None
        return next((self._take(name, x, int(args[1])) for name, x in self._held.items() if args[0] is x), None)

    def _take(self, name: str, held: DTensor, expert: int) -> Tensor:
        local, index = held.to_local(), expert - self._first_here
        here = 0 <= index < self._each
        part = (
            local[index]
            if here
            else local.new_empty(local.shape[1:], device=local.device if local.ndim == 2 else "meta")
        )
        if local.ndim == 2:  # a bias: it is added to rows that all have
            part = self._sum.whole(part if here else part.zero_())
        self._taken[id(part)] = part, name, expert
        return part

    def which(self, weight: Any, name: str) -> int | None:
        """Which expert's part of a parameter this is; None where it is none."""
        taken = self._taken.get(id(weight))
        return None if taken is None or taken[1] != name else taken[2]

    def made(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """What a product or a sum is: a product, as the process makes it that has the expert."""
        weight = next((x for x in (*args, *kwargs.values()) if id(x) in self._taken), None)
        if weight is None or func not in LINEAR_PRODUCTS:
            return func(*args, **kwargs)
        x = self._gradients.part(args[0] if args else kwargs["input"])
        if not weight.is_meta:
            made = func(x, *args[1:], **kwargs) if args else func(**{**kwargs, "input": x})
        else:
            size = func(x.detach().to("meta"), *args[1:], **kwargs).shape[-1]
            nothing = torch.ones((), dtype=torch.bool, device=x.device)
            made = x[:, :1].masked_fill(nothing, 0.0).expand(-1, size)  # gradients come back here all the same
        return self._sum.whole(made)
