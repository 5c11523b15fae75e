"""Operations as rows of tables: what is done to a token is looked up by the number of its row, in every pass.

Every operation that can be here makes of an activation ``x`` of one token

    x * scale + add + norm |x| + sum_r out[r] g_r(read[r] . x + bias[r])

where g_r makes zero of what is not above threshold[r]: a cap, or a feature of a basis (`RowMap`). What these are is
asked of the operation itself, on zeros, ones and its own directions, and tried on random numbers, so there is no second
meaning of an operation here. Several at one place become one map, in their order; where they choose tokens
differently, there is a row for each choice that a token can meet (`lower`).

A probe is a row, too: what it reads of a token goes into a column of its own, next to all places, and a row with a
condition does something where that column says so.
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
    Probe,
    ProjectOnto,
    ProjectOut,
    Scale,
    SequencePart,
    Set,
    Zero,
    chosen,
    orthonormal,
)

#: What can be a row of a table.
LOWERED = (Add, Scale, Set, Zero, ProjectOut, ProjectOnto, AddScaled, Cap)
#: How many sets of choices of tokens may meet at one place, and how many choices: a code has a bit for each.
_CODES, _CHOICES = 256, 62
#: How many features of a basis one operation may change by their values.
_FEATURES = 64
#: The tables; those of probes and conditions are there only in engines that have them.
TABLES = ("scale", "add", "norm", "out", "read", "bias", "threshold")
CONDITIONS = ("probe", "probe_bias", "probes", "asks", "level")


@dataclass(frozen=True)
class EnginePlace:
    """Where a hook point is in the engine's tree.

    Attributes:
        site: the number of the module's input or output.
        width: how many columns the tensor there has.
        columns: which of them are the activation's entries, in order.
        shape: of the activation of one token.
        counts: its entries are numbers of something, and no measure: they are captured, and not changed.
    """

    site: int
    width: int
    columns: tuple[int, ...]
    shape: tuple[int, ...]
    counts: bool = False

    @property
    def whole(self) -> bool:
        """Whether the activation is all of the tensor."""
        return len(self.columns) == self.width


@dataclass(frozen=True)
class RowMap:
    """What is done to an activation ``[feature]`` of one token; see the top of the file.

    Attributes:
        scale, add, norm: ``[feature]``.
        out, read: ``[rank feature]``.
        bias, threshold: ``[rank]``; where nothing is too small, the threshold is ``-inf`` and the bias zero.
    """

    scale: Tensor
    add: Tensor
    norm: Tensor
    out: Tensor
    read: Tensor
    bias: Tensor
    threshold: Tensor

    @classmethod
    def of(cls, scale: Tensor, **more: Tensor) -> RowMap:
        """One that has some of these, the others zero."""
        none, no_rank = torch.zeros_like(scale), scale.new_zeros(0, len(scale))
        rank = len(more.get("out", no_rank))
        usual = {"scale": scale, "add": none, "norm": none, "out": no_rank, "read": no_rank}
        usual |= {"bias": scale.new_zeros(rank), "threshold": scale.new_full((rank,), -torch.inf)}
        return cls(**{**usual, **more})

    def __call__(self, x: Tensor) -> Tensor:
        """What it makes of activations ``[token feature]``."""
        long = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        along = x @ self.read.T + self.bias
        return x * self.scale + self.add + self.norm * long + torch.where(along > self.threshold, along, 0.0) @ self.out

    def then(self, last: RowMap) -> RowMap:
        """This one, and another one behind it, which does not ask for the norm.

        Raises:
            ValueError: the second has a threshold for what the first makes.
        """
        free = last.threshold.isneginf()
        if bool((torch.cat([self.out, self.norm[None]]) @ last.read[~free].T).abs().gt(1e-9).any()):
            raise ValueError("a cap or a feature that others change before cannot be had at one place of an engine")
        linear = lambda v: v * last.scale + (v @ last.read[free].T) @ last.out[free]
        out, read = torch.cat([linear(self.out), last.out]), torch.cat([self.read, last.read * self.scale])
        bias = torch.cat([self.bias, last.bias + torch.where(free, 0.0, last.read @ self.add)])
        threshold, used = torch.cat([self.threshold, last.threshold]), out.any(-1)
        add = linear(self.add) + last.add
        return RowMap(
            self.scale * last.scale, add, linear(self.norm), out[used], read[used], bias[used], threshold[used]
        )  # fmt: skip

    def at(self, place: EnginePlace) -> RowMap:
        """The same for the whole tensor of a site."""
        if place.columns == tuple(range(place.width)):
            return self
        index = torch.tensor(place.columns)
        put = lambda x, whole: whole.index_copy(-1, index, x)
        wide = lambda x: put(x, x.new_zeros(*x.shape[:-1], place.width))
        scale = put(self.scale, self.scale.new_ones(place.width))
        return RowMap(
            scale, wide(self.add), wide(self.norm), wide(self.out), wide(self.read), self.bias, self.threshold
        )  # fmt: skip


def row_of(operation: Operation, hook: HookPoint, place: EnginePlace) -> RowMap:
    """What an operation does to the tokens that it chooses.

    Args:
        operation: the operation.
        hook: the hook point, of any bridge of the model.
        place: where that is.

    Raises:
        ValueError: it cannot be a row of a table.
    """
    name = f"{type(operation).__name__} at {hook.name}"
    if type(operation) not in LOWERED or operation.keys is not None:
        raise ValueError(
            f"{name} cannot be had in an engine, which has {', '.join(kind.__name__ for kind in LOWERED)} and "
            "Probe: use bridge.generate_batch"
        )
    operation.check_alone(hook)
    if isinstance(hook.view, InBasis):
        return _row_of_features(operation, hook, hook.view, place, name).at(place)
    still = replace(operation, positions=None, part="all", from_step=0, where=None)
    width = len(place.columns)

    def made(x: Tensor) -> Tensor:
        activation = x.reshape(1, len(x), *place.shape)
        return still(activation, hook).expand_as(activation).reshape(x.shape)

    zeros, ones = torch.zeros(1, width, dtype=torch.float64), torch.ones(1, width, dtype=torch.float64)
    if isinstance(operation, ProjectOut):
        mask = still.mask(zeros.reshape(1, 1, *place.shape), hook)
        acts = ones[0] if mask is None else mask.expand(1, 1, *place.shape).reshape(width).double()
        scale = 1 - acts if isinstance(operation, ProjectOnto) else ones[0]
        most = float(operation.number("most", zeros, {}, hook)) if isinstance(operation, Cap) else None
        rows = operation.number("directions", zeros.reshape(1, 1, *place.shape), {}, hook)
        basis = orthonormal(rows.reshape(-1, rows.shape[-1]))
        read = torch.zeros(width // basis.shape[-1], len(basis), width // basis.shape[-1], basis.shape[-1]).double()
        for head in range(len(read)):
            read[head, :, head] = basis
        read = read.reshape(-1, width)
        if most is None:
            out = made(read) - read * scale
            found = RowMap.of(scale, out=out[out.any(-1)], read=read[out.any(-1)])
        else:  # what is above is taken away
            far = read * (abs(most) + 1)
            read = read[((made(far) - far) * (read != 0)).any(-1)]  # of the heads that it is for
            level = zeros.new_zeros(len(read))
            found = RowMap.of(scale, out=-read, read=read, bias=level - most, threshold=level)
    elif isinstance(operation, AddScaled):
        if len(place.shape) > 1 or not place.whole:
            raise ValueError(f"{name} cannot be had in an engine: its activation is a part of a tensor there")
        unit = torch.nn.functional.one_hot(torch.tensor([0]), width).double()
        found = RowMap.of(ones[0], norm=(made(unit) - unit)[0])
    else:
        add = made(zeros)[0]
        found = RowMap.of((made(ones)[0] - add).nan_to_num(0.0), add=add)
    _check_row(found, made, width, 1e-6, name)
    return found.at(place)


def _check_row(found: RowMap, made: Callable[[Tensor], Tensor], width: int, bound: float, name: str) -> None:
    """Tries on random numbers of several sizes whether a row does what is to be done.

    Raises:
        ValueError: it does not.
    """
    tried = _tried(width)
    wanted = made(tried)
    if not torch.allclose(found(tried), wanted, rtol=bound, atol=bound, equal_nan=True):
        raise ValueError(f"{name} cannot be had in an engine: no row of a table does what it does")


@functools.lru_cache(maxsize=4)
def _tried(width: int) -> Tensor:
    """Activations of several sizes, which every row of that width is tried on."""
    tried = torch.randn(64, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return tried * torch.logspace(-1, 2, 64, dtype=torch.float64)[:, None]


@torch.no_grad()
def _row_of_features(operation: Operation, hook: HookPoint, view: InBasis, place: EnginePlace, name: str) -> RowMap:
    """What a change of features does to the activation that they are of.

    Of the basis nothing is known: what is decoded has to be linear, and of each feature that is changed by more than a
    number that is added, the direction, the bias and the threshold are found by trial (a ReLU's, a JumpReLU's, none).

    Raises:
        ValueError: it is not so.
    """
    if type(operation) not in (Add, Scale, Set, Zero) or not view.edits_alone or len(place.shape) != 1:
        raise ValueError(
            f"{name} cannot be had in an engine, which changes features of a vector by Add, Scale, Set and Zero where "
            "what the basis does not explain is kept: use bridge.generate_batch"
        )
    still = replace(operation, positions=None, part="all", from_step=0, where=None)
    like = _tensor_of(view)
    encode = lambda x: dense(view.encode(x.to(like)[None]))[0].double()
    decode = lambda f, x: view.decoded(f.to(like)[None], x.to(like)[None])[0].double()
    changed = lambda f: still(f[None], hook)[0].expand_as(f)
    origin = torch.zeros(1, len(place.columns), dtype=torch.float64)
    none = torch.zeros_like(encode(origin))
    base = changed(none)
    slope = changed(torch.ones_like(none)) - base
    at = (slope[0] != 1).nonzero().flatten()
    explained = decode(none, origin)
    add = (decode(base, origin) - explained)[0]
    found = RowMap.of(torch.ones_like(origin[0]), add=add)
    if len(at):
        if len(at) > _FEATURES:
            raise ValueError(f"{name} changes {len(at)} features by their values; in an engine it can be {_FEATURES}")
        rows = torch.nn.functional.one_hot(at, none.shape[-1]).double()
        out = (decode(rows, origin.expand(len(at), -1)) - explained) * (slope[0, at] - 1)[:, None]
        read, bias, threshold = _features(encode, at, origin.shape[-1], name)
        free = threshold.isneginf()
        found = replace(
            found, add=add + bias[free] @ out[free], out=out, read=read, bias=bias.where(~free, 0.0),
            threshold=threshold,
        )  # fmt: skip

    def made(x: Tensor) -> Tensor:
        features = encode(x)
        return x + decode(changed(features), x) - decode(features, x)

    _check_row(found, made, origin.shape[-1], 1e-3, name)
    return found


def _features(encode: Callable[[Tensor], Tensor], at: Tensor, width: int, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """The direction, bias and threshold of some features: what they are of an activation.

    Args:
        encode: from ``[row width]`` to ``[row feature]``.
        at: which features.
        width: of an activation.
        name: for the error.

    Raises:
        ValueError: one that is never active on random activations.
    """
    tried = torch.randn(256, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tried *= torch.logspace(-1, 3, 256, dtype=torch.float64)[:, None]
    active = encode(tried)[:, at] != 0
    if not bool(active.any(0).all()):
        raise ValueError(f"{name}: features {at[~active.any(0)].tolist()} were active on no activation that was tried")
    there = tried[active.int().argmax(0)]  # [feature width]: the smallest, which are rounded least
    own = torch.arange(len(at))
    with torch.enable_grad():
        x = there.clone().requires_grad_()
        made = encode(x)[own, at].sum()
        if not made.requires_grad:
            raise ValueError(f"{name}: its basis gives no gradients, which say in which direction a feature is")
        (read,) = torch.autograd.grad(made, x)
    bias = encode(there)[own, at] - (read * there).sum(-1)
    # Along the direction: where it is just not zero. It is linear if it is negative far behind.
    step = read / (read * read).sum(-1, keepdim=True)
    of = lambda level: encode(step * (level - bias)[:, None])[own, at]
    high = encode(there)[own, at].clone()
    low = -high.abs() - 1
    free = (of(low) - low).abs() < 1e-3 * low.abs()
    for _ in range(60):
        middle = (low + high) / 2
        active = of(middle) != 0
        high, low = torch.where(active, middle, high), torch.where(active, low, middle)
    return read, bias, torch.where(free, -torch.inf, low)


def _tensor_of(view: InBasis) -> Tensor:
    """A tensor of a basis's type; of functions float32."""
    for module in modules_of(view.basis):
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                return tensor.detach()
    return torch.zeros(())


# ----------------------------------------------------------------------------------------------------------------------
# All interventions of one request.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenChoice:
    """Which tokens of a request an operation acts on; see `Operation`."""

    positions: Kept = None
    part: str = "all"
    from_step: int = 0

    @classmethod
    def of(cls, operation: Operation) -> TokenChoice:
        """That of an operation."""
        kept = operation.positions
        assert kept is None or isinstance(kept, slice | tuple)
        return cls(kept, operation.part, operation.from_step)

    def meets(self, other: TokenChoice) -> bool:
        """Whether there may be a token that both are of."""
        if {self._of_prompt(), other._of_prompt()} == {True, False}:
            return False
        mine, theirs = self.positions, other.positions
        if not isinstance(mine, tuple) or not isinstance(theirs, tuple):
            return True
        return len({place < 0 for place in (*mine, *theirs)}) == 2 or bool({*mine} & {*theirs})

    def _of_prompt(self) -> bool | None:
        """Whether it is of the prompt alone, or (False) of what is generated alone."""
        if self.positions is not None or self.part == "prompt":
            return True
        return False if self.part == "generated" or self.from_step else None

    def mask(self, first: int, length: int, prompt: int) -> Tensor:
        """Which of some tokens, ``[length]``.

        Args:
            first: the place of the first of them.
            length: how many there are.
            prompt: how many tokens the prompt has.

        Raises:
            IndexError: the prompt has no such position.
        """
        if self.positions is not None:
            return chosen(self.positions, SequencePart(first, length, prompt), "a position", torch.empty(0))
        places = torch.arange(first, first + length)
        if self.part == "prompt":
            return places < prompt
        return places >= (prompt if self.part == "generated" else prompt + self.from_step - 1 if self.from_step else 0)


@dataclass(frozen=True)
class SiteRows:
    """What a request does at one site.

    Attributes:
        site: its number.
        choices: of tokens; a token that the first and third are true of has the code 1 + 4, one that none is true of 0.
        codes: those that have a row, from the least.
        tables: by name, ``[row ...]``.
    """

    site: int
    choices: tuple[TokenChoice, ...]
    codes: tuple[int, ...]
    tables: Mapping[str, Tensor]


@dataclass(frozen=True)
class EngineEdit:
    """Interventions as rows of tables.

    Attributes:
        key: a digest of all of it: equal for those that do the same.
        sites: where it does something.
    """

    key: str
    sites: tuple[SiteRows, ...]

    def check_prompt(self, length: int) -> None:
        """Refuses a prompt that has not the positions that are chosen.

        Raises:
            IndexError: it is one.
        """
        for choice in (choice for site in self.sites for choice in site.choices):
            choice.mask(0, length, length)


def fit(edits: Iterable[EngineEdit], rows: int) -> bool:
    """Whether the tables have room for edits together.

    Args:
        edits: different ones.
        rows: how many rows the tables of a site have.
    """
    used: Counter[int] = Counter()
    for site in (site for edit in edits for site in edit.sites):
        used[site.site] += len(site.codes)
    return all(count <= rows for count in used.values())


def base_of(hook: HookPoint) -> str:
    """The name of the hook point whose activation one shows, in a basis or as it is."""
    return hook.name.rpartition(".")[0] if isinstance(hook.view, InBasis) else hook.name


def lower(
    pairs: Sequence[tuple[HookPoint, Any]], places: Mapping[str, EnginePlace], rank: int,
    order: Sequence[str] = (), probes: int = 0,
) -> EngineEdit:  # fmt: skip
    """Interventions as rows of tables.

    Args:
        pairs: hook points and operations, in the order in which they act.
        places: of the hook points.
        rank: how many directions a row has room for.
        order: the names of the hook points, as a pass comes by.
        probes: how many probes a request may have.

    Raises:
        ValueError: something that cannot be a row.
        TypeError: a function.
    """
    at_site: dict[int, list[_Lowered]] = {}
    came: Counter[str] = Counter()
    for hook, operation in pairs:
        if not isinstance(operation, Operation):
            raise TypeError(
                f"the intervention at {hook.name} is {operation!r}, a function, and an engine's pass holds no Python: "
                "use an operation of bridge.interventions, or bridge.generate_batch"
            )
        place, name = places[base_of(hook)], base_of(hook)
        when = order.index(name) if name in order else 0, came[name]
        came[name] += 1
        row = None if isinstance(operation, Probe) else row_of(operation, hook, place)
        at_site.setdefault(place.site, []).append(_Lowered(hook, operation, row, place, when))
    slots = _slots([its for found in at_site.values() for its in found], probes)
    sites = tuple([_site_rows(site, found, rank, slots, probes) for site, found in at_site.items()])
    total = hashlib.sha256(str([(site.site, site.choices, site.codes) for site in sites]).encode())
    for table in (table for site in sites for table in site.tables.values()):
        total.update(f"{list(table.shape)}".encode() + table.numpy().tobytes())
    return EngineEdit(total.hexdigest(), sites)


@dataclass(frozen=True)
class _Lowered:
    """One operation of a request: at which hook point, as which row (a probe has none), when in a pass."""

    hook: HookPoint
    operation: Operation
    row: RowMap | None
    place: EnginePlace
    when: tuple[int, int]

    @property
    def shown(self) -> str:
        return f"{type(self.operation).__name__} at {self.hook.name}"


def _slots(found: Sequence[_Lowered], probes: int) -> dict[str, int]:
    """The column that each probe's readings have.

    Raises:
        ValueError: there is no room for so many; a condition that nothing can be read for in time; a probe of features.
    """
    reading = [(its.when, its.operation) for its in found if isinstance(its.operation, Probe)]
    slots = {name: at for at, name in enumerate(dict.fromkeys(probe.name for _, probe in reading))}
    for its in found:
        its.operation.check_alone(its.hook)
        if its.row is None and isinstance(its.hook.view, InBasis):
            raise ValueError(f"{its.shown} cannot be had in an engine, which computes features when a pass is over")
    if len(slots) > probes:
        raise ValueError(f"{len(slots)} probes, and this engine has room for {probes}: Engine(probes=)")
    for its in found:
        where = its.operation.where
        if where is None:
            continue
        if where.over == "rows":
            raise ValueError(
                f"{its.shown} asks for the highest reading of all tokens, and in an engine a prompt may be in several "
                'passes, of which the first knows nothing of the last: use over="tokens", or bridge.generate_batch'
            )
        if not any(when < its.when and probe.name == where.probe for when, probe in reading):
            raise ValueError(
                f"{its.shown} asks what the probe {where.probe!r} read, and no such probe is at a point that comes "
                "before: [(earlier point, probe), (this point, operation)]"
            )
    return slots


def _site_rows(site: int, found: Sequence[_Lowered], rank: int, slots: Mapping[str, int], probes: int) -> SiteRows:
    names, width = ", ".join(its.shown for its in found), found[0].place.width
    reading = sorted([its for its in found if its.row is None], key=lambda its: its.when)
    changing = [(TokenChoice.of(its.operation), its) for its in found if its.row is not None]
    if reading and changing and reading[-1].when > min(its.when for _, its in changing):
        raise ValueError(f"{names}: at one place of an engine a probe reads before anything is changed")
    several = [TokenChoice(), *(choice for choice, _ in changing)]  # all tokens need no row of their own
    distinct = [choice for place, choice in enumerate(several) if choice not in several[:place]][1:]  # no hash
    rows: dict[int, RowMap] = {}
    conditions: dict[int, Condition | None] = {}
    for held in _met(distinct, names):
        true = [TokenChoice(), *(distinct[place] for place in held)]
        acting = [its for choice, its in changing if choice in true]
        if not acting and not reading:
            continue
        code = sum(2**place for place in held)
        wheres = list(dict.fromkeys(its.operation.where for its in acting))
        if len(wheres) > 1:
            raise ValueError(f"{names}: what meets at one token and place of an engine needs the same condition")
        conditions[code] = wheres[0] if wheres else None
        rows[code] = _together([its.row for its in acting if its.row is not None], width, rank, names)
    codes = tuple(sorted(rows))
    room = lambda x: torch.cat([x, x.new_zeros(rank - len(x), *x.shape[1:])])
    tables = {name: torch.stack([getattr(rows[code], name) for code in codes]) for name in TABLES[:3]}
    tables |= {name: torch.stack([room(getattr(rows[code], name)) for code in codes]) for name in TABLES[3:]}
    if probes:
        tables |= _condition_rows(reading, [conditions[code] for code in codes], slots, probes, width)
    return SiteRows(site, tuple(distinct), codes, {name: table.float() for name, table in tables.items()})


def _met(choices: Sequence[TokenChoice], names: str) -> list[tuple[int, ...]]:
    """Which choices a token may be of together.

    Raises:
        ValueError: too many.
    """
    if len(choices) > _CHOICES:
        raise ValueError(f"{names}: {len(choices)} choices of tokens at one place of an engine, which takes {_CHOICES}")
    met: list[tuple[int, ...]] = [()]
    for new, choice in enumerate(choices):
        met += [(*held, new) for held in met if all(choices[place].meets(choice) for place in held)]
        if len(met) > _CODES:
            raise ValueError(f"{names}: too many choices of tokens can meet at one place of an engine")
    return met


def _together(maps: Sequence[RowMap], width: int, rank: int, names: str) -> RowMap:
    """Several maps, one after the other.

    Raises:
        ValueError: no row holds them.
    """
    if any(made.norm.any() for made in maps[1:]):
        raise ValueError(f"{names}: AddScaled can only be the first at one place of an engine")
    whole = maps[0] if maps else RowMap.of(torch.ones(width, dtype=torch.float64))
    try:
        for made in maps[1:]:
            whole = whole.then(made)
    except ValueError as error:
        raise ValueError(f"{names}: {error}") from None
    if len(whole.out) > rank:
        raise ValueError(f"{names}: {len(whole.out)} directions, and this engine has room for {rank}: Engine(rank=)")
    return whole


def _condition_rows(
    reading: Sequence[_Lowered], conditions: Sequence[Condition | None], slots: Mapping[str, int], probes: int,
    width: int,
) -> dict[str, Tensor]:  # fmt: skip
    """What the rows of a place read, and ask: the same probes for each, and its own condition.

    Raises:
        ValueError: a probe whose numbers are of another width.
    """
    direction, bias, read = torch.zeros(probes, width), torch.zeros(probes), torch.zeros(probes)
    for its in reading:
        assert isinstance(its.operation, Probe)
        slot, columns = slots[its.operation.name], torch.tensor(its.place.columns)
        given, offset = (torch.as_tensor(getattr(its.operation, name)).float() for name in Probe.numbers)
        if len(given) != len(columns):
            raise ValueError(f"{its.shown} has a direction of {len(given)} entries; there are {len(columns)}")
        direction[slot] = torch.zeros(width).index_copy(0, columns, given)
        bias[slot], read[slot] = offset, 1.0
    asks, level = torch.zeros(len(conditions), probes), torch.full((len(conditions),), -torch.inf)
    for row, where in enumerate(conditions):
        if where is not None:
            sign = 1.0 if where.above else -1.0
            asks[row, slots[where.probe]], level[row] = sign, sign * where.threshold
    same = lambda x: x.expand(len(conditions), *x.shape).contiguous()
    return {"probe": same(direction), "probe_bias": same(bias), "probes": same(read), "asks": asks, "level": level}


def packed(edits: Sequence[EngineEdit]) -> tuple[str, bytes]:
    """Edits as they are sent to another process: JSON, and tensors as safetensors. Nothing in them is ever run."""
    said: list[object] = []
    tensors: dict[str, Tensor] = {}
    for number, edit in enumerate(edits):
        sites = []
        for place, site in enumerate(edit.sites):
            choices = []
            for choice in site.choices:
                index = choice.positions
                kept = [index.start, index.stop, index.step] if isinstance(index, slice) else index
                choices.append([isinstance(index, slice), kept, choice.part, choice.from_step])
            sites.append([site.site, choices, site.codes])
            tensors |= {f"{number}.{place}.{name}": table for name, table in site.tables.items()}
        said.append([edit.key, sites])
    return json.dumps(said), bytes_of(tensors)


def unpacked(said: str, data: bytes) -> list[EngineEdit]:
    """The other way."""
    tensors, edits = tensors_of(data), []
    for number, (key, sites) in enumerate(json.loads(said)):
        made = []
        for place, (site, choices, codes) in enumerate(sites):
            kept = [
                TokenChoice(slice(*index) if ranged else None if index is None else tuple(index), part, step)
                for ranged, index, part, step in choices
            ]
            known = [name for name in (*TABLES, *CONDITIONS) if f"{number}.{place}.{name}" in tensors]
            tables = {name: tensors[f"{number}.{place}.{name}"] for name in known}
            made.append(SiteRows(site, tuple(kept), tuple(codes), tables))
        edits.append(EngineEdit(key, tuple(made)))
    return edits
