"""The one place where rows are made, whatever runs it: from a shard's inputs to its record batches."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm

from adapters.views import Kwargs
from adapters.views.basis import InBasis, dense
from bridge.bases.bases import read_by
from bridge.bridge import TransformerBridge
from bridge.harvest.fingerprint import HarvestError, of_model
from bridge.harvest.options import ChosenRows, HarvestOptions, TopPositions, choose
from bridge.harvest.packing import Array, ShardInput
from bridge.hooks.context import HookFunction
from bridge.hooks.hooks import HookPoint

if TYPE_CHECKING:
    from bridge.engine import Engine

# ----------------------------------------------------------------------------------------------------------------------
# The activations of one batch, each taken as it comes, without what pads it.
# ----------------------------------------------------------------------------------------------------------------------


#: Called with a hook point's name and its activation while the model runs.
Take = Callable[[str, Tensor], None]
#: Hook points, and what changes their activations.
Changes = Sequence[tuple[str, HookFunction]]


@dataclass(frozen=True)
class RowAxes:
    """Where a hook point's activation has its batch and its positions.

    Attributes:
        position: the axis of the positions that make rows.
        keys: the axis of the keys, where there is one besides it.
        fill: what stands for keys that an input does not reach.
    """

    position: int
    keys: int | None
    fill: float

    @classmethod
    def of(cls, point: HookPoint) -> RowAxes:
        """The places of a hook point.

        Raises:
            HarvestError: its activation has no row for each token.
        """
        axes = point.point.axes.split()
        if axes[0] != "batch" or "decoder_pos" in axes or not {"pos", "key_pos"} & set(axes):
            raise HarvestError(
                f"{point.name} has the axes [{point.point.axes}]: it has no row for each token of the source, "
                "so it cannot be harvested"
            )
        if "pos" not in axes:
            return cls(axes.index("key_pos"), None, 0.0)
        keys = axes.index("key_pos") if "key_pos" in axes else None
        return cls(axes.index("pos"), keys, float("-inf") if point.name.endswith("scores") else 0.0)

    def rows(self, activation: Tensor, taken: Int[Tensor, "row"], context_size: int) -> Tensor:
        """A row for each token that is taken.

        Args:
            activation: ``[batch, ...]`` with the axes of the hook point.
            taken: ``[row]``, the tokens among ``batch * pos``.
            context_size: how many keys a row has.
        """
        if self.keys is not None and activation.shape[self.keys] < context_size:
            assert self.keys == activation.ndim - 1
            missing = context_size - activation.shape[-1]
            activation = torch.nn.functional.pad(activation, (0, missing), value=self.fill)
        rows = activation.movedim(self.position, 1).flatten(0, 1)
        return rows if len(taken) == len(rows) else rows[taken.to(rows.device)]


def stop_layer(bridge: TransformerBridge, points: Sequence[HookPoint]) -> int | None:
    """The first layer that no hook point needs; None where the model has to run to its end."""
    deepest = max(point.point.depth for point in points)
    if bridge.no_layer_runs or deepest >= bridge.cfg.n_layers:
        return None
    return int(deepest) + 1


def model_arguments(bridge: TransformerBridge, points: Sequence[HookPoint]) -> Kwargs:
    """What spares a model work that no hook point needs: keys and values kept, logits of every position."""
    known = inspect.signature(type(bridge.core).forward).parameters
    wanted: Kwargs = {"use_cache": False} if "use_cache" in known else {}
    if "logits_to_keep" in known and not any(point.name.startswith("unembed") for point in points):
        wanted["logits_to_keep"] = 1
    return wanted


def run(
    bridge: TransformerBridge,
    tokens: Int[Tensor, "batch pos"],
    mask: Int[Tensor, "batch pos"] | None,
    points: Sequence[HookPoint],
    interventions: Changes,
    stop_at_layer: int | None,
    arguments: Kwargs,
    take: Take,
) -> None:
    """Runs the model as far as it is needed, and hands over each activation as it comes.

    Args:
        bridge: the bridge.
        tokens: the inputs.
        mask: 1 for tokens, 0 for padding; None where nothing is padded.
        points: whose activations.
        interventions: hooks that are active meanwhile, and whose effect the activations have.
        stop_at_layer: where to stop, or None.
        arguments: further arguments of the model.
        take: what the activations are handed to.
    """

    def give(activation: Tensor, hook: HookPoint) -> None:
        take(hook.name, activation)

    seen = [(point.name, give) for point in points]
    with torch.no_grad():
        bridge.run_with_hooks(
            tokens,
            fwd_hooks=[*interventions, *seen],
            return_type=None,
            attention_mask=mask,
            stop_at_layer=stop_at_layer,
            **arguments,
        )


def run_engine(
    engine: Engine,
    tokens: Int[Tensor, "batch pos"],
    mask: Int[Tensor, "batch pos"] | None,
    points: Sequence[HookPoint],
    interventions: Changes,
    take: Take,
) -> None:
    """The same by an engine, which pads nothing: each input is a request of its own.

    Args:
        engine: the engine.
        tokens, mask, points, interventions, take: as for `run`.
    """
    lengths = [tokens.shape[1]] * len(tokens) if mask is None else mask.sum(1).tolist()
    prompts = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
    names = [point.name for point in points]
    answers = engine.generate(prompts, 1, [interventions] * len(prompts), names, stop_at_eos=False)
    for point in points:
        take(point.name, padded([answer.activations[point.name] for answer in answers], RowAxes.of(point).fill))


def padded(parts: Sequence[Tensor], fill: float) -> Tensor:
    """Tensors of one number of axes as one ``[part ...]``.

    Args:
        parts: the tensors.
        fill: what stands where one is smaller than others.
    """
    shape = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    whole = parts[0].new_full((len(parts), *shape), fill)
    for at, part in enumerate(parts):
        whole[at][tuple(slice(size) for size in part.shape)] = part
    return whole


# ----------------------------------------------------------------------------------------------------------------------
# How far a harvest is, and what came of it.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Progress:
    """How far a harvest is.

    Attributes:
        shards, tokens: done in this call.
        seconds: since it began.
        tokens_per_second: in this call.
        seconds_left: by the share of the documents that are used up; None where their number is not known.
        model_share: the share of the time that was spent in the model (of all workers' time).
    """

    shards: int
    tokens: int
    seconds: float
    tokens_per_second: float
    seconds_left: float | None
    model_share: float

    def __str__(self) -> str:
        left = "" if self.seconds_left is None else f", {self.seconds_left:.0f} s left"
        return (
            f"{self.tokens:,} tokens in {self.shards} shards, {self.tokens_per_second:,.0f} tokens/s{left}, "
            f"{self.model_share:.0%} of the time in the model"
        )


@dataclass(frozen=True)
class Harvested:
    """What a call of `harvest` wrote, and how fast.

    Attributes:
        path: its folder.
        shards, rows, sequences, tokens, size: of the whole harvest (size in bytes).
        made: how many of the shards this call made; the others stood already.
        seconds, tokens_per_second, model_share: of this call.
    """

    path: Path | str
    shards: int
    rows: int
    sequences: int
    tokens: int
    size: int
    made: int
    seconds: float
    tokens_per_second: float
    model_share: float

    def __str__(self) -> str:
        speed = f" at {self.tokens_per_second:,.0f} tokens/s, {self.model_share:.0%} of the time in the model"
        return (
            f"{self.path}: {self.rows:,} rows of {self.tokens:,} tokens in {self.shards} shards "
            f"({self.size / 1e6:,.1f} MB); {self.made} made now" + speed * bool(self.made)
        )


#: Whether, or to whom, it is shown how far a harvest is.
Show = bool | Callable[[Progress], object]


class Meter:
    """Counts, and shows.

    Args:
        show: True for a line on the terminal; a function is called with a `Progress` after each shard.
        total: how many documents the source has, where that is known.
        before: how many were used up before this call.
        workers: how many work at a time.
    """

    def __init__(self, show: Show, total: int | None, before: int, workers: int) -> None:
        self._call = show if callable(show) else None
        self._bar = tqdm(unit="tok", unit_scale=True, desc="harvest") if show is True else None
        self.total, self.before, self.workers = total, before, workers
        self.start = time.perf_counter()
        self.shards = self.tokens = self.documents = 0
        self.model_seconds = 0.0

    def now(self) -> Progress:
        """How far it is."""
        seconds = time.perf_counter() - self.start
        used = self.documents - self.before
        left = None
        if self.total is not None and used > 0:
            left = seconds * max(0, self.total - self.documents) / used
        rate = self.tokens / seconds if seconds else 0.0
        share = min(1.0, self.model_seconds / (seconds * self.workers)) if seconds else 0.0
        return Progress(self.shards, self.tokens, seconds, rate, left, share)

    def add(self, tokens: int, documents: int, model_seconds: float) -> None:
        """Counts one shard.

        Args:
            tokens: that it is from.
            documents: how many are used up behind it.
            model_seconds: time that it took in the model.
        """
        self.shards += 1
        self.tokens += tokens
        self.documents = max(self.documents, documents)
        self.model_seconds += model_seconds
        now = self.now()
        if self._call is not None:
            self._call(now)
        if self._bar is not None:
            left = "?" if now.seconds_left is None else f"{now.seconds_left:.0f} s"
            self._bar.set_postfix_str(f"{now.model_share:.0%} in the model, {left} left", refresh=False)
            self._bar.update(tokens)

    def close(self) -> None:
        """Ends the line on the terminal."""
        if self._bar is not None:
            self._bar.close()


# ----------------------------------------------------------------------------------------------------------------------
# Harvests of a model on several processes. Where they share it, the first does it, and all take part in its runs; where
# each has rows of its own, each harvests, and all take part in the runs of all.
# ----------------------------------------------------------------------------------------------------------------------


class Together:
    """What the first process tells the others that share its model.

    Args:
        group: the processes.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._first = group, dist.get_global_rank(group, 0)

    @property
    def leads(self) -> bool:
        """Whether this is the first."""
        return self._group.rank() == 0

    def tell(self, what: str, *given: object) -> None:
        """Tells the others what to do next, all together.

        Args:
            what: ``"weights"``, ``"run"``, ``"done"`` or ``"failed"``.
            given: what they need for it.
        """
        dist.broadcast_object_list([what, given], src=self._first, group=self._group)

    def weights(self) -> None:
        """Has all put the weights together."""
        self.tell("weights")

    @contextmanager
    def passing(self, *given: object) -> Iterator[None]:
        """Around one run of the model, which all make."""
        self.tell("run", *given)
        yield

    def lead(self, harvest: Callable[[], Harvested]) -> Harvested:
        """Harvests, and tells the others how it went.

        Args:
            harvest: does all of it, in this process.
        """
        try:
            report = harvest()
        except BaseException as error:
            self.tell("failed", f"{type(error).__name__}: {error}")
            raise
        self.tell("done", report)
        return report

    def follow(self, bridge: TransformerBridge, interventions: Changes) -> Harvested:
        """Takes part in the first process's harvest, and returns what it made.

        Args:
            bridge: of the shared model.
            interventions: as there.

        Raises:
            HarvestError: it failed.
        """
        wrong: BaseException | None = None
        while True:
            told: list[Any] = [None, None]
            dist.broadcast_object_list(told, src=self._first, group=self._group)
            what, given = told
            if what == "done":
                report: Harvested = given[0]
                return report
            if what == "failed":
                raise HarvestError(f"the harvest failed on the first process: {given[0]}") from wrong
            if wrong is not None:
                raise wrong
            try:
                if what == "weights":
                    of_model(bridge)
                else:
                    self._run(bridge, interventions, *given)
            except Exception as error:  # noqa: BLE001 - raised above, when the first process has said how it goes on there
                wrong = error

    @staticmethod
    def _run(
        bridge: TransformerBridge, interventions: Changes, tokens: Tensor,
        mask: Tensor | None, points: Sequence[str], stop: int | None, arguments: Kwargs,
    ) -> None:  # fmt: skip
        hooks = [bridge.names.find(name) for name in points]
        edits = [(bridge.names.find(name).name, fn) for name, fn in interventions]
        run(bridge, tokens, mask, hooks, edits, stop, arguments, _nothing)


def _nothing(name: str, activation: Tensor) -> None:
    """The first process keeps what there is."""


class InTurns:
    """Harvests of processes that have rows of their own: each is whole, and the runs of all are made together.

    Args:
        bridge: of the model.
    """

    def __init__(self, bridge: TransformerBridge) -> None:
        sharing = bridge.wiring.sharing
        turns = None if sharing is None else sharing.turns(self._join)
        assert turns is not None
        self._bridge, self._turns = bridge, turns
        #: The numbers of a run to the end, and of putting the weights together; one that stops at a layer is 1 + that.
        self._whole, self._weights = bridge.cfg.n_layers + 2, bridge.cfg.n_layers + 3

    def weights(self) -> None:
        """Waits until all put the weights together."""
        self._turns.take(self._weights)
        self._turns.under_way = False

    @contextmanager
    def passing(
        self, tokens: Tensor, mask: Tensor | None, points: Sequence[str], stop: int | None, arguments: Kwargs
    ) -> Iterator[None]:
        """Around one run of the model, which all make."""
        self._turns.take(self._whole if stop is None else 1 + stop)
        yield
        self._turns.under_way = False

    def lead(self, harvest: Callable[[], Harvested]) -> Harvested:
        """Harvests, and then takes part in the runs of the others, whatever came of it."""
        try:
            return harvest()
        finally:
            self._turns.end()

    def _join(self, number: int) -> None:
        if number == self._weights:
            of_model(self._bridge)
            return
        tokens = torch.zeros((1, 1), dtype=torch.long)
        stop = None if number == self._whole else number - 1
        run(self._bridge, tokens, None, (), (), stop, model_arguments(self._bridge, ()), _nothing)


def together_of(bridge: TransformerBridge) -> Together | InTurns | None:
    """What a harvest does together with other processes; None where this one has all of the model, alone.

    Args:
        bridge: of the model.
    """
    sharing = bridge.wiring.sharing
    if sharing is None:
        return None
    return InTurns(bridge) if sharing.group is None else Together(sharing.group)


#: The columns of every row that say where it is from, and their types.
ID_COLUMNS = {
    "document": pa.int64(),
    "position": pa.int32(),
    "token": pa.int32(),
    "sequence": pa.int64(),
    "context_position": pa.int32(),
}
_TYPES = {
    torch.float16: pa.float16(), torch.float32: pa.float32(), torch.float64: pa.float64(),
    torch.int64: pa.int64(), torch.bool: pa.bool_(),
}  # fmt: skip


def column_type(tensor: Tensor) -> pa.DataType:
    """The Arrow type of a column: fixed-size lists, one in another for each axis.

    Args:
        tensor: ``[row, ...]``.
    """
    found = _TYPES[tensor.dtype]
    for size in reversed(tensor.shape[1:]):
        found = pa.list_(pa.field("item", found, nullable=False), size)
    return found


def column(tensor: Tensor) -> pa.Array:
    """A column of a tensor's rows, without a copy where it is contiguous.

    Args:
        tensor: ``[row, ...]``, on the CPU.
    """
    kind = column_type(tensor)
    types = [kind]
    while pa.types.is_fixed_size_list(types[-1]):
        types.append(types[-1].value_type)
    flat = tensor.contiguous().reshape(-1)
    if flat.dtype == torch.bool:
        found = pa.array(flat.numpy())
    else:
        found = pa.Array.from_buffers(types[-1], flat.numel(), [None, pa.py_buffer(flat.numpy())])
    for outer in reversed(types[:-1]):
        found = pa.FixedSizeListArray.from_arrays(found, type=outer)
    return found


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory has run out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)


class RowMaker:
    """Makes record batches of a shard's inputs.

    Args:
        bridge: the bridge, in evaluation mode.
        options: what decides the rows.
        batch_size: inputs of full length in one forward pass. Where memory runs out it is halved, for good.
        together: tells other processes that share the model.
        engine: what runs the model, in the bridge's place.

    Attributes:
        points: the hook points' canonical names.
        model_seconds: time spent in the model so far.

    Raises:
        HarvestError: a hook point that cannot be harvested, or an option that does not fit the model.
        UnknownHookError: a name that no hook point has.
    """

    def __init__(
        self,
        bridge: TransformerBridge,
        options: HarvestOptions,
        batch_size: int,
        together: Together | InTurns | None = None,
        engine: Engine | None = None,
    ) -> None:
        self.bridge, self.options, self.batch_size, self._together = bridge, options, batch_size, together
        self._engine = engine
        find = bridge.names.find
        hooks = list(dict.fromkeys(find(name) for name in options.hook_points))
        self.points = [hook.name for hook in hooks]
        self._hooks = hooks
        self._places = {hook.name: RowAxes.of(hook) for hook in hooks}
        self._stop = stop_layer(bridge, hooks)
        self._interventions = [(find(name).name, fn) for name, fn in options.interventions]
        self._check_interventions()
        if engine is not None:
            engine.check(self._interventions, self.points)
        self._arguments = model_arguments(bridge, [*hooks, *(find(n) for n, _ in self._interventions)])
        self._reduce = {find(name).name: how for name, how in options.reduce.items()}
        unknown = [name for name in self._reduce if name not in self.points]
        if unknown:
            raise HarvestError(f"reduce names {', '.join(unknown)}, which hook_points does not")
        self._rows = options.rows
        if isinstance(self._rows, TopPositions):
            point = find(self._rows.point).name
            if point not in self.points:
                raise HarvestError(f"rows looks at {point}, which hook_points does not name")
            self._rows = TopPositions(self._rows.k, point, self._rows.function)
        longest = bridge.cfg.n_ctx if engine is None else engine.longest
        if longest is not None and options.tokens.context_size > longest:
            raise HarvestError(
                f"context_size is {options.tokens.context_size}; {bridge.cfg.model_name} has a context of {longest}"
                + " in this engine: Engine(max_model_len=)" * (engine is not None)
            )
        self._dtype = getattr(torch, options.dtype)
        self._refuse_mixed_features()
        self.model_seconds = 0.0

    def _check_interventions(self) -> None:
        for name, _ in self._interventions:
            depth = self.bridge.names.find(name).point.depth
            if self._stop is not None and depth >= self._stop:
                raise HarvestError(
                    f"the intervention at {name} is behind every harvested hook point: it would change nothing"
                )

    def _refuse_mixed_features(self) -> None:
        """Tries each basis on activations of six tokens: of one of them it must say the same, whatever the others are.

        Raises:
            HarvestError: it does not, so that a row would depend on which others are in its batch.
        """
        read = {hook.name: of for hook, of in read_by(self._hooks).items()}
        if not read:
            return
        found: dict[str, Tensor] = {}
        tokens = torch.arange(6).reshape(2, 3) % self.bridge.cfg.d_vocab
        self._forward(tokens, None, [self.bridge.names.find(name) for name in {*read.values()}], found.__setitem__)
        for name, of in read.items():
            view, x = self.bridge.names.find(name).view, found[of]
            assert isinstance(view, InBasis)
            first = dense(view.encode(x))[0, 0]
            for factor in (0.0, 100.0):
                other = x * factor
                other[0, 0] = x[0, 0]
                if not torch.allclose(dense(view.encode(other))[0, 0], first, rtol=1e-4, atol=1e-6):
                    raise HarvestError(
                        f"{name} mixes rows: its features of one token change with the other tokens of a batch, and a "
                        "harvest's rows must not depend on their batch"
                    )

    def batches(self, shard: ShardInput) -> Iterator[pa.RecordBatch]:
        """The shard's rows, a forward pass at a time.

        Args:
            shard: what it is made from.
        """
        top = int(shard.tokens.max())
        if top >= self.bridge.cfg.d_vocab or int(shard.tokens.min()) < 0:
            raise HarvestError(
                f"a token id is {top if top > 0 else int(shard.tokens.min())}; "
                f"{self.bridge.cfg.model_name} has {self.bridge.cfg.d_vocab} tokens"
            )
        starts = np.cumsum(shard.lengths) - shard.lengths
        # Longest first: what runs together has nearly one length, and memory is asked for most at the beginning.
        order = np.argsort(-shard.lengths, kind="stable")
        place = 0
        while place < len(order):
            longest = int(shard.lengths[order[place]])
            count = max(1, self.batch_size * self.options.tokens.context_size // longest)
            chosen = order[place : place + count]
            try:
                made = self._batch(shard, chosen, starts)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error) or len(chosen) == 1:
                    raise
                made = None
            if made is None:  # outside of `except`, whose traceback would keep what the run had made
                self.batch_size = max(1, min(self.batch_size, count) // 2)
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                continue
            place += len(chosen)
            if made.num_rows:
                yield made

    def _batch(self, shard: ShardInput, chosen: Array, starts: Array) -> pa.RecordBatch:
        lengths = shard.lengths[chosen]
        longest = int(lengths.max())
        # Where each token of each input stands in the shard; what pads an input is at its first token.
        at = np.arange(longest)
        real = at[None] < lengths[:, None]
        where = starts[chosen][:, None] + np.where(real, at[None], 0)
        tokens = torch.from_numpy(np.where(real, shard.tokens[where], 0).astype(np.int64))
        mask = None if real.all() else torch.from_numpy(real.astype(np.int64))
        wanted = real if self.options.keep_special else real & (shard.positions[where] >= 0)
        taken = torch.from_numpy(np.flatnonzero(wanted))
        ids = where[wanted]
        sequences = shard.first_sequence + np.broadcast_to(chosen[:, None], where.shape)[wanted]
        activations = self._run(tokens, mask, taken)
        fresh = np.r_[True, (np.diff(sequences) != 0) | (np.diff(shard.documents[ids]) != 0)][: len(ids)]
        rows = choose(self._rows, torch.from_numpy(np.cumsum(fresh)), activations)
        kept = rows.kept.numpy()
        columns = {
            "document": shard.documents[ids][kept],
            "position": shard.positions[ids][kept],
            "token": shard.tokens[ids][kept],
            "sequence": sequences[kept].astype(np.int64),
            "context_position": np.broadcast_to(at.astype(np.int32), where.shape)[wanted][kept],
        }
        arrays = {name: pa.array(values, type=ID_COLUMNS[name]) for name, values in columns.items()}
        for name in self.points:
            for title, values in self._columns(name, activations.pop(name), rows).items():
                arrays[title] = column(values)
        fields = [pa.field(name, array.type, nullable=False) for name, array in arrays.items()]
        return pa.RecordBatch.from_arrays(list(arrays.values()), schema=pa.schema(fields))

    def _run(self, tokens: Tensor, mask: Tensor | None, taken: Tensor) -> dict[str, Tensor]:
        """Each hook point's rows, of the tokens that are taken. The columns are made later, of all rows together."""
        found: dict[str, Tensor] = {}
        ours = 0.0
        plain = self._rows == "all"

        def take(name: str, activation: Tensor) -> None:
            nonlocal ours
            start = time.perf_counter()
            rows = self._places[name].rows(activation, taken, self.options.tokens.context_size)
            # What needs no other activation is done at once: it is smaller afterwards.
            found[name] = self._stored(name, rows) if plain and name not in self._reduce else rows
            ours += time.perf_counter() - start

        start = time.perf_counter()
        self._forward(tokens, mask, self._hooks, take)
        self.model_seconds += time.perf_counter() - start - ours
        missing = [name for name in self.points if name not in found]
        if missing:
            raise HarvestError(f"{', '.join(missing)} did not run in a forward pass of this model")
        return found

    def _forward(self, tokens: Tensor, mask: Tensor | None, hooks: Sequence[HookPoint], take: Take) -> None:
        """Runs the model, and with it the other processes that share it."""
        if self._engine is not None:
            return run_engine(self._engine, tokens, mask, hooks, self._interventions, take)
        given = tokens, mask, [hook.name for hook in hooks], self._stop, self._arguments
        with nullcontext() if self._together is None else self._together.passing(*given):
            run(self.bridge, tokens, mask, hooks, self._interventions, self._stop, self._arguments, take)

    def _columns(self, name: str, activation: Tensor, rows: ChosenRows) -> dict[str, Tensor]:
        if self._rows == "all" and name not in self._reduce:
            return {name: activation}
        chosen = rows.apply(activation)
        made = {name: chosen} if name not in self._reduce else self._reduce[name].columns(name, chosen)
        return {title: self._stored(title, values) for title, values in made.items()}

    def _stored(self, name: str, values: Tensor) -> Tensor:
        """The values as they are written, on the CPU.

        Raises:
            HarvestError: a number that the type cannot hold.
        """
        values = values.detach()
        if not values.is_floating_point():
            return values.to("cpu", torch.bool if values.dtype == torch.bool else torch.int64)
        stored = values.to(self._dtype)
        end = torch.finfo(stored.dtype).max
        if end < torch.finfo(values.dtype).max and values.numel():
            low, high = values.aminmax()  # one pass over it, which nearly always settles it
            if not bool((low >= -end) & (high <= end)):
                wrong = stored.isinf() & values.isfinite()  # -inf is a masked score
                if bool(wrong.any()):
                    raise HarvestError(_too_large(name, float(values[wrong].abs().max()), stored.dtype))
        return stored.cpu()


def _too_large(name: str, value: float, dtype: torch.dtype) -> str:
    holds = next(kind for kind in (torch.float32, torch.float64) if value <= torch.finfo(kind).max)
    kind, wider = (str(each).removeprefix("torch.") for each in (dtype, holds))
    return (
        f"{name} has a value of size {value:g}, which {kind} cannot hold (it ends at {torch.finfo(dtype).max:g}): "
        f"harvest with dtype={wider!r}"
    )
