"""`harvest`: activations of a model over documents, into a folder that any Arrow reader opens.

What comes in is a model (a bridge, or a name that each process loads for itself), a source of documents, hook points
and options. What goes out is a folder, here or in a store: a manifest, and shards of rows that are equal byte for
byte however often the call was broken off, and whichever engine made them. In order:

1. `harvest` checks the options before anything is loaded. `fingerprint` makes a hash of all that decides a row:
   weights, tokenizer, options, the user's functions. A folder whose manifest has other hashes is refused with what
   differs.
2. `packing` reads the documents in their order, tokenizes them and packs them into the model's inputs, and cuts those
   into shards. A cursor says where in the source each shard ends, and a hash what was read until there, so that a
   call goes on behind the last whole shard without tokenizing what went before.
3. `rows` makes a shard's rows: it runs the model as far as the deepest hook point, takes each activation as it comes,
   takes away what pads it, chooses rows and reduces them (`options`).
4. `engines` hands shards to this process or to Ray's workers. All of them make rows with the same object.
5. `shards` writes: a file is whole before it is in its place, and a shard has a record with its size and checksum
   before it counts. When all are there, the manifest is written with the records in it: only then is the harvest
   complete.
6. The same call again looks at the names and sizes of the shards (at their checksums too, if asked), and makes again
   what is lost. `reading` compares each shard's checksum once, when it first opens it.

It refuses what would make rows differ without being seen: a model in training mode, hooks that stand on the bridge,
hook points without a row for each token, features that mix the rows of a batch, numbers that the type cannot hold.

Nothing here knows of a family of models or of sites, and of views only bases: rows are what `run_with_hooks` shows.
Of other rooms it asks the bridge, its hook points and its bases, and no room below knows of a harvest.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import torch

from bridge.bridge import TransformerBridge
from bridge.harvest.engines import WorkerPool, installed, run_local, run_ray
from bridge.harvest.fingerprint import HarvestError, MixError, digest, of_folder, of_model, of_tokenizer
from bridge.harvest.options import (
    DType,
    FileFormat,
    HarvestOptions,
    ModelSource,
    Reduction,
    Rows,
    Special,
    TopPositions,
    bos_id,
    check_choice,
    check_kinds,
    check_number,
    special_id,
)
from bridge.harvest.packing import START, Cursor, DocumentSource, ShardInput, SourceReader, Tokenization, as_source
from bridge.harvest.rows import Changes, Harvested, InTurns, Meter, Progress, RowMaker, Show, Together, together_of
from bridge.harvest.shards import Data, Folder, Manifest, ShardRecord
from bridge.loading.loading import ModelFiles, tokenizer_of
from bridge.version import __version__

if TYPE_CHECKING:
    from bridge.engine import Engine as VLLMEngine

Engine = Literal["local", "ray"]
#: The libraries whose versions a manifest names.
_COMPUTES = ("torch", "transformers", "pyarrow", "numpy")
#: What makes shards and writes them, and tells of each that is whole.
Runs = Callable[[Iterator[ShardInput], Callable[[ShardRecord, float], None]], object]


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
    progress: Show = False,
    checksums: bool = False,
) -> Harvested:
    """Runs a model over documents and writes activations, with ids that lead back to the text.

    A call that was interrupted, in whatever way, goes on from its whole shards when it is made again; one that is
    finished returns when the names and sizes of its shards were looked at, and makes again what is lost or cut short.
    The model runs only as far as the deepest hook point.

    Args:
        model: a bridge (in evaluation mode); an `Engine`, which runs it in vLLM, at points that it offers; or a path or
            name, which is loaded where it is needed ("embedded": the model in the package).
        source: a list or an iterator of texts or rows of token ids; a tensor of tokens ``[document, pos]``; `Files`,
            a `pathlib.Path` or several; a Hugging Face data set, whole or streaming; a Ray data set. A call that goes
            on needs the same documents in the same order, an iterator from its beginning.
        hook_points: names or aliases of points that have a row for each token (an axis ``pos`` or ``key_pos``).
        out: the folder, or the URL of one in a store that fsspec knows, such as ``s3://bucket/acts``.
        context_size: tokens in one input of the model, at most.
        dtype: what floating-point activations are stored as. A value that it cannot hold is an error.
        tokens_per_shard: a shard ends with the input that reaches this many tokens.
        max_tokens: end with the input that reaches this many tokens; None: the whole source.
        column: where the texts or token ids stand in JSONL, Parquet and data sets.
        prepend_bos: start every input with BOS; None: as the bridge does with texts.
        separator: a token behind every document: an id, or a name of one of the tokenizer's ("eos", "bos", "sep", ...).
        pack: inputs hold one document after another and are full; False: each is of one document, and those of nearly
            one length run together. Padding is never written.
        keep_special: write rows for BOS and separators too.
        rows: ``"all"`` tokens; or one row for each document in an input, ``"mean"`` of its tokens or the ``"last"`` of
            them; or `TopPositions`.
        reduce: for a hook point, what is made of its activation: `Project`, `TopK`, or what has the same two methods.
        interventions: pairs of a hook point and a hook function, active in every run.
        batch_size: inputs of full length in one forward pass; None: about 4,096 tokens on a CPU, 32,768 elsewhere. It
            is halved when memory runs out.
        device, model_dtype: for a model that is loaded by name; None: as Hugging Face chooses.
        tokenizer: for texts; None: the bridge's or the model's own.
        format: ``"arrow"`` (IPC files, memory-mapped when read) or ``"parquet"``.
        engine: ``"local"``: this process; ``"ray"``: a pool of Ray actors. Either continues what the other began.
        workers, address, cpus_per_worker, gpus_per_worker: for Ray; without an address a cluster on this machine.
        progress: True for a line on the terminal; a function is called with a `Progress` after each shard.
        checksums: read every shard that is there, too, and make those again that are damaged.

    Returns:
        What was made.

    Raises:
        HarvestError: an option, source or hook point that cannot be harvested.
        MixError: the folder holds a harvest of another model, tokenizer or option.
        WriteError: the disk is full, or the system refused to write.
        UnknownHookError: a name that no hook point has.
        TypeError: a model that is none, or a number that is none.

    Example:
        >>> import tempfile
        >>> from bridge.harvest import harvest
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = harvest("embedded", ["Mary and John"], hook_points=["blocks.2.hook_resid_post"], out=folder)
        >>> report.rows
        4
    """
    for name, choice, choices in (("dtype", dtype, DType), ("format", format, FileFormat), ("engine", engine, Engine)):
        check_choice(name, choice, choices)
    for name, number in (("tokens_per_shard", tokens_per_shard), ("workers", workers)):
        check_number(name, number, 1)
    for name, given in (("max_tokens", max_tokens), ("batch_size", batch_size)):
        check_number(name, given, 1, none=True)
    check_number("context_size", context_size, 2)
    if not isinstance(rows, TopPositions):
        check_choice("rows", rows, Literal["all", "mean", "last"])
    check_kinds(hook_points, interventions, reduce, prepend_bos, pack, keep_special, checksums)
    if not hook_points:
        raise HarvestError(f"hook_points is {hook_points!r}; it must be a list with at least one name")
    if engine == "ray":
        installed()
    spec = ModelSource.of(model, device, model_dtype)
    together = None if spec.bridge is None else together_of(spec.bridge)
    if engine == "ray" and not (together is None is spec.engine):
        where = "shared by several" if spec.engine is None else "in vLLM"
        raise HarvestError(f"a worker of Ray is one process, and this model is {where}: engine='local'")
    tokenizer = tokenizer if tokenizer is not None else _tokenizer(spec)
    reader_source = as_source(source, column)
    separator_id = special_id(tokenizer, separator)
    # BOS may depend on the model: what was asked for is known before that is loaded.
    asked = HarvestOptions(
        tuple(hook_points), Tokenization(context_size, None, separator_id, pack), dtype, tokens_per_shard, max_tokens,
        keep_special, rows, dict(reduce or {}), tuple(interventions), batch_size, format,
    )  # fmt: skip
    files = None if spec.folder is None else of_folder(spec.folder)
    gpus = engine == "ray" and gpus_per_worker > 0
    quick = {
        "model": [spec.path, spec.device, spec.dtype, files, gpus],
        "asked": digest(json.dumps([asked.describe(asked.hook_points, batch_size or 0, ""), prepend_bos])),
        "tokenizer": None if tokenizer is None else of_tokenizer(tokenizer),
    }
    pool = WorkerPool(workers, cpus_per_worker, gpus_per_worker, address) if engine == "ray" else None
    made = partial(
        _harvested,
        spec,
        asked,
        reader_source,
        tokenizer,
        prepend_bos,
        Folder(out),
        quick,
        pool,
        progress,
        together,
        checksums,
    )
    if together is None:
        return made()
    if isinstance(together, InTurns) or together.leads:
        return together.lead(made)
    assert spec.bridge is not None
    return together.follow(spec.bridge, interventions)


def _harvested(
    spec: ModelSource, asked: HarvestOptions, source: DocumentSource, tokenizer: Any, prepend_bos: bool | None,
    folder: Folder, quick: Data, pool: WorkerPool | None,
    progress: Show, together: Together | InTurns | None, checksums: bool,
) -> Harvested:  # fmt: skip
    """What `harvest` does in the process that writes."""
    began, gpus, known = time.perf_counter(), bool(pool and pool.gpus > 0), quick["model"][3] is not None
    with folder.locked():
        manifest = folder.manifest()
        lost = set() if manifest is None else folder.lost(manifest.shards, checksums)
        if manifest is not None and manifest.complete and not lost and known and manifest.quick == quick:
            _check_source(manifest, source)
            return _report(folder, manifest, 0, time.perf_counter() - began, None)
        bridge = (replace(spec, device=None) if gpus else spec).load()
        kind = "cuda" if gpus else torch.device(bridge.cfg.device).type if spec.engine is None else spec.engine.device
        batch_size = asked.batch_size
        if batch_size is None:
            batch_size = asked.usual_batch_size(kind)
            if manifest is not None:
                batch_size = int(manifest.options.get("batch_size", batch_size))
        bos = bos_id(tokenizer, prepend_bos, bridge.cfg.default_prepend_bos)
        options = replace(asked, tokens=replace(asked.tokens, bos=bos))
        maker = RowMaker(bridge, options, batch_size, together, spec.engine)
        if together is not None:
            together.weights()
        planned = _manifest(spec.engine, bridge, maker, options, batch_size, kind, quick, source)
        if manifest is None:
            _refuse_foreign(folder)
            manifest = planned
            folder.write(manifest, new=True)
        else:
            _refuse_mixing(folder, manifest, planned)
            if manifest.complete and not lost:
                _check_source(manifest, source)
                return _report(folder, manifest, 0, time.perf_counter() - began, None)
            whole = [record for record in manifest.shards if record.index not in lost]
            if manifest.complete:
                folder.reopen(manifest)
            folder.clean(whole)
            manifest.shards = whole
        weights = str(planned.model["weights"])
        if pool is not None and spec.bridge is None:
            del bridge, maker  # the workers have their own
        reader = SourceReader(source, tokenizer, options.tokens)
        if pool is None:
            run: Runs = partial(run_local, maker, folder, options.format)
        else:
            run = partial(run_ray, pool, spec, options, batch_size, folder, weights)
        meter = _write(manifest, folder.records(), reader, options, progress, 1 if pool is None else pool.workers, run)
        _finish(folder, manifest, reader, options.max_tokens)
    return _report(folder, manifest, meter.shards, time.perf_counter() - began, meter.now())


def _write(
    manifest: Manifest,
    expected: dict[int, ShardRecord],
    reader: SourceReader,
    options: HarvestOptions,
    progress: Show,
    workers: int,
    run: Runs,
) -> Meter:
    """Writes the shards that are not there yet, and puts them into the manifest.

    Args:
        manifest: of the folder, with the shards that are there.
        expected: what is known of those that are there, and of those that are lost.
        reader: reads the source.
        options: of the harvest.
        progress: who is told of it.
        workers: how many run.
        run: makes and writes shards, and tells of each.

    Raises:
        HarvestError: the source is another than before, or empty.
    """
    whole = {record.index: record for record in manifest.shards}
    after, index, sequence, tokens = _resume_at(whole)
    meter = Meter(progress, reader.source.total, after.documents, workers)

    def done(record: ShardRecord, seconds: float) -> None:
        whole[record.index] = record
        if (before := expected.get(record.index)) is not None and before.checksum != record.checksum:
            warnings.warn(
                f"{record.file} was lost, and is made again with other bytes: it was made with other versions, threads "
                "or batches",
                stacklevel=2,
            )
        meter.add(record.tokens, record.documents, seconds)

    most = None if options.max_tokens is None else options.max_tokens - tokens
    known, ended, finished = frozenset(whole), index, manifest.source["end"] is not None
    left = most is None or most > 0
    given = reader.shards(options.tokens_per_shard, after, index, sequence, most) if left else iter(())

    def missing() -> Iterator[ShardInput]:
        """The shards that are not there yet, if those that are there are of the same tokens."""
        nonlocal ended
        for shard in given:
            record, ended = expected.get(shard.index), shard.index + 1
            if record is not None and record.input != shard.fingerprint():
                raise HarvestError(
                    f"the source is another than the one that {record.file} was made from. "
                    "Give the same source, or another folder for `out`."
                )
            if record is None and finished:
                raise HarvestError(
                    f"the source has more than the {len(expected)} shards that were made from it: it is another than "
                    "before. Give the same source, or another folder for `out`."
                )
            if shard.index not in known:
                yield shard

    try:
        run(missing(), done)
    finally:
        meter.close()
    if (last := max(expected, default=-1)) >= ended:
        raise HarvestError(
            f"the source ends before {expected[last].file}, which was made from it: it is another than before. "
            "Give the same source, or another folder for `out`."
        )
    if not whole:
        raise HarvestError(f"the source ({reader.source.description}) has no tokens")
    manifest.shards = [whole[number] for number in sorted(whole)]
    return meter


def _tokenizer(spec: ModelSource) -> Any:
    """The tokenizer of a bridge or of a model that is not loaded yet; None where there is none."""
    if spec.bridge is not None:
        return spec.bridge.tokenizer
    assert spec.path is not None
    return tokenizer_of(ModelFiles(spec.path, {}, {}), progress=False)


def _manifest(
    ran: VLLMEngine | None, bridge: TransformerBridge, maker: RowMaker, options: HarvestOptions, batch_size: int,
    device: str, quick: Data, source: DocumentSource,
) -> Manifest:  # fmt: skip
    return Manifest(
        # An engine's bridge has no weights; and its rows are not put beside those of a run, which differ in rounding.
        model={
            "name": bridge.cfg.model_name,
            **of_model(bridge),
            **({} if ran is None else {"weights": ran.weights(), "engine": "vllm"}),
        },
        tokenizer=quick["tokenizer"],
        options=options.describe(maker.points, batch_size, device),
        versions={"transformer-bridge": __version__, **{name: import_module(name).__version__ for name in _COMPUTES}},
        source={"description": source.description, "identity": source.identity, "end": None},
        quick=quick,
    )


def _refuse_foreign(folder: Folder) -> None:
    if there := folder.strange():
        raise HarvestError(
            f"{folder.path} has no manifest of a harvest and is not empty (it has {there[0]}): "
            "give an empty or a new folder for `out`"
        )


def _refuse_mixing(folder: Folder, old: Manifest, new: Manifest) -> None:
    """Refuses to continue a harvest of something else.

    Raises:
        MixError: something differs; it says what.
    """
    differences: list[tuple[str, object, object]] = []
    new_options = json.loads(json.dumps(new.options))
    for part, before, now in (("model", old.model, new.model), ("", old.options, new_options)):
        for name in sorted(set(before) | set(now)):
            if (part, name) != ("model", "name") and before.get(name) != now.get(name):
                differences.append((f"{part} {name}".strip(), before.get(name), now.get(name)))
    if old.tokenizer != new.tokenizer:
        differences.append(("tokenizer", old.tokenizer, new.tokenizer))
    if differences:
        raise MixError(str(folder.path), differences)


def _resume_at(whole: dict[int, ShardRecord]) -> tuple[Cursor, int, int, int]:
    """Behind the first whole shards that no other is missing between: the place, the next shard, input and token."""
    after, sequence, tokens, index = START, 0, 0, 0
    while index in whole:
        record = whole[index]
        after = Cursor(record.documents, record.offset, record.source)
        sequence, tokens, index = sequence + record.sequences, tokens + record.tokens, index + 1
    return after, index, sequence, tokens


def _finish(folder: Folder, manifest: Manifest, reader: SourceReader, max_tokens: int | None) -> None:
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
    """Refuses another source than the one that a finished harvest is of."""
    identity = json.loads(json.dumps(source.identity))
    if identity is not None and identity == manifest.source["identity"]:
        return
    end = manifest.source["end"]
    SourceReader(source, None, Tokenization(2, None, None, True)).check(
        Cursor(end["documents"], 0, end["source"]), end["whole"]
    )


def _report(folder: Folder, manifest: Manifest, made: int, seconds: float, progress: Progress | None) -> Harvested:
    speed, share = (0.0, 0.0) if progress is None else (progress.tokens_per_second, progress.model_share)
    return Harvested(
        folder.path, len(manifest.shards), **manifest.totals(), made=made, seconds=seconds, tokens_per_second=speed,
        model_share=share,
    )  # fmt: skip
