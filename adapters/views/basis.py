"""An activation in a basis of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from adapters.views.views import Call, View


class Basis(Protocol):
    """A basis: an SAE, a transcoder, directions, a rotation.

    One layer of a cross-layer transcoder, whose features are written at later points, too, has `n_later`, at how many,
    and ``decode_later(features, ahead)``: what features add at the point that is so many behind their own, from 1.
    """

    def encode(self, x: Tensor, /) -> Tensor:
        """The features ``[..., feature]`` of an activation ``[..., d]``."""

    def decode(self, features: Tensor, /) -> Tensor:
        """The part of the activation ``[..., d]`` that features explain."""


#: What becomes of what a basis does not explain: it stays, it is left out, or it is this tensor.
Error = Literal["keep", "drop"] | Tensor


class InBasis(View):
    """What `inner` sees at the site, as the features of a basis.

    What is written back is the activation and what the change of the features makes of it:
    ``a + decode(new) - decode(old)``. So the same features leave the same bits.

    Args:
        name: of the hook point, for errors.
        inner: the view of the site's tensor.
        basis: see `Basis`.
        error: see `Error`. With any but ``"keep"`` the activation becomes ``decode(new)`` and the error.
        reads: the names of the points that the features are of, and how the last of the call's sources are seen there:
            one (a transcoder), or several, whose activations `encode` gets as one ``[..., point, d]`` (a crosscoder);
            none: they are of the activation.
        skip: what is added to ``decode(new)``, made of what is read; it cancels where the error is kept.
        stateful: `decode` undoes what the last `encode` remembered, and forgets it (normalisation at run time).
        on_top: where the error is not kept, what is decoded goes on top of the activation, not in its place: what a
            cross-layer transcoder of an earlier layer adds.
    """

    def __init__(
        self,
        name: str,
        inner: View,
        basis: Basis,
        error: Error = "keep",
        reads: Sequence[tuple[str, View]] = (),
        skip: Callable[[Tensor], Tensor] | None = None,
        stateful: bool = False,
        on_top: bool = False,
    ) -> None:
        self.name, self.inner, self.basis, self.error = name, inner, basis, error
        self.reads, self.skip, self.stateful, self.on_top = tuple(reads), skip, stateful, on_top
        self.contextual = inner.contextual or bool(reads)
        self.writes_through, self.at_once = inner.writes_through, inner.at_once

    @property
    def edits_alone(self) -> bool:
        """Whether an edit changes the activation by what is decoded, and is of that activation alone."""
        kept = isinstance(self.error, str) and self.error == "keep"
        return kept and not self.reads and not self.stateful

    def get(self, x: Tensor, call: Call) -> Tensor:
        return self.encode(self._read(x, call))

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        act, read = self._activation(x, call), self._read(x, call)
        if isinstance(self.error, str) and self.error == "keep":
            change = -self.decoded(dense(self.encode(read)), act)
            if self.stateful:
                self.encode(read)
            made = act + (self.decoded(new, act) + change)
        else:
            made = self.decoded(new, act)
            if self.skip is not None:
                made = made + self.skip(read).to(made.dtype)
            if isinstance(self.error, Tensor):
                made = made + self._fitting(self.error, made, "the error that it was given")
            if self.on_top:
                made = act + made
        return self.inner.put(x, made, self._own(call))

    def unexplained(self, act: Tensor, features: Tensor, read: Tensor | None = None) -> Tensor:
        """What the basis does not explain of an activation.

        Args:
            act: the activation.
            features: of it, or of what was read.
            read: what was read, where there is a skip path.
        """
        explained = self.decoded(features, act)
        return act - (explained if self.skip is None or read is None else explained + self.skip(read))

    def encode(self, x: Tensor) -> Tensor:
        """The features of an activation."""
        try:
            return self.basis.encode(x)
        except RuntimeError as error:  # torch's own words do not say whose tensors do not fit
            error.add_note(f"in encode of {self.name}, of an activation {list(x.shape)} of {x.dtype} on {x.device}")
            raise

    def decoded(self, features: Tensor, act: Tensor) -> Tensor:
        """What features explain of an activation, of its shape and type."""
        try:
            return self._fitting(self.basis.decode(features), act, "its decode")
        except RuntimeError as error:
            error.add_note(f"in decode of {self.name}, of features {list(features.shape)} of {features.dtype}")
            raise

    def _fitting(self, made: Tensor, act: Tensor, what: str) -> Tensor:
        """What is to be written, in the activation's type.

        Raises:
            ValueError: it has another shape, or is on another device.
        """
        if made.shape != act.shape or made.device != act.device:
            raise ValueError(
                f"{self.name}: {what} gives {list(made.shape)} on {made.device}, where the activation is "
                f"{list(act.shape)} on {act.device}"
            )
        return made.to(act.dtype)

    def _own(self, call: Call) -> Call:
        """The call as the site's own view knows it."""
        if not self.reads:
            return call
        return Call(call.module, call.args, call.kwargs, call.sources[: -len(self.reads)], call.scratch)

    def _activation(self, x: Tensor, call: Call) -> Tensor:
        act = self.inner.get(x, self._own(call))
        # The tensor that is written through is changed in place: nothing that autograd keeps may be it.
        return act.clone() if self.writes_through else act

    def _read(self, x: Tensor, call: Call) -> Tensor:
        """What the features are of."""
        if not self.reads:
            return self._activation(x, call)
        sources = zip(self.reads, call.sources[-len(self.reads) :], strict=True)
        return self.read_in(
            {name: view.get(seen, Call(module, (seen,), {})) for (name, view), (module, seen) in sources}
        )

    def read_in(self, activations: Mapping[str, Tensor]) -> Tensor:
        """What the features are of, where they are of other points.

        Args:
            activations: of these points, by name.
        """
        seen = [activations[name] for name, _ in self.reads]
        return seen[0] if len(seen) == 1 else torch.stack(seen, -2)


def dense(features: Tensor) -> Tensor:
    """Features as whoever changed them has them, so that their decoding has the same bits.

    Args:
        features: sparse or not.
    """
    return features.to_dense() if features.is_sparse else features
