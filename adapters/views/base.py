"""What a view is, and the simplest ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from adapters.views.given import place_of_input

#: What a module is called with.
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@dataclass(slots=True)
class Call:
    """One call of a hooked module, as the views see it.

    Attributes:
        module: the module being called.
        args, kwargs: what it was called with.
        sources: for each of the point's source sites, the module that was called there and the tensor seen there.
        scratch: a dictionary shared by the points that stand on this site, for this call only.
        private: the tensor at the site was made for the one hook point there: nobody else holds it.
    """

    module: nn.Module
    args: Args
    kwargs: Kwargs
    sources: tuple[tuple[nn.Module, Tensor], ...] = ()
    scratch: dict[str, Any] = field(default_factory=dict)
    private: bool = False

    @property
    def input(self) -> Tensor:
        """The first tensor that the module is given."""
        if self.args and isinstance(self.args[0], Tensor):
            return self.args[0]
        place = place_of_input(self.module, self.args, self.kwargs)
        found: Tensor = self.args[place] if isinstance(place, int) else self.kwargs[place or ""]
        return found

    def without_graph(self) -> Call:
        """The same call, of tensors that hold no graph: for what is kept."""
        if not torch.is_grad_enabled():
            return self
        args = tuple([x.detach() if isinstance(x, Tensor) else x for x in self.args])
        kwargs = {name: x.detach() if isinstance(x, Tensor) else x for name, x in self.kwargs.items()}
        return Call(self.module, args, kwargs, self.sources, self.scratch)


def split(x: Tensor, n: int) -> Tensor:
    """``... (n d) -> ... n d``, a view. (`Tensor.unflatten` does the same through several layers of Python.)"""
    return x.view(*x.shape[:-1], n, x.shape[-1] // n)


class Deferred:
    """What a view would show, computed when it is asked for.

    Args:
        view: one that is `deferrable`.
        x: the tensor at its site.
        call: the call that it came from.
    """

    __slots__ = ("_seen", "call", "view", "x")

    def __init__(self, view: View, x: Tensor, call: Call) -> None:
        self.view, self.x, self.call = view, x, call
        self._seen = self._versions()

    def _versions(self) -> tuple[int, ...]:
        """Of what it is computed from."""
        x = self.x
        own = -1 if x.is_inference() else x._version
        if not self.view.contextual:
            return (own,)
        given = self.call.input
        return own, -1 if given.is_inference() else given._version

    @property
    def keeps_more(self) -> bool:
        """Whether it keeps more in memory than the activation would take."""
        return self.view.contextual

    @property
    def n_rows(self) -> int:
        """How many rows it has, where its view sees each by itself."""
        return self.x.shape[-2]

    def _at_site(self, rows: slice | Tensor | None) -> Tensor:
        """The tensor at its site, or some of its rows."""
        return self.x if rows is None else self.x[..., rows, :]

    def value(self, name: str, rows: slice | Tensor | None = None) -> Tensor:
        """The activation.

        Args:
            name: of the hook point, for the error.
            rows: which of its rows, where its view sees each by itself; None: all.

        Raises:
            RuntimeError: what it is computed from was changed in place since.
        """
        if self._versions() != self._seen:
            raise RuntimeError(f"{name} cannot be computed any more: what it is made from was changed in place")
        with torch.inference_mode(self.x.is_inference()), torch.no_grad():  # as in the run
            return self.view.get(self._at_site(rows), self.call)


class View:
    """The identity: the site's tensor is the activation."""

    #: True where `get` returns the site's own tensor.
    identity: bool = True
    #: True where `get` and `put` look at the call.
    contextual: bool = False
    #: True where `get` computes something from the site's tensor and the module's input alone: it can wait until asked.
    deferrable: bool = False
    #: True where the model writes over the site's tensor afterwards: `get` cannot wait.
    at_once: bool = False
    #: True where `get` computes each row ``[..., row, :]`` from the same row of the site's tensor alone.
    by_row: bool = False
    #: The parameters of the module, an entry for each head, that `get` and `put` look for in ``call.scratch``, and then
    #: in the module: where processes share the heads, the module has those of some heads.
    parameters: tuple[str, ...] = ()
    #: True where an edit is copied into the site's tensor, so that everyone who holds that tensor sees it.
    writes_through: bool = False

    @property
    def can_wait(self) -> bool:
        """Whether `get` may be asked after the run: it needs no more of the call than the module's input."""
        return (self.deferrable or not self.contextual) and not self.at_once

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return new

    def __repr__(self) -> str:
        return type(self).__name__

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))


class Branch(View):
    """One of several readers of a tensor: its edit, and its gradient, are of that reader alone."""

    identity = False

    def get(self, x: Tensor, call: Call) -> Tensor:
        return x.view_as(x) if x.requires_grad else x


class WriteThrough(View):
    """The tensor that enters a norm is also the skip connection: an edit is made in place, and both see it."""

    writes_through = True

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        if x.requires_grad and x.is_leaf:
            raise RuntimeError(
                "cannot edit a residual stream that is a leaf of the autograd graph in place; "
                "detach it or compute it from a parameter"
            )
        return x.copy_(new)


class Derived(View):
    """A view whose activation is computed, not a part of the site's tensor."""

    identity = False
    contextual = True
