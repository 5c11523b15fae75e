"""A harvest in the forms of other libraries, and features that may not be harvested."""

import importlib
import io
import json
import tarfile
import uuid

import fsspec
import numpy as np
import pytest
import torch

from bridge import TransformerBridge
from bridge.harvest import Activations, HarvestError, harvest
from bridge.harvest import shards as storage
from tests.conftest import tiny
from tests.harvest.common import RESID, TEXTS, Z


@pytest.fixture(scope="module", params=["arrow", "parquet"])
def acts(request, embedded, tmp_path_factory):
    out = tmp_path_factory.mktemp("acts") / "a"
    harvest(
        embedded,
        TEXTS[:20],
        hook_points=[RESID, Z],
        out=out,
        context_size=16,
        tokens_per_shard=100,
        format=request.param,
    )
    return Activations(out)


def test_datasets(acts):
    made, expected = acts.to_datasets(), acts.read(range(len(acts)))
    assert made.column_names == acts.columns and len(made) == len(acts)
    rows = made.with_format("arrow")[:]
    for name, values in expected.items():
        found = storage.to_numpy(rows.column(name))
        assert found.dtype == values.numpy().dtype and np.array_equal(found, values.numpy())
    batch = next(iter(made.with_format("torch").iter(len(made))))
    assert torch.equal(batch[Z], expected[Z].float())
    some = acts.to_datasets(["token", RESID]).shuffle(seed=0)
    assert some.column_names == ["token", RESID] and sorted(some["token"]) == sorted(
        expected["token"].tolist()
    )
    with pytest.raises(HarvestError, match="there is no column"):
        acts.to_datasets(["tokens"])


def same_rows(acts, rows, columns):
    expected = acts.read(range(len(acts)), columns)
    ids = [name for name in columns if name not in (RESID, Z)]
    for number, row in enumerate(rows):
        assert row.get("ids.json", {}) == {name: int(expected[name][number]) for name in ids}
        for name in columns:
            if name in (RESID, Z):
                value = row[f"{name}.npy"]
                assert value.dtype == np.float16 and np.array_equal(
                    value, expected[name][number].numpy()
                )
    assert number + 1 == len(acts)


@pytest.mark.parametrize("columns", [None, ["token", Z], [RESID]])
def test_tar_files(acts, tmp_path, columns):
    made = acts.to_webdataset(tmp_path / "tars", columns, rows_per_file=37)
    assert len(made) == -(-len(acts) // 37) > 3
    rows = {}
    for name in made:
        with tarfile.open(tmp_path / "tars" / name) as tar:
            for entry in tar:
                number, _, part = entry.name.partition(".")
                data = tar.extractfile(entry).read()
                value = json.loads(data) if part.endswith("json") else np.load(io.BytesIO(data))
                rows.setdefault(number, {})[part] = value
    assert list(rows) == [f"{number:012d}" for number in range(len(acts))]
    same_rows(acts, rows.values(), columns or acts.columns)
    before = [(tmp_path / "tars" / name).read_bytes() for name in made]
    acts.to_webdataset(tmp_path / "tars", columns, rows_per_file=37)
    assert [(tmp_path / "tars" / name).read_bytes() for name in made] == before
    assert sorted(path.name for path in (tmp_path / "tars").iterdir()) == made


def test_tar_files_in_a_store(acts, tmp_path, monkeypatch):
    monkeypatch.setenv("TRANSFORMER_BRIDGE_CACHE", str(tmp_path / "kept"))
    url = f"memory://{uuid.uuid4().hex}/tars"
    (name,) = acts.to_webdataset(url)
    acts.to_webdataset(tmp_path / "tars")
    assert fsspec.open(f"{url}/{name}").open().read() == (tmp_path / "tars" / name).read_bytes()


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_webdataset_reads_them(acts, tmp_path):
    pytest.importorskip("webdataset", reason="webdataset is not installed")
    made = acts.to_webdataset(tmp_path, rows_per_file=37)
    names = [str(tmp_path / name) for name in made]
    data = importlib.import_module("webdataset").WebDataset(names, shardshuffle=False).decode()
    same_rows(acts, data, acts.columns)


class Mixing(torch.nn.Module):
    """A basis that takes something of the other rows."""

    def __init__(self, how):
        super().__init__()
        self.how, self.directions = how, torch.nn.Parameter(torch.eye(32))

    def encode(self, x):
        features = x @ self.directions
        if self.how == "mean of the batch":
            return features - features.mean((0, 1))
        if self.how == "mean of the positions":
            return features - features.mean(1, keepdim=True)
        if self.how == "best of the batch":  # BatchTopK, as it is trained
            kept = features.flatten().topk(features.numel() // 8).values.min()
            return features * (features >= kept)
        if self.how == "best of a row":
            kept = features.topk(4, dim=-1).values[..., -1:]
            return features * (features >= kept)
        return features

    def decode(self, features):
        return features @ self.directions.T


@pytest.mark.parametrize(
    ("how", "refused"),
    [
        ("mean of the batch", True),
        ("mean of the positions", True),
        ("best of the batch", True),
        ("best of a row", False),
        ("nothing", False),
    ],
)
def test_features_that_mix_rows_are_refused(tmp_path, how, refused):
    bridge = TransformerBridge(tiny("gpt2"))
    width = bridge.cfg.d_model
    basis = Mixing(how)
    basis.directions = torch.nn.Parameter(torch.eye(width))
    bridge.add_basis("blocks.0.hook_resid_post", "dirs", basis)
    call = lambda: harvest(
        bridge,
        [[1, 2, 3], [4, 5]],
        hook_points=["blocks.0.hook_resid_post.dirs"],
        out=tmp_path / "a",
        context_size=4,
    )
    if not refused:
        assert call().rows == 5
        return
    with pytest.raises(HarvestError, match=r"blocks.0.hook_resid_post.dirs mixes rows"):
        call()
    assert not (tmp_path / "a").exists()
