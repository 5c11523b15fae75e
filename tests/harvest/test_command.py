"""``python -m bridge harvest``."""

import sys

import pytest

from bridge.cli.main import main
from bridge.harvest import Activations
from tests.harvest.common import RESID, TEXTS


def test_it_harvests_goes_on_and_checks(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("\n".join(TEXTS))
    command = [
        "harvest",
        "embedded",
        str(tmp_path / "*.txt"),
        "--points",
        RESID,
        "--out",
        str(tmp_path / "acts"),
        "--context-size",
        "16",
        "--tokens-per-shard",
        "200",
        "--separator",
        "eos",
        "--quiet",
    ]
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
    assert (
        main(
            [
                "harvest",
                "embedded",
                str(tmp_path / "none"),
                "--points",
                RESID,
                "--out",
                str(tmp_path / "a"),
            ]
        )
        == 2
    )
    assert capsys.readouterr().err.startswith("error: no file matches")
    assert main(["harvest", "--check", str(tmp_path)]) == 2
    assert "holds no harvest" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["harvest", "embedded"])
    assert "harvest needs files, points, out" in capsys.readouterr().err


def test_progress(tmp_path, capsys, embedded):
    from bridge.harvest import harvest

    seen = []
    kw = {"hook_points": [RESID], "context_size": 16, "tokens_per_shard": 200, "batch_size": 2}
    report = harvest(embedded, TEXTS, out=tmp_path / "a", progress=seen.append, **kw)
    assert len(seen) > 2 * report.shards  # each shard has several batches
    shards = [progress.shards for progress in seen]
    assert shards == sorted(shards) and shards[0] == 0 and shards[-1] == report.shards
    tokens = [progress.tokens for progress in seen]
    assert tokens == sorted(tokens) and 0 < tokens[0] <= 2 * 16
    assert seen[-1].tokens == report.tokens and seen[-1].seconds_left == 0
    assert seen[0].seconds_left > 0 and seen[0].tokens_per_second > 0
    assert 0 < seen[-1].model_share <= 1
    harvest(embedded, iter(TEXTS), out=tmp_path / "b", progress=seen.append, **kw)
    assert seen[-1].seconds_left is None
    capsys.readouterr()
    harvest(embedded, TEXTS, out=tmp_path / "c", progress=True, **kw)
    bar = capsys.readouterr().err
    assert "in the model" in bar and "100%" in bar


def test_the_first_batch_tells_how_much_is_left(tmp_path, embedded):
    """All documents fit into one shard, as those of most first harvests do."""
    from bridge.harvest import harvest

    seen = []
    kw = {"hook_points": [RESID], "context_size": 16, "batch_size": 2}
    report = harvest(embedded, TEXTS, out=tmp_path / "a", progress=seen.append, **kw)
    assert report.shards == 1
    first = seen[0]
    expected = first.tokens * (1 + first.seconds_left / first.seconds)
    assert expected == pytest.approx(report.tokens, rel=0.05)


def test_max_tokens_are_what_is_left_of_documents_without_a_number(tmp_path, embedded):
    from bridge.harvest import harvest

    seen = []
    kw = {"hook_points": [RESID], "context_size": 16, "batch_size": 2, "max_tokens": 160}
    harvest(embedded, iter(TEXTS), out=tmp_path / "a", progress=seen.append, **kw)
    assert seen[0].seconds_left > 0 and seen[-1].seconds_left == 0


@pytest.mark.parametrize("terminal", [False, True])
def test_a_bar_is_for_terminals(tmp_path, capsys, monkeypatch, embedded, terminal):
    from bridge.harvest import harvest

    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    harvest(embedded, TEXTS, out=tmp_path / "a", hook_points=[RESID])
    assert ("harvest: " in capsys.readouterr().err) == terminal
    harvest(embedded, TEXTS, out=tmp_path / "b", hook_points=[RESID], progress=False)
    assert capsys.readouterr().err == ""
