"""The same documents from every kind of source make the same shards."""

import gzip
import json
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from bridge.harvest import Files, HarvestError, harvest
from tests.harvest.common import RESID, TEXTS, documents, shards

KW = {"hook_points": [RESID], "context_size": 16, "tokens_per_shard": 200}


@pytest.fixture(scope="module")
def expected(embedded, tmp_path_factory):
    out = tmp_path_factory.mktemp("list") / "a"
    harvest(embedded, TEXTS, out=out, **KW)
    return shards(out)


def test_iterators_and_tuples(embedded, tmp_path, expected):
    for number, source in enumerate((iter(TEXTS), tuple(TEXTS), (text for text in TEXTS))):
        harvest(embedded, source, out=tmp_path / str(number), **KW)
        assert shards(tmp_path / str(number)) == expected


def test_token_ids(embedded, tmp_path, expected):
    rows = documents(embedded, TEXTS)
    for number, source in enumerate(
        (rows, [torch.tensor(row) for row in rows], [np.array(row) for row in rows])
    ):
        harvest(embedded, source, out=tmp_path / str(number), **KW)
        assert shards(tmp_path / str(number)) == expected


def test_a_tensor_of_tokens(embedded, tmp_path):
    tokens = torch.randint(3, 200, (5, 12), generator=torch.Generator().manual_seed(0))
    harvest(embedded, tokens, out=tmp_path / "a", **KW)
    harvest(embedded, tokens.tolist(), out=tmp_path / "b", **KW)
    assert shards(tmp_path / "a") == shards(tmp_path / "b")
    with pytest.raises(HarvestError, match=r"\[document, pos\]"):
        harvest(embedded, tokens[0], out=tmp_path / "c", **KW)


def test_files(embedded, tmp_path, expected):
    half = len(TEXTS) // 2
    (tmp_path / "one.txt").write_text("\n".join(TEXTS[:half]) + "\n\n")
    with gzip.open(tmp_path / "two.txt.gz", "wt") as file:
        file.write("\r\n".join(TEXTS[half:]))
    (tmp_path / "one.jsonl").write_text(
        "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in TEXTS[:half])
    )
    (tmp_path / "two.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[half:])
    )
    pq.write_table(
        pa.table({"n": list(range(len(TEXTS))), "text": TEXTS}), tmp_path / "all.parquet"
    )
    pq.write_table(pa.table({"ids": documents(embedded, TEXTS)}), tmp_path / "ids.parquet")
    sources = {
        "texts": (Files(tmp_path / "one.txt", tmp_path / "two.txt.gz"), "text"),
        "paths": ([tmp_path / "one.txt", tmp_path / "two.txt.gz"], "text"),
        "json": (Files(str(tmp_path / "*.jsonl")), "text"),
        "parquet": (pathlib.Path(tmp_path / "all.parquet"), "text"),
        "ids": (Files(tmp_path / "ids.parquet"), "ids"),
    }
    for name, (source, column) in sources.items():
        harvest(embedded, source, column=column, out=tmp_path / name, **KW)
        assert shards(tmp_path / name) == expected, name


def test_bad_files(embedded, tmp_path):
    with pytest.raises(FileNotFoundError, match="no file matches"):
        Files(tmp_path / "none*.txt")
    (tmp_path / "a.csv").write_text("a")
    with pytest.raises(HarvestError, match="no file that can be read"):
        Files(tmp_path / "a.csv")
    (tmp_path / "a.jsonl").write_text('{"txt": "a"}\n')
    with pytest.raises(HarvestError, match=r"a.jsonl:1 has no field 'text'; it has txt"):
        harvest(embedded, Files(tmp_path / "a.jsonl"), out=tmp_path / "x", **KW)
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\n{\n')
    with pytest.raises(HarvestError, match=r"b.jsonl:2 is no JSON"):
        harvest(embedded, Files(tmp_path / "b.jsonl"), out=tmp_path / "y", **KW)
    pq.write_table(pa.table({"n": [1]}), tmp_path / "c.parquet")
    with pytest.raises(HarvestError, match="has no column 'text'; it has n"):
        harvest(embedded, Files(tmp_path / "c.parquet"), out=tmp_path / "z", **KW)


def test_a_changed_file_is_another_source(embedded, tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(TEXTS))
    harvest(embedded, Files(tmp_path / "a.txt"), out=tmp_path / "a", **KW)
    (tmp_path / "a.txt").touch()  # another time, the same text
    assert harvest(embedded, Files(tmp_path / "a.txt"), out=tmp_path / "a", **KW).made == 0
    (tmp_path / "a.txt").write_text("\n".join(TEXTS).replace("bee", "ant"))
    with pytest.raises(HarvestError, match="the source is another"):
        harvest(embedded, Files(tmp_path / "a.txt"), out=tmp_path / "a", **KW)


def test_hugging_face_data_sets(embedded, tmp_path, expected):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    whole = datasets.Dataset.from_dict({"text": TEXTS, "n": list(range(len(TEXTS)))})
    harvest(embedded, whole, out=tmp_path / "whole", **KW)
    assert shards(tmp_path / "whole") == expected
    harvest(embedded, whole.to_iterable_dataset(), out=tmp_path / "stream", **KW)
    assert shards(tmp_path / "stream") == expected
    with pytest.raises(HarvestError, match="no column 'words'; it has text, n"):
        harvest(embedded, whole, column="words", out=tmp_path / "x", **KW)
    with pytest.raises(HarvestError, match="give one of them"):
        harvest(embedded, datasets.DatasetDict({"train": whole}), out=tmp_path / "y", **KW)


def test_empty_documents_have_no_rows_and_keep_their_number(embedded, tmp_path):
    from tests.harvest.common import read

    harvest(
        embedded,
        ["", "Mary", "", "John", ""],
        out=tmp_path / "a",
        separator="eos",
        pack=False,
        **KW,
    )
    assert set(read(tmp_path / "a").column("document").to_pylist()) == {1, 3}
    assert (
        harvest(
            embedded,
            ["", "Mary", "", "John", ""],
            out=tmp_path / "a",
            separator="eos",
            pack=False,
            **KW,
        ).made
        == 0
    )
