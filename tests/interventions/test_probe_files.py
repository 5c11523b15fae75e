"""Probes in files: saved and loaded they are the same, and another file or model is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from bridge import TransformerBridge, UnknownHookError
from bridge.interventions import (
    Add,
    FittedProbe,
    Interventions,
    InterventionsFileError,
    OtherModelError,
    Probe,
    load,
)
from bridge.interventions.probes import AGGREGATIONS
from bridge.interventions.stored import FileKind, write
from tests.conftest import tiny
from tests.interventions.test_probes import POINT, TEXTS, drawn, probe_over, separable

HEADER = "transformer_bridge_probe"
FIELDS = ("point", "over", "name", "bias", "alpha", "threshold", "fitted")


@pytest.fixture(scope="module")
def bridge() -> TransformerBridge:
    return TransformerBridge.boot_embedded()


@pytest.mark.parametrize("over", AGGREGATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_loaded_probe_is_the_same(
    bridge: TransformerBridge, tmp_path: Path, over: str, dtype: torch.dtype
) -> None:
    own = probe_over(over)
    queries = None if own.queries is None else own.queries.to(dtype)
    probe = FittedProbe(
        point=POINT,
        values=own.values.to(dtype),
        queries=queries,
        over=over,
        bias=0.1,
        alpha=0.3,
        threshold=float("inf"),
    )
    file = tmp_path / "probe.safetensors"
    probe.save(file, bridge)
    again = FittedProbe.load(file, bridge)
    assert all(getattr(again, name) == getattr(probe, name) for name in FIELDS)
    assert torch.equal(again.values, probe.values) and again.values.dtype == dtype
    assert (again.queries is None) == (queries is None)
    assert queries is None or torch.equal(again.queries, queries)
    both = [bridge.readings(TEXTS, [each]) for each in (probe, again)]
    for one, other in zip(*both, strict=True):
        assert one["probe"].value == other["probe"].value
        assert torch.equal(one["probe"].tokens, other["probe"].tokens)


def test_a_report_is_saved(tmp_path: Path) -> None:
    rows, labels = separable()
    probe = Probe.fit(rows, labels, POINT, "multimax", seed=1)
    probe.save(tmp_path / "probe.safetensors")
    again = FittedProbe.load(tmp_path / "probe.safetensors")
    assert again.report() == probe.report() and type(again.report().rows) is int
    assert torch.equal(again.values, probe.values) and again.threshold == probe.threshold


def test_a_loaded_condition_decides_the_same(bridge: TransformerBridge, tmp_path: Path) -> None:
    probe = probe_over("last")
    probe.save(tmp_path / "probe.safetensors")
    results = []
    for each in (probe, FittedProbe.load(tmp_path / "probe.safetensors", bridge)):
        steer = Add(drawn(128, seed=4), where=each > 0.3)
        pairs = [(POINT, each.operation), ("blocks.3.hook_resid_post", steer)]
        results.append(bridge.run_with_hooks(TEXTS, fwd_hooks=Interventions(pairs, bridge)))
    assert torch.equal(*results) and not torch.equal(results[0], bridge(TEXTS))


def rewritten(
    file: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]
) -> None:
    """Change what a file says, with the checksum that it had."""
    with safe_open(file, framework="pt") as opened:
        header = json.loads(opened.metadata()[HEADER])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    change(header, tensors)
    save_file(tensors, file, {HEADER: json.dumps(header)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header, tensors: header.update(version=3), "version 3; this library reads"),
        (lambda header, tensors: header.update(version=1), "version 1; this library reads"),
        (lambda header, tensors: tensors["values"].add_(1), "it is damaged"),
        (lambda header, tensors: tensors["numbers"].add_(1), "it is damaged"),
        (lambda header, tensors: header["probe"].update(over="mean"), "it is damaged"),
        (lambda header, tensors: header.pop("model"), "its header has"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    file = tmp_path / "probe.safetensors"
    probe_over("last").save(file)
    rewritten(file, change)
    with pytest.raises(InterventionsFileError, match=rf"probe\.safetensors.*{message}"):
        FittedProbe.load(file)


VALUES, NUMBERS = torch.ones(1, 128), torch.zeros(3)
ENTRY = {"point": POINT, "over": "last", "name": "probe"}


@pytest.mark.parametrize(
    ("entry", "tensors", "message"),
    [
        ("probe", {"values": VALUES, "numbers": NUMBERS}, "it has to have point, over, name"),
        ({"point": POINT}, {"values": VALUES, "numbers": NUMBERS}, "it has to have point"),
        ({**ENTRY, "name": 3}, {"values": VALUES, "numbers": NUMBERS}, "have to be text"),
        ({**ENTRY, "over": "sum"}, {"values": VALUES, "numbers": NUMBERS + 1}, "over is 'sum'"),
        (ENTRY, {"values": VALUES}, "it has the tensors values; a probe has"),
        (
            ENTRY,
            {"values": VALUES, "numbers": NUMBERS, "more": VALUES + 1},
            "tensors more, numbers",
        ),
        (ENTRY, {"values": VALUES, "numbers": torch.zeros(2)}, "it has 3 numbers"),
        (ENTRY, {"values": VALUES[0], "numbers": NUMBERS + 1}, r"it is \[head feature\]"),
        (ENTRY, {"values": VALUES.long(), "numbers": NUMBERS + 1}, r"it is \[head feature\]"),
        (ENTRY, {"values": VALUES, "numbers": NUMBERS}, "alpha is 0"),
    ],
)
def test_what_is_no_probe_is_refused(
    tmp_path: Path, entry: Any, tensors: dict[str, torch.Tensor], message: str
) -> None:
    """The checksum of each file is right."""
    file = tmp_path / "probe.safetensors"
    write(file, FileKind("probe"), entry, tensors, None)
    with pytest.raises(InterventionsFileError, match=message):
        FittedProbe.load(file)


def test_other_files_are_refused(bridge: TransformerBridge, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no file"):
        FittedProbe.load(tmp_path / "nothing.safetensors")
    (tmp_path / "text").write_text("a probe")
    with pytest.raises(InterventionsFileError, match="not a safetensors file"):
        FittedProbe.load(tmp_path / "text")
    steer = tmp_path / "steer.safetensors"
    Interventions([(POINT, Add(0.5))], bridge).save(steer)
    with pytest.raises(InterventionsFileError, match="nothing says which probe"):
        FittedProbe.load(steer)
    probe_over("last").save(tmp_path / "probe.safetensors")
    with pytest.raises(InterventionsFileError, match="nothing says which interventions"):
        load(tmp_path / "probe.safetensors", bridge)


def test_other_models_are_refused(bridge: TransformerBridge, tmp_path: Path) -> None:
    other, file = TransformerBridge(tiny("llama")), tmp_path / "probe.safetensors"
    probe_over("last").save(file, bridge)
    with pytest.raises(OtherModelError, match=r"this probe was made on .*d_model 128 there"):
        FittedProbe.load(file, other)
    probe_over("last").save(file)  # without its model: the width and the point are checked
    with pytest.raises(InterventionsFileError, match="has 128 features"):
        FittedProbe.load(file, other)
    far = FittedProbe(point="blocks.7.hook_resid_post", values=torch.ones(1, 128), over="last")
    with pytest.raises(UnknownHookError, match=r"blocks\.7"):
        far.save(file, bridge)
    far.save(file)
    with pytest.raises(InterventionsFileError, match=r"blocks\.7"):
        FittedProbe.load(file, bridge)
