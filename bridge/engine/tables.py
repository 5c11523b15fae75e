"""Operations as table rows: every pass looks up a token's edit by its row number.

Each supported operation maps the activation ``x`` of one token to

    x * scale + add + norm |x| + sum_r out[r] g_r(read[r] . x + bias[r])

where g_r is zero for inputs at or below threshold[r], which covers caps and features of a basis
(`_RowMap`). The coefficients are found by applying the operation itself to zeros, ones and its own
directions, and are checked on random activations, so no operation is implemented twice. Several
operations at one place are composed into one map, in order; if they choose different tokens, each
reachable combination of choices gets its own row (`lower`).

A probe is a row, too: its reading of a token goes into a column of its own, shared by all places. A
row with a condition acts only where that column satisfies it.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of
from torch import Tensor

from adapters.views.basis import InBasis, dense
from bridge.bases.bases import modules_of
from bridge.hooks.hooks import HookPoint
from bridge.interventions.operations import (
    Add,
    AddScaled,
    Cap,
    Condition,
    Kept,
    Operation,
    ProjectOnto,
    ProjectOut,
    Scale,
    SequencePart,
    Set,
    Zero,
    chosen,
    orthonormal,
)
from bridge.interventions.probes import Probe

#: The operations that can be table rows.
LOWERED = (Add, Scale, Set, Zero, ProjectOut, ProjectOnto, AddScaled, Cap)
#: The largest number of combined token choices at one place.
_CODES = 256
#: The largest number of choices there: a code has one bit per choice.
_CHOICES = 62
#: The largest number of features whose values one operation may change.
_FEATURES = 64
#: The tables with one entry per column.
_PER_COLUMN = ("scale", "add", "norm")
#: The tables with one entry per direction.
_PER_DIRECTION = ("out", "read", "bias", "threshold")
#: All tables. Those for probes and conditions exist only in engines with probes.
_TABLES = (*_PER_COLUMN, *_PER_DIRECTION, "probe", "probe_bias", "probes", "asks", "level")


# --------------------------------------------------------------------------------------------------
# One operation as a row.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EnginePlace:
    """The place of a hook point in the engine's module tree.

    Attributes:
        site: the index of the module's input or output.
        width: the number of columns of the tensor at the site.
        columns: the columns that hold the activation's entries, in order.
        shape: the shape of one token's activation.
        counts: whether its entries are indices, which can be captured but not edited.
    """

    site: int
    width: int
    columns: Sequence[int]
    shape: Sequence[int]
    counts: bool = False

    @property
    def is_whole_tensor(self) -> bool:
        """Tell whether the activation is the whole tensor."""
        return len(self.columns) == self.width


@dataclass(frozen=True)
class _RowMap:
    """An edit of one token's activation ``[feature]``; see the module docstring.

    Attributes:
        scale, add, norm: ``[feature]``.
        out, read: ``[rank feature]``.
        bias, threshold: ``[rank]``; without a threshold, it is ``-inf`` and the bias zero.
    """

    scale: Tensor
    add: Tensor
    norm: Tensor
    out: Tensor
    read: Tensor
    bias: Tensor
    threshold: Tensor

    @classmethod
    def of(cls, scale: Tensor, **coefficients: Tensor) -> _RowMap:
        """Return a map with these coefficients; the others are zero."""
        zeros = torch.zeros_like(scale)
        none = scale.new_zeros(0, len(scale))
        rank = len(coefficients.get("out", none))
        threshold = scale.new_full((rank,), -torch.inf)
        row = cls(scale, zeros, zeros, none, none, scale.new_zeros(rank), threshold)
        return replace(row, **coefficients)

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the map to activations ``[token feature]``."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        readings = x @ self.read.T + self.bias
        active = torch.where(readings > self.threshold, readings, 0.0)
        return x * self.scale + self.add + self.norm * length + active @ self.out

    def then(self, last: _RowMap) -> _RowMap:
        """Compose this map with a second one that follows it and does not use the norm.

        Raises:
            ValueError: the second map has a threshold on the result of the first.
        """
        free = last.threshold.isneginf()
        outputs = torch.cat([self.out, self.norm[None]])
        if bool((outputs @ last.read[~free].T).abs().gt(1e-9).any()):
            raise ValueError(
                "a cap or a feature that is changed by an earlier operation is not available at one"
                " place of an engine"
            )
        linear = lambda v: v * last.scale + (v @ last.read[free].T) @ last.out[free]
        shift = torch.where(free, 0.0, last.read @ self.add)
        out = torch.cat([linear(self.out), last.out])
        read = torch.cat([self.read, last.read * self.scale])
        bias = torch.cat([self.bias, last.bias + shift])
        threshold = torch.cat([self.threshold, last.threshold])
        used = out.any(-1)
        return _RowMap(
            self.scale * last.scale,
            linear(self.add) + last.add,
            linear(self.norm),
            out[used],
            read[used],
            bias[used],
            threshold[used],
        )

    def widened(self, place: EnginePlace) -> _RowMap:
        """Extend the map to all columns of a site's tensor."""
        if list(place.columns) == list(range(place.width)):
            return self
        columns = torch.tensor(place.columns)
        wide: dict[str, Tensor] = {}
        for name in (*_PER_COLUMN, "out", "read"):
            x = getattr(self, name)
            unchanged = float(name == "scale")
            blank = x.new_full((*x.shape[:-1], place.width), unchanged)
            wide[name] = blank.index_copy(-1, columns, x)
        return replace(self, **wide)


def row_of(operation: Operation, hook: HookPoint, place: EnginePlace) -> _RowMap:
    """Return the table row of an operation.

    Args:
        operation: the operation.
        hook: the hook point, of any bridge of the model.
        place: the hook point's place.

    Raises:
        ValueError: the operation cannot be a table row.
    """
    name = f"{type(operation).__name__} at {hook.name}"
    if type(operation) not in LOWERED or operation.keys is not None:
        kinds = ", ".join(kind.__name__ for kind in LOWERED)
        raise ValueError(
            f"{name} is not available in an engine, which has {kinds} and Probe: use"
            " bridge.generate_batch"
        )
    operation.check_alone(hook)
    everywhere = replace(operation, positions=None, part="all", from_step=0, where=None)
    if isinstance(hook.view, InBasis):
        features = _FeatureEdit(everywhere, hook, hook.view, _tensor_of(hook.view))
        return _row_of_features(features, place, name).widened(place)
    edit = _FlatEdit(everywhere, hook, place)
    row = edit.row(name)
    _check_row(row, edit, len(place.columns), 1e-6, name)
    return row.widened(place)


@dataclass(frozen=True)
class _FlatEdit:
    """An operation on flat activations ``[token column]``, at every token."""

    operation: Operation
    hook: HookPoint
    place: EnginePlace

    def __call__(self, x: Tensor) -> Tensor:
        activation = x.reshape(1, len(x), *self.place.shape)
        return self.operation(activation, self.hook).expand_as(activation).reshape(x.shape)

    def row(self, name: str) -> _RowMap:
        """Return the row that should compute the same as the operation.

        Raises:
            ValueError: no row can.
        """
        if isinstance(self.operation, ProjectOut):
            return self._projection_row(self.operation)
        width = len(self.place.columns)
        ones = torch.ones(1, width, dtype=torch.float64)
        if not isinstance(self.operation, AddScaled):
            add = self(torch.zeros_like(ones))[0]
            scale = self(ones)[0] - add
            return _RowMap.of(scale.nan_to_num(0.0), add=add)
        if len(self.place.shape) > 1 or not self.place.is_whole_tensor:
            raise ValueError(
                f"{name} is not available in an engine: its activation is a part of a tensor there"
            )
        unit = torch.zeros_like(ones)
        unit[0, 0] = 1
        return _RowMap.of(ones[0], norm=(self(unit) - unit)[0])

    def _projection_row(self, operation: ProjectOut) -> _RowMap:
        """Return the row of a projection or a cap."""
        zeros = torch.zeros(1, 1, *self.place.shape, dtype=torch.float64)
        scale = torch.ones(len(self.place.columns), dtype=torch.float64)
        if isinstance(operation, ProjectOnto):
            mask = operation.mask(zeros, self.hook)
            scale = torch.zeros_like(scale) if mask is None else 1 - mask.expand_as(zeros).double()
            scale = scale.flatten()
        directions = operation.number("directions", zeros, {}, self.hook)
        basis = orthonormal(directions.reshape(-1, directions.shape[-1]))
        heads = len(scale) // basis.shape[-1]
        read = torch.block_diag(*[basis] * heads).double()
        if isinstance(operation, Cap):
            highest = float(operation.number("most", zeros, {}, self.hook))
            return self._cap_row(read, highest)
        out = self(read) - read * scale
        used = out.any(-1)
        return _RowMap.of(scale, out=out[used], read=read[used])

    def _cap_row(self, read: Tensor, highest: float) -> _RowMap:
        """Return the row that subtracts the excess of readings over the cap."""
        above = read * (abs(highest) + 1)
        chosen_heads = ((self(above) - above) * (read != 0)).any(-1)
        read = read[chosen_heads]
        level = read.new_zeros(len(read))
        scale = read.new_ones(read.shape[-1])
        return _RowMap.of(scale, out=-read, read=read, bias=level - highest, threshold=level)


def _check_row(
    row: _RowMap, edit: Callable[[Tensor], Tensor], width: int, bound: float, name: str
) -> None:
    """Check on random activations of several sizes that a row computes the same as its operation.

    Raises:
        ValueError: the results differ.
    """
    samples = _random_rows(64, width, seed=0, highest=2)
    if not torch.allclose(row(samples), edit(samples), rtol=bound, atol=bound, equal_nan=True):
        raise ValueError(
            f"{name} is not available in an engine: no table row computes the same as it does"
        )


@functools.lru_cache(maxsize=4)
def _random_rows(rows: int, width: int, seed: int, highest: int) -> Tensor:
    """Return random activations with sizes from 0.1 to ``10 ** highest``. Do not write to them."""
    generator = torch.Generator().manual_seed(seed)
    activations = torch.randn(rows, width, dtype=torch.float64, generator=generator)
    sizes = torch.logspace(-1, highest, rows, dtype=torch.float64)
    return activations * sizes[:, None]


# --------------------------------------------------------------------------------------------------
# An operation on features of a basis as a row.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _FeatureEdit:
    """An operation on features of a basis, as an edit of activations ``[token column]``. The basis
    is treated as a black box.

    Attributes:
        operation: the operation, at every token.
        hook: the hook point in the basis.
        view: its view.
        like: a tensor with the dtype of the basis.
    """

    operation: Operation
    hook: HookPoint
    view: InBasis
    like: Tensor

    def encode(self, x: Tensor) -> Tensor:
        """Return the features of activations."""
        rows = x.to(self.like)[None]
        return dense(self.view.encode(rows))[0].double()

    def decode(self, features: Tensor, x: Tensor) -> Tensor:
        """Return the activations that the features represent; `x` contains the original
        activations."""
        rows = features.to(self.like)[None]
        return self.view.decoded(rows, x.to(self.like)[None])[0].double()

    def changed(self, features: Tensor) -> Tensor:
        """Return the features after the operation."""
        return self.operation(features[None], self.hook)[0].expand_as(features)

    def __call__(self, x: Tensor) -> Tensor:
        features = self.encode(x)
        return x + self.decode(self.changed(features), x) - self.decode(features, x)


@torch.no_grad()
def _row_of_features(edit: _FeatureEdit, place: EnginePlace, name: str) -> _RowMap:
    """Return the row that edits an activation by changing features of its basis.

    The basis's decoder must be linear. For each feature whose change is not a constant, the
    direction, bias and threshold are determined by experiment (ReLU, JumpReLU or linear).

    Raises:
        ValueError: the basis does not have this form.
    """
    is_linear = type(edit.operation) in (Add, Scale, Set, Zero)
    if not is_linear or not edit.view.edits_alone or len(place.shape) != 1:
        raise ValueError(
            f"{name} is not available in an engine, which changes features of a vector by Add,"
            " Scale, Set and Zero where what the basis does not explain is kept: use"
            " bridge.generate_batch"
        )
    width = len(place.columns)
    origin = torch.zeros(1, width, dtype=torch.float64)
    none = torch.zeros_like(edit.encode(origin))
    base = edit.changed(none)
    slope = (edit.changed(torch.ones_like(none)) - base)[0]
    explained = edit.decode(none, origin)
    add = (edit.decode(base, origin) - explained)[0]
    row = _RowMap.of(torch.ones_like(origin[0]), add=add)
    indices = (slope != 1).nonzero().flatten()
    if len(indices) > _FEATURES:
        raise ValueError(
            f"{name} changes {len(indices)} features by their values; in an engine it can be"
            f" {_FEATURES}"
        )
    if len(indices):
        one_hot = torch.nn.functional.one_hot(indices, len(slope)).double()
        decoded = edit.decode(one_hot, origin.expand(len(indices), -1)) - explained
        out = decoded * (slope[indices] - 1)[:, None]
        read, bias, threshold = _feature_readings(edit.encode, indices, width, name)
        row = _with_readings(row, out, read, bias, threshold)
    _check_row(row, edit, width, 1e-3, name)
    return row


def _with_readings(
    row: _RowMap, out: Tensor, read: Tensor, bias: Tensor, threshold: Tensor
) -> _RowMap:
    """Return a row with readings; the bias of a reading without a threshold is a constant."""
    free = threshold.isneginf()
    add = row.add + bias[free] @ out[free]
    bias = bias.where(~free, 0.0)
    return replace(row, add=add, out=out, read=read, bias=bias, threshold=threshold)


def _feature_readings(
    encode: Callable[[Tensor], Tensor], indices: Tensor, width: int, name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the direction, bias and threshold of some features as functions of an activation.

    Args:
        encode: from ``[row width]`` to ``[row feature]``.
        indices: the indices of the features.
        width: the width of an activation.
        name: the name for error messages.

    Raises:
        ValueError: a feature is never active on random activations.
    """
    samples = _random_rows(256, width, seed=1, highest=3)
    is_active = encode(samples)[:, indices] != 0
    if not bool(is_active.any(0).all()):
        raise ValueError(
            f"{name}: features {indices[~is_active.any(0)].tolist()} were active on no activation"
            " that was tried"
        )
    rows = torch.arange(len(indices))
    values_at = lambda x: encode(x)[rows, indices]
    # [feature width]: the smallest active values, which have the least rounding error
    smallest = samples[is_active.int().argmax(0)]
    with torch.enable_grad():
        x = smallest.clone().requires_grad_()
        total = values_at(x).sum()
        if not total.requires_grad:
            raise ValueError(
                f"{name}: its basis gives no gradients, which say in which direction a feature is"
            )
        (read,) = torch.autograd.grad(total, x)
    values = values_at(smallest)
    bias = values - (read * smallest).sum(-1)
    step = read / (read * read).sum(-1, keepdim=True)
    threshold = _threshold(lambda level: values_at(step * (level - bias)[:, None]), values)
    return read, bias, threshold


def _threshold(value_at: Callable[[Tensor], Tensor], high: Tensor) -> Tensor:
    """Return the level above which each feature is active, by bisection; ``-inf`` if it is linear:
    still negative far in the opposite direction.

    Args:
        value_at: from a level along the feature's direction to its value.
        high: levels at which the features are active.
    """
    low = -high.abs() - 1
    is_linear = (value_at(low) - low).abs() < 1e-3 * low.abs()
    for _ in range(60):
        middle = (low + high) / 2
        is_active = value_at(middle) != 0
        high = torch.where(is_active, middle, high)
        low = torch.where(is_active, low, middle)
    return torch.where(is_linear, -torch.inf, low)


def _tensor_of(view: InBasis) -> Tensor:
    """Return a tensor with the dtype of a basis; float32 for functions."""
    for module in modules_of(view.basis):
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                return tensor.detach()
    return torch.zeros(())


# --------------------------------------------------------------------------------------------------
# All interventions of one request.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TokenChoice:
    """The tokens of a request that an operation edits; see `Operation`."""

    positions: Kept = None
    part: str = "all"
    from_step: int = 0

    @classmethod
    def of(cls, operation: Operation) -> _TokenChoice:
        """Return the token choice of an operation."""
        kept = operation.positions
        assert kept is None or isinstance(kept, slice | tuple)
        return cls(kept, operation.part, operation.from_step)

    def meets(self, other: _TokenChoice) -> bool:
        """Tell whether some token may belong to both choices."""
        if {self._of_prompt(), other._of_prompt()} == {True, False}:
            return False
        mine = self.positions
        theirs = other.positions
        if not isinstance(mine, tuple) or not isinstance(theirs, tuple):
            return True
        signs = {place < 0 for place in (*mine, *theirs)}
        return len(signs) == 2 or bool({*mine} & {*theirs})

    def _of_prompt(self) -> bool | None:
        """Return True for a choice of only prompt tokens, False for only generated tokens,
        otherwise None.
        """
        if self.positions is not None or self.part == "prompt":
            return True
        return False if self.part == "generated" or self.from_step else None

    def mask(self, first: int, length: int, prompt: int) -> Tensor:
        """Return the mask of the chosen tokens, ``[length]``.

        Args:
            first: the position of the first token.
            length: the number of tokens.
            prompt: the number of prompt tokens.

        Raises:
            IndexError: the prompt has no such position.
        """
        if self.positions is not None:
            tokens = SequencePart(first, length, prompt)
            return chosen(self.positions, tokens, "a position", torch.empty(0))
        places = torch.arange(first, first + length)
        if self.part == "prompt":
            return places < prompt
        if self.part == "generated":
            return places >= prompt
        begin = prompt + self.from_step - 1 if self.from_step else 0
        return places >= begin


@dataclass(frozen=True)
class SiteRows:
    """The edits of one request at one site.

    Attributes:
        site: the index of the site.
        choices: the token choices; a token in the first and the third choice has the code 1 + 4, a
            token in none has the code 0.
        codes: the codes that have a row, in ascending order.
        tables: by name, ``[row ...]``.
    """

    site: int
    choices: tuple[_TokenChoice, ...]
    codes: tuple[int, ...]
    tables: Mapping[str, Tensor]


@dataclass(frozen=True)
class EngineEdit:
    """A request's interventions as table rows.

    Attributes:
        key: a digest of the edit; equal edits have equal keys.
        sites: the sites that it edits.
    """

    key: str
    sites: tuple[SiteRows, ...]

    def check_prompt(self, length: int) -> None:
        """Check that a prompt has the positions that the edit chooses.

        Raises:
            IndexError: it does not.
        """
        for site in self.sites:
            for choice in site.choices:
                choice.mask(0, length, length)


def fit(edits: Iterable[EngineEdit], rows: int) -> bool:
    """Tell whether the tables have enough rows for several edits together.

    Args:
        edits: distinct edits.
        rows: the number of rows per site.
    """
    used: Counter[int] = Counter()
    for edit in edits:
        for site in edit.sites:
            used[site.site] += len(site.codes)
    return all(count <= rows for count in used.values())


def base_of(hook: HookPoint) -> str:
    """Return the name of the hook point that a hook point in a basis is based on, or its own
    name."""
    return hook.name.rpartition(".")[0] if isinstance(hook.view, InBasis) else hook.name


def lower(
    pairs: Sequence[tuple[HookPoint, Any]],
    places: Mapping[str, EnginePlace],
    rank: int,
    order: Sequence[str] = (),
    probes: int = 0,
) -> EngineEdit:
    """Turn interventions into table rows.

    Args:
        pairs: hook points and operations, in the order in which they act.
        places: the places of the hook points.
        rank: the number of directions per row.
        order: the names of the hook points in forward order.
        probes: the largest number of probes of a request.

    Raises:
        ValueError: an operation that cannot be a row.
        TypeError: a function in place of an operation.
    """
    by_site: dict[int, list[_Lowered]] = {}
    uses: Counter[str] = Counter()
    for hook, operation in pairs:
        if not isinstance(operation, Operation):
            raise TypeError(
                f"the intervention at {hook.name} is {operation!r}, a function, and an engine's"
                " pass holds no Python: use an operation of bridge.interventions, or"
                " bridge.generate_batch"
            )
        name = base_of(hook)
        place = places[name]
        when = (order.index(name) if name in order else 0), uses[name]
        uses[name] += 1
        row = None if isinstance(operation, Probe) else row_of(operation, hook, place)
        by_site.setdefault(place.site, []).append(_Lowered(hook, operation, row, place, when))
    slots = _slots([lowered for group in by_site.values() for lowered in group], probes)
    sites = [_site_rows(site, group, rank, slots, probes) for site, group in by_site.items()]
    return EngineEdit(_digest(sites), tuple(sites))


def _digest(sites: Sequence[SiteRows]) -> str:
    digest = hashlib.sha256(str([(site.site, site.choices, site.codes) for site in sites]).encode())
    for site in sites:
        for table in site.tables.values():
            digest.update(f"{list(table.shape)}".encode() + table.numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class _Lowered:
    """An operation of a request: its hook point, its row (none for a probe), and its place in
    forward order.
    """

    hook: HookPoint
    operation: Operation
    row: _RowMap | None
    place: EnginePlace
    when: tuple[int, int]

    @property
    def label(self) -> str:
        """Return the name for error messages."""
        return f"{type(self.operation).__name__} at {self.hook.name}"

    @functools.cached_property
    def choice(self) -> _TokenChoice:
        """Return the tokens that the operation edits."""
        return _TokenChoice.of(self.operation)


def _slots(operations: Sequence[_Lowered], probes: int) -> dict[str, int]:
    """Assign a reading column to each probe.

    Raises:
        ValueError: too many probes; a condition on a probe that is read later; a probe of features.
    """
    slots: dict[str, int] = {}
    first_reads: dict[str, tuple[int, int]] = {}
    for lowered in operations:
        operation = lowered.operation
        when = lowered.when
        if isinstance(operation, Probe):
            slots.setdefault(operation.name, len(slots))
            first_reads[operation.name] = min(when, first_reads.get(operation.name, when))
        operation.check_alone(lowered.hook)
        if lowered.row is None and isinstance(lowered.hook.view, InBasis):
            raise ValueError(
                f"{lowered.label} is not available in an engine, which computes features when a"
                " pass is over"
            )
    if len(slots) > probes:
        raise ValueError(
            f"{len(slots)} probes, and this engine has room for {probes}: Engine(probes=)"
        )
    for lowered in operations:
        where = lowered.operation.where
        if where is None:
            continue
        if where.over == "rows":
            raise ValueError(
                f"{lowered.label} asks for the highest reading of all tokens, and in an engine a"
                " prompt may be in several passes, of which the first knows nothing of the last:"
                ' use over="tokens", or bridge.generate_batch'
            )
        if where.probe not in slots or first_reads[where.probe] >= lowered.when:
            raise ValueError(
                f"{lowered.label} asks what the probe {where.probe!r} read, and no such probe is at"
                " a point that comes before: [(earlier point, probe), (this point, operation)]"
            )
    return slots


def _site_rows(
    site: int, operations: Sequence[_Lowered], rank: int, slots: Mapping[str, int], probes: int
) -> SiteRows:
    """Return the rows of all operations at one site: one for each combination of token choices."""
    names = ", ".join(lowered.label for lowered in operations)
    width = operations[0].place.width
    in_order = sorted(operations, key=lambda lowered: lowered.when)
    readings = [lowered for lowered in in_order if lowered.row is None]
    changes = [lowered for lowered in operations if lowered.row is not None]
    _check_probes_first(readings, changes, names)
    choices = _distinct_choices(changes)
    rows: dict[int, tuple[_RowMap, Condition | None]] = {}
    for combination in _combinations(choices, names):
        fulfilled = [_TokenChoice(), *(choices[index] for index in combination)]
        acting = [lowered for lowered in changes if lowered.choice in fulfilled]
        if acting or readings:
            code = sum(2**index for index in combination)
            condition = _common_condition(acting, names)
            rows[code] = _composed(acting, width, rank, names), condition
    codes = tuple(sorted(rows))
    tables = _edit_tables([rows[code][0] for code in codes], rank)
    if probes:
        tables |= _probe_tables(readings, (len(codes), probes, width), slots)
        tables |= _condition_tables([rows[code][1] for code in codes], slots, probes)
    tables = {name: table.float() for name, table in tables.items()}
    return SiteRows(site, tuple(choices), codes, tables)


def _check_probes_first(
    readings: Sequence[_Lowered], changes: Sequence[_Lowered], names: str
) -> None:
    """Check that the probes at one place read before anything is changed there.

    Raises:
        ValueError: one of them reads later.
    """
    if readings and changes and readings[-1].when > min(lowered.when for lowered in changes):
        raise ValueError(
            f"{names}: at one place of an engine a probe reads before anything is changed"
        )


def _edit_tables(maps: Sequence[_RowMap], rank: int) -> dict[str, Tensor]:
    """Return the tables of edits; unused directions are zero."""
    tables: dict[str, Tensor] = {}
    for name in (*_PER_COLUMN, *_PER_DIRECTION):
        rows = [getattr(row, name) for row in maps]
        if name in _PER_DIRECTION:
            rows = [torch.cat([x, x.new_zeros(rank - len(x), *x.shape[1:])]) for x in rows]
        tables[name] = torch.stack(rows)
    return tables


def _distinct_choices(changes: Sequence[_Lowered]) -> list[_TokenChoice]:
    """Return the distinct token choices, in order. An edit of all tokens needs no code of its
    own.
    """
    distinct = [_TokenChoice()]
    for lowered in changes:
        if lowered.choice not in distinct:  # choices are not hashable
            distinct.append(lowered.choice)
    return distinct[1:]


def _combinations(choices: Sequence[_TokenChoice], names: str) -> list[tuple[int, ...]]:
    """Return the combinations of choices that a token may belong to.

    Raises:
        ValueError: there are too many.
    """
    if len(choices) > _CHOICES:
        raise ValueError(
            f"{names}: {len(choices)} choices of tokens at one place of an engine, which takes"
            f" {_CHOICES}"
        )
    combinations: list[tuple[int, ...]] = [()]
    for new, choice in enumerate(choices):
        combinations += [
            (*others, new)
            for others in combinations
            if all(choices[other].meets(choice) for other in others)
        ]
        if len(combinations) > _CODES:
            raise ValueError(
                f"{names}: too many choices of tokens can meet at one place of an engine"
            )
    return combinations


def _common_condition(acting: Sequence[_Lowered], names: str) -> Condition | None:
    """Return the condition of operations that act on the same token.

    Raises:
        ValueError: their conditions differ.
    """
    conditions = dict.fromkeys(lowered.operation.where for lowered in acting)
    if len(conditions) > 1:
        raise ValueError(
            f"{names}: what meets at one token and place of an engine needs the same condition"
        )
    return next(iter(conditions), None)


def _composed(operations: Sequence[_Lowered], width: int, rank: int, names: str) -> _RowMap:
    """Compose the maps of several operations, in order.

    Raises:
        ValueError: no row can hold the result.
    """
    maps = [lowered.row for lowered in operations if lowered.row is not None]
    if any(row.norm.any() for row in maps[1:]):
        raise ValueError(f"{names}: AddScaled can only be the first at one place of an engine")
    identity = _RowMap.of(torch.ones(width, dtype=torch.float64))
    try:
        composed = functools.reduce(_RowMap.then, maps[1:], maps[0] if maps else identity)
    except ValueError as error:
        raise ValueError(f"{names}: {error}") from None
    if len(composed.out) > rank:
        raise ValueError(
            f"{names}: {len(composed.out)} directions, and this engine has room for {rank}:"
            " Engine(rank=)"
        )
    return composed


def _probe_tables(
    readings: Sequence[_Lowered], shape: tuple[int, int, int], slots: Mapping[str, int]
) -> dict[str, Tensor]:
    """Return the probe tables of a place: every row has the same probes.

    Args:
        readings: the probes at the place.
        shape: the numbers of rows, probes and columns.
        slots: the column of each probe's reading, by name.

    Raises:
        ValueError: a probe whose width differs from the activation's.
    """
    directions = torch.zeros(shape)
    biases = torch.zeros(shape[:2])
    reads = torch.zeros(shape[:2])
    for lowered in readings:
        probe = lowered.operation
        assert isinstance(probe, Probe)
        direction, bias = (torch.as_tensor(getattr(probe, name)).float() for name in Probe.numbers)
        columns = torch.tensor(lowered.place.columns)
        if len(direction) != len(columns):
            raise ValueError(
                f"{lowered.label} has a direction of {len(direction)} entries; there are"
                f" {len(columns)}"
            )
        slot = slots[probe.name]
        directions[:, slot] = torch.zeros(shape[2]).index_copy(0, columns, direction)
        biases[:, slot] = bias
        reads[:, slot] = 1.0
    return {"probe": directions, "probe_bias": biases, "probes": reads}


def _condition_tables(
    conditions: Sequence[Condition | None], slots: Mapping[str, int], probes: int
) -> dict[str, Tensor]:
    """Return the condition tables of a place, with one condition for each row."""
    asks = torch.zeros(len(conditions), probes)
    level = torch.full((len(conditions),), -torch.inf)
    for row, where in enumerate(conditions):
        if where is not None:
            sign = 1.0 if where.above else -1.0
            asks[row, slots[where.probe]] = sign
            level[row] = sign * where.threshold
    return {"asks": asks, "level": level}


# --------------------------------------------------------------------------------------------------
# Edits on their way to the worker.
# --------------------------------------------------------------------------------------------------


def packed(edits: Sequence[EngineEdit]) -> tuple[str, bytes]:
    """Serialise edits for another process, as JSON and safetensors. No code is executed when they
    are read.
    """
    listing: list[object] = []
    tensors: dict[str, Tensor] = {}
    for number, edit in enumerate(edits):
        sites: list[object] = []
        for place, site in enumerate(edit.sites):
            sites.append([site.site, list(map(_choice_as_json, site.choices)), site.codes])
            tensors |= {f"{number}.{place}.{name}": table for name, table in site.tables.items()}
        listing.append([edit.key, sites])
    return json.dumps(listing), bytes_of(tensors)


def unpacked(listing: str, data: bytes) -> list[EngineEdit]:
    """Deserialise edits; the inverse of `packed`."""
    tensors = tensors_of(data)
    edits = []
    for number, (key, sites) in enumerate(json.loads(listing)):
        rows = []
        for place, (site, choices, codes) in enumerate(sites):
            prefix = f"{number}.{place}."
            tables = {name: tensors[prefix + name] for name in _TABLES if prefix + name in tensors}
            choices = tuple([_choice_from_json(choice) for choice in choices])
            rows.append(SiteRows(site, choices, tuple(codes), tables))
        edits.append(EngineEdit(key, tuple(rows)))
    return edits


def _choice_as_json(choice: _TokenChoice) -> list[object]:
    positions = choice.positions
    if isinstance(positions, slice):
        return [
            True,
            [positions.start, positions.stop, positions.step],
            choice.part,
            choice.from_step,
        ]
    return [False, positions, choice.part, choice.from_step]


def _choice_from_json(choice: list[Any]) -> _TokenChoice:
    is_slice, positions, part, step = choice
    if is_slice:
        return _TokenChoice(slice(*positions), part, step)
    return _TokenChoice(None if positions is None else tuple(positions), part, step)
