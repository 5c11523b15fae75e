"""Coordination of processes that share a model; unused if one process holds the model.

A `Layout` (`adapters.spread`) describes how a model is sharded, a `Cut` how parts are gathered and
sharded again, and `Peers` how processes communicate. This file has what hook points need of them,
in one object for each bridge, `Sharing`, which sites, taps and runs call:

1. A run checks that all processes do the same: hooks at the same points, the same input
   (`check_alike`).
2. A site, or a channel of a tap, requests its `SharedTensor`. In the run, it gathers the parts,
   shows the whole, compares the hooks' results over processes by checksum, and shards them again.
3. The results of gradient hooks are compared likewise (`compared`).
4. Experts that are distributed over processes are computed where their weights are
   (`SharedExperts`).
5. Processes that have rows of their own, and sharded parameters, make their passes together
   (`turns`).

What is not implemented for such models raises an error (`refuse`). This file does not know the site
of a hook point: it is given the hook points that listen, and a function that shows them a tensor.
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
    """The collective operations of processes that share a model or have different rows.

    Args:
        layout: how the model is spread over them.
        points: the hook points of the bridge, by name.
        core: the Hugging Face model.

    Attributes:
        said: a description of how the model is spread.
        peers: the processes that share each layer; None if no layer is shared.
    """

    def __init__(self, layout: Layout, points: Mapping[str, HookPoint], core: nn.Module) -> None:
        self._layout = layout
        self._points = points
        self._core = core
        self.said = layout.description
        self.peers = layout.peers

    @property
    def group(self) -> ProcessGroup | None:
        """Return the processes that share each layer of the model; None if none do."""
        return None if self.peers is None else self.peers.group

    def tensor_at(self, site: Site) -> SharedTensor | None:
        """Return how a site's tensor is sharded; None if each process has different rows."""
        cut = self._layout.cut(site)
        return None if cut is None else SharedTensor(site, cut, self._layout)

    def least(self, number: int) -> int:
        """Return the smallest value among the processes that share the model. All must call
        this."""
        return number if self.peers is None else self.peers.least(number)

    def refuse(self, what: str) -> None:
        """Reject what is not implemented for models over several processes.

        Args:
            what: a description of it.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{what} is for models in one process, and this one is {self.said}")

    def turns(self, join: Callable[[int], object]) -> Turns | None:
        """Return the synchronisation of passes between processes with different rows; None if all
        get the same rows.

        Args:
            join: see `Turns`.

        Raises:
            ValueError: it is unknown which processes these are.
        """
        if self.peers is not None:
            return None
        if not self._layout.rows_of:
            raise ValueError(
                "FSDP2 had put all parameters together when the bridge was made, so that nothing"
                " says over which processes they are sharded: call model.reshard(), and make"
                " another bridge"
            )
        return Turns(side_of(self._layout.rows_of), join)

    def meet(self, what: str) -> None:
        """Wait until all processes have reached this point (see `Peers.meet`)."""
        if self.peers is not None:
            self._check_plain()
            self.peers.meet(what)

    def _check_plain(self) -> None:
        """Reject adapters that were added after the bridge was made."""
        if hasattr(self._core, "peft_config"):  # PEFT marks the model, however an adapter was added
            refuse_adapters(self._core)

    def compared(self, make: Callable[[], T], gradient: Tensor, name: str) -> T:
        """Call a function on a gradient; check that processes that share the model agree on the
        result.

        Args:
            make: calls the function.
            gradient: the gradient, which the function may write to.
            name: the hook point's name.

        Raises:
            DifferentEditsError: see `Peers.agreed`.
        """
        if self.peers is None:
            return make()
        results: list[T] = []

        def run() -> Tensor:
            result = make()
            results.append(result)
            new = result[0] if isinstance(result, tuple) else result
            return new if isinstance(new, Tensor) else gradient

        self.peers.agreed(run, f"the gradient at {name}")
        return results[0]

    def check_alike(self, inputs: object, random: bool = False) -> None:
        """Check that all processes that share the model do the same; all must call this. See
        `asked_alike`.
        """
        self.asked_alike(inputs, random)()

    def asked_alike(self, inputs: object, random: bool = False) -> Callable[[], None]:
        """Start to check that all processes that share the model do the same; all must call this.

        Args:
            inputs: the model's input.
            random: whether the run draws random numbers.

        Returns:
            A function that waits for the result; call it before the model communicates. It raises
            `DifferentEditsError` if hook points, inputs or random numbers differ.
        """
        if self.peers is None:
            return lambda: None
        self._check_plain()
        kinds = []
        for hook in self._points.values():
            if hook.listeners and hook.has_visible_listeners:
                kinds.append((hook.name, [listener.kind for listener in hook.visible_listeners()]))
        drawn = number_of(torch.get_rng_state()) if random else 0
        numbers = [zlib.crc32(repr(kinds).encode()), number_of(inputs), drawn]
        answer = self.peers.agree(numbers)

        def check() -> None:
            same_points, same_input, same_draws = answer()
            if not same_points:
                names = ", ".join(name for name, _ in kinds) or "no hook point"
                raise DifferentEditsError(
                    f"hooks are at {names} here, and at other hook points on other processes that"
                    " share this model: do the same on all"
                )
            if not same_input:
                raise DifferentEditsError(
                    "the processes that share this model are given different inputs (or masks,"
                    " lengths of the past, layers to run): each computes a part of every row, so"
                    " give all of them the same"
                )
            if not same_draws:
                raise DifferentEditsError(
                    "the processes that share this model would draw different tokens: call"
                    " torch.manual_seed with the same number on all, or give do_sample=False"
                )

        return check


@dataclass(frozen=True)
class SharedTensor:
    """The tensor at a site, held by each process in part or in full.

    Attributes:
        site: the site.
        cut: how it is sharded.
        layout: the layout of the model.
    """

    site: Site
    cut: Cut
    layout: Layout

    @property
    def parts(self) -> int:
        """Return the number of parts."""
        return self.cut.parts

    @property
    def is_plain(self) -> bool:
        """Tell whether tensors may be shown unchanged: every process has them, and nothing is
        sharded.
        """
        return self.cut.is_whole and module_path(self.site.path) not in self.layout.styles

    def joined(self, x: Tensor, axis: int | None = None) -> Tensor:
        """Gather the processes' parts along an axis (None: its own), without a gradient."""
        cut = self.cut
        if axis is not None and cut.axis is not None:
            cut = replace(cut, axis=axis)
        return cut.joined(x)

    def check_in_place(self, module: nn.Module) -> None:
        """Check that the sharding is unchanged since the bridge was made (see
        `Layout.check_in_place`).
        """
        self.layout.check_in_place(self.site.path, module)

    def whole_call(self, module: nn.Module, args: Args) -> tuple[nn.Module, Args]:
        """Return the module with gathered weights, and its gathered input, for views that compute
        with them.
        """
        if args and module_path(self.site.path) in self.layout.styles:
            cut = self.layout.cut(Site(self.site.path, "input"))
            if cut is not None and not cut.is_whole:
                args = (cut.whole(args[0]), *args[1:])
        return _whole(module), args

    def agreed(
        self, x: Tensor, points: Sequence[HookPoint], see: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Show the whole tensor to hooks, and return this process's part of their result.

        Args:
            x: this process's part, or the whole tensor.
            points: the hook points to which it is shown.
            see: shows them the whole tensor, and returns their result.

        Raises:
            DifferentEditsError: the results differ between processes, or a hook failed on another
                process.
        """
        peers = self.cut.peers
        assert peers is not None
        editors: list[str] = []
        followed: list[str] = []
        for point in points:
            kinds = {listener.kind for listener in point.visible_listeners()}
            if not kinds <= {"read"}:
                editors.append(point.name)
            if "follow" in kinds:
                followed.append(point.name)
        if followed:  # a trace may request it on one process alone
            peers.meet(followed[0])
        full = self.cut.whole(x)
        new = peers.agreed(lambda: see(full), editors[0]) if editors else see(full)
        with_gradient = editors and torch.is_grad_enabled()
        return x if new is full and not with_gradient else self.cut.part(new)


def _whole(module: nn.Module) -> nn.Module:
    """Return a linear layer with gathered weights; any other module unchanged."""
    if type(module) is not nn.Linear or not isinstance(module.weight, DTensor):
        return module
    new = nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
    for name in dict(new.named_parameters()):
        del new._parameters[name]
        # Not a parameter: gradients flow on to the module's own.
        new.__dict__[name] = materialized(module, name)
    return new


# --------------------------------------------------------------------------------------------------
# Experts that several processes share by number (expert parallelism), visible on all of them.
#
# Each process runs all experts, in the model's own forward. An expert's products are computed by
# the process that holds its weights, and sent to the others. So all processes show the same rows of
# the same expert, and gradients are complete.
# --------------------------------------------------------------------------------------------------


class SharedExperts:
    """The experts of one module, distributed over processes, during one call.

    Args:
        module: the module with this process's experts.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        parameters: Mapping[str, object] = module._parameters
        self._held = {name: x for name, x in parameters.items() if isinstance(x, DTensor)}
        held = self._held["down_proj"]
        group = held.device_mesh.get_group()
        self._sum = Cut(group, sums="tensor")
        self._gradients = Cut(group, sums="gradient")
        self._n_local: int = len(held) // group.size()
        self._first_here: int = self._n_local * group.rank()
        #: The tensors that the forward has read from the parameters: tensor, parameter name,
        #: expert.
        self._taken: dict[int, tuple[Tensor, str, int]] = {}

    @classmethod
    def of(cls, module: nn.Module) -> SharedExperts | None:
        """Return the sharded experts of a module; None if this process has all of them."""
        held = module._parameters.get("down_proj")
        return cls(module) if isinstance(held, DTensor) and held.placements == (Shard(0),) else None

    @contextmanager
    def all_numbered(self) -> Iterator[None]:
        """Make the module's forward index the experts of all processes, inside a ``with``
        statement."""
        own = self._module.num_experts
        self._module.num_experts = self._module.down_proj.shape[0]
        try:
            yield
        finally:
            self._module.num_experts = own

    def taken(self, func: Callable[..., Any], args: Args) -> Tensor | None:
        """Return one expert's part of a parameter, if the function selects one; otherwise None."""
        if func is not Tensor.__getitem__:
            return None
        for name, x in self._held.items():
            if args[0] is x:
                return self._take(name, x, int(args[1]))
        return None

    def _take(self, name: str, held: DTensor, expert: int) -> Tensor:
        local = held.to_local()
        index = expert - self._first_here
        is_here = 0 <= index < self._n_local
        if is_here:
            part = local[index]
        else:
            device = local.device if local.ndim == 2 else "meta"
            part = local.new_empty(local.shape[1:], device=device)
        if local.ndim == 2:  # a bias: it is added to rows that all processes have
            part = self._sum.whole(part if is_here else part.zero_())
        self._taken[id(part)] = part, name, expert
        return part

    def which(self, weight: Any, name: str) -> int | None:
        """Return the index of the expert to which a part of a parameter belongs; None if it belongs
        to none."""
        taken = self._taken.get(id(weight))
        return None if taken is None or taken[1] != name else taken[2]

    def made(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Compute a product or a sum; products are computed by the process that holds the
        expert.
        """
        weight = next((x for x in (*args, *kwargs.values()) if id(x) in self._taken), None)
        if weight is None or func not in LINEAR_PRODUCTS:
            return func(*args, **kwargs)
        x = self._gradients.part(args[0] if args else kwargs["input"])
        if not weight.is_meta:
            product = func(x, *args[1:], **kwargs) if args else func(**{**kwargs, "input": x})
        else:
            size = func(x.detach().to("meta"), *args[1:], **kwargs).shape[-1]
            nothing = torch.ones((), dtype=torch.bool, device=x.device)
            # Gradients flow back here in any case.
            product = x[:, :1].masked_fill(nothing, 0.0).expand(-1, size)
        return self._sum.whole(product)
