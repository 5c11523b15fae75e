"""One forward pass of many requests: each request's part of every activation, as in a run of that request alone.

transformers packs the tokens of all requests that are under way into one row. Which are whose is said by the arguments
of the pass (`cu_seq_lens_q`, `cu_seq_lens_k`), in the order of the batch's requests.
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
from bridge.hooks.modules import close
from bridge.interventions.operations import Operation

#: A hook point's function, for one request (by its number) or, with None, for all.
Edit = tuple[int | None, HookFunction]


@dataclass
class PackedRequest:
    """One request, while it is generated and afterwards.

    Attributes:
        index: its number.
        prompt: its tokens.
        generation: where it is.
        kept: for each captured hook point what was seen: the place of the first query, and the activation.
        logits: of each new token.
        error: what one of its functions raised.
        started: its prompt has been processed.
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
    """What of a packed pass belongs to one request.

    Attributes:
        request: the request.
        queries: where its tokens begin and end.
        keys: where its keys begin and end, by the kind of attention.
        first: the place of its first token in its sequence.
    """

    request: PackedRequest
    queries: tuple[int, int]
    keys: Mapping[str, tuple[int, int]]
    first: int


@dataclass
class Packed:
    """The pass that is under way.

    Attributes:
        parts: of its requests, in order.
        totals: how many keys there are in all, by the kind of attention.
    """

    parts: Sequence[RequestPart]
    totals: Mapping[str, int]

    @classmethod
    def of(cls, requests: Sequence[PackedRequest], kwargs: Mapping[str, Any]) -> Packed:
        """The pass that a model is called for.

        Args:
            requests: in the order of the batch.
            kwargs: what the model is called with.
        """
        ends = kwargs["cu_seq_lens_q"].tolist()
        keys = {kind: counts.tolist() for kind, counts in kwargs["cu_seq_lens_k"].items()}
        first = kwargs["position_ids"][0].tolist()
        parts = []
        for number, request in enumerate(requests):
            begin, end = ends[number], ends[number + 1]
            of_keys = {kind: (counts[number], counts[number + 1]) for kind, counts in keys.items()}
            parts.append(RequestPart(request, (begin, end), of_keys, first[begin]))
            request.generation.processed = first[begin] + end - begin
            request.generation.step = max(0, request.generation.processed - len(request.prompt))
        return cls(parts, {kind: counts[len(requests)] for kind, counts in keys.items()})

    def index(self, part: RequestPart, axes: Sequence[str], shape: Sequence[int], name: str) -> tuple[slice, ...]:
        """The part of an activation that belongs to a request.

        Args:
            part: of the request.
            axes: of the activation.
            shape: of the packed activation.
            name: of the hook point.

        Raises:
            RuntimeError: the activation has another number of keys than any kind of attention.
        """
        index = [slice(None)] * len(axes)
        tokens = self.parts[-1].queries[1]
        for axis, called in enumerate(axes):
            if called in ("pos", "key_pos"):
                kind = None if called == "pos" else self._keys(shape[axis])
                if kind is None and shape[axis] != tokens:
                    raise RuntimeError(
                        f"{name} has {shape[axis]} entries along {called}, and this pass {tokens} tokens and "
                        f"{dict(self.totals)} keys"
                    )
                index[axis] = slice(*(part.queries if kind is None else part.keys[kind]))
        return tuple(index)

    def _keys(self, total: int) -> str | None:
        """The kind of attention that has so many keys; where there are as many tokens, these are the keys."""
        return next((kind for kind, counted in self.totals.items() if counted == total), None)


def check_tells_apart(hook: HookPoint) -> None:
    """Refuses a hook point at which the requests of a pass cannot be told apart.

    Raises:
        ValueError: it is one.
    """
    axes = hook.point.axes.split()
    if axes[0] != "batch" or not {"pos", "key_pos"} & set(axes) or "held_pos" in axes:
        raise ValueError(
            f"{hook.name} has the axes [{hook.point.axes}], at which the tokens of many requests cannot be told apart: "
            "use bridge.generate for it"
        )


def is_wrong(values: Tensor, masks: bool = False) -> bool:
    """Whether there is something among values that is no number, or infinite.

    Args:
        values: of an activation.
        masks: minus infinity is meant.
    """
    if math.isfinite(values.sum().item()):  # one pass over them; it may overflow where they are all finite
        return False
    wrong = values.isnan() | values.isposinf() if masks else ~values.isfinite()
    return bool(wrong.any())


def not_finite(request: PackedRequest, what: str) -> FloatingPointError:
    """Why a request ends whose edits made something that is not finite.

    Args:
        request: the request.
        what: is not finite.
    """
    return FloatingPointError(
        f"{what} at step {request.generation.step} of request {request.index} is not finite, which its edits have made "
        "of it: smaller ones, or a model in float32, may do. The other requests go on"
    )


class PackedHook:
    """The listener's function at one hook point: edits each request's part, and keeps it.

    Args:
        now: tells the pass that is under way.
        edits: the functions, in order.
        capture: whether to keep what the functions made.
        failed: is told of a request whose function raised.
    """

    in_run = True

    def __init__(
        self,
        now: Callable[[], Packed],
        edits: Sequence[Edit],
        capture: bool,
        failed: Callable[[PackedRequest, BaseException], None],
    ) -> None:
        self._now, self._capture, self._failed = now, capture, failed
        self._of_all = [fn for who, fn in edits if who is None]
        self._edits: dict[int, list[HookFunction]] = {}
        self._order = list(edits)
        self._together = bool(edits) and all(who is None and _of_each_token(fn) for who, fn in edits)

    def __call__(self, act: Tensor, hook: HookPoint) -> Tensor | None:
        now = self._now()
        axes = hook.point.axes.split()
        if self._together:  # the same for every token, whoever's it is
            for fn in self._of_all:
                act = _result(fn, act, hook)
        outside = CURRENT.get()
        edited = list(now.parts) if self._together else []
        kept = act.detach().clone() if self._capture and not self._order else None
        for part in now.parts:
            request = part.request
            index = now.index(part, axes, act.shape, hook.name)
            if self._order and not self._together and request.error is None:
                fns = self._edits_of(request.index)
                if fns:
                    CURRENT.set(RunContext(outside.shared, outside.own, outside.run, request.generation))
                    try:
                        act[index] = _edited(fns, act[index], hook)
                        edited.append(part)
                    except BaseException as error:  # noqa: BLE001
                        self._failed(request, error)  # it is raised, or told, where the answers are asked for
                    finally:
                        CURRENT.set(outside)
        if edited:
            self._end_what_is_not_finite(act, hook, now, edited)
        for part in now.parts if self._capture else ():
            index = now.index(part, axes, act.shape, hook.name)
            seen = act[index].detach().clone() if kept is None else kept[index]
            part.request.kept.setdefault(hook.name, []).append((part.first, seen))
        return act if edited else None

    def _end_what_is_not_finite(self, act: Tensor, hook: HookPoint, now: Packed, parts: Sequence[RequestPart]) -> None:
        """Ends the requests whose edits are no numbers, and puts zeros in their place, which harm nobody."""
        masks = hook.name.endswith("hook_attn_scores")  # where minus infinity is a number like any other
        if not act.is_floating_point() or not is_wrong(act, masks):
            return
        for part in parts:
            index = now.index(part, hook.point.axes.split(), act.shape, hook.name)
            if is_wrong(act[index], masks):
                act[index] = 0
                self._failed(part.request, not_finite(part.request, hook.name))

    def _edits_of(self, index: int) -> list[HookFunction]:
        found = self._edits.get(index)
        if found is None:
            found = self._edits[index] = [fn for who, fn in self._order if who is None or who == index]
        return found


class TellsApart:
    """The listener's function where the features of a basis are read: whether it gives each request its own.

    Args:
        now: tells the pass that is under way.
        basis: the point in the basis.
        failed: is told of each request, where it does not.
    """

    in_run = True

    def __init__(
        self, now: Callable[[], Packed], basis: HookPoint, failed: Callable[[PackedRequest, BaseException], None]
    ) -> None:
        self._now, self._basis, self._failed = now, basis, failed
        self._tried, self._mixes = False, False

    def __call__(self, act: Tensor, hook: HookPoint) -> None:
        now = self._now()
        if not self._tried and len(now.parts) > 1:
            self._tried = True
            whole = reconstructed(self._basis, act)
            parts = [slice(*part.queries) for part in now.parts]
            self._mixes = not all(close(whole[:, mine], reconstructed(self._basis, act[:, mine])) for mine in parts)
        for part in now.parts if self._mixes else ():
            why = ValueError(
                f"the basis of {self._basis.name} makes of a position what depends on others: in a pass of many "
                "requests these are other people's: use bridge.generate"
            )
            self._failed(part.request, why)


def _of_each_token(fn: HookFunction) -> bool:
    """Whether a function does the same to every token, whichever row it is of."""
    if not isinstance(fn, Operation) or fn.remembers:
        return False
    return not fn.chooses_tokens and fn.rows is None and not fn.mixes_rows


def _edited(fns: Sequence[HookFunction], act: Tensor, hook: HookPoint) -> Tensor:
    for fn in fns:
        act = _result(fn, act, hook)
    return act


def _result(fn: HookFunction, act: Tensor, hook: HookPoint) -> Tensor:
    """What a function makes of an activation: what it returns, or the copy that it was given."""
    if isinstance(fn, Operation):
        return fn(act, hook)
    given = act.clone()
    new = fn(given, hook=hook)
    return given if new is None else checked(new, act, Listener("fwd", fn), hook)


def with_unseen_keys(act: Tensor, axis: int, by: tuple[int, int], hook: HookPoint) -> Tensor:
    """Scores or a pattern with keys to which no query of a step attends.

    Args:
        act: the activation.
        axis: that of keys.
        by: how many come first, and how many last.
        hook: the hook point.
    """
    nothing = float("-inf") if hook.name.endswith("hook_attn_scores") else 0.0
    return pad(act, (0, 0) * (act.ndim - 1 - axis) + by, value=nothing)


def together(kept: Sequence[tuple[int, Tensor]], hook: HookPoint) -> Tensor:
    """What was seen in the steps of a request, as in one run of its sequence.

    Args:
        kept: the place of the first query of each step, and the activation.
        hook: the hook point.
    """
    axes = hook.point.axes.split()
    total = kept[-1][0] + _queries(kept, axes)
    parts = []
    for number, (first, act) in enumerate(kept):
        end = kept[number + 1][0] if number + 1 < len(kept) else total
        if "key_pos" in axes:
            axis = axes.index("key_pos")
            if "pos" not in axes:  # keys and values of the past too: these are the new ones
                act = act.narrow(axis, act.shape[axis] - (end - first), end - first)
            else:  # what a window has left behind, and what comes later: keys that no query of this step sees
                act = with_unseen_keys(act, axis, (end - act.shape[axis], total - end), hook)
        parts.append(act)
    return torch.cat(parts, axes.index("pos") if "pos" in axes else axes.index("key_pos"))


def _queries(kept: Sequence[tuple[int, Tensor]], axes: Sequence[str]) -> int:
    first, act = kept[-1]
    return act.shape[axes.index("pos")] if "pos" in axes else (1 if first else act.shape[axes.index("key_pos")])
