"""Reading a harvest back."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from bridge.harvest import Activations, HarvestError, Share, harvest, shards
from tests.harvest.common import RESID, TEXTS, Z, numbers, read


@pytest.fixture(scope="module", params=["arrow", "parquet"])
def folder(request, embedded, tmp_path_factory):
    """Several shards, of several pieces each, with a short one at the end."""
    out = tmp_path_factory.mktemp("acts") / "a"
    patch = pytest.MonkeyPatch()
    patch.setattr(shards, "_PIECE_BYTES", 2**15)
    harvest(
        embedded,
        TEXTS,
        hook_points=[RESID, Z],
        out=out,
        context_size=16,
        tokens_per_shard=200,
        format=request.param,
    )
    patch.undo()
    return out


@pytest.fixture(scope="module")
def table(embedded, tmp_path_factory):
    """The same rows, by pyarrow alone."""
    out = tmp_path_factory.mktemp("plain") / "a"
    harvest(embedded, TEXTS, hook_points=[RESID, Z], out=out, context_size=16, tokens_per_shard=200)
    return read(out)


def keys(batch):
    """What tells a row from every other."""
    return (batch["sequence"] * 1000 + batch["context_position"]).tolist()


def test_length_and_random_access(folder, table):
    acts = Activations(folder)
    assert len(acts) == len(table)
    assert repr(acts).startswith(
        f"Activations({folder}: {len(table):,} rows; "
    ) and f"{Z} [4, 32]" in repr(acts)
    expected = numbers(table, Z)
    assert acts._piece < 200 and len(acts.manifest.shards) > 3
    rng = np.random.default_rng(0)
    for rows in (rng.integers(-len(acts), len(acts), 60), [len(acts) - 1, 0, 0, -1], []):
        found = acts.read(rows)
        np.testing.assert_array_equal(
            found[Z].numpy(), expected[np.asarray(rows, int)].astype(np.float16)
        )
        assert found["token"].tolist() == [table.column("token")[int(row)].as_py() for row in rows]
    assert acts[7][Z].shape == (4, 32)
    assert torch.equal(acts[3:40:5][RESID], acts.read(range(3, 40, 5))[RESID])
    assert torch.equal(acts[-1][RESID], acts[len(acts) - 1][RESID])
    for bad in (len(acts), -len(acts) - 1):
        with pytest.raises(IndexError, match="there is no row"):
            acts[bad]
    with pytest.raises(HarvestError, match=r"Did you mean blocks.2.hook_resid_post"):
        acts.read([0], columns=["blocks.2.hook_resid_pots"])


def test_in_order(folder, table):
    acts = Activations(folder)
    batches = list(acts.batches(33))
    assert [len(batch["token"]) for batch in batches[:-1]] == [33] * (len(batches) - 1)
    np.testing.assert_array_equal(
        torch.cat([b[RESID] for b in batches]).numpy(), numbers(table, RESID)
    )
    dropped = list(acts.batches(33, drop_last=True))
    assert len(dropped) == len(acts) // 33


@pytest.mark.parametrize("memory", [2**17, 2**19, 2**29])
def test_shuffled_is_every_row_once_and_reproducible(folder, memory):
    acts = Activations(folder)
    plain = {
        key: row
        for batch in acts.batches(64)
        for key, row in zip(keys(batch), batch[RESID], strict=True)
    }
    first = list(acts.batches(64, shuffle=True, seed=3, memory=memory))
    assert all(len(batch["token"]) == 64 for batch in first[:-1])
    seen = [key for batch in first for key in keys(batch)]
    assert sorted(seen) == sorted(plain) and seen != list(plain)
    for batch in first:
        for key, row in zip(keys(batch), batch[RESID], strict=True):
            assert torch.equal(row, plain[key])
    again = list(acts.batches(64, shuffle=True, seed=3, memory=memory))
    assert all(
        torch.equal(a[name], b[name]) for a, b in zip(first, again, strict=True) for name in a
    )
    for other in ({"seed": 4}, {"seed": 3, "epoch": 1}):
        assert [
            key
            for batch in acts.batches(64, shuffle=True, memory=memory, **other)
            for key in keys(batch)
        ] != seen


def test_shuffled_batches_are_mixed_across_shards_and_documents(folder):
    acts = Activations(folder)
    batch = next(acts.batches(128, shuffle=True, memory=2**19))
    assert len(set(batch["document"].tolist())) > 30
    neighbours = (batch["sequence"][1:] == batch["sequence"][:-1]).float().mean()
    assert neighbours < 0.1


def test_too_little_memory(folder):
    with pytest.raises(HarvestError, match="needs at least"):
        Activations(folder).batches(64, shuffle=True, memory=1000)


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 0), (1, 2), (3, 2)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_data_loaders(folder, ranks, workers, shuffle):
    acts = Activations(folder)
    if workers and (shuffle, ranks) == (False, 3):
        pytest.skip("what it would show, the other five show")
    seen = []
    for rank in range(ranks):
        data = acts.torch(
            50,
            shuffle=shuffle,
            seed=1,
            rank=rank,
            ranks=ranks,
            columns=["sequence", "context_position"],
        )
        own = [
            key
            for batch in DataLoader(data, batch_size=None, num_workers=workers)
            for key in keys(batch)
        ]
        assert own
        seen += own
    assert sorted(seen) == sorted(key for batch in acts.batches(999) for key in keys(batch))


def test_epochs_of_a_data_loader(folder):
    data = Activations(folder).torch(50, shuffle=True)
    first = [keys(batch) for batch in DataLoader(data, batch_size=None)]
    assert [keys(batch) for batch in DataLoader(data, batch_size=None)] == first
    data.set_epoch(1)
    assert [keys(batch) for batch in DataLoader(data, batch_size=None)] != first
    with pytest.raises(HarvestError, match="rank is 2"):
        Share(rank=2, ranks=2)


def test_statistics(folder, table):
    acts = Activations(folder)
    x = numbers(table, RESID).astype(np.float64)
    found = acts.statistics(RESID, covariance=True)
    assert found.rows == len(x)
    np.testing.assert_allclose(found.mean.numpy(), x.mean(0), atol=1e-12)
    np.testing.assert_allclose(found.variance.numpy(), x.var(0), rtol=1e-12)
    np.testing.assert_allclose(found.norm, np.linalg.norm(x, axis=1).mean(), rtol=1e-12)
    np.testing.assert_allclose(found.covariance.numpy(), np.cov(x.T, bias=True), atol=1e-12)
    z = numbers(table, Z).astype(np.float64)
    plain = acts.statistics(Z)
    assert plain.covariance is None
    np.testing.assert_allclose(plain.mean.numpy(), z.mean(0), atol=1e-12)
    np.testing.assert_allclose(plain.variance.numpy(), z.var(0), rtol=1e-11)
    with pytest.raises(HarvestError, match="floating-point"):
        acts.statistics("token")


def test_batches_can_be_written_to(folder):
    for acts in (Activations(folder).batches(20), Activations(folder).batches(20, shuffle=True)):
        next(acts)[RESID].zero_()
    assert Activations(folder)[0][RESID].abs().sum() > 0


def test_to_a_device_and_only_some_columns(folder):
    batch = next(Activations(folder).batches(20, columns=[RESID], device="meta"))
    assert list(batch) == [RESID] and batch[RESID].device.type == "meta"
