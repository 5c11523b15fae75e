"""What the tests of harvesting share: texts, and readers that are not ours."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from bridge.embedded import prompts

RESID, Z, PATTERN = "blocks.2.hook_resid_post", "blocks.3.attn.hook_z", "blocks.1.attn.hook_pattern"
TEXTS = [prompt.text for prompt in prompts("fact", 30)] + [
    prompt.text for prompt in prompts("ioi", 30)
]


def read(folder: pathlib.Path) -> pa.Table:
    """All shards, by pyarrow alone."""
    tables = [
        pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        for path in sorted(folder.glob("shard-*.arrow"))
    ]
    return pa.concat_tables(tables)


def numbers(table: pa.Table, name: str) -> np.ndarray[Any, Any]:
    """A column as nested lists make it: slow, and nothing of ours."""
    return np.array(table.column(name).to_pylist())


def shards(folder: pathlib.Path) -> dict[str, bytes]:
    """The shards, byte for byte."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("shard-*"))}


def documents(bridge: Any, texts: list[str]) -> list[list[int]]:
    """Token ids of texts, without anything added."""
    return [bridge.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def hidden(bridge: Any, rows: list[list[int]], layer: int) -> list[torch.Tensor]:
    """The residual stream after a block, one input at a time, by Hugging Face alone."""
    with torch.no_grad():
        return [
            bridge.original_model(torch.tensor([row]), output_hidden_states=True).hidden_states[
                layer + 1
            ][0]
            for row in rows
        ]
