"""An activation in a basis of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from adapters.views.views import Call, View


class Basis(Protocol):
    """A basis: an SAE, a transcoder, directions, a rotation.

    One layer of a cross-layer transcoder also writes to later points. It has `n_later`, the number
    of these points, and ``decode_later(features, ahead)``, which returns the contribution of its
    features `ahead` layers later (1 or more).
    """

    def encode(self, x: Tensor, /) -> Tensor:
        """Encode an activation ``[..., d]`` as features ``[..., feature]``."""

    def decode(self, features: Tensor, /) -> Tensor:
        """Decode features into the part of the activation ``[..., d]`` that they explain."""


#: The treatment of a basis's reconstruction error: kept, dropped, or replaced by this tensor.
Error = Literal["keep", "drop"] | Tensor


class InBasis(View):
    """The activation that `inner` shows, as the features of a basis.

    An edit adds the change of the decoded features to the activation: ``a + decode(new) -
    decode(old)``. So unchanged features leave it bit-identical.

    Args:
        name: the name of the hook point, for errors.
        inner: the view of the site's tensor.
        basis: see `Basis`.
        error: see `Error`. Unless it is ``"keep"``, the activation becomes ``decode(new)`` plus the
            error.
        reads: the names of the points that are encoded, each with the view of its source (the last
            sources of the call): one point (a transcoder), or several, whose activations are
            stacked as ``[..., point, d]`` for `encode` (a crosscoder). None: the activation itself
            is encoded.
        skip: a function of the encoder's input, added to ``decode(new)``; it cancels if the error
            is kept.
        stateful: `encode` stores a state (run-time normalisation) that the next `decode` undoes and
            clears.
        on_top: if the error is not kept, add the decoded features to the activation instead of
            replacing it, as for a cross-layer transcoder of an earlier layer.
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
        self.name = name
        self.inner = inner
        self.basis = basis
        self.error = error
        self.reads = tuple(reads)
        self.skip = skip
        self.stateful = stateful
        self.on_top = on_top
        self.contextual = inner.contextual or bool(reads)
        self.writes_through = inner.writes_through
        self.at_once = inner.at_once

    @property
    def edits_alone(self) -> bool:
        """Tell whether features encode only this activation, and an edit changes it only by the
        decoded change.
        """
        return self._keeps_error and not self.reads and not self.stateful

    @property
    def _keeps_error(self) -> bool:
        """Tell whether the reconstruction error stays."""
        return isinstance(self.error, str) and self.error == "keep"

    def get(self, x: Tensor, call: Call) -> Tensor:
        return self.encode(self._read(x, call))

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        act = self._activation(x, call)
        read = self._read(x, call)
        if self._keeps_error:
            before = self.decoded(dense(self.encode(read)), act)
            if self.stateful:
                self.encode(read)
            edited = act + (self.decoded(new, act) - before)
        else:
            if self.stateful:  # the user's function may have run the model, and so the basis
                self.encode(read)
            edited = self.decoded(new, act)
            if self.skip is not None:
                edited = edited + self.skip(read).to(edited.dtype)
            if isinstance(self.error, Tensor):
                edited = edited + self._fitting(self.error, edited, "the error that it was given")
            if self.on_top:
                edited = act + edited
        return self.inner.put(x, edited, self._own(call))

    def unexplained(self, act: Tensor, features: Tensor, read: Tensor | None = None) -> Tensor:
        """Compute the reconstruction error of an activation.

        Args:
            act: the activation.
            features: the features of this activation, or of the points that the basis reads.
            read: the encoder's input if it is another activation; needed with a skip path, or if
                `decode` needs what `encode` remembers.
        """
        if self.stateful:  # what it remembers may be of another run
            self.encode(act if read is None else read)
        explained = self.decoded(features, act)
        if self.skip is not None and read is not None:
            explained = explained + self.skip(read)
        return act - explained

    def encode(self, x: Tensor) -> Tensor:
        """Encode an activation as features."""
        try:
            return self.basis.encode(x)
        except RuntimeError as error:
            # torch's own error does not name the tensors whose shapes differ.
            error.add_note(
                f"in encode of {self.name}, of an activation {list(x.shape)} of {x.dtype} on"
                f" {x.device}"
            )
            raise

    def decoded(self, features: Tensor, act: Tensor) -> Tensor:
        """Decode features into an activation's shape and dtype."""
        try:
            return self._fitting(self.basis.decode(features), act, "its decode")
        except RuntimeError as error:
            error.add_note(
                f"in decode of {self.name}, of features {list(features.shape)} of {features.dtype}"
            )
            raise

    def _fitting(self, x: Tensor, act: Tensor, source: str) -> Tensor:
        """Cast a tensor that is to be written to the activation's dtype.

        Raises:
            ValueError: it has a different shape, or is on a different device.
        """
        if x.shape != act.shape or x.device != act.device:
            raise ValueError(
                f"{self.name}: {source} gives {list(x.shape)} on {x.device}, where the"
                f" activation is {list(act.shape)} on {act.device}"
            )
        return x.to(act.dtype)

    def _own(self, call: Call) -> Call:
        """Return the call as the site's own view expects it."""
        if not self.reads:
            return call
        sources = call.sources[: -len(self.reads)]
        return Call(call.module, call.args, call.kwargs, sources, call.scratch)

    def _activation(self, x: Tensor, call: Call) -> Tensor:
        act = self.inner.get(x, self._own(call))
        # A written-through tensor is changed in place, so autograd must not keep it.
        return act.clone() if self.writes_through else act

    def _read(self, x: Tensor, call: Call) -> Tensor:
        """Return the encoder's input."""
        if not self.reads:
            return self._activation(x, call)
        activations: dict[str, Tensor] = {}
        sources = call.sources[-len(self.reads) :]
        for (name, view), (module, source) in zip(self.reads, sources, strict=True):
            activations[name] = view.get(source, Call(module, (source,), {}))
        return self.read_in(activations)

    def read_in(self, activations: Mapping[str, Tensor]) -> Tensor:
        """Return the encoder's input, if it is read from other hook points.

        Args:
            activations: the activations of these points, by name.
        """
        read = [activations[name] for name, _ in self.reads]
        return read[0] if len(read) == 1 else torch.stack(read, -2)


def dense(features: Tensor) -> Tensor:
    """Return features as a dense tensor, as user edits return them, so that their decoding is
    bit-identical.

    Args:
        features: the features, sparse or dense.
    """
    return features.to_dense() if features.is_sparse else features
