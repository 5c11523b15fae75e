"""One forward pass of many requests: each request's part of every activation, as in a run of that
request alone.

transformers packs the tokens of all requests that are under way into one row. Which are whose is
said by the arguments of the pass (`cu_seq_lens_q`, `cu_seq_lens_k`), in the order of the batch's
requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from bridge.bases.bases import reconstructed
from bridge.hooks.context import CURRENT, Generation, HookFunction, Listener, RunContext
from bridge.hooks.hooks import HookPoint, checked
from bridge.interventions.operations import Operation
from bridge.modules import close

#: A hook point's function, for one request (by its number) or, with None, for all.
Edit = tuple[int | None, HookFunction]


@dataclass
class PackedRequest:
    """A request, during its generation and afterwards.

    Attributes:
        index: its number.
        prompt: its tokens.
        generation: the state of its generation.
        kept: for each captured hook point, pairs of the position of the first query and the
            activation.
        logits: the logits of each new token.
        error: the error that one of its functions raised.
        started: whether its prompt has been processed.
    """

    index: int
    prompt: list[int]
    generation: Generation
    kept: dict[str, list[tuple[int, Tensor]]] = field(default_factory=dict)
    logits: list[Tensor] = field(default_factory=list)
    error: BaseException | None = None
    started: bool = False


@dataclass(frozen=True)
class RequestPart:
    """The part of a packed pass that belongs to one request.

    Attributes:
        request: the request.
        queries: the range of its tokens.
        keys: the range of its keys, by the kind of attention.
        first: the position of its first token in its sequence.
    """

    request: PackedRequest
    queries: tuple[int, int]
    keys: Mapping[str, tuple[int, int]]
    first: int


@dataclass
class Packed:
    """The current packed pass.

    Attributes:
        parts: the parts of its requests, in order.
        totals: the total number of keys, by the kind of attention.
    """

    parts: Sequence[RequestPart]
    totals: Mapping[str, int]

    @classmethod
    def of(cls, requests: Sequence[PackedRequest], kwargs: Mapping[str, Any]) -> Packed:
        """Return the pass of a call of the model.

        Args:
            requests: the requests, in the order of the batch.
            kwargs: the arguments of the model.
        """
        ends = kwargs["cu_seq_lens_q"].tolist()
        key_ends = {kind: counts.tolist() for kind, counts in kwargs["cu_seq_lens_k"].items()}
        positions = kwargs["position_ids"][0].tolist()
        parts = []
        for i, request in enumerate(requests):
            begin, end = ends[i : i + 2]
            keys = {kind: (counts[i], counts[i + 1]) for kind, counts in key_ends.items()}
            first = positions[begin]
            parts.append(RequestPart(request, (begin, end), keys, first))
            generation = request.generation
            generation.processed = first + end - begin
            generation.step = max(0, generation.processed - len(request.prompt))
        totals = {kind: counts[len(requests)] for kind, counts in key_ends.items()}
        return cls(parts, totals)

    def index(self, part: RequestPart, act: Tensor, hook: HookPoint) -> tuple[slice, ...]:
        """Return the index of a request's part of an activation.

        Args:
            part: the request's part of the pass.
            act: the packed activation.
            hook: the hook point.

        Raises:
            RuntimeError: the number of keys matches no kind of attention.
        """
        index = [slice(None)] * act.ndim
        tokens = self.parts[-1].queries[1]
        for place, axis in enumerate(hook.point.axes.split()):
            if axis not in ("pos", "key_pos"):
                continue
            size = act.shape[place]
            kind = None if axis == "pos" else self._attention_kind(size)
            if kind is None and size != tokens:
                raise RuntimeError(
                    f"{hook.name} has {size} entries along {axis}, and this pass {tokens}"
                    f" tokens and {dict(self.totals)} keys"
                )
            index[place] = slice(*(part.queries if kind is None else part.keys[kind]))
        return tuple(index)

    def _attention_kind(self, total: int) -> str | None:
        """Return the kind of attention that has this number of keys; None if there is none."""
        return next((kind for kind, keys in self.totals.items() if keys == total), None)


def check_tells_apart(hook: HookPoint) -> None:
    """Check that the requests of a pass can be told apart at a hook point.

    Raises:
        ValueError: they cannot.
    """
    axes = hook.point.axes.split()
    has_positions = "pos" in axes or "key_pos" in axes
    if axes[0] != "batch" or not has_positions or "held_pos" in axes:
        raise ValueError(
            f"{hook.name} has the axes [{hook.point.axes}], at which the tokens of many requests"
            " cannot be told apart: use bridge.generate for it"
        )


def is_wrong(values: Tensor, masks: bool = False) -> bool:
    """Tell whether an activation has values that are not finite.

    Args:
        values: the activation.
        masks: accept minus infinity.
    """
    # A sum is one pass over the values; it may overflow although they are all finite.
    if math.isfinite(values.sum().item()):
        return False
    wrong = values.isnan() | values.isposinf() if masks else ~values.isfinite()
    return bool(wrong.any())


def not_finite(request: PackedRequest, what: str) -> FloatingPointError:
    """Return the error of a request whose edits are not finite.

    Args:
        request: the request.
        what: the name of the values that are not finite.
    """
    return FloatingPointError(
        f"{what} at step {request.generation.step} of request {request.index} is not finite, which"
        " its edits have made of it: smaller ones, or a model in float32, may do. The other"
        " requests go on"
    )


class PackedHook:
    """The listener's function at one hook point: it edits each request's part, and keeps it.

    Args:
        now: returns the current pass.
        edits: the functions, in order.
        capture: whether to keep the edited activations.
        failed: called with a request whose function raised, and the error.
    """

    in_run = True

    def __init__(
        self,
        now: Callable[[], Packed],
        edits: Sequence[Edit],
        capture: bool,
        failed: Callable[[PackedRequest, BaseException], None],
    ) -> None:
        self._now = now
        self._capture = capture
        self._failed = failed
        self._edits = list(edits)
        #: Every function does the same to every token, of whichever request.
        self._together = all(index is None and _is_tokenwise(fn) for index, fn in edits)

    def __call__(self, act: Tensor, hook: HookPoint) -> Tensor | None:
        now = self._now()
        before = act.detach().clone() if self._capture and not self._edits else None
        if self._together:
            act = _edited([fn for _, fn in self._edits], act, hook)
            edited = list(now.parts) if self._edits else []
        else:
            edited = [part for part in now.parts if self._edit(part, now, act, hook)]
        if edited:
            self._end_infinite(act, hook, now, edited)
        if self._capture:
            for part in now.parts:
                index = now.index(part, act, hook)
                value = act[index].detach().clone() if before is None else before[index]
                part.request.kept.setdefault(hook.name, []).append((part.first, value))
        return act if edited else None

    def _edit(self, part: RequestPart, now: Packed, act: Tensor, hook: HookPoint) -> bool:
        """Edit one request's part in place; return whether it was edited."""
        request = part.request
        fns = [fn for index, fn in self._edits if index is None or index == request.index]
        if not fns or request.error is not None:
            return False
        own = now.index(part, act, hook)
        outside = CURRENT.get()
        CURRENT.set(RunContext(outside.shared, outside.own, outside.run, request.generation))
        try:
            act[own] = _edited(fns, act[own], hook)
        except BaseException as error:  # noqa: BLE001 - the reader of the answers gets it
            self._failed(request, error)
            return False
        finally:
            CURRENT.set(outside)
        return True

    def _end_infinite(
        self, act: Tensor, hook: HookPoint, now: Packed, parts: Sequence[RequestPart]
    ) -> None:
        """End the requests whose edits are not finite, and write zeros for them."""
        masks = hook.name.endswith("hook_attn_scores")  # minus infinity is a mask
        if not act.is_floating_point() or not is_wrong(act, masks):
            return
        for part in parts:
            index = now.index(part, act, hook)
            if is_wrong(act[index], masks):
                act[index] = 0
                self._failed(part.request, not_finite(part.request, hook.name))


class TellsApart:
    """The listener's function at a basis's source: it checks that each request's features do not
    depend on other requests.

    Args:
        now: returns the current pass.
        basis: the point in the basis.
        failed: called with each request whose features do, and an error.
    """

    in_run = True

    def __init__(
        self,
        now: Callable[[], Packed],
        basis: HookPoint,
        failed: Callable[[PackedRequest, BaseException], None],
    ) -> None:
        self._now = now
        self._basis = basis
        self._failed = failed
        self._tried = False
        self._mixes = False

    def __call__(self, act: Tensor, hook: HookPoint) -> None:
        parts = self._now().parts
        if not self._tried and len(parts) > 1:
            self._tried = True
            joint = reconstructed(self._basis, act)
            for part in parts:
                own = slice(*part.queries)
                alone = reconstructed(self._basis, act[:, own])
                if not close(joint[:, own], alone):
                    self._mixes = True
                    break
        for part in parts if self._mixes else ():
            error = ValueError(
                f"the basis of {self._basis.name} makes of a position what depends on others: in a"
                " pass of many requests these are other people's: use bridge.generate"
            )
            self._failed(part.request, error)


def _is_tokenwise(fn: HookFunction) -> bool:
    """Tell whether a function treats every token of every row alike."""
    if not isinstance(fn, Operation) or fn.remembers:
        return False
    return not fn.chooses_tokens and fn.rows is None and not fn.mixes_rows


def _edited(fns: Sequence[HookFunction], act: Tensor, hook: HookPoint) -> Tensor:
    for fn in fns:
        act = _result(fn, act, hook)
    return act


def _result(fn: HookFunction, act: Tensor, hook: HookPoint) -> Tensor:
    """Return a function's result: its return value, or the copy that it changed in place."""
    if isinstance(fn, Operation):
        return fn(act, hook)
    copy = act.clone()
    new = fn(copy, hook=hook)
    return copy if new is None else checked(new, act, Listener("fwd", fn), hook)


def with_unseen_keys(act: Tensor, axis: int, by: tuple[int, int], hook: HookPoint) -> Tensor:
    """Return scores or a pattern with added keys to which no query of a step attends.

    Args:
        act: the activation.
        axis: the axis of keys.
        by: the number of keys to add at the beginning, and at the end.
        hook: the hook point.
    """
    nothing = float("-inf") if hook.name.endswith("hook_attn_scores") else 0.0
    later_axes = act.ndim - 1 - axis
    return pad(act, (0, 0) * later_axes + by, value=nothing)


def together(kept: Sequence[tuple[int, Tensor]], hook: HookPoint) -> Tensor:
    """Join the activations of a request's steps, as in one run of its sequence.

    Args:
        kept: for each step, the position of its first query, and the activation.
        hook: the hook point.
    """
    axes = hook.point.axes.split()
    growing = axes.index("pos" if "pos" in axes else "key_pos")
    last, act = kept[-1]
    # After the prompt a step has one query, and keys and values of the past too.
    new = 1 if last and "pos" not in axes else act.shape[growing]
    total = last + new
    ends = [*(first for first, _ in kept[1:]), total]
    parts = []
    for (first, act), end in zip(kept, ends, strict=True):
        if "pos" not in axes:
            new = end - first
            act = act.narrow(growing, act.shape[growing] - new, new)
        elif "key_pos" in axes:
            # Keys that a window has dropped, and later ones: no query of this step attends to them.
            axis = axes.index("key_pos")
            act = with_unseen_keys(act, axis, (end - act.shape[axis], total - end), hook)
        parts.append(act)
    return torch.cat(parts, growing)
