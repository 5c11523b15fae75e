"""Whether a hook point of an engine is what it is in a run: tried on the plain model, before it is offered.

The plain model runs a few prompts of unequal length and some tokens that it generates behind them, and the engine the
same, all together: every point's value is compared, at every token. Then each point has a request that changes it by
all that tables hold, at some tokens and at all, and the log-probabilities of its next token are compared. What differs
by more than the bound is refused, with the difference.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adapters.points import Point, base_path, is_inside, module_at
from adapters.views import Call, View
from adapters.views.attention import HeadsFirst, MaskedScores
from adapters.views.views import FlatRows
from bridge.bridge import TransformerBridge
from bridge.engine.tables import EnginePlace
from bridge.hooks.hooks import HookPoint
from bridge.interventions import Add, AddScaled, Cap, Interventions, Operation, Probe, ProjectOut, Scale, Set

#: As what the arguments of attention, and what is computed from them, can be seen in an engine.
_INSIDE: dict[str, tuple[type[View], ...]] = {
    "q": (HeadsFirst,), "k": (HeadsFirst,), "scores": (MaskedScores,), "pattern": (View,)
}  # fmt: skip
#: The lengths of the prompts that are run together, how many tokens follow them, and that of the edited ones.
_LENGTHS, _NEW, _EDITED = (5, 19, 11), 3, 7
#: How far values may be from those of the plain model in float32, of the largest of them.
BOUND = 1e-4
#: How many of the most likely next tokens are compared.
MOST_LIKELY = 20


def engine_point(hook: HookPoint, model: nn.Module, like: Tensor | None) -> dict[str, Any] | str:
    """What the worker has to know of a hook point, or why an engine cannot have it.

    Args:
        hook: the hook point.
        model: the plain model.
        like: a row of its site's tensor; None: its module was not run.
    """
    if why := why_not(hook.point, model):
        return why
    site, view = hook.point.site, hook.point.view
    if site.kind == "attention":  # the engine's own kernel says how many heads there are, and how wide they are
        return {"path": site.path.removeprefix(f"{base_path(model)}."), "kind": site.kind, "key": site.key}
    if like is None:
        return "its module did not run"
    width = len(like)
    seen = view.get(torch.arange(float(width)).reshape(1, 1, width), Call(module_at(model, site.path), (), {}))
    columns = seen.flatten().tolist()
    if len(set(columns)) != len(columns) or not set(columns) <= set(range(width)):
        return "it is computed from a tensor of the model, and is no part of one"
    return {
        "path": site.path.removeprefix(f"{base_path(model)}."), "kind": site.kind, "key": site.key,
        "through": view.writes_through, "width": width, "columns": [int(x) for x in columns],
        "shape": list(seen.shape[2:]), "counts": not like.is_floating_point(),
    }  # fmt: skip


def why_not(point: Point, model: nn.Module) -> str:
    """Why an engine cannot have a point, as far as its declaration says; "" where it may."""
    site = point.site
    if site.kind == "attention" and type(point.view) not in _INSIDE.get(str(site.key), ()):
        return "it is seen in a way of its own inside of attention, which the engine has another for"
    if site.kind not in ("input", "output", "attention"):
        return f"it is inside of a module's forward ({site.kind}), which the engine has another for"
    if not is_inside(site.path, base_path(model)) or "@" in site.path:
        return f"{site.path} stands outside of what the engine runs, or runs several times"
    rows = point.view if isinstance(point.view, FlatRows) else getattr(point.view, "outer", None)
    if (
        point.view.contextual or point.linked or (point.sources and not isinstance(rows, FlatRows))
    ):  # of flat rows: of whom
        return "it is computed from a tensor of the model, and is no part of one"
    return ""


def rows_like(bridge: TransformerBridge, hooks: Sequence[HookPoint]) -> dict[str, Tensor]:
    """One row of the tensors at the sites of hook points, empty: how many columns they have, and of which type."""
    found: dict[str, Tensor] = {}
    handles = []
    for hook in hooks:
        site = hook.point.site
        if why_not(hook.point, bridge.original_model) or site.kind == "attention":
            continue

        def see(name: str, key: object, given: Any) -> None:
            tensors = [given] if isinstance(given, Tensor) else list(given)
            x = tensors[key if isinstance(key, int) else 0]
            found[name] = torch.empty(x.shape[-1], dtype=x.dtype)

        module = module_at(bridge.original_model, site.path)
        if site.kind == "input":
            handles.append(
                module.register_forward_pre_hook(
                    lambda m, args, kwargs, n=hook.name, k=site.key, see=see: see(n, None, args or [kwargs[k]]),
                    with_kwargs=True,
                )
            )
        else:
            handles.append(module.register_forward_hook(lambda m, a, o, n=hook.name, k=site.key, see=see: see(n, k, o)))
    try:
        bridge(torch.tensor([[1, 0]]), return_type=None)
    finally:
        for handle in handles:
            handle.remove()
    return found


def seen_in_order(bridge: TransformerBridge, names: Sequence[str]) -> list[str]:
    """Hook points in the order in which a run comes by."""
    order: list[str] = []
    hooks = [(name, lambda x, hook: order.append(hook.name)) for name in names]
    bridge.run_with_hooks(torch.tensor([[1, 0]]), return_type=None, fwd_hooks=hooks)
    return order


@dataclass(frozen=True)
class ProofRequest:
    """One of the requests that an engine is tried with.

    Attributes:
        prompt: its tokens.
        new: how many are generated.
        edits: the interventions.
        capture: whose activations are compared.
        edited: the point that is tried.
    """

    prompt: list[int]
    new: int
    edits: Interventions
    capture: tuple[str, ...]
    edited: str = ""


class EngineProof:
    """What a plain model says of hook points, to be compared with what an engine says.

    Args:
        bridge: of the plain model, in float32.
        hooks: the points that the engine has a place for.
        places: of them.
        dtype: in which the engine computes.
        rank: how many directions its tables have room for.
        order: the points in the order of a pass, where there are probes; the first that can have one is read.
    """

    def __init__(
        self, bridge: TransformerBridge, hooks: Sequence[HookPoint], places: Mapping[str, EnginePlace],
        dtype: torch.dtype, rank: int, order: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.bridge, self.places, self.dtype, self.rank = bridge, places, dtype, rank
        self.drawn = torch.Generator().manual_seed(0)
        names = tuple(hook.name for hook in hooks)
        self.requests = [ProofRequest(self._prompt(n), _NEW, Interventions(), names) for n in _LENGTHS]
        prompt = self._prompt(_EDITED)
        with torch.no_grad():
            _, cache = bridge.run_with_cache(torch.tensor([prompt]), names_filter=list(names))
        for hook in hooks:
            if hook.name not in places or places[hook.name].counts:  # computed afterwards, or numbers of experts
                continue
            edits = Interventions([(hook.name, operation) for operation in self._operations(hook, cache[hook.name])])
            self.requests.append(ProofRequest(prompt, 1, edits, (), hook.name))
        changed = {request.edited for request in self.requests}
        self.requests += self._conditions(prompt, cache, [name for name in order if name in changed])

    def _conditions(self, prompt: list[int], cache: Mapping[str, Tensor], order: Sequence[str]) -> list[ProofRequest]:
        """For each point a request that changes it where the first in a pass reads more than in half of the tokens."""
        first = next((at for at, name in enumerate(order) if cache[name].ndim == 3), None)
        if first is None:
            return []
        direction = torch.randn(cache[order[first]].shape[-1], generator=self.drawn)
        read = (cache[order[first]][0].float() @ direction).sort().values
        probe = Probe(direction, "read")
        found = []
        for name in order[first:]:
            value = cache[name][0, 0].float().std() * torch.randn(cache[name].shape[2:], generator=self.drawn)
            level = float(read[len(read) // 2 - 1 : len(read) // 2 + 1].mean())  # between two, so that rounding is none
            pairs = [(order[first], probe), (name, Set(value, where=probe > level))]
            found.append(ProofRequest(prompt, 1, Interventions(pairs), (), name))
        return found

    def _prompt(self, length: int) -> list[int]:
        high, longest = max(2, self.bridge.cfg.d_vocab), (self.bridge.cfg.n_ctx or length + _NEW) - _NEW
        return torch.randint(min(3, high - 1), high, (min(length, longest),), generator=self.drawn).tolist()

    def _operations(self, hook: HookPoint, seen: Tensor) -> list[Operation]:
        """All that tables hold, of the size of what is there."""
        shape, size = seen.shape[2:], float(seen.float().std().clamp_min(1e-3))
        draw = lambda: torch.randn(shape, generator=self.drawn)
        found: list[Operation] = [Scale(1 + draw() / 4), Add(draw() * size)]
        capped = len(self.requests) % 2  # which of the two a point is tried with says nothing of the point
        if self.rank:
            direction, heads = torch.randn(shape[-1], generator=self.drawn), 0 if len(shape) > 1 else None
            found.append(Cap(direction, 0.0, heads=heads) if capped else ProjectOut(direction, heads=heads))
        if self.places[hook.name].whole and len(shape) == 1 and not capped:
            found.insert(0, AddScaled(draw(), 0.5))
        return [*found, Set(draw() * size, positions=slice(1, 3))]

    @torch.no_grad()
    def _alone(self, model: TransformerBridge, request: ProofRequest, tokens: Sequence[int]) -> tuple[Tensor, Any]:
        """Log-probabilities behind each token, and what was seen at the points."""
        with model.hooks(fwd_hooks=list(request.edits)):
            names = list(request.capture) or [request.edited]
            logits, cache = model.run_with_cache(torch.tensor([list(tokens)]), names_filter=names)
        return logits[0].float().log_softmax(-1), cache

    def differences(self, answers: Sequence[Any]) -> dict[str, str]:
        """Why each point is not offered; "" where it is.

        Args:
            answers: the engine's, of `requests` in order: `tokens`, `activations`, and `likely`, the log-probabilities
                of the most likely next tokens.
        """
        models = [self.bridge]
        if self.dtype != torch.float32:
            models.append(TransformerBridge(copy.deepcopy(self.bridge.original_model).to(self.dtype), None))
        found: dict[str, str] = dict.fromkeys(self.requests[0].capture, "")
        for request, answer in zip(self.requests, answers, strict=True):
            tokens = [*request.prompt, *answer.tokens.tolist()[:-1]]
            (said, seen), *rounded = [self._alone(model, request, tokens) for model in models]
            for name in request.capture:
                others = [cache[name][0].float() for _, cache in rounded]
                self._compare(found, name, "its value", answer.activations[name], seen[name][0], others)
            if request.edits:
                ids = torch.tensor(list(answer.likely[0]))
                likely = torch.tensor(list(answer.likely[0].values()))
                others = [logs[len(request.prompt) - 1][ids] for logs, _ in rounded]
                what = "the effect of an edit there"
                self._compare(found, request.edited, what, likely, said[len(request.prompt) - 1][ids], others)
        return found

    def _compare(
        self, found: dict[str, str], name: str, what: str, here: Tensor, there: Tensor, rounded: Sequence[Tensor]
    ) -> None:
        apart = lambda x: float(torch.where(x == there, 0.0, (x - there).abs()).max())  # -inf is a masked score
        off = apart(here.float()) if here.shape == there.shape else float("inf")
        size = float(there.abs().nan_to_num(posinf=0.0).max())
        most = BOUND * max(1.0, size) + 2 * sum(apart(x) for x in rounded)
        if not off <= most and not found[name]:
            found[name] = f"{what} is off by {off:.2g} from the plain model's (at most {most:.2g})"
