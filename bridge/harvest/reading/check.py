"""Whether a harvest's folder holds what its manifest says."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from bridge.harvest.shards import ShardFile
from bridge.harvest.storage import Folder, ShardRecord
from bridge.hooks.arguments import refuse_wrong_types


@dataclass
class Check:
    """What was found.

    Attributes:
        path: the folder.
        complete: whether the harvest is finished.
        shards, rows, size: of the whole shards (size in bytes).
        problems: what is wrong, in words.
    """

    path: Path
    complete: bool
    shards: int
    rows: int
    size: int
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether everything is there, and as it was written."""
        return self.complete and not self.problems

    def __str__(self) -> str:
        state = "finished" if self.complete else "not finished: the same call of harvest goes on"
        head = f"{self.path}: {self.shards} shards, {self.rows:,} rows, {self.size / 1e6:,.1f} MB, {state}"
        if self.complete and not self.problems:
            head += "; every checksum and row count holds"
        return "\n".join([head, *(f"  {problem}" for problem in self.problems)])


@refuse_wrong_types
def check(path: str | os.PathLike[str]) -> Check:
    """Reads every shard of a harvest and compares it with the manifest: size, checksum, rows.

    Args:
        path: the harvest's folder.

    Raises:
        HarvestError: there is no harvest.

    Example:
        >>> import tempfile
        >>> from bridge.harvest import check, harvest
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = harvest("embedded", ["Mary and John"], hook_points=["blocks.2.hook_resid_post"], out=folder)
        ...     check(folder).passed
        True
    """
    folder = Folder(path)
    manifest = folder.harvested()
    records, totals = manifest.shards, manifest.totals()
    found = Check(folder.path, manifest.complete, len(records), totals["rows"], totals["size"])
    for record in records:
        problem = _problem(folder.path / record.file, record)
        if problem:
            found.problems.append(f"{record.file}: {problem}")
    known = {record.file for record in records}
    if manifest.complete:
        strange = [place.name for place in sorted(folder.path.glob("shard-*")) if place.name not in known]
        found.problems += [f"{name} is not in the manifest" for name in strange]
    return found


def _problem(place: Path, record: ShardRecord) -> str | None:
    if not place.exists():
        return "it is missing"
    size = place.stat().st_size
    if size != record.size:
        return f"it has {size} bytes in place of {record.size}"
    total = xxhash.xxh3_128()
    with open(place, "rb") as file:
        while data := file.read(2**22):
            total.update(data)
    if total.hexdigest() != record.checksum:
        return f"its checksum is {total.hexdigest()} in place of {record.checksum}"
    with ShardFile(place) as shard:
        rows = shard.count()
    return None if rows == record.rows else f"it has {rows} rows in place of {record.rows}"
