"""Interrupted in whatever way, a harvest goes on: nothing lost, nothing twice, nothing mixed."""

import contextlib
import errno
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from bridge import TransformerBridge
from bridge.harvest import Activations, HarvestError, MixError, WriteError, check, harvest
from bridge.harvest import shards as storage
from bridge.harvest.engines import do_in_background
from tests.conftest import tiny
from tests.harvest.common import RESID, TEXTS, Z, read, shards

ROOT = pathlib.Path(__file__).resolve().parents[2]
KW = {"hook_points": [RESID, Z], "context_size": 32, "batch_size": 4, "tokens_per_shard": 128}


def test_called_again_it_returns_at_once(embedded, tmp_path):
    first = harvest("embedded", TEXTS, out=tmp_path / "a", **KW)
    before = shards(tmp_path / "a")

    class Fail(torch.nn.Module):
        """Stands for a model that must not be loaded."""

    boot, TransformerBridge.boot_embedded = TransformerBridge.boot_embedded, Fail
    try:
        again = harvest("embedded", TEXTS, out=tmp_path / "a", **KW)
    finally:
        TransformerBridge.boot_embedded = boot
    assert (again.made, again.rows) == (0, first.rows)
    assert (
        harvest(embedded, TEXTS, out=tmp_path / "a", **KW).made == 0
    )  # the same model, already loaded
    assert shards(tmp_path / "a") == before


def kill(tmp_path, times, copies, per_shard):
    """Kills a harvest at random moments, over and over, and then lets it end; another is left
    alone.

    Returns how often it was killed, how many shards the last call made, and how many there are.
    """
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.harvest.run_one"],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )

    def start(name):
        server.stdin.write(f"{tmp_path / name} {per_shard} {copies}\n")
        server.stdin.flush()
        return int(server.stdout.readline())

    with server:
        start("first")  # the first one also reads files that the others find in memory
        assert server.stdout.readline() == "0\n"
        began = time.perf_counter()
        start("whole")
        assert server.stdout.readline() == "0\n"
        undisturbed = time.perf_counter() - began
        rng, killed, total = random.Random(0), 0, len(shards(tmp_path / "whole"))
        for share in sorted(rng.uniform(0, 0.9) for _ in range(times)):
            process = start("killed")
            while len(list((tmp_path / "killed").glob("shard-*"))) < share * total:
                time.sleep(0.001)
                assert time.perf_counter() - began < 300, "it makes no more shards"
            time.sleep(rng.uniform(0, 2) * undisturbed / total)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            killed += int(server.stdout.readline()) == -signal.SIGKILL
        start("killed")
        assert server.stdout.readline() == "0\n"
        server.stdin.close()
    whole = shards(tmp_path / "whole")
    assert shards(tmp_path / "killed") == whole
    ours, theirs = (
        json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("killed", "whole")
    )
    assert ours["shards"] == theirs["shards"]
    assert check(tmp_path / "killed").passed
    assert not [path.name for path in (tmp_path / "killed").iterdir() if path.name.endswith(".tmp")]
    return killed, int((tmp_path / "killed.made").read_text()), len(whole)


def test_killed_at_random_moments(tmp_path):
    killed, made, total = kill(tmp_path, 4, 12, 128)
    assert killed >= 3
    assert made < total


@pytest.mark.slow
def test_killed_at_twenty_random_moments(tmp_path):
    killed, made, total = kill(tmp_path, 20, 300, 1024)
    print(f"killed {killed} times; the last call made {made} of {total} shards")
    assert killed >= 15
    assert made < total


def test_every_place_a_write_can_be_cut(tmp_path):
    """Stopped at each step of writing in turn: before and after each file is in its place."""
    harvest("embedded", TEXTS, out=tmp_path / "whole", **KW)
    expected = shards(tmp_path / "whole")

    class Stop(BaseException):
        """Stands for the end of the process: nothing that the library does may catch it."""

    real, count = storage.os.replace, 0
    for after in (False, True):
        for stop_at in (1, 2, 3, 4, 5, 17):
            out = tmp_path / f"{after}-{stop_at}"
            count = 0

            def replace(a, b, stop_at=stop_at, after=after):
                nonlocal count
                count += 1
                if count == stop_at:
                    if after:
                        real(a, b)
                    raise Stop
                real(a, b)

            storage.os.replace = replace
            try:
                with pytest.raises(Stop):
                    harvest("embedded", TEXTS, out=out, **KW)
            finally:
                storage.os.replace = real
            harvest("embedded", TEXTS, out=out, **KW)
            assert shards(out) == expected


@pytest.mark.parametrize("only_once", [False, True])
def test_a_full_disk(tmp_path, monkeypatch, only_once):
    harvest("embedded", TEXTS, out=tmp_path / "whole", **KW)
    plain, written, refused = storage.AtomicFile.write, 0, []

    def write(self, data):
        nonlocal written
        if self.name.endswith(".arrow"):
            written += len(memoryview(data).cast("B"))
            if written > 200_000 and not (only_once and refused):
                refused.append(True)
                raise OSError(errno.ENOSPC, "No space left on device")
        return plain(self, data)

    monkeypatch.setattr(storage.AtomicFile, "write", write)
    with pytest.raises(
        WriteError, match=r"No space left.*every shard that was whole stands"
    ) as caught:
        harvest("embedded", TEXTS, out=tmp_path / "full", **KW)
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    there = shards(tmp_path / "full")
    assert 0 < len(there) < len(shards(tmp_path / "whole"))
    assert there.items() <= shards(tmp_path / "whole").items()
    assert not list((tmp_path / "full").glob(".shard*"))
    report = harvest("embedded", TEXTS, out=tmp_path / "full", **KW)
    assert report.made == report.shards - len(there)
    assert shards(tmp_path / "full") == shards(tmp_path / "whole")


def test_a_disk_that_is_really_full(tmp_path):
    """A file system of 300 kB, where that can be mounted."""
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(mount)], capture_output=True
    )
    if done.returncode:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        with pytest.raises(WriteError, match="could not be written"):
            harvest("embedded", TEXTS, out=mount / "a", **KW)
        whole = len(list((mount / "a").glob("shard-*")))
        subprocess.run(["mount", "-o", "remount,size=50m", str(mount)], check=True)
        report = harvest("embedded", TEXTS, out=mount / "a", **KW)
        assert report.made == report.shards - whole and whole
        harvest("embedded", TEXTS, out=tmp_path / "whole", **KW)
        assert shards(mount / "a") == shards(tmp_path / "whole")
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_a_file_is_whole_before_it_is_in_its_place(tmp_path, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        real = getattr(storage.os, name)
        monkeypatch.setattr(
            storage.os, name, lambda *a, name=name, real=real: (done.append(name), real(*a))
        )
    place, folder = tmp_path / "a", storage.Folder(tmp_path)
    with folder.whole("a") as file:
        file.write(b"half")
        file.flush()
        assert not place.exists() and [path.read_bytes() for path in tmp_path.iterdir()] == [
            b"half"
        ]
        file.write(b" and half")
    assert place.read_bytes() == b"half and half" and len(list(tmp_path.iterdir())) == 1
    assert done == ["fsync", "replace", "fsync"]  # the file, its name, the folder

    def fail():
        with folder.whole("a") as file:
            file.write(b"other")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert place.read_bytes() == b"half and half" and len(list(tmp_path.iterdir())) == 1


def test_nothing_is_written_after_an_error():
    def refuse():
        raise OSError(errno.ENOSPC, "No space left on device")

    done = []
    with pytest.raises(OSError, match="No space left"):
        do_in_background([lambda: done.append(1), refuse, lambda: done.append(2)])
    assert done == [1]


def cut(out, number):
    """Leaves a harvest as if it had been killed after some shards."""
    manifest = storage.Folder(out).manifest()
    folder = storage.Folder(out)
    kept = manifest.shards[:number]
    for record in manifest.shards[number:]:
        (out / record.file).unlink()
    for record in kept:
        folder.add(record)
    manifest.complete, manifest.shards, manifest.source["end"] = False, [], None
    folder.write(manifest)


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"context_size": 16}, "context_size: it has 32, given was 16"),
        ({"hook_points": [RESID]}, "hook_points"),
        ({"dtype": "float32"}, "dtype: it has 'float16', given was 'float32'"),
        ({"tokens_per_shard": 64}, "tokens_per_shard: it has 128, given was 64"),
        ({"prepend_bos": False}, "bos: it has"),
        ({"separator": "eos"}, "separator: it has None"),
        ({"pack": False}, "pack: it has True, given was False"),
        ({"keep_special": False}, "keep_special"),
        ({"rows": "last"}, "rows: it has 'all', given was 'last'"),
        ({"batch_size": 3}, "batch_size: it has 4, given was 3"),
        ({"max_tokens": 99}, "max_tokens: it has None, given was 99"),
        ({"format": "parquet"}, "format: it has 'arrow', given was 'parquet'"),
        ({"interventions": [("blocks.0.hook_mlp_out", lambda x, hook: x * 0)]}, "interventions"),
        ({"model_dtype": "bfloat16"}, "model weights"),
    ],
)
def test_it_refuses_to_mix(tmp_path, complete, change, said):
    harvest("embedded", TEXTS, out=tmp_path / "a", **KW)
    if not complete:
        cut(tmp_path / "a", 3)
    before = shards(tmp_path / "a")
    with pytest.raises(MixError, match=said):
        harvest("embedded", TEXTS, out=tmp_path / "a", **KW | change)
    assert shards(tmp_path / "a") == before


def test_it_refuses_another_model_and_tokenizer(tmp_path):
    model = tiny("gpt2")
    kw = {"hook_points": ["blocks.0.hook_resid_post"], "context_size": 8, "out": tmp_path / "a"}
    source = [[1, 2, 3], [4, 5]]
    harvest(TransformerBridge(model), source, **kw)
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight[0, 0] += 1
    with pytest.raises(MixError, match="model weights") as caught:
        harvest(TransformerBridge(model), source, **kw)
    assert [name for name, _, _ in caught.value.differences] == ["model weights"]
    with pytest.raises(MixError, match=r"model class.*model config"):
        harvest(TransformerBridge(tiny("llama")), source, **kw)


def test_it_refuses_another_tokenizer(embedded, tmp_path):
    harvest(embedded, TEXTS, out=tmp_path / "a", **KW)
    import copy

    other = copy.deepcopy(embedded.tokenizer)
    other.add_tokens(["Zanzibar"])
    with pytest.raises(MixError, match="tokenizer") as caught:
        harvest(embedded, TEXTS, tokenizer=other, out=tmp_path / "a", **KW)
    assert [name for name, _, _ in caught.value.differences] == ["tokenizer"]


def test_it_refuses_another_function_but_not_the_same(embedded, tmp_path):
    def kw(factor):
        return KW | {
            "out": tmp_path / "a",
            "interventions": [("blocks.0.hook_mlp_out", lambda x, hook: x * factor)],
        }

    harvest(embedded, TEXTS, **kw(0.5))
    assert harvest(embedded, TEXTS, **kw(0.5)).made == 0
    with pytest.raises(MixError, match="interventions"):
        harvest(embedded, TEXTS, **kw(0.25))


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize(
    "source",
    [
        [*TEXTS[:2], "Another text", *TEXTS[3:]],
        TEXTS[:-1],
        TEXTS[:5],
        TEXTS[1:],
        [*TEXTS, "One more"],
    ],
)
def test_it_refuses_another_source(tmp_path, complete, source):
    harvest("embedded", TEXTS, out=tmp_path / "a", **KW)
    if not complete:
        if source[:5] == TEXTS[:5] and len(source) != 5:
            pytest.skip("what comes behind the whole shards is not known before it is read")
        cut(tmp_path / "a", 3)
    with pytest.raises(HarvestError, match="the source"):
        harvest("embedded", source, out=tmp_path / "a", **KW)


def test_a_gap_between_whole_shards_is_filled(tmp_path):
    harvest("embedded", TEXTS, out=tmp_path / "a", **KW)
    before = shards(tmp_path / "a")
    cut(tmp_path / "a", 6)
    (tmp_path / "a" / "shard-000002.arrow").unlink()
    (tmp_path / "a" / "shard-000004.arrow").write_bytes(b"half")
    report = harvest("embedded", TEXTS, out=tmp_path / "a", **KW)
    assert shards(tmp_path / "a") == before
    assert report.made == report.shards - 4
    cut(tmp_path / "a", 6)
    (tmp_path / "a" / "shard-000002.arrow").unlink()
    # Behind the gap, the shards that stand are compared with the tokens they were made from.
    with pytest.raises(HarvestError, match=r"that shard-00000.* was made from"):
        harvest(
            "embedded",
            [*TEXTS[:33], "Something else entirely", *TEXTS[33:]],
            out=tmp_path / "a",
            **KW,
        )


def test_an_iterator_goes_on_from_its_beginning(tmp_path):
    harvest("embedded", TEXTS, out=tmp_path / "whole", **KW)
    harvest("embedded", iter(TEXTS), out=tmp_path / "a", **KW)
    cut(tmp_path / "a", 3)
    harvest("embedded", iter(TEXTS), out=tmp_path / "a", **KW)
    assert shards(tmp_path / "a") == shards(tmp_path / "whole")
    assert harvest("embedded", iter(TEXTS), out=tmp_path / "a", **KW).made == 0


def test_what_went_before_is_not_tokenized_again(embedded, tmp_path):
    harvest(embedded, TEXTS, out=tmp_path / "a", **KW)
    cut(tmp_path / "a", 5)
    asked = []

    class Counted:
        """The tokenizer, counted."""

        def __getattr__(self, name):
            return getattr(embedded.tokenizer, name)

        def __call__(self, texts, **kwargs):
            asked.extend(texts)
            return embedded.tokenizer(texts, **kwargs)

    harvest(embedded, TEXTS, tokenizer=Counted(), out=tmp_path / "a", **KW)
    assert 0 < len(asked) < len(TEXTS)
    assert asked == TEXTS[-len(asked) :]


def test_max_tokens(tmp_path):
    report = harvest("embedded", TEXTS, out=tmp_path / "a", max_tokens=300, **KW)
    assert report.tokens == 320  # ten inputs of 32
    assert harvest("embedded", [*TEXTS, "more"], out=tmp_path / "a", max_tokens=300, **KW).made == 0
    harvest("embedded", TEXTS, out=tmp_path / "all", **KW)
    assert read(tmp_path / "a").equals(read(tmp_path / "all").slice(0, 320))


def test_two_at_once_are_refused(embedded, tmp_path):
    folder = storage.Folder(tmp_path / "a")
    with folder.locked(), pytest.raises(HarvestError, match="another process"):
        harvest(embedded, TEXTS, out=tmp_path / "a", **KW)


def test_a_folder_of_something_else_is_left_alone(embedded, tmp_path):
    (tmp_path / "shard-000000.arrow").write_text("mine")
    with pytest.raises(HarvestError, match="not empty"):
        harvest(embedded, TEXTS, out=tmp_path, **KW)
    assert (tmp_path / "shard-000000.arrow").read_text() == "mine"


def test_unfinished_is_not_read_as_if_it_were_whole(tmp_path):
    report = harvest("embedded", TEXTS, out=tmp_path / "a", **KW)
    cut(tmp_path / "a", 3)
    with pytest.raises(HarvestError, match="not finished"):
        Activations(tmp_path / "a")
    assert 0 < len(Activations(tmp_path / "a", partial=True)) < report.rows
    assert not check(tmp_path / "a").passed


def test_check_finds_what_was_changed(tmp_path):
    harvest("embedded", TEXTS, out=tmp_path / "a", **KW)
    assert check(tmp_path / "a").passed
    place = tmp_path / "a" / "shard-000001.arrow"
    data = bytearray(place.read_bytes())
    data[len(data) // 2] ^= 1
    place.write_bytes(data)
    (tmp_path / "a" / "shard-000002.arrow").unlink()
    (tmp_path / "a" / "shard-000099.arrow").write_bytes(b"")
    found = check(tmp_path / "a")
    assert not found.passed
    said = "\n".join(found.problems)
    assert (
        "shard-000001.arrow: its checksum" in said and "shard-000002.arrow: it is missing" in said
    )
    assert "shard-000099.arrow is not in the manifest" in said
