"""Turn a shard's inputs into record batches; used by every engine."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

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

# --------------------------------------------------------------------------------------------------
# The activations of one batch, each taken as it comes, without what pads it.
# --------------------------------------------------------------------------------------------------


#: Called with a hook point's name and its activation while the model runs.
Take = Callable[[str, Tensor], None]
#: Hook points, and what changes their activations.
Changes = Sequence[tuple[str, HookFunction]]


class _ModelPass(NamedTuple):
    """One forward pass of the model, up to the last needed layer.

    Attributes:
        tokens: the inputs, ``[input, pos]``.
        mask: 1 for tokens, 0 for padding; None without padding.
        points: the hook points whose activations are read.
        stop_at_layer: where to stop, or None.
        arguments: further arguments of the model.
    """

    tokens: Tensor
    mask: Tensor | None
    points: Sequence[str]
    stop_at_layer: int | None
    arguments: Kwargs


@dataclass(frozen=True)
class _RowAxes:
    """The positions of the axes in a hook point's activation.

    Attributes:
        position: the axis of the positions that make rows.
        keys: the axis of the keys, if there is one besides it.
        fill: the value for keys beyond an input's length.
    """

    position: int
    keys: int | None
    fill: float

    @classmethod
    def of(cls, point: HookPoint) -> _RowAxes:
        """Return the axes of a hook point.

        Raises:
            HarvestError: its activation has no row for each token.
        """
        axes = point.point.axes.split()
        if axes[0] != "batch" or "decoder_pos" in axes or not {"pos", "key_pos"} & set(axes):
            raise HarvestError(
                f"{point.name} has the axes [{point.point.axes}]: it has no row for each token of"
                " the source, so it cannot be harvested"
            )
        if "pos" not in axes:
            return cls(axes.index("key_pos"), None, 0.0)
        keys = axes.index("key_pos") if "key_pos" in axes else None
        fill = float("-inf") if point.name.endswith("scores") else 0.0
        return cls(axes.index("pos"), keys, fill)

    def rows(self, activation: Tensor, taken: Int[Tensor, "row"], context_size: int) -> Tensor:
        """Return a row for each selected token.

        Args:
            activation: ``[batch, ...]`` with the axes of the hook point.
            taken: ``[row]``, the indices of the selected tokens among ``batch * pos``.
            context_size: the number of keys in a row.
        """
        if self.keys is not None and activation.shape[self.keys] < context_size:
            assert self.keys == activation.ndim - 1
            missing = context_size - activation.shape[-1]
            activation = torch.nn.functional.pad(activation, (0, missing), value=self.fill)
        rows = activation.movedim(self.position, 1).flatten(0, 1)
        return rows if len(taken) == len(rows) else rows[taken.to(rows.device)]


def stop_layer(bridge: TransformerBridge, points: Sequence[HookPoint]) -> int | None:
    """Return the first layer that no hook point needs; None if the model has to run to its end."""
    deepest = max(point.point.depth for point in points)
    if bridge.no_layer_runs or deepest >= bridge.cfg.n_layers:
        return None
    return int(deepest) + 1


def model_arguments(bridge: TransformerBridge, points: Sequence[HookPoint]) -> Kwargs:
    """Return arguments that avoid computing what no hook point needs: a cache of keys and values,
    most logits."""
    known = inspect.signature(type(bridge.core).forward).parameters
    arguments: Kwargs = {}
    if "use_cache" in known:
        arguments["use_cache"] = False
    if "logits_to_keep" in known and not any(point.name.startswith("unembed") for point in points):
        arguments["logits_to_keep"] = 1
    return arguments


def run(
    bridge: TransformerBridge, model_pass: _ModelPass, interventions: Changes, take: Take
) -> None:
    """Run the model, and pass on each activation.

    Args:
        bridge: the bridge.
        model_pass: its inputs, and how far it runs.
        interventions: hooks that are active during the run and affect the activations.
        take: a function that receives each activation.
    """

    def give(activation: Tensor, hook: HookPoint) -> None:
        take(hook.name, activation)

    readers = [(name, give) for name in model_pass.points]
    with torch.no_grad():
        bridge.run_with_hooks(
            model_pass.tokens,
            fwd_hooks=[*interventions, *readers],
            return_type=None,
            attention_mask=model_pass.mask,
            stop_at_layer=model_pass.stop_at_layer,
            **model_pass.arguments,
        )


def run_engine(
    engine: Engine,
    model_pass: _ModelPass,
    points: Sequence[HookPoint],
    interventions: Changes,
    take: Take,
) -> None:
    """Run an engine as `run` runs the model; each input is a separate request, without padding.

    Args:
        engine: the engine.
        points: the hook points of `model_pass`.
        model_pass, interventions, take: as for `run`.
    """
    prompts = list(model_pass.tokens)
    if model_pass.mask is not None:
        lengths = model_pass.mask.sum(1).tolist()
        prompts = [row[:length] for row, length in zip(prompts, lengths, strict=True)]
    changes = [interventions] * len(prompts)
    answers = engine.generate(prompts, 1, changes, list(model_pass.points), stop_at_eos=False)
    for point in points:
        parts = [answer.activations[point.name] for answer in answers]
        take(point.name, padded(parts, _RowAxes.of(point).fill))


def padded(parts: Sequence[Tensor], fill: float) -> Tensor:
    """Stack tensors of different sizes, padded, as ``[part, ...]``.

    Args:
        parts: the tensors.
        fill: the padding of smaller ones.
    """
    shape = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    batch = parts[0].new_full((len(parts), *shape), fill)
    for row, part in zip(batch, parts, strict=True):
        row[tuple(map(slice, part.shape))] = part
    return batch


# --------------------------------------------------------------------------------------------------
# The progress of a harvest, and its report.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Progress:
    """The state of a harvest: finished shards, speed, and remaining time.

    Attributes:
        shards: the number of shards finished in this call.
        tokens: the number of tokens read in this call, with those of the current shard.
        seconds: the time since it began.
        tokens_per_second: the speed of this call.
        seconds_left: an estimate from the share of finished documents; None if their total number
            is unknown.
        model_share: the share of (all workers') time that was spent in the model.
    """

    shards: int
    tokens: int
    seconds: float
    tokens_per_second: float
    seconds_left: float | None
    model_share: float

    def __str__(self) -> str:
        remaining = "" if self.seconds_left is None else f", {self.seconds_left:.0f} s left"
        return (
            f"{self.tokens:,} tokens in {self.shards} shards, {self.tokens_per_second:,.0f}"
            f" tokens/s{remaining}, {self.model_share:.0%} of the time in the model"
        )


@dataclass(frozen=True)
class Harvested:
    """The report of a call of `harvest`: its files and speed.

    Attributes:
        path: its folder.
        shards, rows, sequences, tokens, size: the totals of the whole harvest (size in bytes).
        made: the number of shards that this call wrote; the others already existed.
        seconds, tokens_per_second, model_share: the figures for this call.
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
        report = (
            f"{self.path}: {self.rows:,} rows of {self.tokens:,} tokens in {self.shards} shards "
            f"({self.size / 1e6:,.1f} MB); {self.made} made now"
        )
        if not self.made:
            return report
        return (
            f"{report} at {self.tokens_per_second:,.0f} tokens/s, {self.model_share:.0%} of the"
            " time in the model"
        )


#: Whether, or to whom, it is shown how far a harvest is; None: on a terminal.
Show = bool | Callable[[Progress], object] | None


class Meter:
    """The counter of a harvest, and its display.

    Args:
        show: True for a progress bar, None for one on a terminal alone; a function is called with a
            `Progress` after each batch and after each shard.
        total: the number of documents in the source, if known.
        before: the number of documents finished before this call.
        workers: the number of concurrent workers.
        most: the number of tokens after which the harvest ends, if known.
    """

    def __init__(
        self, show: Show, total: int | None, before: int, workers: int, most: int | None = None
    ) -> None:
        self._call = show if callable(show) else None
        off = None if show is None else show is not True
        self._bar = tqdm(total=most, unit="tok", unit_scale=True, desc="harvest", disable=off)
        self.total, self.before, self.workers = total, before, workers
        self.most = most
        self.start = time.perf_counter()
        self.shards = self.tokens = 0
        self.documents = before
        self.model_seconds = 0.0
        #: Tokens, documents and seconds of the shard under way.
        self._under_way = (0, 0.0, 0.0)

    def now(self) -> Progress:
        """Return the present state."""
        seconds = time.perf_counter() - self.start
        tokens = self.tokens + self._under_way[0]
        expected = self._expected()
        remaining = None
        if expected is not None and tokens:
            remaining = seconds * max(0, expected - tokens) / tokens
        rate = share = 0.0
        if seconds:
            rate = tokens / seconds
            spent = self.model_seconds + self._under_way[2]
            share = min(1.0, spent / (seconds * self.workers))
        return Progress(self.shards, tokens, seconds, rate, remaining, share)

    def _expected(self) -> int | None:
        """Estimate how many tokens this call writes, from the share of finished documents, at
        most `most`; None if neither is known.
        """
        tokens, documents, _ = self._under_way
        used = self.documents + documents - self.before
        if self.total is None or used <= 0:
            return self.most
        by_documents = round((self.tokens + tokens) * (self.total - self.before) / used)
        return by_documents if self.most is None else min(self.most, by_documents)

    def ran(self, shard: ShardInput, tokens: int, model_seconds: float) -> None:
        """Count a batch of the shard under way.

        Args:
            shard: that shard.
            tokens: of the batch.
            model_seconds: time that it took in the model.
        """
        before, _, seconds = self._under_way
        tokens += before
        documents = max(0, shard.after.documents - self.documents) * tokens / len(shard.tokens)
        self._under_way = (tokens, documents, seconds + model_seconds)
        self._show()

    def add(self, tokens: int, documents: int, model_seconds: float) -> None:
        """Count one shard, whose batches may have been counted before.

        Args:
            tokens: the number of its tokens.
            documents: the number of documents finished after it.
            model_seconds: the time spent in the model.
        """
        self.shards += 1
        self.tokens += tokens
        self.documents = max(self.documents, documents)
        self.model_seconds += model_seconds
        self._under_way = (0, 0.0, 0.0)
        self._show()

    def _show(self) -> None:
        now = self.now()
        if self._call is not None:
            self._call(now)
        self._bar.total = self._expected()
        self._bar.set_postfix_str(f"{now.model_share:.0%} in the model", refresh=False)
        self._bar.update(now.tokens - self._bar.n)

    def close(self) -> None:
        """End the line on the terminal."""
        self._bar.close()


# --------------------------------------------------------------------------------------------------
# Harvests of a model on several processes. Where they share it, the first does it, and all take
# part in its runs; where each has rows of its own, each harvests, and all take part in the runs of
# all.
# --------------------------------------------------------------------------------------------------


class Together:
    """Messages from the first process to the others that share its model.

    Args:
        group: the processes.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._first = group, dist.get_global_rank(group, 0)

    @property
    def leads(self) -> bool:
        """Whether this is the first."""
        return self._group.rank() == 0

    def tell(self, task: str, *arguments: object) -> None:
        """Send the next task to the other processes.

        Args:
            task: ``"weights"``, ``"run"``, ``"done"`` or ``"failed"``.
            arguments: the arguments of the task.
        """
        dist.broadcast_object_list([task, arguments], src=self._first, group=self._group)

    def weights(self) -> None:
        """Gather the weights in all processes."""
        self.tell("weights")

    @contextmanager
    def passing(self, model_pass: _ModelPass) -> Iterator[None]:
        """Tell the other processes to run the model too, before the body of the ``with`` runs it in
        this process.
        """
        self.tell("run", *model_pass)
        yield

    def lead(self, harvest: Callable[[], Harvested]) -> Harvested:
        """Harvest, and report the result to the others.

        Args:
            harvest: runs the whole harvest, in this process.
        """
        try:
            report = harvest()
        except BaseException as error:
            self.tell("failed", f"{type(error).__name__}: {error}")
            raise
        self.tell("done", report)
        return report

    def follow(self, bridge: TransformerBridge, interventions: Changes) -> Harvested:
        """Take part in the first process's harvest, and return its report.

        Args:
            bridge: the bridge of the shared model.
            interventions: the same interventions as in the first process.

        Raises:
            HarvestError: it failed.
        """
        failure: BaseException | None = None
        while True:
            message: list[Any] = [None, None]
            dist.broadcast_object_list(message, src=self._first, group=self._group)
            task, arguments = message
            if task == "done":
                report: Harvested = arguments[0]
                return report
            if task == "failed":
                raise HarvestError(
                    f"the harvest failed on the first process: {arguments[0]}"
                ) from failure
            if failure is not None:
                raise failure
            try:
                if task == "weights":
                    of_model(bridge)
                else:
                    edits = _by_canonical_name(bridge, interventions)
                    run(bridge, _ModelPass(*arguments), edits, _ignore)
            except Exception as error:  # noqa: BLE001 - raised above, with the first process's own
                failure = error


def _by_canonical_name(bridge: TransformerBridge, changes: Changes) -> Changes:
    return [(bridge.names.find(name).name, function) for name, function in changes]


def _ignore(name: str, activation: Tensor) -> None:
    """Ignore an activation, which the first process keeps."""


class InTurns:
    """The harvests of processes that share a model but have different rows: each process writes its
    own complete harvest, and all take part in all runs.

    Args:
        bridge: the bridge of the model.
    """

    def __init__(self, bridge: TransformerBridge) -> None:
        sharing = bridge.wiring.sharing
        turns = None if sharing is None else sharing.turns(self._join)
        assert turns is not None
        self._bridge, self._turns = bridge, turns
        #: The number of a run to the end; one that stops at a layer is 1 + that.
        self._full_run = bridge.cfg.n_layers + 2
        #: The number of gathering the weights.
        self._weights = bridge.cfg.n_layers + 3

    def weights(self) -> None:
        """Wait until all processes gather the weights."""
        self._turns.take(self._weights)
        self._turns.under_way = False

    @contextmanager
    def passing(self, model_pass: _ModelPass) -> Iterator[None]:
        """Wait until this pass is next, joining the other processes' passes until then; they take
        part in the pass that the body of the ``with`` runs.
        """
        stop = model_pass.stop_at_layer
        self._turns.take(self._full_run if stop is None else 1 + stop)
        yield
        self._turns.under_way = False

    def lead(self, harvest: Callable[[], Harvested]) -> Harvested:
        """Run the harvest, and then take part in the runs of the other processes, even after an
        error."""
        try:
            return harvest()
        finally:
            self._turns.end()

    def _join(self, number: int) -> None:
        if number == self._weights:
            of_model(self._bridge)
            return
        tokens = torch.zeros((1, 1), dtype=torch.long, device="cpu")
        stop = None if number == self._full_run else number - 1
        arguments = model_arguments(self._bridge, ())
        run(self._bridge, _ModelPass(tokens, None, (), stop, arguments), (), _ignore)


def together_of(bridge: TransformerBridge) -> Together | InTurns | None:
    """Return the communication of a harvest with other processes; None if this process holds the
    whole model.

    Args:
        bridge: the bridge of the model.
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
    torch.float16: pa.float16(),
    torch.float32: pa.float32(),
    torch.float64: pa.float64(),
    torch.int64: pa.int64(),
}


def column(tensor: Tensor) -> pa.Array:
    """Convert a tensor's rows to a column of nested fixed-size lists, one for each axis; a
    contiguous tensor is not copied.

    Args:
        tensor: ``[row, ...]``, on the CPU.
    """
    values = tensor.contiguous().reshape(-1).numpy()
    if tensor.dtype == torch.bool:
        array = pa.array(values)
    else:
        buffers = [None, pa.py_buffer(values)]
        array = pa.Array.from_buffers(_TYPES[tensor.dtype], len(values), buffers)
    for size in reversed(tensor.shape[1:]):
        kind = pa.list_(pa.field("item", array.type, nullable=False), size)
        array = pa.FixedSizeListArray.from_arrays(array, type=kind)
    return array


def out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that memory has run out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return "can't allocate memory" in text or "out of memory" in text


@dataclass(frozen=True)
class _Inputs:
    """The inputs of one forward pass.

    Attributes:
        tokens: ``[input, pos]``, right-padded.
        mask: 1 for tokens, 0 for padding; None without padding.
        taken: ``[row]``, the flat indices of the tokens that have rows.
        ids: ``[row]``, the columns that identify the origin of each row.
    """

    tokens: Tensor
    mask: Tensor | None
    taken: Tensor
    ids: dict[str, Array]

    @classmethod
    def of(cls, shard: ShardInput, chosen: Array, keep_special: bool) -> _Inputs:
        """Return some inputs of a shard.

        Args:
            shard: the shard.
            chosen: ``[input]``, the indices of the inputs.
            keep_special: whether BOS and separators have rows too.
        """
        lengths = shard.lengths[chosen]
        positions = np.arange(int(lengths.max()), dtype=np.int32)
        is_token = positions < lengths[:, None]
        starts = (np.cumsum(shard.lengths) - shard.lengths)[chosen]
        # The place of each token in the shard; padding has that of the first token.
        places = starts[:, None] + np.where(is_token, positions, 0)
        tokens = np.where(is_token, shard.tokens[places], 0).astype(np.int64)
        mask = None if is_token.all() else torch.from_numpy(is_token.astype(np.int64))
        has_row = is_token & (shard.positions[places] >= (-1 if keep_special else 0))
        rows = places[has_row]
        inputs, context_positions = np.nonzero(has_row)
        ids = {
            "document": shard.documents[rows],
            "position": shard.positions[rows],
            "token": shard.tokens[rows],
            "sequence": (shard.first_sequence + chosen[inputs]).astype(np.int64),
            "context_position": context_positions.astype(np.int32),
        }
        taken = torch.from_numpy(np.flatnonzero(has_row))
        return cls(torch.from_numpy(tokens), mask, taken, ids)

    def segments(self) -> Tensor:
        """Return ``[row]``, numbers that change whenever another document or input begins."""
        other_input = np.diff(self.ids["sequence"]) != 0
        other_document = np.diff(self.ids["document"]) != 0
        starts = np.r_[True, other_input | other_document][: len(self.taken)]
        return torch.from_numpy(np.cumsum(starts))


class RowMaker:
    """The maker of record batches from a shard's inputs.

    Args:
        bridge: the bridge, in evaluation mode.
        options: the options that determine the rows.
        batch_size: the number of full-length inputs in one forward pass. When memory runs out, it
            is halved permanently.
        together: the communication with other processes that share the model, which have to run
            each pass too; None without any.
        engine: the engine that runs the model instead of the bridge, or None.

    Attributes:
        points: the hook points' canonical names.
        model_seconds: time spent in the model so far.
        tokens_run: how many tokens of the shard under way were run.

    Raises:
        HarvestError: a hook point that cannot be harvested, or an option that does not fit the
            model.
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
        self.bridge, self.options, self.batch_size = bridge, options, batch_size
        self._together, self._engine = together, engine
        self.model_seconds = 0.0
        self.tokens_run = 0
        self._dtype = getattr(torch, options.dtype)
        self._find = find = bridge.names.find
        self._hooks = list(dict.fromkeys(find(name) for name in options.hook_points))
        self.points = [hook.name for hook in self._hooks]
        self._axes = {hook.name: _RowAxes.of(hook) for hook in self._hooks}
        self._stop = stop_layer(bridge, self._hooks)
        self._set_interventions()
        self._reduce = {find(name).name: reduction for name, reduction in options.reduce.items()}
        self._rows = options.rows
        self._check_choice_of_rows()
        self._check_context()
        self._check_bases()

    def _check_choice_of_rows(self) -> None:
        """Check that reductions and the choice of rows name harvested points."""
        unknown = [name for name in self._reduce if name not in self.points]
        if unknown:
            raise HarvestError(f"reduce names {', '.join(unknown)}, which hook_points does not")
        if isinstance(self._rows, TopPositions):
            point = self._find(self._rows.point).name
            if point not in self.points:
                raise HarvestError(f"rows looks at {point}, which hook_points does not name")
            self._rows = replace(self._rows, point=point)

    def _check_context(self) -> None:
        cfg, size = self.bridge.cfg, self.options.tokens.context_size
        longest, where = cfg.n_ctx, ""
        if self._engine is not None:
            longest, where = self._engine.longest, " in this engine: Engine(max_model_len=)"
        if longest is not None and size > longest:
            raise HarvestError(
                f"context_size is {size}; {cfg.model_name} has a context of {longest}{where}"
            )

    def _set_interventions(self) -> None:
        """Set the interventions by canonical names, and the arguments that fit all hook points."""
        self._interventions = _by_canonical_name(self.bridge, self.options.interventions)
        edited = [self._find(name) for name, _ in self._interventions]
        self._arguments = model_arguments(self.bridge, [*self._hooks, *edited])
        for hook in edited:
            if self._stop is not None and hook.point.depth >= self._stop:
                raise HarvestError(
                    f"the intervention at {hook.name} is behind every harvested hook point: it"
                    " would change nothing"
                )
        if self._engine is not None:
            self._engine.check(self._interventions, self.points)

    def _check_bases(self) -> None:
        """Encode six tokens with each basis: the features of one must not depend on the others.

        Raises:
            HarvestError: they do, so a row would depend on its batch.
        """
        sources = read_by(self._hooks)
        if not sources:
            return
        activations: dict[str, Tensor] = {}
        tokens = torch.arange(6, device="cpu").reshape(2, 3) % self.bridge.cfg.d_vocab
        hooks = [self._find(name) for name in {*sources.values()}]
        self._forward(tokens, None, hooks, activations.__setitem__)
        for hook, source in sources.items():
            x = activations[source]
            assert isinstance(hook.view, InBasis)
            features = dense(hook.view.encode(x))[0, 0]
            for factor in (0.0, 100.0):
                changed = x * factor
                changed[0, 0] = x[0, 0]
                again = dense(hook.view.encode(changed))[0, 0]
                if not torch.allclose(again, features, rtol=1e-4, atol=1e-6):
                    raise HarvestError(
                        f"{hook.name} mixes rows: its features of one token change with the other"
                        " tokens of a batch, and a harvest's rows must not depend on their batch"
                    )

    def batches(self, shard: ShardInput) -> Iterator[pa.RecordBatch]:
        """Yield the shard's rows, one forward pass at a time.

        Args:
            shard: the inputs.
        """
        cfg = self.bridge.cfg
        low, high = int(shard.tokens.min()), int(shard.tokens.max())
        if high >= cfg.d_vocab or low < 0:
            wrong = high if high > 0 else low
            raise HarvestError(f"a token id is {wrong}; {cfg.model_name} has {cfg.d_vocab} tokens")
        # Longest first: a batch has inputs of nearly one length, and the most memory is needed at
        # the beginning.
        order = np.argsort(-shard.lengths, kind="stable")
        start = 0
        self.tokens_run = 0
        while start < len(order):
            longest = int(shard.lengths[order[start]])
            count = max(1, self.batch_size * self.options.tokens.context_size // longest)
            chosen = order[start : start + count]
            batch = self._batch_or_none(shard, chosen)
            if batch is None:
                self.batch_size = max(1, min(self.batch_size, count) // 2)
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                continue
            start += len(chosen)
            self.tokens_run += int(shard.lengths[chosen].sum())
            if batch.num_rows:
                yield batch

    def _batch_or_none(self, shard: ShardInput, chosen: Array) -> pa.RecordBatch | None:
        """Return the rows of some inputs; None if memory ran out and fewer can be tried. This is a
        separate function because the error's traceback would keep the activations alive.
        """
        try:
            return self._batch(shard, chosen)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error) or len(chosen) == 1:
                raise
        return None

    def _batch(self, shard: ShardInput, chosen: Array) -> pa.RecordBatch:
        inputs = _Inputs.of(shard, chosen, self.options.keep_special)
        activations = self._run(inputs)
        rows = choose(self._rows, inputs.segments(), activations)
        kept = rows.kept.numpy()
        arrays: dict[str, pa.Array] = {}
        for name, kind in ID_COLUMNS.items():
            arrays[name] = pa.array(inputs.ids[name][kept], type=kind)
        for point in self.points:
            for name, values in self._columns(point, activations.pop(point), rows).items():
                arrays[name] = column(values)
        fields = [pa.field(name, array.type, nullable=False) for name, array in arrays.items()]
        return pa.RecordBatch.from_arrays(list(arrays.values()), schema=pa.schema(fields))

    def _run(self, inputs: _Inputs) -> dict[str, Tensor]:
        """Run the model and return each hook point's rows. Columns that need all rows together are
        computed later."""
        activations: dict[str, Tensor] = {}
        own_seconds = 0.0
        plain = self._rows == "all"

        def take(name: str, activation: Tensor) -> None:
            nonlocal own_seconds
            start = time.perf_counter()
            context_size = self.options.tokens.context_size
            rows = self._axes[name].rows(activation, inputs.taken, context_size)
            # Convert at once what needs no other activation: it is smaller afterwards.
            if plain and name not in self._reduce:
                rows = self._stored(name, rows)
            activations[name] = rows
            own_seconds += time.perf_counter() - start

        start = time.perf_counter()
        self._forward(inputs.tokens, inputs.mask, self._hooks, take)
        self.model_seconds += time.perf_counter() - start - own_seconds
        missing = [name for name in self.points if name not in activations]
        if missing:
            raise HarvestError(f"{', '.join(missing)} did not run in a forward pass of this model")
        return activations

    def _forward(
        self, tokens: Tensor, mask: Tensor | None, hooks: Sequence[HookPoint], take: Take
    ) -> None:
        """Run the model, also in the other processes that share it."""
        names = [hook.name for hook in hooks]
        model_pass = _ModelPass(tokens, mask, names, self._stop, self._arguments)
        edits = self._interventions
        if self._engine is not None:
            return run_engine(self._engine, model_pass, hooks, edits, take)
        passing: Any = nullcontext()
        if self._together is not None:
            passing = self._together.passing(model_pass)
        with passing:
            run(self.bridge, model_pass, edits, take)

    def _columns(self, name: str, activation: Tensor, rows: ChosenRows) -> dict[str, Tensor]:
        reduction = self._reduce.get(name)
        if self._rows == "all" and reduction is None:
            return {name: activation}  # stored already
        chosen = rows.apply(activation)
        columns = {name: chosen} if reduction is None else reduction.columns(name, chosen)
        return {title: self._stored(title, values) for title, values in columns.items()}

    def _stored(self, name: str, values: Tensor) -> Tensor:
        """Convert the values to the stored dtype, on the CPU.

        Raises:
            HarvestError: a number that the dtype cannot represent.
        """
        values = values.detach()
        if not values.is_floating_point():
            return values.to("cpu", torch.bool if values.dtype == torch.bool else torch.int64)
        stored = values.to(self._dtype)
        limit = torch.finfo(self._dtype).max
        if limit >= torch.finfo(values.dtype).max or not values.numel():
            return stored.cpu()
        low, high = values.aminmax()  # one pass over it, which nearly always settles it
        if not bool((low >= -limit) & (high <= limit)):
            too_large = stored.isinf() & values.isfinite()  # -inf is a masked score
            if bool(too_large.any()):
                value = float(values[too_large].abs().max())
                wider = "float32" if value <= torch.finfo(torch.float32).max else "float64"
                raise HarvestError(
                    f"{name} has a value of size {value:g}, which {self.options.dtype} cannot hold"
                    f" (it ends at {limit:g}): harvest with dtype={wider!r}"
                )
        return stored.cpu()
