"""`harvest`: activations of a model over documents, into a folder that any Arrow reader opens.

What comes in is a model (a bridge, or a name that each process loads for itself), a source of
documents, hook points and options. What goes out is a folder, here or in a store: a manifest, and
shards of rows that are equal byte for byte however often the call was broken off, and whichever
engine made them. In order:

1. `harvest` checks the options before anything is loaded. `fingerprint` makes a hash of all that
   decides a row: weights, tokenizer, options, the user's functions. A folder whose manifest has
   other hashes is refused with what differs.
2. `packing` reads the documents in their order, tokenizes them and packs them into the model's
   inputs, and cuts those into shards. A cursor says where in the source each shard ends, and a hash
   what was read until there, so that a call goes on behind the last whole shard without tokenizing
   what went before.
3. `rows` makes a shard's rows: it runs the model as far as the deepest hook point, takes each
   activation as it comes, takes away what pads it, chooses rows and reduces them (`options`).
4. `engines` hands shards to this process or to Ray's workers. All of them make rows with the same
   object.
5. `shards` writes: a file is whole before it is in its place, and a shard has a record with its
   size and checksum before it counts. When all are there, the manifest is written with the records
   in it: only then is the harvest complete.
6. The same call again looks at the names and sizes of the shards (at their checksums too, if
   asked), and makes again what is lost. `reading` compares each shard's checksum once, when it
   first opens it.

It refuses what would make rows differ without being seen: a model in training mode, hooks that
stand on the bridge, hook points without a row for each token, features that mix the rows of a
batch, numbers that the type cannot hold.

Nothing here knows of a family of models or of sites, and of views only bases: rows are what
`run_with_hooks` shows. Of other rooms it asks the bridge, its hook points and its bases, and no
room below knows of a harvest.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from bridge.arguments import TokenPositions, check_choice, positions_of, shown
from bridge.bridge import TransformerBridge
from bridge.harvest.engines import Done, Ran, WorkerPool, installed, run_local, run_ray
from bridge.harvest.fingerprint import (
    HarvestError,
    MixError,
    digest,
    of_folder,
    of_model,
    of_tokenizer,
)
from bridge.harvest.options import (
    DType,
    FileFormat,
    HarvestOptions,
    ModelSource,
    Reduction,
    Rows,
    Special,
    bos_id,
    check_kinds,
    check_number,
    special_id,
)
from bridge.harvest.packing import (
    START,
    Cursor,
    DocumentSource,
    Positions,
    ShardInput,
    SourceReader,
    Tokenization,
    as_source,
)
from bridge.harvest.rows import (
    Changes,
    Harvested,
    InTurns,
    Meter,
    RowMaker,
    Show,
    Together,
    together_of,
)
from bridge.harvest.shards import Data, Folder, Manifest, ShardRecord
from bridge.loading.loading import ModelFiles, tokenizer_of
from bridge.version import __version__

if TYPE_CHECKING:
    from bridge.engine import Engine as VLLMEngine

Engine = Literal["local", "ray"]
#: The libraries whose versions a manifest names.
_COMPUTES = ("torch", "transformers", "pyarrow", "numpy")
#: What makes shards and writes them, and reports each, and each batch.
Runs = Callable[[Iterator[ShardInput], Done, Ran], object]


def harvest(
    model: TransformerBridge | VLLMEngine | str,
    source: Any,
    *,
    hook_points: Sequence[str],
    out: str | os.PathLike[str],
    context_size: int = 128,
    dtype: DType = "float16",
    tokens_per_shard: int = 2**20,
    max_tokens: int | None = None,
    column: str = "text",
    prepend_bos: bool | None = None,
    separator: int | Special | None = None,
    pack: bool = True,
    keep_special: bool = True,
    positions: Positions | TokenPositions | None = None,
    rows: Rows = "all",
    reduce: Mapping[str, Reduction] | None = None,
    interventions: Changes = (),
    batch_size: int | None = None,
    device: torch.device | str | None = None,
    model_dtype: torch.dtype | str | None = None,
    tokenizer: Any = None,
    format: FileFormat = "arrow",
    engine: Engine = "local",
    workers: int = 2,
    address: str | None = None,
    cpus_per_worker: float = 1,
    gpus_per_worker: float = 0,
    progress: Show = None,
    checksums: bool = False,
) -> Harvested:
    """Run a model over documents and write activations, with ids that identify their tokens in the
    text.

    After an interruption, the same call continues from the complete shards. A finished harvest
    checks the names and sizes of its shards, and writes lost or truncated ones again. The model
    runs only up to the deepest hook point.

    Args:
        model: a bridge (in evaluation mode); an `Engine`, which runs it in vLLM, with the points
            that it offers; or a path or name, which is loaded when needed ("embedded": the model in
            the package).
        source: a list or an iterator of texts, chats or rows of token ids; a tensor of tokens
            ``[document, pos]``; `Files`, a `pathlib.Path` or several; a Hugging Face data set,
            whole or streaming; a Ray data set. A call that continues a harvest needs the same
            documents in the same order; pass an iterator from its beginning.
        hook_points: names or aliases of points that have a row for each token (an axis ``pos`` or
            ``key_pos``).
        out: the folder, or the URL of one in a store that fsspec knows, such as
            ``s3://bucket/acts``.
        context_size: the maximum number of tokens in one input of the model.
        dtype: the dtype in which floating-point activations are stored. A value that it cannot
            represent is an error.
        tokens_per_shard: a shard ends with the input that reaches this many tokens.
        max_tokens: end with the input that reaches this many tokens; None: the whole source.
        column: the column with texts or token ids in JSONL, Parquet and data sets.
        prepend_bos: start every input with BOS; None: the bridge's default for texts.
        separator: a token added after every document: an id, or the name of one of the tokenizer's
            special tokens ("eos", "bos", "sep", ...).
        pack: fill each input with several documents; False: each input has one document, and inputs
            of similar length share a batch. Padding is never written.
        keep_special: write rows for BOS and separators too.
        positions: the tokens whose rows are written, by their positions in each document, such as
            `Spans`; for chats it may be a function from the `Spans` of each to some of them. None:
            all.
        rows: ``"all"`` tokens; or one row for each document in an input, the ``"mean"`` of its
            tokens or the ``"last"`` one; or `TopPositions`.
        reduce: by hook point, a reduction of its activation: `Project`, `TopK`, or an object with
            the same two methods.
        interventions: pairs of a hook point and a hook function, active in every run.
        batch_size: inputs of full length in one forward pass; None: about 4,096 tokens on a CPU,
            32,768 elsewhere. It is halved when memory runs out.
        device, model_dtype: for a model that is loaded by name; None: Hugging Face's default.
        tokenizer: for texts; None: the bridge's or the model's own.
        format: ``"arrow"`` (IPC files, memory-mapped when read) or ``"parquet"``.
        engine: ``"local"``: this process; ``"ray"``: a pool of Ray actors. Each can continue a
            harvest that the other began.
        workers, address, cpus_per_worker, gpus_per_worker: for Ray; without an address, a cluster
            on this machine is used.
        progress: True for a progress bar, False for none; None: one if this is a terminal. A
            function is called with a `Progress` after each batch, and after each shard (with Ray,
            after each shard alone).
        checksums: also read every existing shard, and write damaged ones again.

    Returns:
        A report of the harvest.

    Raises:
        HarvestError: an option, source or hook point that cannot be harvested.
        MixError: the folder holds a harvest of another model, tokenizer or option.
        WriteError: the disk is full, or the system refused to write.
        UnknownHookError: a name that no hook point has.
        TypeError: an argument that is not a model, or not a number.

    Example:
        >>> import tempfile
        >>> from bridge.harvest import harvest
        >>> points = ["blocks.2.hook_resid_post"]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = harvest("embedded", ["Mary and John"], hook_points=points, out=folder)
        >>> report.rows
        4
    """
    check_choice("engine", engine, get_args(Engine), HarvestError)
    check_number("workers", workers, 1)
    check_number("context_size", context_size, 2)
    check_kinds(hook_points, interventions, reduce, prepend_bos, pack, keep_special, checksums)
    # BOS may depend on the model, which is not loaded yet; the separator on its tokenizer.
    options = HarvestOptions(
        tuple(hook_points),
        Tokenization(context_size, None, None, pack, _checked_positions(positions)),
        dtype,
        tokens_per_shard,
        max_tokens,
        keep_special,
        rows,
        dict(reduce or {}),
        tuple(interventions),
        batch_size,
        format,
    )
    pool = _pool(engine, workers, cpus_per_worker, gpus_per_worker, address)
    spec = ModelSource.of(model, device, model_dtype)
    together = _together(spec, pool)
    if tokenizer is None:
        tokenizer = _tokenizer(spec)
    documents = as_source(source, column)
    folder = Folder(out)
    call = _Call(
        spec,
        options.with_special(separator=special_id(tokenizer, separator)),
        documents,
        tokenizer,
        prepend_bos,
        folder,
        pool,
        progress,
        together,
        checksums,
    )
    return call.start()


def _checked_positions(positions: Positions | TokenPositions | None) -> Positions | None:
    """Return the positions whose rows are written.

    Raises:
        HarvestError: they are neither positions from 0 on nor a function.
    """
    chosen = positions_of(positions)
    if chosen is None or callable(chosen):
        return chosen  # type: ignore[no-any-return]
    is_list = isinstance(chosen, Sequence) and not isinstance(chosen, str)
    if not is_list or not chosen or any(type(x) is not int or x < 0 for x in chosen):
        raise HarvestError(
            f"positions is {shown(positions)}; it must be positions from 0 on, spans of a chat, or"
            " a function from a chat's spans to some of them"
        )
    return list(chosen)


def _pool(
    engine: Engine, workers: int, cpus: float, gpus: float, address: str | None
) -> WorkerPool | None:
    """Return Ray's workers; None for this process."""
    if engine == "local":
        return None
    installed()
    return WorkerPool(workers, cpus, gpus, address)


def _together(spec: ModelSource, pool: WorkerPool | None) -> Together | InTurns | None:
    """Return the communication with other processes that run the model; None for a model in one
    process.

    Raises:
        HarvestError: a Ray worker cannot load such a model.
    """
    together = None if spec.bridge is None else together_of(spec.bridge)
    if pool is not None and not (together is None is spec.engine):
        where = "shared by several" if spec.engine is None else "in vLLM"
        raise HarvestError(
            f"a worker of Ray is one process, and this model is {where}: engine='local'"
        )
    return together


@dataclass(frozen=True)
class _Call:
    """A call of `harvest`, in the process that writes. Its options do not contain the BOS id
    yet."""

    model: ModelSource
    options: HarvestOptions
    source: DocumentSource
    tokenizer: Any
    prepend_bos: bool | None
    folder: Folder
    pool: WorkerPool | None
    progress: Show
    together: Together | InTurns | None
    checksums: bool

    def start(self) -> Harvested:
        """Run the harvest, or take part in the first process's."""
        together, bridge = self.together, self.model.bridge
        if together is None:
            return self.run()
        if isinstance(together, InTurns) or together.leads:
            return together.lead(self.run)
        assert bridge is not None
        return together.follow(bridge, self.options.interventions)

    def run(self) -> Harvested:
        """Write the missing shards."""
        start, folder = time.perf_counter(), self.folder
        quick, files_known = self._quick()
        meter: Meter | None = None
        with folder.locked():
            manifest = folder.manifest()
            lost: Collection[str] = ()
            if manifest is not None:
                lost = folder.problems(manifest.shards, self.checksums)
            finished = manifest is not None and manifest.complete and not lost
            maker: RowMaker | None = None
            if manifest is None or not (finished and files_known and manifest.quick == quick):
                maker, planned = self._plan(manifest, quick)
                manifest = self._begin(manifest, planned, lost)
            if maker is None or finished:
                _check_source(manifest, self.source)
            else:
                options = maker.options
                run = self._engine(maker, str(manifest.model["weights"]))
                del maker  # Ray's workers have their own
                reader = SourceReader(self.source, self.tokenizer, options.tokens)
                meter = self._write(manifest, reader, options, run)
                _finish(folder, manifest, reader, options.max_tokens)
        return _report(folder, manifest, meter, time.perf_counter() - start)

    def _begin(
        self, manifest: Manifest | None, planned: Manifest, lost: Collection[str]
    ) -> Manifest:
        """Return the manifest to continue: a new one, or the folder's without lost shards.

        Raises:
            HarvestError: the folder holds other files.
            MixError: it holds another harvest.
        """
        folder = self.folder
        if manifest is None:
            if files := folder.strange():
                raise HarvestError(
                    f"{folder.path} has no manifest of a harvest and is not empty (it has"
                    f" {files[0]}): give an empty or a new folder for `out`"
                )
            folder.write(planned, new=True)
            return planned
        _check_same(folder, manifest, planned)
        if manifest.complete and not lost:
            return manifest
        records = [record for record in manifest.shards if record.file not in lost]
        if manifest.complete:
            folder.reopen(manifest)
        folder.clean(records)
        manifest.shards = records
        return manifest

    @property
    def _on_gpus(self) -> bool:
        return self.pool is not None and self.pool.gpus > 0

    def _quick(self) -> tuple[Data, bool]:
        """Return a fingerprint that is computed without loading the model, and whether it includes
        the model's files."""
        spec, options = self.model, self.options
        files = None if spec.folder is None else of_folder(spec.folder)
        described = options.describe(options.hook_points, options.batch_size or 0, "")
        quick = {
            "model": [spec.path, spec.device, spec.dtype, files, self._on_gpus],
            "asked": digest(json.dumps([described, self.prepend_bos])),
            "tokenizer": None if self.tokenizer is None else of_tokenizer(self.tokenizer),
        }
        return quick, files is not None

    def _plan(self, manifest: Manifest | None, quick: Data) -> tuple[RowMaker, Manifest]:
        """Load the model; return the maker of its rows, and the manifest of a new harvest."""
        spec, engine, options = self.model, self.model.engine, self.options
        bridge = (replace(spec, device=None) if self._on_gpus else spec).load()
        kind = torch.device(bridge.cfg.device).type
        if engine is not None:
            kind = engine.device
        if self._on_gpus:
            kind = "cuda"
        batch_size = options.batch_size
        if batch_size is None:
            batch_size = options.usual_batch_size(kind)
            if manifest is not None:
                batch_size = int(manifest.options.get("batch_size", batch_size))
        bos = bos_id(self.tokenizer, self.prepend_bos, bridge.cfg.default_prepend_bos)
        options = options.with_special(bos=bos)
        maker = RowMaker(bridge, options, batch_size, self.together, engine)
        if self.together is not None:
            self.together.weights()
        source = self.source
        planned = Manifest(
            model=_describe_model(bridge, engine),
            tokenizer=quick["tokenizer"],
            options=options.describe(maker.points, batch_size, kind),
            versions=_versions(),
            source={"description": source.description, "identity": source.identity, "end": None},
            quick=quick,
        )
        return maker, planned

    def _engine(self, maker: RowMaker, weights: str) -> Runs:
        """Return the function that makes and writes shards."""
        options, pool = maker.options, self.pool
        if pool is None:
            return partial(run_local, maker, self.folder, options.format)
        return partial(run_ray, pool, self.model, options, maker.batch_size, self.folder, weights)

    def _write(
        self, manifest: Manifest, reader: SourceReader, options: HarvestOptions, run: Runs
    ) -> Meter:
        """Write the missing shards, and add them to the manifest.

        Args:
            manifest: the manifest, with the shards on disk.
            reader: reads the source.
            options: the options of the harvest.
            run: makes and writes shards, and reports each.

        Raises:
            HarvestError: the source has changed, or is empty.
        """
        records = {record.index: record for record in manifest.shards}
        after, index, sequence, tokens = _resume_at(records)
        workers = 1 if self.pool is None else self.pool.workers
        most = None if options.max_tokens is None else options.max_tokens - tokens
        meter = Meter(self.progress, self.source.total, after.documents, workers, most)
        ended = manifest.source["end"] is not None
        shards = _Shards(self.folder.records(), records, meter, ended, index)
        inputs: Iterable[ShardInput] = ()
        if most is None or most > 0:
            inputs = reader.shards(options.tokens_per_shard, after, index, sequence, most)
        try:
            run(shards.missing(inputs), shards.add, meter.ran)
        finally:
            meter.close()
        shards.check_end()
        if not records:
            raise HarvestError(f"the source ({self.source.description}) has no tokens")
        manifest.shards = [records[number] for number in sorted(records)]
        return meter


def _versions() -> dict[str, str]:
    versions = {name: import_module(name).__version__ for name in _COMPUTES}
    return {"transformer-bridge": __version__, **versions}


def _describe_model(bridge: TransformerBridge, engine: VLLMEngine | None) -> Data:
    """Return a model's entry in the manifest.

    An engine's bridge has no weights, so its weights are hashed in the engine. Its rows, which
    differ in rounding, must not be mixed with rows from a run of the bridge.
    """
    model: Data = {"name": bridge.cfg.model_name, **of_model(bridge)}
    if engine is not None:
        model |= {"weights": engine.weights(), "engine": "vllm"}
    return model


@dataclass
class _Shards:
    """The shards of a harvest: their records, and a check that the source is still the same.

    Attributes:
        expected: the records of the shards on disk, and of lost ones.
        records: the records of the shards on disk.
        meter: counts new shards.
        source_ended: whether an earlier call reached the source's end.
        end: the number of shards that the source has so far.
    """

    expected: dict[int, ShardRecord]
    records: dict[int, ShardRecord]
    meter: Meter
    source_ended: bool
    end: int

    def add(self, record: ShardRecord, seconds: float) -> None:
        """Count a shard that was written."""
        self.records[record.index] = record
        before = self.expected.get(record.index)
        if before is not None and before.checksum != record.checksum:
            warnings.warn(
                f"{record.file} was lost, and is made again with other bytes: it was made with"
                " other versions, threads or batches",
                stacklevel=2,
            )
        self.meter.add(record.tokens, record.documents, seconds)

    def missing(self, shards: Iterable[ShardInput]) -> Iterator[ShardInput]:
        """Yield the shards that are not on disk; check the others' tokens."""
        on_disk = frozenset(self.records)
        for shard in shards:
            record = self.expected.get(shard.index)
            self.end = shard.index + 1
            if record is not None and record.input != shard.fingerprint():
                raise HarvestError(
                    f"the source is another than the one that {record.file} was made from. "
                    "Give the same source, or another folder for `out`."
                )
            if record is None and self.source_ended:
                raise HarvestError(
                    f"the source has more than the {len(self.expected)} shards that were made from"
                    " it: it is another than before. Give the same source, or another folder for"
                    " `out`."
                )
            if shard.index not in on_disk:
                yield shard

    def check_end(self) -> None:
        """Check that the source has all expected shards."""
        last = max(self.expected, default=-1)
        if last >= self.end:
            raise HarvestError(
                f"the source ends before {self.expected[last].file}, which was made from it: it is"
                " another than before. Give the same source, or another folder for `out`."
            )


def _tokenizer(spec: ModelSource) -> Any:
    """Return the tokenizer of a bridge, or of a model that is not loaded yet; None without one."""
    if spec.bridge is not None:
        return spec.bridge.tokenizer
    assert spec.path is not None
    return tokenizer_of(ModelFiles(spec.path, {}, {}), progress=False)


def _check_same(folder: Folder, old: Manifest, new: Manifest) -> None:
    """Check that a call continues the same harvest.

    Raises:
        MixError: something differs; the message says what.
    """
    compared: list[tuple[str, object, object]] = []
    for name in sorted({*old.model, *new.model} - {"name"}):
        compared.append((f"model {name}", old.model.get(name), new.model.get(name)))
    options = json.loads(json.dumps(new.options))
    for name in sorted({*old.options, *options}):
        compared.append((name, old.options.get(name), options.get(name)))
    compared.append(("tokenizer", old.tokenizer, new.tokenizer))
    differences = [(name, before, now) for name, before, now in compared if before != now]
    if differences:
        raise MixError(str(folder.path), differences)


def _resume_at(records: dict[int, ShardRecord]) -> tuple[Cursor, int, int, int]:
    """Return the place in the source where the complete shards first have a gap, and the numbers of
    the next shard, input and token.
    """
    after = START
    index = sequence = tokens = 0
    while index in records:
        record = records[index]
        after = Cursor(record.documents, record.offset, record.source)
        sequence += record.sequences
        tokens += record.tokens
        index += 1
    return after, index, sequence, tokens


def _finish(
    folder: Folder, manifest: Manifest, reader: SourceReader, max_tokens: int | None
) -> None:
    total = sum(record.tokens for record in manifest.shards)
    cut = max_tokens is not None and total >= max_tokens
    last = manifest.shards[-1]
    end = Cursor(last.documents, last.offset, last.source) if cut else reader.end
    manifest.source["end"] = {"documents": end.documents, "source": end.source, "whole": not cut}
    manifest.complete = True
    folder.write(manifest)
    for record in manifest.shards:
        folder.remove(record.note)


def _check_source(manifest: Manifest, source: DocumentSource) -> None:
    """Check that the source is the one of the finished harvest."""
    identity = json.loads(json.dumps(source.identity))
    if identity is not None and identity == manifest.source["identity"]:
        return
    end = manifest.source["end"]
    reader = SourceReader(source, None, Tokenization(2, None, None, True))
    reader.check(Cursor(end["documents"], 0, end["source"]), end["whole"])


def _report(folder: Folder, manifest: Manifest, meter: Meter | None, seconds: float) -> Harvested:
    shards, speed, share = 0, 0.0, 0.0
    if meter is not None:
        progress = meter.now()
        shards, speed, share = progress.shards, progress.tokens_per_second, progress.model_share
    return Harvested(
        folder.path,
        len(manifest.shards),
        **manifest.totals(),
        made=shards,
        seconds=seconds,
        tokens_per_second=speed,
        model_share=share,
    )
