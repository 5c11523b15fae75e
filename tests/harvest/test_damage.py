"""What is on disk, or in a store, stays right: lost, cut and flipped files are told, and made again
to equal bytes.
"""

import contextlib
import os
import random
import subprocess
import sys
import time
import uuid

import fsspec
import pytest

from bridge.harvest import Activations, HarvestError, check, harvest
from bridge.harvest import shards as storage
from tests.harvest.common import RESID, TEXTS
from tests.harvest.test_resume import KW, ROOT


def content(url):
    """What a folder holds, byte for byte, without the lock."""
    store, root = fsspec.url_to_fs(str(url))
    store.invalidate_cache()
    if not store.exists(root):
        return {}
    names = [
        name for name in store.ls(root, detail=False) if not name.endswith((".lock", "records"))
    ]
    return {name.rpartition("/")[2]: store.cat_file(name) for name in names}


def put(url, name, data):
    store, root = fsspec.url_to_fs(str(url))
    store.pipe_file(f"{root}/{name}", data)


@pytest.fixture(scope="module")
def server():
    """A server of S3's protocol on this machine."""
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    moto = pytest.importorskip("moto.server", reason="moto's server is not installed")
    given = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    running = moto.ThreadedMotoServer(port=0)
    running.start()
    given["AWS_ENDPOINT_URL"] = "http://{}:{}".format(*running.get_host_and_port())
    before = dict(os.environ)
    os.environ.update(given)
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir("bucket")
    yield "s3://bucket"
    os.environ.clear()
    os.environ.update(before)
    running.stop()


STORES = [
    "here",
    "memory",
    pytest.param(
        "s3", marks=[pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
    ),
]


@pytest.fixture(params=STORES)
def place(request, tmp_path, monkeypatch):
    """A folder that is not there yet: here, in memory, on a server of S3's protocol."""
    monkeypatch.setenv("TRANSFORMER_BRIDGE_CACHE", str(tmp_path / "kept"))
    if request.param == "here":
        return str(tmp_path / "a")
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/a"
    return f"{request.getfixturevalue('server')}/{uuid.uuid4().hex}"


def damage(rng, url, name, data):
    """Loses a file, cuts it short or flips a bit; which of them."""
    how = rng.choice(("lost", "cut", "flipped"))
    if how == "lost":
        store, root = fsspec.url_to_fs(url)
        store.rm_file(f"{root}/{name}")
    elif how == "cut":
        put(url, name, data[: rng.randrange(len(data))])
    else:
        at = rng.randrange(len(data))
        put(url, name, data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
    return how


def test_lost_cut_and_flipped_shards_are_made_again(place):
    go = lambda **more: harvest("embedded", TEXTS, out=place, **KW, **more)
    report = go()
    whole = content(place)
    names = sorted(name for name in whole if name.startswith("shard-"))
    assert len(names) == report.shards > 4 and check(place).passed and go().made == 0
    rng, seen = random.Random(0), set()
    for _ in range(6):
        some = rng.sample(names, rng.randrange(1, 4))
        found = {name: damage(rng, place, name, whole[name]) for name in some}
        seen |= set(found.values())
        said = "\n".join(check(place).problems)
        assert all(name in said for name in found) and said.count("shard-") == len(found)
        short = [name for name, how in found.items() if how != "flipped"]
        if short:
            with pytest.raises(HarvestError, match=min(short)):
                Activations(place)
        assert go().made == len(short)
        assert go(checksums=True).made == len(found) - len(short)
        assert go(checksums=True).made == 0
        assert content(place) == whole and check(place).passed
    assert seen == {"lost", "cut", "flipped"}


def test_a_flipped_bit_is_seen_when_its_shard_is_first_read(place):
    harvest("embedded", TEXTS, out=place, **KW)
    name = "shard-000001.arrow"
    data = content(place)[name]
    put(place, name, data[:5000] + bytes([data[5000] ^ 4]) + data[5001:])
    acts = Activations(place)
    acts[0]
    for read in (lambda: acts[130], lambda: list(acts.batches(64)), lambda: acts.statistics(RESID)):
        with pytest.raises(
            HarvestError, match=f"{name} is damaged: its checksum is .* checksums=True"
        ):
            read()
    put(place, name, data)
    assert len(list(acts.batches(1))) == len(acts)


def test_a_shard_is_compared_once_by_whoever_reads(tmp_path, monkeypatch):
    harvest("embedded", TEXTS, out=tmp_path / "a", **KW)
    real, read = storage.checksum_of, []
    monkeypatch.setattr(
        storage, "checksum_of", lambda path: (read.append(path.name), real(path))[1]
    )
    acts = Activations(tmp_path / "a")
    for _ in range(2):
        for _ in acts.batches(50, shuffle=True):
            pass
    assert sorted(read) == [record.file for record in acts.manifest.shards]


def test_a_killed_repair_goes_on(place, monkeypatch):
    harvest("embedded", TEXTS, out=place, **KW)
    whole = content(place)
    for name in ("shard-000001.arrow", "shard-000003.arrow"):
        put(place, name, b"half")

    class Stop(BaseException):
        """Stands for the end of the process."""

    real = storage.AtomicFile.commit
    for stop_at in range(1, len(whole) + 2):
        count = 0

        def commit(file, new=False, stop_at=stop_at):
            nonlocal count
            count += 1
            if count == stop_at:
                raise Stop
            return real(file, new)

        monkeypatch.setattr(storage.AtomicFile, "commit", commit)
        with pytest.raises(Stop):
            harvest("embedded", TEXTS, out=place, **KW)
        monkeypatch.undo()
        monkeypatch.setenv(
            "TRANSFORMER_BRIDGE_CACHE", str(storage.Folder(place).scratch.parent.parent)
        )
    harvest("embedded", TEXTS, out=place, **KW)
    assert content(place) == whole


def test_another_source_repairs_nothing(tmp_path):
    harvest("embedded", TEXTS, out=tmp_path / "a", **KW)
    names = sorted(name for name in content(tmp_path / "a") if name.startswith("shard-"))
    for lost, source in (
        (names[1], ["Another text", *TEXTS[1:]]),
        (names[-1], [*TEXTS, *TEXTS]),
        (names[-1], TEXTS[:9]),
    ):
        data = (tmp_path / "a" / lost).read_bytes()
        (tmp_path / "a" / lost).unlink()
        with pytest.raises(HarvestError, match="the source"):
            harvest("embedded", source, out=tmp_path / "a", **KW)
        assert not {*content(tmp_path / "a")} - {*names, "manifest.json"}
        (tmp_path / "a" / lost).write_bytes(data)


def test_other_bytes_are_told(tmp_path, monkeypatch):
    harvest("embedded", TEXTS, out=tmp_path / "a", **KW)
    (tmp_path / "a" / "shard-000001.arrow").unlink()
    monkeypatch.setattr(storage, "_PIECE_BYTES", 2**14)
    with pytest.warns(
        UserWarning, match=r"shard-000001.arrow was lost, and is made again with other bytes"
    ):
        harvest("embedded", TEXTS, out=tmp_path / "a", **KW)
    assert check(tmp_path / "a").passed


def test_a_damaged_record_is_no_record(tmp_path):
    class Stop(BaseException):
        """Stands for the end of the process."""

    def stop(progress):
        if progress.shards == 4:
            raise Stop

    harvest("embedded", TEXTS, out=tmp_path / "whole", **KW)
    with pytest.raises(Stop):
        harvest("embedded", TEXTS, out=tmp_path / "a", progress=stop, **KW)
    for number, data in enumerate((b"", b"{", b'{"index": 1}')):
        (tmp_path / "a" / "records" / f"shard-{number:06d}.json").write_bytes(data)
    report = harvest("embedded", TEXTS, out=tmp_path / "a", **KW)
    assert report.made == report.shards - 1
    assert content(tmp_path / "a").keys() == content(tmp_path / "whole").keys()


@pytest.mark.parametrize("form", ["arrow", "parquet"])
@pytest.mark.parametrize("times", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_damaged_files_never_give_another_number(tmp_path, times, form):
    """The manifest and the shards: cut, flipped, with bytes between and without."""
    harvest(
        "embedded", TEXTS[:12], out=tmp_path / "a", format=form, **KW | {"hook_points": [RESID]}
    )
    whole = content(tmp_path / "a")
    expected = [
        (name, tensor) for name, tensor in Activations(tmp_path / "a").read(range(-60, 60)).items()
    ]
    rng, refused = random.Random(1), 0
    for _ in range(times):
        name = rng.choice(sorted(whole))
        data = bytearray(whole[name])
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                del data[at:]
            case 2:
                del data[at : at + rng.randrange(1, 9)]
            case _:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
        (tmp_path / "a" / name).write_bytes(data)
        said = None
        try:
            read = Activations(tmp_path / "a").read(range(-60, 60))
        except HarvestError as error:
            said = str(error)
        if said is not None:
            assert name in said
            refused += 1
        else:
            assert all(read[column].equal(tensor) for column, tensor in expected)
        (tmp_path / "a" / name).write_bytes(whole[name])
    assert refused > 0.8 * times


def test_a_store_is_read_through_a_folder_of_this_machine(tmp_path, monkeypatch):
    place = f"memory://{uuid.uuid4().hex}/a"
    monkeypatch.setenv("TRANSFORMER_BRIDGE_CACHE", str(tmp_path / "kept"))
    harvest("embedded", TEXTS, out=place, **KW)
    acts = Activations(place, cache=tmp_path / "cache")
    first = list(acts.batches(64, shuffle=True))
    kept = {path.name: path for path in (tmp_path / "cache").iterdir() if path.is_file()}
    assert {path.stem for path in kept.values()} == {
        record.checksum for record in acts.manifest.shards
    }
    store = fsspec.filesystem("memory")
    monkeypatch.setattr(type(store), "get_file", None)  # nothing is fetched twice
    again = Activations(place, cache=tmp_path / "cache")
    for a, b in zip(first, again.batches(64, shuffle=True), strict=True):
        assert all(a[name].equal(b[name]) for name in a)
    monkeypatch.undo()
    # What went wrong in the folder is fetched again.
    for path in kept.values():
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    for a, b in zip(
        first, Activations(place, cache=tmp_path / "cache").batches(64, shuffle=True), strict=True
    ):
        assert all(a[name].equal(b[name]) for name in a)


def test_urls_that_nobody_knows(tmp_path, embedded):
    with pytest.raises(HarvestError, match="nowhere://a/b cannot be opened"):
        harvest(embedded, TEXTS, out="nowhere://a/b", **KW)
    with pytest.raises(HarvestError, match="memory://never holds no harvest"):
        Activations("memory://never")


def test_a_store_keeps_one_harvest_from_another(monkeypatch, tmp_path, embedded):
    """Nothing locks a store: of two calls that begin at once, the one that comes second is
    refused.
    """
    monkeypatch.setenv("TRANSFORMER_BRIDGE_CACHE", str(tmp_path / "kept"))
    place = f"memory://{uuid.uuid4().hex}/a"
    real = storage.Folder.strange

    def late(folder):
        found = real(folder)
        put(place, "manifest.json", b"another's")
        return found

    monkeypatch.setattr(storage.Folder, "strange", late)
    with pytest.raises(HarvestError, match="another process began a harvest in memory://"):
        harvest(embedded, TEXTS, out=place, **KW)
    assert content(place) == {"manifest.json": b"another's"}
    with (
        storage.Folder(place).locked(),
        pytest.raises(HarvestError, match="another process is harvesting"),
    ):
        harvest(embedded, TEXTS, out=place, **KW)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["here", "s3"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_fifty_kills_and_damages(where, request, tmp_path, monkeypatch):
    """Killed at random moments, and damaged in between: equal bytes in the end."""
    monkeypatch.setenv("TRANSFORMER_BRIDGE_CACHE", str(tmp_path / "kept"))
    place = (
        str(tmp_path / "a")
        if where == "here"
        else f"{request.getfixturevalue('server')}/{uuid.uuid4().hex}"
    )
    copies = 8
    harvest("embedded", TEXTS * copies, out=tmp_path / "whole", **KW)
    whole = {
        name: data for name, data in content(tmp_path / "whole").items() if name != "manifest.json"
    }
    runner = subprocess.Popen(
        [sys.executable, "-m", "tests.harvest.run_one"],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    rng, killed, seen = random.Random(0), 0, []
    with runner:
        for turn in range(51):
            runner.stdin.write(f"{place} 128 {copies} {tmp_path / 'made'}\n")
            runner.stdin.flush()
            process = int(runner.stdout.readline())
            if turn < 50:
                time.sleep(rng.uniform(0.2, 1.5) if where == "here" else rng.uniform(0.5, 3))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, 9)
            status = int(runner.stdout.readline())
            killed += status == -9
            there = {
                name: data for name, data in content(place).items() if name.startswith("shard-")
            }
            assert all(data == whole[name] for name, data in there.items() if name not in seen)
            if turn < 50 and there:
                seen.append(rng.choice(sorted(there)))
                damage(rng, place, seen[-1], whole[seen[-1]])
        assert status == 0
        runner.stdin.close()
    harvest("embedded", TEXTS * copies, out=place, checksums=True, **KW)
    assert {name: data for name, data in content(place).items() if name != "manifest.json"} == whole
    assert check(place).passed
    print(f"killed {killed} times")
    assert killed >= 20
