"""What benchmarks measure with, by a clock that the test turns."""

import importlib.util
import pathlib
import time

import pytest

_PATH = pathlib.Path(__file__).parents[2] / "benchmarks" / "alternated.py"


@pytest.fixture
def alternated(monkeypatch):
    monkeypatch.syspath_prepend(str(_PATH.parent))
    spec = importlib.util.spec_from_file_location("alternated", _PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "alternated", module)
    spec.loader.exec_module(module)
    return module


def test_ratios_are_of_the_same_round_and_the_null_is_the_first_again(alternated, monkeypatch):
    now, order = [0.0], []

    def job(name, seconds):
        def run():
            order.append(name)
            # The machine is slower in every round: a ratio of medians would not see it, one within
            # a round does.
            now[0] += seconds * 2 ** (len(order) // 3)

        return run

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    found = alternated.alternated({"plain": job("plain", 1.0), "ours": job("ours", 1.5)}, rounds=5)
    assert list(found) == ["plain", alternated.NULL, "ours"]
    assert len(order) == 6 * 3  # one round is not counted
    assert all(
        order[i : i + 3].count("plain") == 2 and "ours" in order[i : i + 3] for i in range(0, 18, 3)
    )
    assert {tuple(order[i : i + 3]) for i in range(0, 18, 3)} != {("plain", "plain", "ours")}
    assert len(found["ours"].ratios) == 5 and found["ours"].first == found["plain"].rounds
    assert all(ratio in (0.75, 1.5, 3.0) for ratio in found["ours"].ratios)


def test_the_spread_is_where_half_of_the_rounds_lie(alternated):
    assert alternated.spread([1.0, 2.0, 3.0, 4.0, 100.0]) == " 3.000 (2.000 to 4.000)"
    timed = alternated.Timed((2.0, 4.0, 6.0), (1.0, 2.0, 2.0))
    assert timed.ratios == [2.0, 2.0, 3.0] and str(timed) == " 4000.000 ms   2.000 (2.000 to 2.500)"
