"""``python -m bridge harvest``."""

import pytest

from bridge.cli.main import main
from bridge.harvest import Activations
from tests.harvest.common import RESID, TEXTS


def test_it_harvests_goes_on_and_checks(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("\n".join(TEXTS))
    command = [
        "harvest", "embedded", str(tmp_path / "*.txt"), "--points", RESID, "--out", str(tmp_path / "acts"),
        "--context-size", "16", "--tokens-per-shard", "200", "--separator", "eos", "--quiet",
    ]  # fmt: skip
    assert main(command) == 0
    assert "shards (" in capsys.readouterr().out
    assert main(command) == 0
    assert "; 0 made now" in capsys.readouterr().out
    assert main(["harvest", "--check", str(tmp_path / "acts")]) == 0
    assert "every checksum and row count holds" in capsys.readouterr().out
    assert Activations(tmp_path / "acts").manifest.options["separator"] is not None
    (tmp_path / "acts" / "shard-000000.arrow").write_bytes(b"")
    assert main(["harvest", "--check", str(tmp_path / "acts")]) == 1
    assert "shard-000000.arrow: it has 0 bytes" in capsys.readouterr().out
    assert main(command) == 0
    assert "; 1 made now" in capsys.readouterr().out
    data = bytearray((tmp_path / "acts" / "shard-000001.arrow").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "acts" / "shard-000001.arrow").write_bytes(data)
    assert main(command) == 0
    assert "; 0 made now" in capsys.readouterr().out
    assert main([*command, "--checksums"]) == 0
    assert "; 1 made now" in capsys.readouterr().out
    assert main(["harvest", "--check", str(tmp_path / "acts")]) == 0


def test_errors_are_one_line(tmp_path, capsys):
    assert main(["harvest", "embedded", str(tmp_path / "none"), "--points", RESID, "--out", str(tmp_path / "a")]) == 2
    assert capsys.readouterr().err.startswith("error: no file matches")
    assert main(["harvest", "--check", str(tmp_path)]) == 2
    assert "holds no harvest" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["harvest", "embedded"])
    assert "harvest needs files, points, out" in capsys.readouterr().err


def test_progress(tmp_path, capsys, embedded):
    from bridge.harvest import harvest

    seen = []
    kw = {"hook_points": [RESID], "context_size": 16, "tokens_per_shard": 200}
    report = harvest(embedded, TEXTS, out=tmp_path / "a", progress=seen.append, **kw)
    assert [progress.shards for progress in seen] == list(range(1, report.shards + 1))
    assert seen[-1].tokens == report.tokens and seen[-1].seconds_left == 0
    assert seen[0].seconds_left > 0 and seen[0].tokens_per_second > 0
    assert 0 < seen[-1].model_share <= 1
    harvest(embedded, iter(TEXTS), out=tmp_path / "b", progress=seen.append, **kw)
    assert seen[-1].seconds_left is None
    harvest(embedded, TEXTS, out=tmp_path / "c", progress=True, **kw)
    assert "in the model" in capsys.readouterr().err
