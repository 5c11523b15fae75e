"""Random documents, shard sizes and kinds of rows: whatever way they are read, they are the plain
list of rows.
"""

from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from bridge import TransformerBridge
from bridge.harvest import Activations, HarvestError, Share, harvest, shards
from tests.conftest import tiny

EMBED = "hook_embed"


@pytest.fixture(scope="module")
def bridge():
    return TransformerBridge(tiny("gpt2"))


def segments(documents, size, pack):
    """The inputs as lists of (token, document), each cut where another document begins: the slow
    way.
    """
    rows = [[(token, n) for token in ids] for n, ids in enumerate(documents)]
    rows = [list(chain(*rows))] if pack else rows
    inputs = [row[start : start + size] for row in rows for start in range(0, len(row), size)]
    return [
        [[t for t, n in row if n == document] for document in sorted({n for _, n in row})]
        for row in inputs
    ]


def plain(folder, suffix):
    """All rows in the order of the files, by pyarrow alone."""
    paths = sorted(folder.glob(f"shard-*.{suffix}"))
    if suffix == "parquet":
        return pa.concat_tables([pq.read_table(path) for path in paths]).combine_chunks()
    return pa.concat_tables(
        [pa.ipc.open_file(str(path)).read_all() for path in paths]
    ).combine_chunks()


def numbers(batch):
    """What a batch holds, as a list of rows that can be compared and sorted."""
    return list(
        zip(
            batch["sequence"].tolist(),
            batch["context_position"].tolist(),
            batch["token"].tolist(),
            (tuple(row) for row in batch[EMBED].tolist()),
            strict=True,
        )
    )


@pytest.mark.parametrize("seed", range(24))
def test_rows_are_the_plain_list(bridge, tmp_path, monkeypatch, seed):
    rng = np.random.default_rng(seed)
    kind, suffix, pack = (
        ["all", "mean", "last"][seed % 3],
        ["arrow", "parquet"][seed // 3 % 2],
        bool(seed // 6 % 2),
    )
    # Long documents first, or last, or mixed: shards of a harvest may then differ in rows by the
    # length of an input.
    lengths = np.concatenate(
        [rng.integers(1, 4, rng.integers(1, 60)), rng.integers(6, 30, rng.integers(1, 12))]
    )
    lengths = [lengths, lengths[::-1], rng.permutation(lengths)][rng.integers(3)]
    documents = [rng.integers(3, 60, length).tolist() for length in lengths]
    size, per_shard = int(rng.integers(2, 12)), int(rng.integers(12, 120))
    piece = int(rng.integers(1, 24))  # so few rows as only the longest would have
    monkeypatch.setattr(shards, "piece_rows", lambda schema: piece)
    harvest(
        bridge,
        documents,
        hook_points=[EMBED],
        out=tmp_path / "a",
        context_size=size,
        tokens_per_shard=per_shard,
        rows=kind,
        pack=pack,
        prepend_bos=False,
        dtype="float32",
        format=suffix,
    )
    acts, table = Activations(tmp_path / "a"), plain(tmp_path / "a", suffix)
    written = {name: torch.tensor(table.column(name).to_pylist()) for name in acts.columns}

    # What was written, against lists made here.
    expected = []
    for number, row in enumerate(segments(documents, size, pack)):
        start = 0
        for ids in row:
            vectors = bridge.W_E[ids].detach()
            end = start + len(ids) - 1
            if kind == "all":
                expected += [(number, start + i, token, vectors[i]) for i, token in enumerate(ids)]
            else:
                expected.append(
                    (
                        number,
                        end,
                        ids[-1],
                        vectors[-1] if kind == "last" else vectors.double().mean(0),
                    )
                )
            start = end + 1
    order = sorted(
        range(len(acts)),
        key=lambda i: (written["sequence"][i].item(), written["context_position"][i].item()),
    )
    found = numbers(written)
    assert [found[i][:3] for i in order] == [row[:3] for row in expected]
    torch.testing.assert_close(
        written[EMBED][order],
        torch.stack([row[3] for row in expected]).float(),
        rtol=1e-6,
        atol=1e-7,
    )

    # What is read, against what was written, bit for bit.
    assert len(acts) == len(found)
    for number in rng.permutation(len(acts))[:20].tolist():
        assert numbers({name: value[None] for name, value in acts[number].items()}) == [
            found[number]
        ]
    some = rng.integers(-len(acts), len(acts), 50)
    assert numbers(acts.read(some)) == [found[i] for i in some]
    batch = int(rng.integers(1, 40))
    batches = list(acts.batches(batch))
    assert [len(each["token"]) for each in batches] == [
        min(batch, len(acts) - at) for at in range(0, len(acts), batch)
    ]
    assert list(chain(*map(numbers, batches))) == found
    for memory in (2**29, 2**16):
        mixed = list(acts.batches(batch, shuffle=True, seed=seed, memory=memory))
        assert sorted(chain(*map(numbers, mixed))) == sorted(found)
    shares = [
        row
        for rank in range(3)
        for each in acts.batches(batch, share=Share(rank, 3))
        for row in numbers(each)
    ]
    assert sorted(shares) == sorted(found)
    statistics = acts.statistics(EMBED, covariance=True)
    assert statistics.rows == len(acts)
    torch.testing.assert_close(statistics.mean, written[EMBED].double().mean(0))
    torch.testing.assert_close(statistics.covariance, written[EMBED].double().mT.cov(correction=0))


def test_the_finished_part_of_a_stopped_harvest(bridge, tmp_path, monkeypatch):
    """Shards of many rows after one of few, some of them not there yet."""
    documents = [[5] * 30] * 10 + [[6 + n % 50] for n in range(300)]
    kw = {
        "hook_points": [EMBED],
        "context_size": 30,
        "rows": "last",
        "pack": False,
        "prepend_bos": False,
    }
    whole, calls = shards.ShardWriter.finish, []

    def finish(writer, batch_size):
        calls.append(writer)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return whole(writer, batch_size)

    monkeypatch.setattr(shards, "piece_rows", lambda schema: 16)
    monkeypatch.setattr(shards.ShardWriter, "finish", finish)
    with pytest.raises(KeyboardInterrupt):
        harvest(bridge, documents, out=tmp_path / "a", tokens_per_shard=100, **kw)
    monkeypatch.setattr(shards.ShardWriter, "finish", whole)
    part = Activations(tmp_path / "a", partial=True)
    expected = [ids[-1] for ids in documents]
    for acts in (part, None):
        if acts is None:
            harvest(bridge, documents, out=tmp_path / "a", tokens_per_shard=100, **kw)
            acts = Activations(tmp_path / "a")
            assert len(acts) == len(documents) > len(part)
        tokens = expected[: len(acts)]
        assert torch.cat([each["token"] for each in acts.batches(7)]).tolist() == tokens
        assert acts.read(range(len(acts)))["token"].tolist() == tokens


def test_pieces_of_another_size_are_refused(bridge, tmp_path, monkeypatch):
    """A shard that another program wrote anew: the right rows, cut otherwise."""
    harvest(
        bridge,
        [[n] for n in range(3, 60)] * 3,
        hook_points=[EMBED],
        out=tmp_path / "a",
        context_size=4,
        tokens_per_shard=60,
        pack=False,
        prepend_bos=False,
    )
    acts, before = Activations(tmp_path / "a"), Activations(tmp_path / "a")
    second = acts.manifest.shards[0].rows + 30
    path = tmp_path / "a" / acts.manifest.shards[1].file
    before[second]  # its checksum was compared, and the shard was written anew behind it
    table = pa.ipc.open_file(str(path)).read_all().combine_chunks()
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=20)
    acts[3]
    with pytest.raises(HarvestError, match=r"shard-000001.arrow is damaged: it has"):
        acts[second]
    with pytest.raises(HarvestError, match=r"piece 0 of .* should have 60 rows and has 20"):
        before[second]
    with pytest.raises(HarvestError, match="should have"):
        list(before.batches(8))
