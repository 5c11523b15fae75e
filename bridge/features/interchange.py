"""Interchange interventions: coordinates of one run in another, and the subspace that carries a variable."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrize import cached

from adapters.norms import at_least_float32
from adapters.views.basis import Basis, dense
from bridge.analysis.analysis import refuse_training
from bridge.bases.bases import Directions, Rotation
from bridge.bridge import TransformerBridge
from bridge.circuits.graph import refuse_inference_mode
from bridge.hooks.arguments import check_choice, check_positive, refuse_wrong_types
from bridge.hooks.hooks import HookPoint
from bridge.hooks.rows import places_of
from bridge.run.inputs import Prompts, prompts_with


@refuse_wrong_types
def interchange(
    bridge: TransformerBridge,
    base: Prompts,
    source: Prompts,
    point: str | HookPoint,
    *,
    position: int | None = None,
    source_position: int | None = None,
    features: Int[Tensor, " n"] | None = None,
    **model_kwargs: Any,
) -> Float[Tensor, "batch pos d_vocab"]:
    """The logits of prompts that run with coordinates of other prompts (Geiger et al. 2021, "Causal Abstractions").

    Row i of `base` gets what row i of `source` has there, or all rows what the single row of `source` has; all of them
    are one batch. With every feature of a basis of full rank this is activation patching.

    Args:
        bridge: the bridge.
        base: the prompts that run, ``[batch, pos]``, or what a processor gives.
        source: the prompts whose coordinates they get, likewise.
        point: the hook point, such as one in a basis.
        position: where, among the tokens of each row (-1 is its last one); None: at all, of which both have as many.
        source_position: where in the source; None: at `position`.
        features: which coordinates; None: all.
        model_kwargs: what else the model takes with both, such as ``pixel_values=``. Where each has its own, such as an
            ``attention_mask``, give prompts as a processor gives them.

    Returns:
        ``[batch, pos, d_vocab]``.

    Raises:
        ValueError: the numbers of rows or of positions do not fit.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.bases import Rotation
        >>> from bridge.features import interchange
        >>> bridge = TransformerBridge.boot_embedded()
        >>> point = bridge.add_basis("blocks.3.hook_resid_post", "all", Rotation(128))
        >>> base, source = bridge.to_tokens(["Mary and", "John and"])[:, None]
        >>> logits = interchange(bridge, base, source, point)
        >>> bool((logits - bridge(source)).abs().max() < 1e-3)
        True
    """
    one, other = (prompts_with(bridge, each, model_kwargs) for each in (base, source))
    (rows, length), (sources, width) = (prompts["input_ids"].shape for prompts in (one, other))
    if sources not in (1, rows):
        raise ValueError(f"source has {sources} rows and base {rows}: give one for each, or one for all")
    if position is None and width != length:
        raise ValueError(f"source has {width} positions and base {length}: give position, or prompts of one length")
    (hook,) = bridge.select_hooks(point)
    with torch.no_grad():
        _, cache = bridge.run_with_cache(other, names_filter=hook)
    found = dense(cache[hook.name])
    at = position if source_position is None else source_position
    given = found if at is None else _read(found, places_of(other.get("attention_mask"), at, found.shape))
    where = None if position is None else places_of(one.get("attention_mask"), position, (rows, length))

    def put(act: Tensor, hook: HookPoint) -> Tensor:
        here = act if where is None else _read(act, where)
        there = given.to(act).expand_as(here)
        new = there if features is None else here.index_copy(-1, features, there[..., features])
        return new if where is None else _written(act, where, new)

    return bridge.run_with_hooks(one, fwd_hooks=[(hook, put)])


def _read(act: Tensor, places: Tensor) -> Tensor:
    """Each row's activation at a place of its own."""
    return act[torch.arange(len(act), device=act.device), places.to(act.device)]


def _written(act: Tensor, places: Tensor, new: Tensor) -> Tensor:
    """An activation with another at a place of each row."""
    at = torch.arange(act.shape[1], device=act.device) == places.to(act.device)[:, None]
    return torch.where(at.view(*act.shape[:2], *[1] * (act.ndim - 2)), new.unsqueeze(1), act)


@dataclass(frozen=True, repr=False)
class RotationFit:
    """A subspace that was fitted, and what the same search finds where there is nothing to be found.

    Attributes:
        rotation: the subspace, a basis for `add_basis`.
        accuracy: the share of held-out pairs whose prediction after the interchange is the wanted one.
        before: that of the held-out pairs without any interchange.
        controls: the same number for ``random subspace`` (not fitted), ``shuffled labels`` (fitted and tested with
            labels that belong to other pairs), and ``random model`` (the model's weights in random order).
        losses: of each step.
    """

    rotation: Rotation
    accuracy: float
    before: float
    controls: dict[str, float]
    losses: list[float]

    def __repr__(self) -> str:
        controls = ", ".join(f"{name} {value:.2f}" for name, value in self.controls.items())
        return f"RotationFit(accuracy {self.accuracy:.2f}; without {self.before:.2f}; {controls})"


@refuse_wrong_types
def fit_rotation(
    bridge: TransformerBridge,
    base: Prompts,
    source: Prompts,
    labels: Int[Tensor, " batch"],
    point: str | HookPoint,
    *,
    dimension: int,
    position: int = -1,
    source_position: int | None = None,
    among: Int[Tensor, " answers"] | None = None,
    steps: int = 100,
    batch_size: int = 32,
    lr: float = 1e-2,
    held_out: float = 0.25,
    seed: int = 0,
    controls: bool = True,
    **model_kwargs: Any,
) -> RotationFit:
    """Learns the subspace of an activation that carries a variable (distributed alignment search, Geiger et al. 2023).

    The subspace is turned until a prompt that gets its coordinates from another prompt answers as it would if the
    variable alone were the other prompt's. The model's parameters are left alone.

    Args:
        bridge: the bridge, in evaluation mode.
        base, source: pairs of prompts, ``[batch, pos]``, or what a processor gives.
        labels: the token that is right after the interchange, behind the last token.
        point: the hook point, of ``[batch, pos, d]``.
        dimension: of the subspace.
        position, source_position: where coordinates are put, and taken (None: at `position`), among each row's tokens.
        among: the tokens that an answer is chosen from; None: all.
        steps, batch_size, lr: of the search, by Adam.
        held_out: the share of the pairs that the search does not see.
        seed: of the split, the batches and the beginning.
        controls: search also where there is nothing to be found: about twice the time.
        model_kwargs: as for `interchange`, with an entry for each row: they are chosen with their rows.

    Returns:
        The subspace, its accuracy on the held-out pairs, and the controls' accuracies.

    Raises:
        ValueError: numbers of rows that do not fit, no pairs to train or to test with, an answer that is not `among`,
            or training mode.
        RuntimeError: in inference mode, which makes no gradients.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.features import fit_rotation
        >>> from bridge.tasks import embedded_pairs
        >>> bridge = TransformerBridge.boot_embedded()
        >>> pairs = embedded_pairs(bridge, "ioi", 16)
        >>> labels = bridge(pairs.corrupted)[:, -1].argmax(-1)
        >>> fit = fit_rotation(bridge, pairs.clean, pairs.corrupted, labels, "blocks.3.hook_resid_post", dimension=8,
        ...                    steps=5, controls=False)
        >>> fit.rotation.columns.shape
        torch.Size([128, 8])
    """
    refuse_inference_mode("fit_rotation")
    one, other = (prompts_with(bridge, each, model_kwargs) for each in (base, source))
    refuse_training(bridge)
    generator = torch.Generator().manual_seed(seed)
    train, test = _split(one, other, labels, held_out, generator)
    search = _Alignment(one, other, labels, point, position, source_position, among, bridge.cfg.d_vocab_out)

    def fitted(model: TransformerBridge, wanted: Tensor) -> tuple[Rotation, list[float], float]:
        exchange = search.new(model, dimension, torch.Generator().manual_seed(seed))
        losses = search.train(model, exchange, wanted, train, steps, batch_size, lr, generator)
        return exchange.rotation, losses, search.accuracy(model, exchange, wanted, test)

    rotation, losses, accuracy = fitted(bridge, search.wanted)
    measured = {}
    if controls:
        untrained = search.new(bridge, dimension, torch.Generator().manual_seed(seed + 1))
        measured["random subspace"] = search.accuracy(bridge, untrained, search.wanted, test)
        mixed = search.wanted[torch.randperm(len(labels), generator=generator).to(search.wanted.device)]
        measured["shuffled labels"] = fitted(bridge, mixed)[2]
        measured["random model"] = fitted(_with_weights_in_random_order(bridge, generator), search.wanted)[2]
    return RotationFit(rotation, accuracy, search.accuracy(bridge, None, search.wanted, test), measured, losses)


def _split(
    base: Mapping[str, Any], source: Mapping[str, Any], labels: Tensor, held_out: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Which pairs are trained with, and which tested.

    Raises:
        ValueError: numbers of rows that do not fit, or no pairs for one of both.
    """
    n, sources = len(base["input_ids"]), len(source["input_ids"])
    if not sources == len(labels) == n:
        raise ValueError(f"there are {n} base prompts, {sources} source prompts and {len(labels)} labels")
    tested = round(n * held_out)
    if not 0 < tested < n:
        raise ValueError(f"of {n} pairs {tested} are held out: there must be some to train with, and some to test with")
    order = torch.randperm(n, generator=generator)
    return order[tested:], order[:tested]


class _Along(nn.Module):
    """Exchanges what lies in a subspace."""

    def __init__(self, rotation: Rotation) -> None:
        super().__init__()
        self.rotation = rotation

    def forward(self, here: Tensor, there: Tensor) -> Tensor:
        kind = next(self.rotation.parameters()).dtype
        one, other = here.to(kind), there.to(kind)
        return (one + self.rotation.decode(self.rotation.encode(other) - self.rotation.encode(one))).to(here.dtype)


#: How steep a mask is at the end of its training: the temperature falls from 1 to this.
_COLDEST = 0.01


class CoordinateMask(nn.Module):
    """Exchanges some coordinates of a basis, which are trained: differential binary masking (De Cao et al. 2020).

    In training a coordinate is exchanged by a share, the sigmoid of a number of its own over a temperature that falls;
    in evaluation, wholly where that number is more than 0.

    Args:
        basis: with `encode` and `decode`; None: the activation's own coordinates.
        size: how many coordinates there are.

    Attributes:
        given: the numbers, ``[coordinate]``.
        temperature: what they are divided by.

    Example:
        >>> import torch
        >>> from bridge.features import CoordinateMask
        >>> mask = CoordinateMask(None, 3).eval()
        >>> mask.given.data = torch.tensor([1.0, -1.0, 2.0])
        >>> mask(torch.zeros(3), torch.ones(3))
        tensor([1., 0., 1.])
    """

    def __init__(self, basis: Basis | None, size: int) -> None:
        super().__init__()
        self._basis = (basis,)  # in a tuple: its parameters are not trained
        self.given, self.temperature = nn.Parameter(torch.full((size,), 0.1)), 1.0

    @property
    def chosen(self) -> Bool[Tensor, " coordinate"]:
        """Which coordinates are exchanged."""
        return self.given.detach() > 0

    def forward(self, here: Float[Tensor, "... d"], there: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """An activation with coordinates of another.

        Args:
            here: the activation.
            there: the other one.
        """
        (basis,) = self._basis
        old, new = (act if basis is None else dense(basis.encode(act)) for act in (here, there))
        share = (self.given / self.temperature).sigmoid() if self.training else self.chosen
        mixed = old + share.to(old) * (new - old)
        return mixed if basis is None else here + basis.decode(mixed) - basis.decode(old)


#: Makes of an activation, and that of the source, what takes its place.
Exchange = Callable[[Tensor, Tensor], Tensor]


class _Alignment:
    """The pairs of a search, and what is done with them."""

    def __init__(
        self,
        base: dict[str, Any],
        source: dict[str, Any],
        labels: Tensor,
        point: str | HookPoint,
        position: int,
        source_position: int | None,
        among: Tensor | None,
        n_answers: int,
    ) -> None:
        self.base, self.source, self.among = base, source, among
        shape, n = base["input_ids"].shape, len(labels)
        for name, value in base.items():
            if not isinstance(value, Tensor | list) or len(value) != n:
                raise ValueError(f"{name} has no entry for each of the {n} prompts, which are chosen from")
        self.name = point if isinstance(point, str) else point.name
        self.last, self.places = (places_of(base.get("attention_mask"), at, shape) for at in (-1, position))
        there = position if source_position is None else source_position
        self.source_places = places_of(source.get("attention_mask"), there, source["input_ids"].shape)
        self.wanted = labels
        if among is None and not bool(((labels >= 0) & (labels < n_answers)).all()):
            raise ValueError(
                f"labels go from {int(labels.min())} to {int(labels.max())}, the answers to {n_answers - 1}"
            )
        if among is not None:
            places = (labels[:, None] == among[None].to(labels)).int()
            if not bool(places.any(1).all()):
                raise ValueError("a label is not among the answers that are to be chosen from")
            self.wanted = places.argmax(1)
        self._sources: dict[TransformerBridge, Tensor] = {}

    def source_of(self, bridge: TransformerBridge) -> Float[Tensor, "batch d"]:
        """The sources' activations."""
        if bridge not in self._sources:
            self._sources[bridge] = self.at(bridge, self.source, self.source_places)
        return self._sources[bridge]

    @torch.no_grad()
    def at(self, bridge: TransformerBridge, prompts: dict[str, Any], places: Tensor) -> Float[Tensor, "batch d"]:
        """The activations of prompts, each at a place of its own."""
        _, cache = bridge.run_with_cache(prompts, names_filter=self.name)
        (act,) = cache.values()
        if act.ndim != 3:
            raise ValueError(f"{self.name} has the shape {list(act.shape)}; a subspace is of [batch, pos, d]")
        return _read(act, places)

    def new(self, bridge: TransformerBridge, dimension: int, generator: torch.Generator) -> _Along:
        """A random subspace."""
        like = at_least_float32(self.source_of(bridge)[:1])  # half precision knows no orthogonal matrices
        return _Along(Rotation(like.shape[-1], dimension, generator=generator).to(like))

    def answers(self, bridge: TransformerBridge, exchange: Exchange | None, rows: Tensor) -> Float[Tensor, "rows n"]:
        """The logits at the last position after the exchange of activations; without one, as they are."""
        chosen = rows.tolist()
        base: dict[str, Any] = {
            name: [value[row] for row in chosen] if isinstance(value, list) else value[chosen]
            for name, value in self.base.items()
        }
        hooks = []
        if exchange is not None:
            there, places = self.source_of(bridge)[chosen], self.places[chosen]

            def put(act: Tensor, hook: HookPoint) -> Tensor:
                here = _read(act, places)
                return _written(act, places, exchange(here, there))

            hooks = [(self.name, put)]
        logits = _read(bridge.run_with_hooks(base, fwd_hooks=hooks), self.last[chosen])
        return logits if self.among is None else logits[:, self.among.to(logits.device)]

    def train(
        self,
        bridge: TransformerBridge,
        exchange: nn.Module,
        wanted: Tensor,
        rows: Tensor,
        steps: int,
        batch_size: int,
        lr: float,
        generator: torch.Generator,
    ) -> list[float]:
        """Trains how activations are exchanged. Gives the losses."""
        optimiser = torch.optim.Adam(exchange.parameters(), lr=lr)
        losses = []
        for step in range(steps):
            if isinstance(exchange, CoordinateMask):
                exchange.temperature = _COLDEST ** (step / max(1, steps - 1))
            some = rows[torch.randperm(len(rows), generator=generator)[:batch_size]]
            with torch.enable_grad(), cached():
                loss = cross_entropy(self.answers(bridge, exchange, some).float(), wanted[some.to(wanted.device)])
                gradients = torch.autograd.grad(loss, list(exchange.parameters()))
            for parameter, gradient in zip(exchange.parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimiser.step()
            losses.append(loss.item())
        return losses

    @torch.no_grad()
    def accuracy(self, bridge: TransformerBridge, exchange: Exchange | None, wanted: Tensor, rows: Tensor) -> float:
        """The share of pairs that answer as wanted."""
        found = self.answers(bridge, exchange, rows).argmax(-1)
        return float((found == wanted[rows.to(wanted.device)]).float().mean())


@torch.no_grad()
def _with_weights_in_random_order(bridge: TransformerBridge, generator: torch.Generator) -> TransformerBridge:
    """A copy whose every parameter has its numbers in random order: a model of the same scales that knows nothing."""
    other = copy.deepcopy(bridge)
    for parameter in other.original_model.parameters():
        order = torch.randperm(parameter.numel(), generator=generator).to(parameter.device)
        parameter.copy_(parameter.flatten()[order].view_as(parameter))
    return other


# ----------------------------------------------------------------------------------------------------------------------
# Where a variable is: how well exchanges by several methods work, over layers and positions.
# ----------------------------------------------------------------------------------------------------------------------


#: By which methods activations are exchanged.
EXCHANGES = ("full", "coordinates", "components", "subspace", "features")


@dataclass(frozen=True, repr=False)
class InterchangeTable:
    """How often answers are the wanted ones after an exchange, by methods, hook points and positions.

    Attributes:
        methods, points, positions: what was exchanged how, and where.
        accuracy: the share of held-out pairs, ``[method, point, position]``.
        sizes: how many coordinates were exchanged, likewise.
        before: the share without any exchange.
    """

    methods: tuple[str, ...]
    points: tuple[str, ...]
    positions: tuple[int, ...]
    accuracy: Float[Tensor, "method point position"]
    sizes: Int[Tensor, "method point position"]
    before: float

    def __repr__(self) -> str:
        largest = self.accuracy.amax((1, 2)).tolist()
        best = ", ".join(f"{name} {value:.2f}" for name, value in zip(self.methods, largest, strict=True))
        return f"InterchangeTable(best: {best}; without {self.before:.2f})"

    def best(self, method: str) -> tuple[str, int, float]:
        """Where a method works best: the hook point, the position and the accuracy.

        Args:
            method: one of the table's.

        Raises:
            ValueError: another one.
        """
        check_choice("method", method, self.methods)
        table = self.accuracy[self.methods.index(method)]
        row, column = divmod(int(table.argmax()), table.shape[1])
        return self.points[row], self.positions[column], float(table[row, column])

    def draw(self, **options: Any) -> Any:
        """A picture of the table, by `bridge.pictures.heat_map`: a panel for each method.

        Args:
            options: as `bridge.pictures.heat_map` takes them.

        Raises:
            ImportError: what pictures need is not installed.
        """
        rows = [name.removeprefix("blocks.").replace(".hook_", ".") for name in self.points]
        given = {
            "rows": rows, "columns": [str(position) for position in self.positions], "panels": list(self.methods),
            "row_title": "hook point", "column_title": "position", "measure": "accuracy",
            "title": "Interchange accuracy",
        }  # fmt: skip
        return importlib.import_module("bridge.pictures").heat_map(self.accuracy, **(given | options))


@refuse_wrong_types
def interchange_table(
    bridge: TransformerBridge,
    base: Prompts,
    source: Prompts,
    labels: Int[Tensor, " batch"],
    points: Sequence[str],
    positions: Sequence[int] = (-1,),
    *,
    methods: Sequence[str] = ("full", "coordinates", "components", "subspace"),
    dimension: int = 16,
    features: Mapping[str, Basis] | None = None,
    among: Int[Tensor, " answers"] | None = None,
    steps: int = 100,
    batch_size: int = 32,
    lr: float = 1e-2,
    held_out: float = 0.25,
    seed: int = 0,
    **model_kwargs: Any,
) -> InterchangeTable:
    """Where a variable stands, and in what: how often answers are as wanted after exchanges, over points and positions.

    The methods are those of the causal variables of the Mechanistic Interpretability Benchmark (Mueller et al. 2025):

    - ``"full"``: the whole activation is exchanged.
    - ``"coordinates"``: some of its own coordinates, by a trained mask (DBM).
    - ``"components"``: some of its principal components, of base and source prompts, by a trained mask.
    - ``"features"``: some features of a basis, such as an SAE's, by a trained mask.
    - ``"subspace"``: a trained subspace (DAS, `fit_rotation`).

    Args:
        bridge, base, source, labels, among, batch_size, held_out, seed, model_kwargs: as for `fit_rotation`.
        points: hook points of ``[batch, pos, d]``.
        positions: among each row's tokens; activations are taken and put at the same.
        methods: some of those above.
        dimension: of the subspace.
        features: for ``"features"``: the basis at each of the points.
        steps, lr: of each search, by Adam; masks learn ten times as fast.

    Raises:
        ValueError: as `fit_rotation`; no point, position or method; a point without its basis.
        RuntimeError: as `fit_rotation`, where something is trained.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.features import interchange_table
        >>> from bridge.tasks import embedded_pairs
        >>> bridge = TransformerBridge.boot_embedded()
        >>> pairs = embedded_pairs(bridge, "ioi", 16)
        >>> labels = bridge(pairs.corrupted)[:, -1].argmax(-1)
        >>> points = [f"blocks.{layer}.hook_resid_post" for layer in (0, 3)]
        >>> table = interchange_table(bridge, pairs.clean, pairs.corrupted, labels, points, methods=("full",))
        >>> table.best("full")
        ('blocks.3.hook_resid_post', -1, 1.0)
        >>> table.draw()
        Picture('Interchange accuracy')
    """
    refuse_training(bridge)
    if not points or not positions or not methods:
        raise ValueError("a table needs a point, a position and a method, or more")
    for method in methods:
        check_choice("method", method, EXCHANGES)
    if set(methods) != {"full"}:
        refuse_inference_mode("interchange_table")
    check_positive("dimension", dimension)
    check_positive("steps", steps)
    check_positive("batch_size", batch_size)
    if "features" in methods and (without := sorted(set(points) - set(features or ()))):
        raise ValueError(f"there are no features for {without[0]}: give the basis at each point")
    one, other = (prompts_with(bridge, each, model_kwargs) for each in (base, source))
    train, test = _split(one, other, labels, held_out, torch.Generator().manual_seed(seed))
    accuracy = torch.zeros(len(methods), len(points), len(positions))
    sizes, before = torch.zeros(accuracy.shape, dtype=torch.long), 0.0
    for column, position in enumerate(positions):
        for row, point in enumerate(points):
            search = _Alignment(one, other, labels, point, position, None, among, bridge.cfg.d_vocab_out)
            before = search.accuracy(bridge, None, search.wanted, test)
            for at, method in enumerate(methods):
                generator = torch.Generator().manual_seed(seed)
                basis = None if features is None or method != "features" else features[point]
                exchange = None
                if method != "full":
                    exchange = _exchange(search, bridge, method, dimension, basis, train, seed)
                    rate = 10 * lr if isinstance(exchange, CoordinateMask) else lr
                    search.train(bridge, exchange, search.wanted, train, steps, batch_size, rate, generator)
                    exchange.eval()
                everything = lambda here, there: there
                accuracy[at, row, column] = search.accuracy(bridge, exchange or everything, search.wanted, test)
                sizes[at, row, column] = _size(exchange, search.source_of(bridge).shape[-1])
    return InterchangeTable(tuple(methods), tuple(points), tuple(positions), accuracy, sizes, before)


def _exchange(
    search: _Alignment,
    bridge: TransformerBridge,
    method: str,
    dimension: int,
    basis: Basis | None,
    train: Tensor,
    seed: int,
) -> nn.Module:
    """How activations are exchanged, before it is trained."""
    there = search.source_of(bridge)
    if method == "subspace":
        return search.new(bridge, dimension, torch.Generator().manual_seed(seed))
    size = there.shape[-1]
    if method == "components":
        acts = torch.cat([search.at(bridge, search.base, search.places)[train], there[train]]).float()
        found = torch.linalg.svd(acts - acts.mean(0), full_matrices=False)
        known = found.S[0] * 1e-5 < found.S
        basis, size = Directions(found.Vh[known].T.contiguous(), orthonormal=True).to(there), int(known.sum())
    elif method == "features":
        assert basis is not None
        size = basis.encode(there[:1]).shape[-1]
    return CoordinateMask(basis, size).to(there.device)


def _size(exchange: nn.Module | None, width: int) -> int:
    """How many coordinates it exchanges; None: all."""
    if isinstance(exchange, _Along):
        return exchange.rotation.columns.shape[1]
    return int(exchange.chosen.sum()) if isinstance(exchange, CoordinateMask) else width
