"""Proof that a hook point of an engine agrees with the same point in a run of the plain model.

The plain model and the engine run the same prompts of unequal length in one batch and generate some
tokens. The activations of every hook point are compared at every token. Then each hook point gets
one request that edits it with every operation that the tables support, at some tokens and at all
tokens, and the log-probabilities of the next token are compared. A hook point that differs by more
than the bound is not offered; the reason states the difference.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from adapters.points import Point, base_path, is_inside, module_at
from adapters.views import Args, Call, Kwargs, View
from adapters.views.heads import HeadsFirst, MaskedScores
from adapters.views.views import FlatRows
from bridge.bridge import TransformerBridge
from bridge.engine.tables import EnginePlace
from bridge.hooks.hooks import HookPoint
from bridge.interventions import (
    Add,
    AddScaled,
    Cap,
    Interventions,
    Operation,
    Probe,
    ProjectOut,
    Scale,
    Set,
)

#: The views that an engine supports inside attention, by the key of the site.
_INSIDE: dict[str, tuple[type[View], ...]] = {
    "q": (HeadsFirst,),
    "k": (HeadsFirst,),
    "scores": (MaskedScores,),
    "pattern": (View,),
}
#: The prompt lengths of the batch.
_LENGTHS = (5, 19, 11)
#: The number of generated tokens.
_NEW = 3
#: The prompt length of the edited requests.
_EDITED = 7
#: Largest allowed difference from the plain float32 model, relative to the largest value.
BOUND = 1e-4
#: Number of most likely next tokens that are compared.
MOST_LIKELY = 20
_COMPUTED = "it is computed from a tensor of the model, and not a part of that tensor"


def engine_point(hook: HookPoint, model: nn.Module, like: Tensor | None) -> dict[str, Any] | str:
    """Return the worker's description of a hook point, or the reason why an engine cannot offer it.

    Args:
        hook: the hook point.
        model: the plain model.
        like: a row of the tensor at its site; None if its module did not run.
    """
    if why := why_not(hook.point, model):
        return why
    site = hook.point.site
    view = hook.point.view
    path = site.path.removeprefix(f"{base_path(model)}.")
    point = {"path": path, "kind": site.kind, "key": site.key}
    if site.kind == "attention":
        return point  # the engine's own kernel has the number of heads and their width
    if like is None:
        return "its module did not run"
    width = len(like)
    numbers = torch.arange(float(width)).reshape(1, 1, width)
    activation = view.get(numbers, Call(module_at(model, site.path), (), {}))
    columns = activation.flatten().tolist()
    if len(set(columns)) != len(columns) or not set(columns) <= set(range(width)):
        return _COMPUTED
    return {
        **point,
        "through": view.writes_through,
        "width": width,
        "columns": [int(x) for x in columns],
        "shape": list(activation.shape[2:]),
        "counts": not like.is_floating_point(),
    }


def why_not(point: Point, model: nn.Module) -> str:
    """Return why an engine cannot offer a hook point, judged by its declaration alone; "" if it
    can.
    """
    site = point.site
    if site.kind == "attention" and type(point.view) not in _INSIDE.get(str(site.key), ()):
        return (
            "it is seen in a way of its own inside of attention, which the engine has another for"
        )
    if site.kind not in ("input", "output", "attention"):
        return f"it is inside of a module's forward ({site.kind}), which the engine has another for"
    if not is_inside(site.path, base_path(model)) or "@" in site.path:
        return f"{site.path} is outside of what the engine runs, or runs several times"
    # The source of flat rows only gives the batch size, which an engine does not need.
    outer = getattr(point.view, "outer", point.view)
    has_sources = point.sources and not isinstance(outer, FlatRows)
    return _COMPUTED if point.view.contextual or point.linked or has_sources else ""


def rows_like(bridge: TransformerBridge, hooks: Sequence[HookPoint]) -> dict[str, Tensor]:
    """Return one empty row of the tensor at each hook point's site: its number of columns and its
    dtype.
    """
    model = bridge.original_model
    rows = dict[str, Tensor]()
    handles = []
    for hook in hooks:
        if hook.point.site.kind != "attention" and not why_not(hook.point, model):
            handles.append(_note_row(hook, model, rows))
    try:
        bridge(torch.tensor([[1, 0]]), return_type=None)
    finally:
        for handle in handles:
            handle.remove()
    return rows


def _note_row(hook: HookPoint, model: nn.Module, rows: dict[str, Tensor]) -> RemovableHandle:
    """Add hooks with which the model's next run stores, in `rows`, an empty row of the tensor at a
    hook point's site.
    """
    site = hook.point.site
    module = module_at(model, site.path)

    def note(x: Tensor) -> None:
        rows[hook.name] = torch.empty(x.shape[-1], dtype=x.dtype)

    def on_input(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        note(args[0] if args else kwargs[str(site.key)])

    def on_output(module: nn.Module, args: Args, output: Any) -> None:
        index = site.key if isinstance(site.key, int) else 0
        note(output if isinstance(output, Tensor) else list(output)[index])

    if site.kind == "input":
        return module.register_forward_pre_hook(on_input, with_kwargs=True)
    return module.register_forward_hook(on_output)


def seen_in_order(bridge: TransformerBridge, names: Sequence[str]) -> list[str]:
    """Return hook points in forward order."""
    order: list[str] = []
    hooks = [(name, lambda x, hook: order.append(hook.name)) for name in names]
    bridge.run_with_hooks(torch.tensor([[1, 0]]), return_type=None, fwd_hooks=hooks)
    return order


@dataclass(frozen=True)
class _ProofRequest:
    """A request of the proof.

    Attributes:
        prompt: the prompt's tokens.
        new: the number of tokens to generate.
        edits: the interventions.
        capture: the hook points whose activations are compared.
        edited: the hook point under test.
    """

    prompt: list[int]
    new: int
    edits: Interventions
    capture: tuple[str, ...]
    edited: str = ""


class EngineProof:
    """The expected answers of an engine, computed by the plain model.

    Args:
        bridge: a bridge of the plain model, in float32.
        hooks: the hook points that exist in the engine.
        places: their places in the engine.
        dtype: the dtype that the engine computes in.
        rank: the number of directions per table row.
        order: the hook points in forward order, if probes are enabled; the probe reads the first
            point that supports one.
    """

    def __init__(
        self,
        bridge: TransformerBridge,
        hooks: Sequence[HookPoint],
        places: Mapping[str, EnginePlace],
        dtype: torch.dtype,
        rank: int,
        order: Sequence[str] = (),
    ) -> None:
        self.bridge = bridge
        self.places = places
        self.dtype = dtype
        self.rank = rank
        self.drawn = torch.Generator().manual_seed(0)
        names = tuple(hook.name for hook in hooks)
        self.requests = [
            _ProofRequest(self._prompt(n), _NEW, Interventions(), names) for n in _LENGTHS
        ]
        prompt = self._prompt(_EDITED)
        with torch.no_grad():
            _, cache = bridge.run_with_cache(torch.tensor([prompt]), names_filter=list(names))
        for hook in hooks:
            if hook.name not in places or places[hook.name].counts:
                continue  # computed afterwards, or expert indices
            operations = self._operations(hook, cache[hook.name])
            edits = Interventions([(hook.name, operation) for operation in operations])
            self.requests.append(_ProofRequest(prompt, 1, edits, (), hook.name))
        edited = {request.edited for request in self.requests}
        self.requests += self._conditions(prompt, cache, [name for name in order if name in edited])

    def _conditions(
        self, prompt: list[int], cache: Mapping[str, Tensor], order: Sequence[str]
    ) -> list[_ProofRequest]:
        """Build one request per hook point that edits it only where a probe at the first readable
        point exceeds the threshold in half of the tokens.
        """
        first = next((place for place, name in enumerate(order) if cache[name].ndim == 3), None)
        if first is None:
            return []
        read = cache[order[first]]
        direction = self._draw(read.shape[-1])
        readings = (read[0].float() @ direction).sort().values
        probe = Probe(direction, "read")
        # Halfway between two readings, so that rounding cannot flip the condition
        middle = len(readings) // 2
        level = float(readings[middle - 1 : middle + 1].mean())
        requests = []
        for name in order[first:]:
            size = cache[name][0, 0].float().std()
            value = size * self._draw(*cache[name].shape[2:])
            pairs = [(order[first], probe), (name, Set(value, where=probe > level))]
            requests.append(_ProofRequest(prompt, 1, Interventions(pairs), (), name))
        return requests

    def _draw(self, *shape: int) -> Tensor:
        """Return random numbers."""
        return torch.randn(shape, generator=self.drawn)

    def _prompt(self, length: int) -> list[int]:
        cfg = self.bridge.cfg
        high = max(2, cfg.d_vocab)
        longest = (cfg.n_ctx or length + _NEW) - _NEW
        shape = (min(length, longest),)
        return torch.randint(min(3, high - 1), high, shape, generator=self.drawn).tolist()

    def _operations(self, hook: HookPoint, activation: Tensor) -> list[Operation]:
        """Return every operation that tables support, scaled to the size of the activations."""
        shape = activation.shape[2:]
        size = float(activation.float().std().clamp_min(1e-3))
        operations: list[Operation] = [Scale(1 + self._draw(*shape) / 4)]
        operations.append(Add(self._draw(*shape) * size))
        capped = len(self.requests) % 2  # alternate between the two operations
        if self.rank:
            direction = self._draw(shape[-1])
            heads = 0 if len(shape) > 1 else None
            operations.append(
                Cap(direction, 0.0, heads=heads) if capped else ProjectOut(direction, heads=heads)
            )
        if self.places[hook.name].is_whole_tensor and len(shape) == 1 and not capped:
            operations.insert(0, AddScaled(self._draw(*shape), 0.5))
        return [*operations, Set(self._draw(*shape) * size, positions=slice(1, 3))]

    @torch.no_grad()
    def _alone(
        self, model: TransformerBridge, request: _ProofRequest, tokens: Sequence[int]
    ) -> tuple[Tensor, Any]:
        """Return the next-token log-probabilities and the activations at the hook points."""
        with model.hooks(fwd_hooks=list(request.edits)):
            names = list(request.capture) or [request.edited]
            logits, cache = model.run_with_cache(torch.tensor([list(tokens)]), names_filter=names)
        return logits[0].float().log_softmax(-1), cache

    def differences(self, answers: Sequence[Any]) -> dict[str, str]:
        """Return why each hook point is not offered; "" if it is.

        Args:
            answers: the engine's answers to `requests`, in order: `tokens`, `activations`, and
                `likely`, the log-probabilities of the most likely next tokens.
        """
        models = [self.bridge]
        if self.dtype != torch.float32:
            rounded = copy.deepcopy(self.bridge.original_model).to(self.dtype)
            models.append(TransformerBridge(rounded, None))
        differences = dict.fromkeys(self.requests[0].capture, "")
        for request, answer in zip(self.requests, answers, strict=True):
            tokens = [*request.prompt, *answer.tokens.tolist()[:-1]]
            runs = [self._alone(model, request, tokens) for model in models]
            for name in request.capture:
                values = [cache[name][0].float() for _, cache in runs]
                differences[name] = differences[name] or _difference(
                    "its value", answer.activations[name], values
                )
            if request.edits:
                ids = torch.tensor(list(answer.likely[0]))
                likely = torch.tensor(list(answer.likely[0].values()))
                expected = [logs[len(request.prompt) - 1][ids] for logs, _ in runs]
                name = request.edited
                differences[name] = differences[name] or _difference(
                    "the effect of an edit there", likely, expected
                )
        return differences


def _difference(what: str, actual: Tensor, values: Sequence[Tensor]) -> str:
    """Return how an engine's values differ from the plain model's; "" within the bound.

    Args:
        what: the name for the reason.
        actual: the engine's values.
        values: the plain model's values, and, if the engine has a different dtype, the values of
            the model in that dtype.
    """
    expected, *rounded = values
    # Equal infinities are masked scores.
    distance = lambda x: float(torch.where(x == expected, 0.0, (x - expected).abs()).max())
    off = distance(actual.float()) if actual.shape == expected.shape else float("inf")
    size = float(expected.abs().nan_to_num(posinf=0.0).max())
    bound = BOUND * max(1.0, size) + 2 * sum(distance(x) for x in rounded)
    if off <= bound:
        return ""
    return f"{what} is off by {off:.2g} from the plain model's (at most {bound:.2g})"
