"""Interchange interventions: coordinates swapped between runs, and subspaces of a variable."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrize import cached

from adapters.norms import at_least_float32
from adapters.views.basis import Basis, dense
from bridge.analysis.analysis import refuse_training
from bridge.arguments import check_choice, check_positive, refuse_wrong_types
from bridge.bases.bases import Directions, Rotation
from bridge.bridge import TransformerBridge
from bridge.circuits.graph import refuse_inference_mode
from bridge.hooks.hooks import HookPoint
from bridge.rows import places_of
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
    """Return the logits of prompts that run with coordinates of other prompts (Geiger et al. 2021,
    "Causal Abstractions").

    Row i of `base` gets the coordinates of row i of `source`, or all rows get those of the single
    row of `source`; all rows run as one batch. With every feature of a basis of full rank this is
    activation patching.

    Args:
        bridge: the bridge.
        base: the prompts that run, ``[batch, pos]``, or a processor's output.
        source: the prompts that provide the coordinates, in the same form.
        point: the hook point, such as one in a basis.
        position: the position among each row's tokens (-1 is the last one); None: all positions,
            whose number must be equal in both.
        source_position: the position in the source; None: `position`.
        features: the coordinates; None: all.
        model_kwargs: further model inputs for both, such as ``pixel_values=``. If each has its own,
            such as an ``attention_mask``, pass prompts as a processor's output.

    Returns:
        ``[batch, pos, d_vocab]``.

    Raises:
        ValueError: the numbers of rows or of positions do not match.

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
        raise ValueError(
            f"source has {sources} rows and base {rows}: give one for each, or one for all"
        )
    if position is None and width != length:
        raise ValueError(
            f"source has {width} positions and base {length}: give position, or prompts of one"
            " length"
        )
    (hook,) = bridge.select_hooks(point)
    with torch.no_grad():
        _, cache = bridge.run_with_cache(other, names_filter=hook)
    values = dense(cache[hook.name])
    read_at = position if source_position is None else source_position
    if read_at is not None:
        values = _read(values, places_of(other.get("attention_mask"), read_at, values.shape))
    mask = one.get("attention_mask")
    written = None if position is None else places_of(mask, position, (rows, length))

    def put(act: Tensor, hook: HookPoint) -> Tensor:
        old = act if written is None else _read(act, written)
        new = values.to(act).expand_as(old)
        if features is not None:
            new = old.index_copy(-1, features, new[..., features])
        return new if written is None else _written(act, written, new)

    return bridge.run_with_hooks(one, fwd_hooks=[(hook, put)])


def _read(act: Tensor, places: Tensor) -> Tensor:
    """Return each row's activation at its own position."""
    return act[torch.arange(len(act), device=act.device), places.to(act.device)]


def _written(act: Tensor, places: Tensor, new: Tensor) -> Tensor:
    """Return the activation with a replacement at each row's own position."""
    own = torch.arange(act.shape[1], device=act.device) == places.to(act.device)[:, None]
    own = own.view(*act.shape[:2], *[1] * (act.ndim - 2))
    return torch.where(own, new.unsqueeze(1), act)


@dataclass(frozen=True, repr=False)
class RotationFit:
    """A fitted subspace, with the results of the same search on controls that carry no variable.

    Attributes:
        rotation: the fitted subspace, a basis for `add_basis`.
        accuracy: the share of held-out pairs with the expected prediction after the interchange.
        before: the share of held-out pairs with the expected prediction without any interchange.
        controls: the same accuracy for ``random subspace`` (not fitted), ``shuffled labels``
            (fitted and tested with the labels of other pairs), and ``random model`` (the model's
            weights in random order).
        losses: the loss of each step.
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
    """Fit the subspace of an activation that carries a variable (distributed alignment search,
    Geiger et al. 2023).

    The subspace is rotated until a prompt that receives another prompt's coordinates is answered as
    if only the variable had the other prompt's value. The model's parameters do not change.

    Args:
        bridge: the bridge, in evaluation mode.
        base, source: pairs of prompts, ``[batch, pos]``, or a processor's output.
        labels: the correct next token after the interchange.
        point: the hook point, of ``[batch, pos, d]``.
        dimension: the dimension of the subspace.
        position, source_position: the positions among each row's tokens at which coordinates are
            written, and from which they are read (None: `position`).
        among: the tokens among which an answer is chosen; None: all.
        steps, batch_size, lr: settings of the search, by Adam.
        held_out: the share of the pairs that the search does not use.
        seed: the seed of the split, the batches and the initialisation.
        controls: also run the controls, which takes about twice as long.
        model_kwargs: as for `interchange`, with an entry for each row: entries are selected with
            their rows.

    Returns:
        The subspace, its accuracy on the held-out pairs, and the controls' accuracies.

    Raises:
        ValueError: numbers of rows that do not match, no pairs for training or testing, an answer
            that is not `among`, or training mode.
        RuntimeError: the call is in inference mode, which has no gradients.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.features import fit_rotation
        >>> from bridge.tasks import embedded_pairs
        >>> bridge = TransformerBridge.boot_embedded()
        >>> pairs = embedded_pairs(bridge, "ioi", 16)
        >>> labels = bridge(pairs.corrupted)[:, -1].argmax(-1)
        >>> fit = fit_rotation(
        ...     bridge,
        ...     pairs.clean,
        ...     pairs.corrupted,
        ...     labels,
        ...     "blocks.3.hook_resid_post",
        ...     dimension=8,
        ...     steps=5,
        ...     controls=False,
        ... )
        >>> fit.rotation.columns.shape
        torch.Size([128, 8])
    """
    refuse_inference_mode("fit_rotation")
    one, other = (prompts_with(bridge, each, model_kwargs) for each in (base, source))
    refuse_training(bridge)
    generator = torch.Generator().manual_seed(seed)
    train, test = _split(one, other, labels, held_out, generator)
    search = _Alignment(
        one, other, labels, point, position, source_position, among, bridge.cfg.d_vocab_out
    )
    training, targets = _Training(steps, batch_size, lr), search.targets
    fit = _SubspaceFit(search, dimension, (train, test), training, generator, seed)
    rotation, losses, accuracy = fit.fitted(bridge, targets)
    measured = fit.controls(bridge) if controls else {}
    before = search.accuracy(bridge, None, targets, test)
    return RotationFit(rotation, accuracy, before, measured, losses)


def _split(
    base: Mapping[str, Any],
    source: Mapping[str, Any],
    labels: Tensor,
    held_out: float,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Return the pairs for training, and those for testing.

    Raises:
        ValueError: numbers of rows that do not match, or no pairs for training or testing.
    """
    n, sources = len(base["input_ids"]), len(source["input_ids"])
    if not sources == len(labels) == n:
        raise ValueError(
            f"there are {n} base prompts, {sources} source prompts and {len(labels)} labels"
        )
    tested = round(n * held_out)
    if not 0 < tested < n:
        raise ValueError(
            f"of {n} pairs {tested} are held out: there must be some to train with, and some to"
            " test with"
        )
    order = torch.randperm(n, generator=generator, device="cpu")
    return order[tested:], order[:tested]


class _Along(nn.Module):
    """An exchange of the coordinates in a subspace."""

    def __init__(self, rotation: Rotation) -> None:
        super().__init__()
        self.rotation = rotation

    def forward(self, base: Tensor, source: Tensor) -> Tensor:
        dtype, encode = next(self.rotation.parameters()).dtype, self.rotation.encode
        one, other = base.to(dtype), source.to(dtype)
        change = self.rotation.decode(encode(other) - encode(one))
        return (one + change).to(base.dtype)


#: The final temperature of a mask's training, which starts from 1.
_COLDEST = 0.01


class CoordinateMask(nn.Module):
    """A trained mask of exchanged coordinates of a basis: differential binary masking (De Cao et
    al. 2020).

    In training a coordinate is exchanged partly, by the sigmoid of its logit over a falling
    temperature; in evaluation it is exchanged fully if its logit is above 0.

    Args:
        basis: a basis with `encode` and `decode`; None: the activation's own coordinates.
        size: the number of coordinates.

    Attributes:
        given: the logits of the mask, ``[coordinate]``.
        temperature: the divisor of the logits.

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
        self._basis = (basis,)  # in a tuple, so that its parameters are not registered
        self.given, self.temperature = nn.Parameter(torch.full((size,), 0.1, device="cpu")), 1.0

    @property
    def chosen(self) -> Bool[Tensor, " coordinate"]:
        """Return which coordinates are exchanged."""
        return self.given.detach() > 0

    def forward(
        self, here: Float[Tensor, "... d"], there: Float[Tensor, "... d"]
    ) -> Float[Tensor, "... d"]:
        """Return an activation with some coordinates of another one.

        Args:
            here: the activation of the base.
            there: the activation of the source.
        """
        (basis,) = self._basis
        old, new = (act if basis is None else dense(basis.encode(act)) for act in (here, there))
        share = (self.given / self.temperature).sigmoid() if self.training else self.chosen
        mixed = old + share.to(old) * (new - old)
        return mixed if basis is None else here + basis.decode(mixed) - basis.decode(old)


#: Maps an activation and the source's activation to the replacement.
Exchange = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class _Training:
    """Settings of a search by Adam; masks use ten times the learning rate."""

    steps: int
    batch_size: int
    rate: float


class _Alignment:
    """The pairs of a search, with its training and evaluation."""

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
                raise ValueError(
                    f"{name} has no entry for each of the {n} prompts, which are chosen from"
                )
        self.name = point if isinstance(point, str) else point.name
        mask = base.get("attention_mask")
        self.last, self.places = places_of(mask, -1, shape), places_of(mask, position, shape)
        read_at = position if source_position is None else source_position
        tokens = source["input_ids"]
        self.source_places = places_of(source.get("attention_mask"), read_at, tokens.shape)
        self.targets = _targets(labels, among, n_answers)
        self._sources: dict[TransformerBridge, Tensor] = {}

    def source_of(self, bridge: TransformerBridge) -> Float[Tensor, "batch d"]:
        """Return the sources' activations."""
        if bridge not in self._sources:
            self._sources[bridge] = self.activations(bridge, self.source, self.source_places)
        return self._sources[bridge]

    @torch.no_grad()
    def activations(
        self, bridge: TransformerBridge, prompts: dict[str, Any], places: Tensor
    ) -> Float[Tensor, "batch d"]:
        """Return the prompts' activations, each at its own position."""
        _, cache = bridge.run_with_cache(prompts, names_filter=self.name)
        (act,) = cache.values()
        if act.ndim != 3:
            raise ValueError(
                f"{self.name} has the shape {list(act.shape)}; a subspace is of [batch, pos, d]"
            )
        return _read(act, places)

    def new(self, bridge: TransformerBridge, dimension: int, seed: int) -> _Along:
        """Return a random subspace."""
        # Half precision is too coarse for orthogonal matrices.
        like = at_least_float32(self.source_of(bridge)[:1])
        generator = torch.Generator().manual_seed(seed)
        return _Along(Rotation(like.shape[-1], dimension, generator=generator).to(like))

    def answers(
        self, bridge: TransformerBridge, exchange: Exchange | None, rows: Tensor
    ) -> Float[Tensor, "rows n"]:
        """Return the logits at the last position after an exchange of activations, or without
        one.
        """
        chosen = rows.tolist()
        base: dict[str, Any] = {
            name: [value[row] for row in chosen] if isinstance(value, list) else value[chosen]
            for name, value in self.base.items()
        }
        hooks = []
        if exchange is not None:
            source, places = self.source_of(bridge)[chosen], self.places[chosen]

            def put(act: Tensor, hook: HookPoint) -> Tensor:
                return _written(act, places, exchange(_read(act, places), source))

            hooks = [(self.name, put)]
        logits = _read(bridge.run_with_hooks(base, fwd_hooks=hooks), self.last[chosen])
        return logits if self.among is None else logits[:, self.among.to(logits.device)]

    def train(
        self,
        bridge: TransformerBridge,
        exchange: nn.Module,
        targets: Tensor,
        rows: Tensor,
        training: _Training,
        generator: torch.Generator,
    ) -> list[float]:
        """Train the exchange of activations, and return the losses."""
        parameters = list(exchange.parameters())
        rate = training.rate * (10 if isinstance(exchange, CoordinateMask) else 1)
        optimiser = torch.optim.Adam(parameters, lr=rate)
        losses = []
        for step in range(training.steps):
            if isinstance(exchange, CoordinateMask):
                exchange.temperature = _COLDEST ** (step / max(1, training.steps - 1))
            some = rows[
                torch.randperm(len(rows), generator=generator, device="cpu")[: training.batch_size]
            ]
            with torch.enable_grad(), cached():
                logits = self.answers(bridge, exchange, some).float()
                loss = cross_entropy(logits, targets[some.to(targets.device)])
                gradients = torch.autograd.grad(loss, parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimiser.step()
            losses.append(loss.item())
        return losses

    @torch.no_grad()
    def accuracy(
        self, bridge: TransformerBridge, exchange: Exchange | None, targets: Tensor, rows: Tensor
    ) -> float:
        """Return the share of pairs with the expected answer."""
        answers = self.answers(bridge, exchange, rows).argmax(-1)
        return float((answers == targets[rows.to(targets.device)]).float().mean())


def _targets(labels: Tensor, among: Tensor | None, n_answers: int) -> Tensor:
    """Return the index of each label among the answers.

    Raises:
        ValueError: a label is not an answer.
    """
    if among is None:
        if not bool(((labels >= 0) & (labels < n_answers)).all()):
            raise ValueError(
                f"labels go from {int(labels.min())} to {int(labels.max())}, the answers to"
                f" {n_answers - 1}"
            )
        return labels
    equal = (labels[:, None] == among[None].to(labels)).int()
    if not bool(equal.any(1).all()):
        raise ValueError("a label is not among the answers that are to be chosen from")
    return equal.argmax(1)


@dataclass(frozen=True)
class _SubspaceFit:
    """A search for a subspace, which is repeated for the controls.

    Attributes:
        search: the pairs.
        dimension: the dimension of the subspace.
        rows: the pairs for training, and those for testing.
        training: the settings.
        generator: draws batches, shuffled labels and weights, in turn.
        seed: the seed of the initial subspace.
    """

    search: _Alignment
    dimension: int
    rows: tuple[Tensor, Tensor]
    training: _Training
    generator: torch.Generator
    seed: int

    def fitted(
        self, bridge: TransformerBridge, targets: Tensor
    ) -> tuple[Rotation, list[float], float]:
        """Return a fitted subspace, the losses, and the accuracy."""
        train, test = self.rows
        exchange = self.search.new(bridge, self.dimension, self.seed)
        losses = self.search.train(bridge, exchange, targets, train, self.training, self.generator)
        return exchange.rotation, losses, self.search.accuracy(bridge, exchange, targets, test)

    def controls(self, bridge: TransformerBridge) -> dict[str, float]:
        """Return the accuracy of each control."""
        targets, (_, test) = self.search.targets, self.rows
        untrained = self.search.new(bridge, self.dimension, self.seed + 1)
        random_subspace = self.search.accuracy(bridge, untrained, targets, test)
        order = torch.randperm(len(targets), generator=self.generator, device="cpu")
        *_, shuffled_labels = self.fitted(bridge, targets[order.to(targets.device)])
        random_model = _with_weights_in_random_order(bridge, self.generator)
        *_, of_random_model = self.fitted(random_model, targets)
        return {
            "random subspace": random_subspace,
            "shuffled labels": shuffled_labels,
            "random model": of_random_model,
        }


@torch.no_grad()
def _with_weights_in_random_order(
    bridge: TransformerBridge, generator: torch.Generator
) -> TransformerBridge:
    """Return a copy with the entries of each parameter shuffled: a model with weights of the same
    scale but without knowledge.
    """
    other = copy.deepcopy(bridge)
    for parameter in other.original_model.parameters():
        order = torch.randperm(parameter.numel(), generator=generator, device="cpu").to(
            parameter.device
        )
        parameter.copy_(parameter.flatten()[order].view_as(parameter))
    return other


# --------------------------------------------------------------------------------------------------
# Localisation of a variable: the accuracy of exchanges by several methods, over layers and
# positions.
# --------------------------------------------------------------------------------------------------


#: The methods of exchanging activations.
EXCHANGES = ("full", "coordinates", "components", "subspace", "features")


@dataclass(frozen=True, repr=False)
class InterchangeTable:
    """The accuracy after an exchange, by method, hook point and position.

    Attributes:
        methods, points, positions: the methods, hook points and positions of the exchanges.
        accuracy: the accuracy on held-out pairs, ``[method, point, position]``.
        sizes: the number of exchanged coordinates, in the same shape.
        before: the accuracy without any exchange.
    """

    methods: tuple[str, ...]
    points: tuple[str, ...]
    positions: tuple[int, ...]
    accuracy: Float[Tensor, "method point position"]
    sizes: Int[Tensor, "method point position"]
    before: float

    def __repr__(self) -> str:
        largest = zip(self.methods, self.accuracy.amax((1, 2)).tolist(), strict=True)
        best = ", ".join(f"{name} {value:.2f}" for name, value in largest)
        return f"InterchangeTable(best: {best}; without {self.before:.2f})"

    def best(self, method: str) -> tuple[str, int, float]:
        """Return where a method works best: the hook point, the position and the accuracy.

        Args:
            method: one of the table's methods.

        Raises:
            ValueError: an unknown method.
        """
        check_choice("method", method, self.methods)
        table = self.accuracy[self.methods.index(method)]
        row, column = divmod(int(table.argmax()), table.shape[1])
        return self.points[row], self.positions[column], float(table[row, column])

    #: The function of `bridge.pictures` that draws it.
    picture: ClassVar[str] = "heat_map"

    def draw(self, **options: Any) -> Any:
        """Draw the table with `bridge.pictures.heat_map`: a panel for each method.

        Args:
            options: options of `bridge.pictures.heat_map`.

        Raises:
            ImportError: the dependencies of pictures are not installed.
        """
        rows = [name.removeprefix("blocks.").replace(".hook_", ".") for name in self.points]
        defaults = {
            "rows": rows,
            "columns": [str(position) for position in self.positions],
            "panels": list(self.methods),
            "row_title": "hook point",
            "column_title": "position",
            "measure": "accuracy",
            "title": "Interchange accuracy",
        }
        pictures = importlib.import_module("bridge.pictures")
        return pictures.heat_map(self.accuracy, **(defaults | options))


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
    """Measure where a variable is represented, and in what form: the accuracy after exchanges, by
    point and position.

    The methods are those of the causal variables of the Mechanistic Interpretability Benchmark
    (Mueller et al. 2025):

    - ``"full"``: the entire activation is exchanged.
    - ``"coordinates"``: some of its own coordinates, by a trained mask (DBM).
    - ``"components"``: some of its principal components, of base and source prompts, by a trained
      mask.
    - ``"features"``: some features of a basis, such as an SAE's, by a trained mask.
    - ``"subspace"``: a trained subspace (DAS, `fit_rotation`).

    Args:
        bridge, base, source, labels, among, batch_size, held_out, seed, model_kwargs: as for
            `fit_rotation`.
        points: hook points of ``[batch, pos, d]``.
        positions: positions among each row's tokens; activations are read and written at the same
            position.
        methods: some of the methods above.
        dimension: the dimension of the subspace.
        features: for ``"features"``: the basis at each of the points.
        steps, lr: settings of each search, by Adam; masks use ten times the learning rate.

    Raises:
        ValueError: as `fit_rotation`; no point, position or method; a point without its basis.
        RuntimeError: as `fit_rotation`, if something is trained.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.features import interchange_table
        >>> from bridge.tasks import embedded_pairs
        >>> bridge = TransformerBridge.boot_embedded()
        >>> pairs = embedded_pairs(bridge, "ioi", 16)
        >>> labels = bridge(pairs.corrupted)[:, -1].argmax(-1)
        >>> points = [f"blocks.{layer}.hook_resid_post" for layer in (0, 3)]
        >>> table = interchange_table(
        ...     bridge, pairs.clean, pairs.corrupted, labels, points, methods=("full",)
        ... )
        >>> table.best("full")
        ('blocks.3.hook_resid_post', -1, 1.0)
        >>> table.draw()
        Picture('Interchange accuracy')
    """
    refuse_training(bridge)
    _check_axes(methods, points, positions, features or {})
    check_positive("dimension", dimension)
    check_positive("steps", steps)
    check_positive("batch_size", batch_size)
    one, other = (prompts_with(bridge, each, model_kwargs) for each in (base, source))
    train, test = _split(one, other, labels, held_out, torch.Generator().manual_seed(seed))
    exchanges = _Exchanges(bridge, (train, test), _Training(steps, batch_size, lr), dimension, seed)
    accuracy = torch.zeros(len(methods), len(points), len(positions), device="cpu")
    sizes, before = torch.zeros(accuracy.shape, dtype=torch.long, device="cpu"), 0.0
    n_answers = bridge.cfg.d_vocab_out
    for column, position in enumerate(positions):
        for row, point in enumerate(points):
            search = _Alignment(one, other, labels, point, position, None, among, n_answers)
            before = search.accuracy(bridge, None, search.targets, test)
            for panel, method in enumerate(methods):
                cell, basis = (panel, row, column), (features or {}).get(point)
                accuracy[cell], sizes[cell] = exchanges.measure(search, method, basis)
    axes = tuple(methods), tuple(points), tuple(positions)
    return InterchangeTable(*axes, accuracy, sizes, before)


def _check_axes(
    methods: Sequence[str],
    points: Sequence[str],
    positions: Sequence[int],
    features: Mapping[str, Basis],
) -> None:
    """Raise an error for axes that a table cannot have.

    Raises:
        ValueError: an empty axis, an unknown method, or a point without its basis.
        RuntimeError: the call is in inference mode, and something is trained.
    """
    if not points or not positions or not methods:
        raise ValueError("a table needs a point, a position and a method, or more")
    for method in methods:
        check_choice("method", method, EXCHANGES)
    if set(methods) != {"full"}:
        refuse_inference_mode("interchange_table")
    without = sorted(set(points) - set(features))
    if "features" in methods and without:
        raise ValueError(f"there are no features for {without[0]}: give the basis at each point")


def _everything(base: Tensor, source: Tensor) -> Tensor:
    """Exchange all coordinates."""
    return source


@dataclass(frozen=True)
class _Exchanges:
    """The exchanges of a table.

    Attributes:
        bridge: the bridge.
        rows: the pairs for training, and those for testing.
        training: the settings.
        dimension: the dimension of a subspace.
        seed: the seed of each search.
    """

    bridge: TransformerBridge
    rows: tuple[Tensor, Tensor]
    training: _Training
    dimension: int
    seed: int

    def measure(self, search: _Alignment, method: str, basis: Basis | None) -> tuple[float, int]:
        """Return the accuracy of a method, and how many coordinates it exchanges."""
        train, test = self.rows
        bridge, targets = self.bridge, search.targets
        exchange = self._untrained(search, method, basis)
        if exchange is None:
            width = search.source_of(bridge).shape[-1]
            return search.accuracy(bridge, _everything, targets, test), width
        generator = torch.Generator().manual_seed(self.seed)
        search.train(bridge, exchange, targets, train, self.training, generator)
        accuracy = search.accuracy(bridge, exchange.eval(), targets, test)
        if isinstance(exchange, _Along):
            return accuracy, exchange.rotation.columns.shape[1]
        return accuracy, int(exchange.chosen.sum())

    def _untrained(
        self, search: _Alignment, method: str, basis: Basis | None
    ) -> _Along | CoordinateMask | None:
        """Return an untrained exchange of activations for a method; None for all coordinates."""
        if method == "full":
            return None
        if method == "subspace":
            return search.new(self.bridge, self.dimension, self.seed)
        source = search.source_of(self.bridge)
        size = source.shape[-1]
        if method == "coordinates":
            basis = None
        elif method == "components":
            train, _ = self.rows
            base = search.activations(self.bridge, search.base, search.places)
            acts = torch.cat([base[train], source[train]]).float()
            svd = torch.linalg.svd(acts - acts.mean(0), full_matrices=False)
            columns = svd.Vh[svd.S[0] * 1e-5 < svd.S].T.contiguous()
            basis, size = Directions(columns, orthonormal=True).to(source), columns.shape[1]
        else:
            assert basis is not None
            size = basis.encode(source[:1]).shape[-1]
        return CoordinateMask(basis, size).to(source.device)
