"""What a harvest refuses, and what stops one."""

from __future__ import annotations


class HarvestError(ValueError):
    """A harvest cannot be made, continued, or read as asked."""


class MixError(HarvestError):
    """A folder holds a harvest of another model, tokenizer, source or option.

    Attributes:
        differences: what differs: its name, what the folder has, what was given.
    """

    def __init__(self, folder: str, differences: list[tuple[str, object, object]]) -> None:
        self.differences = differences
        said = "; ".join(f"{name}: it has {old!r}, given was {new!r}" for name, old, new in differences)
        super().__init__(
            f"{folder} holds a harvest that this one cannot continue ({said}). "
            "Give the same, or another folder for `out`."
        )


class WriteError(OSError):
    """A shard could not be written: the disk is full, say. The whole shards stand."""
