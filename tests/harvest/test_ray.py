"""Harvesting on Ray: the same shards, byte for byte, whatever happens to the workers."""

import logging
import os
import signal

import pytest
import torch

from bridge.harvest import HarvestError, Project, check, harvest
from tests.harvest.common import RESID, TEXTS, Z, shards
from tests.harvest.test_resume import cut

ray = pytest.importorskip("ray", reason="ray is not installed")
psutil = pytest.importorskip("psutil", reason="psutil is not installed")


KW = {"hook_points": [RESID, Z], "context_size": 32, "batch_size": 4, "tokens_per_shard": 128}
RAY = KW | {"engine": "ray", "workers": 2}
pytestmark = [
    # Ray sends functions to its workers. Those that check their annotations cannot be sent; `make
    # slow` has others.
    pytest.mark.skipif(not os.environ.get("UNCHECKED"), reason="annotations are checked"),
    # Ray's own: changes that it announces for later, and sockets that it leaves to the collector.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def cluster():
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": {"PYTHONPATH": root, "HF_HUB_OFFLINE": "1"}},
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def expected(embedded, tmp_path_factory):
    out = tmp_path_factory.mktemp("local") / "a"
    harvest(embedded, TEXTS, out=out, **KW)
    return shards(out)


@pytest.mark.slow
def test_all_of_it_on_ray(cluster, tmp_path, expected):
    report = harvest("embedded", TEXTS, out=tmp_path / "a", **RAY)
    assert shards(tmp_path / "a") == expected
    assert report.made == len(expected) and check(tmp_path / "a").passed
    assert harvest("embedded", TEXTS, out=tmp_path / "a", **KW).made == 0
    cut(tmp_path / "a", 3)
    assert harvest("embedded", TEXTS, out=tmp_path / "a", **KW).made == len(expected) - 3
    assert shards(tmp_path / "a") == expected


def test_it_goes_on_with_what_the_other_engine_began(cluster, tmp_path, expected):
    harvest("embedded", TEXTS, out=tmp_path / "a", **KW)
    cut(tmp_path / "a", 4)
    (tmp_path / "a" / "shard-000001.arrow").unlink()
    assert harvest("embedded", TEXTS, out=tmp_path / "a", **RAY).made == len(expected) - 3
    assert shards(tmp_path / "a") == expected


@pytest.mark.slow
def test_a_bridge_functions_and_a_ray_data_set(cluster, embedded, tmp_path):
    def half(x, hook):
        return x * 0.5

    kw = {
        "interventions": [("blocks.0.hook_mlp_out", half)],
        "rows": "mean",
        "pack": False,
        "reduce": {Z: Project(torch.ones(4, 32, 3))},
    }
    harvest(embedded, TEXTS, out=tmp_path / "local", **KW | kw)
    source = ray.data.from_items([{"text": text} for text in TEXTS])
    harvest(embedded, source, out=tmp_path / "ray", **RAY | kw)
    assert shards(tmp_path / "ray") == shards(tmp_path / "local")


def workers():
    """The processes of the pool."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any("MapWorker" in part for part in process.cmdline()):
                found.append(process)
        except (
            psutil.NoSuchProcess
        ):  # it ended since; one whose end nobody has noticed is such a one, too
            continue
    return found


def test_a_worker_dies(cluster, tmp_path, expected):
    killed = []

    def kill(progress):
        if len(killed) < 2:
            victim = workers()[0]
            victim.send_signal(signal.SIGKILL)
            killed.append(victim.pid)

    harvest("embedded", TEXTS, out=tmp_path / "a", progress=kill, **RAY)
    assert len(killed) == 2
    assert shards(tmp_path / "a") == expected
    assert check(tmp_path / "a").passed


@pytest.mark.slow
def test_this_process_dies(cluster, tmp_path, expected):
    class Stop(BaseException):
        """Stands for the end of this process."""

    def stop(progress):
        raise Stop

    with pytest.raises(Stop):
        harvest("embedded", TEXTS, out=tmp_path / "a", progress=stop, **RAY)
    harvest("embedded", TEXTS, out=tmp_path / "a", **RAY)
    assert shards(tmp_path / "a") == expected


def test_errors(cluster, embedded, tmp_path):
    with pytest.raises(HarvestError, match="a token id is 100000"):
        harvest(embedded, [[1, 2], [1, 100_000]], out=tmp_path / "a", **RAY)
    with pytest.raises(HarvestError, match="document 1 is int"):
        harvest(embedded, iter([[1, 2], 3]), out=tmp_path / "b", **RAY)
    with pytest.raises(
        HarvestError, match="5 workers with 1 CPU each need 5; the Ray cluster has 2"
    ):
        harvest(embedded, [[1, 2]], out=tmp_path / "c", **RAY | {"workers": 5})
