"""Memory while harvesting and while reading does not depend on how much there is."""

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("psutil", reason="psutil is not installed")
ROOT = pathlib.Path(__file__).resolve().parents[2]
MEASURE = """
import os, sys, threading
import psutil, torch
from bridge.harvest import Activations, harvest

def source(documents):
    generator = torch.Generator().manual_seed(0)
    for _ in range(documents):
        yield torch.randint(3, 200, (64,), generator=generator).tolist()

def run(what, out, documents):
    torch.set_num_threads(1)
    if what == "harvest":
        harvest("embedded", source(documents), hook_points=["blocks.0.hook_resid_post"], out=out,
                context_size=64, tokens_per_shard=2**14,
                batch_size=16, prepend_bos=False, dtype="float32")
    elif what == "shuffle":
        for batch in Activations(out).batches(1024, shuffle=True, memory=2**24):
            pass
    else:
        Activations(out).statistics("blocks.0.hook_resid_post", covariance=True)

def watched(*arguments):
    peak, stop, process = [], threading.Event(), psutil.Process()
    def watch():
        while not stop.wait(0.005):
            peak.append(process.memory_info().rss)
    thread = threading.Thread(target=watch)
    thread.start()
    run(*arguments)
    stop.set()
    thread.join()
    print(max(peak), flush=True)

# Each in a process of its own, that has everything imported already.
for line in sys.stdin:
    what, out, documents = line.split()
    child = os.fork()
    if not child:
        watched(what, out, int(documents))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_memory_is_constant_at_two_sizes(tmp_path):
    """1,024 documents are 35 MB of rows, 4,096 are 142 MB: any part that was held would show."""
    sizes = {"small": 1024, "large": 4096}
    jobs = [(what, name) for what in ("harvest", "shuffle", "statistics") for name in sizes]
    lines = "".join(f"{what} {tmp_path / name} {sizes[name]}\n" for what, name in jobs)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE],
        input=lines,
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    peaks = dict(zip(jobs, map(int, done.stdout.split()), strict=True))
    stored = {
        name: sum(f.stat().st_size for f in (tmp_path / name).glob("shard-*")) for name in sizes
    }
    print({job: peak / 1e6 for job, peak in peaks.items()}, stored)
    apart = stored["large"] - stored["small"]
    assert apart > 90e6
    for what in ("harvest", "shuffle", "statistics"):
        assert peaks[what, "large"] - peaks[what, "small"] < 0.3 * apart, what
