"""The shards are ordinary files: other libraries read them, and see the same numbers."""

import numpy as np
import pyarrow.dataset
import pytest

from bridge.harvest import Activations, harvest
from tests.harvest.common import RESID, TEXTS, Z


@pytest.fixture(scope="module", params=["arrow", "parquet"])
def folder(request, embedded, tmp_path_factory):
    out = tmp_path_factory.mktemp("acts") / "a"
    harvest(
        embedded,
        TEXTS,
        hook_points=[RESID, Z],
        out=out,
        context_size=16,
        tokens_per_shard=200,
        format=request.param,
    )
    return out


@pytest.fixture
def expected(folder):
    return Activations(folder)[:]


def files(folder):
    return sorted(map(str, folder.glob("shard-*")))


def test_pyarrow(folder, expected):
    data = pytest.importorskip("pyarrow.dataset", reason="pyarrow is not installed")
    kind = "parquet" if files(folder)[0].endswith("parquet") else "ipc"
    table = data.dataset(files(folder), format=kind).to_table()
    np.testing.assert_array_equal(np.array(table.column(Z).to_pylist()), expected[Z].numpy())
    assert table.column("document").to_pylist() == expected["document"].tolist()


def test_datasets(folder, expected, tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    datasets.disable_progress_bars()
    kind = "parquet" if files(folder)[0].endswith("parquet") else "arrow"
    found = datasets.load_dataset(
        kind, data_files=files(folder), split="train", cache_dir=str(tmp_path)
    )
    assert found["token"][:] == expected["token"].tolist()
    np.testing.assert_array_equal(np.array(found[RESID][:]), expected[RESID].numpy())
    np.testing.assert_array_equal(np.array(found[Z][:]), expected[Z].numpy())


def test_polars(folder, expected):
    polars = pytest.importorskip("polars", reason="polars is not installed")
    parquet = files(folder)[0].endswith("parquet")
    table = polars.concat(
        [(polars.read_parquet if parquet else polars.read_ipc)(path) for path in files(folder)]
    )
    assert table["token"].to_list() == expected["token"].tolist()
    np.testing.assert_array_equal(np.array(table[RESID].to_list()), expected[RESID].numpy())
    np.testing.assert_array_equal(np.array(table[Z].to_list()), expected[Z].numpy())


def test_duckdb_reads_parquet(folder, expected):
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    if not files(folder)[0].endswith("parquet"):
        pytest.skip("the next test is about Arrow")
    with duckdb.connect() as connection:
        rows = connection.read_parquet(files(folder)).project(f'token, "{RESID}", "{Z}"').fetchall()
    assert [row[0] for row in rows] == expected["token"].tolist()
    np.testing.assert_array_equal(np.array([row[1] for row in rows]), expected[RESID].numpy())
    np.testing.assert_array_equal(np.array([row[2] for row in rows]), expected[Z].numpy())


def test_duckdb_reads_arrow_in_float32(embedded, tmp_path):
    """DuckDB has no half-precision type for Arrow tables; docs/harvest.md says so."""
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    harvest(
        embedded, TEXTS[:9], hook_points=[Z], out=tmp_path / "a", context_size=16, dtype="float32"
    )
    table = pyarrow.dataset.dataset(files(tmp_path / "a"), format="ipc")
    with duckdb.connect() as connection:
        rows = connection.from_arrow(table).project(f'"{Z}"').fetchall()
    np.testing.assert_array_equal(
        np.array([row[0] for row in rows], np.float32), Activations(tmp_path / "a")[:][Z]
    )
