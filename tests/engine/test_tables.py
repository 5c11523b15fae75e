"""Operations as rows of tables: they do what the operation does, or are refused by name. vLLM is
not needed.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adapters.imports import VersionError
from bridge import TransformerBridge
from bridge.engine.insides import check_options, check_vllm, sampling, vllm_version
from bridge.engine.proof import engine_point, rows_like
from bridge.engine.serving import SavedEdits
from bridge.engine.tables import (
    LOWERED,
    EngineEdit,
    EnginePlace,
    SiteRows,
    lower,
    packed,
    row_of,
    unpacked,
)
from bridge.interventions import (
    OPERATIONS,
    Add,
    AddScaled,
    Cap,
    Clamp,
    Operation,
    Probe,
    ProjectOnto,
    ProjectOut,
    Scale,
    Set,
    Zero,
)
from tests.conftest import tiny

D, HEADS, D_HEAD = 32, 4, 8
STREAM = EnginePlace(0, D, tuple(range(D)), (D,))
#: Queries of a projection that vLLM fused: columns 0 to 31 of 64.
QUERIES = EnginePlace(1, 64, tuple(range(D)), (HEADS, D_HEAD))


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


ON_STREAM = [
    Add(draw(D), 0.5),
    Add(2.0),
    Add(draw(D), features=[1, 5]),
    Scale(0.5),
    Scale(draw(D)),
    Set(draw(D)),
    Set(0.25),
    Zero(),
    Zero(features=slice(0, 8)),
    ProjectOut(draw(D)),
    ProjectOut(draw(2, D)),
    ProjectOnto(draw(2, D)),
    ProjectOnto(draw(D), features=slice(3, 9)),
    AddScaled(draw(D), 0.7),
    Cap(draw(D), 0.3),
    Cap(draw(D), -1.0),
]
ON_HEADS = [
    Add(draw(D_HEAD)),
    Add(draw(HEADS, D_HEAD)),
    Add(draw(D_HEAD), heads=[0, 2]),
    Scale(0.0, heads=-1),
    Zero(heads=1),
    Set(draw(D_HEAD), heads=3),
    ProjectOut(draw(D_HEAD)),
    ProjectOnto(draw(D_HEAD), heads=1),
    Cap(draw(D_HEAD), 0.2),
    Cap(draw(D_HEAD), -0.2, heads=[1, 3]),
]


@pytest.fixture(scope="module")
def bridge() -> TransformerBridge:
    return TransformerBridge(tiny("llama"), None)


@pytest.mark.parametrize("operation", ON_STREAM, ids=lambda op: type(op).__name__)
def test_a_row_does_at_the_stream_what_the_operation_does(
    bridge: TransformerBridge, operation: Operation
) -> None:
    hook = bridge.hook_dict["blocks.1.hook_resid_post"]
    x = draw(1, 5, D, seed=1).double()
    assert torch.allclose(row_of(operation, hook, STREAM)(x[0]), operation(x, hook)[0], atol=1e-6)


@pytest.mark.parametrize("operation", ON_HEADS, ids=lambda op: type(op).__name__)
def test_a_row_does_at_some_columns_what_the_operation_does(
    bridge: TransformerBridge, operation: Operation
) -> None:
    hook = bridge.hook_dict["blocks.1.attn.hook_q"]
    x = draw(5, 64, seed=1).double()
    wanted = x.clone()
    wanted[:, :D] = operation(x[None, :, :D].unflatten(-1, (HEADS, D_HEAD)), hook)[0].flatten(1)
    assert torch.allclose(row_of(operation, hook, QUERIES)(x), wanted, atol=1e-6)


class SAE(torch.nn.Module):
    """One with random weights: features above thresholds, all that are positive, all, or the
    largest.
    """

    def __init__(self, kind: str, width: int = D) -> None:
        super().__init__()
        self.kind = kind
        self.w, self.b = (
            torch.nn.Parameter(draw(width, 50, seed=1) / 5),
            torch.nn.Parameter(draw(50, seed=2)),
        )
        self.d, self.c = (
            torch.nn.Parameter(draw(50, width, seed=3)),
            torch.nn.Parameter(draw(width, seed=4)),
        )

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        before = (x - self.c) @ self.w + self.b
        if self.kind == "top":
            return before * (before >= before.topk(8).values[..., -1:])
        return (
            before
            if self.kind == "linear"
            else before * (before > {"jump": 0.7, "relu": 0.0}[self.kind])
        )

    def decode(self, features: torch.Tensor) -> torch.Tensor:
        return features @ self.d + self.c


ON_FEATURES = [
    Add(3.0, features=[4]),
    Add(draw(50)),
    Scale(2.0, features=[1, 7]),
    Zero(features=slice(0, 5)),
    Set(1.5, features=9),
]


@pytest.mark.parametrize("kind", ["linear", "relu", "jump"])
@pytest.mark.parametrize("operation", ON_FEATURES, ids=lambda op: type(op).__name__)
def test_a_row_does_what_an_operation_does_at_features(kind: str, operation: Operation) -> None:
    bridge = TransformerBridge(tiny("llama"), None)
    hook, x = (
        bridge.add_basis("blocks.1.hook_resid_post", "sae", sae := SAE(kind)),
        draw(40, D, seed=9) * 3,
    )
    features = sae.encode(x)
    wanted = x + sae.decode(operation(features[None].clone(), hook)[0]) - sae.decode(features)
    row = row_of(operation, hook, STREAM)
    assert torch.allclose(row(x.double()).float(), wanted, atol=1e-3)
    assert len(row.out) == {"Scale": 2, "Zero": 5, "Set": 1}.get(type(operation).__name__, 0)


def test_features_that_no_row_has_are_refused() -> None:
    bridge = TransformerBridge(tiny("llama"), None)
    hook = bridge.add_basis("blocks.1.hook_resid_post", "top", SAE("top"))
    with pytest.raises(ValueError, match="no table row computes the same"):
        row_of(Zero(features=[0, 1]), hook, STREAM)
    with pytest.raises(
        ValueError, match="changes features of a vector by Add, Scale, Set and Zero"
    ):
        row_of(Cap(draw(50), 0.0), hook, STREAM)
    heads = bridge.add_basis("blocks.1.attn.hook_q", "sae", SAE("relu", D_HEAD))
    with pytest.raises(ValueError, match="changes features of a vector"):
        row_of(Zero(features=[0]), heads, QUERIES)
    whole = bridge.add_basis("blocks.1.hook_resid_post", "whole", SAE("relu"), error="drop")
    with pytest.raises(ValueError, match="where what the basis does not explain is kept"):
        row_of(Zero(features=[0]), whole, STREAM)
    assert (
        len(row_of(Add(1.0, features=[0]), hook, STREAM).out) == 0
    )  # the same whatever the features are


def applied(rows: SiteRows, x: torch.Tensor, prompt: int) -> torch.Tensor:
    """What an engine's pass makes of all tokens of a request."""
    code = sum(
        choice.mask(0, len(x), prompt).long() * 2**place
        for place, choice in enumerate(rows.choices)
    )
    made = x.clone()
    for token, its in enumerate(code.tolist()):
        if its in rows.codes:
            t = {name: table[rows.codes.index(its)] for name, table in rows.tables.items()}
            one = x[token]
            along = t["read"] @ one + t["bias"]
            along = along * (along > t["threshold"])
            made[token] = one * t["scale"] + t["add"] + t["norm"] * one.norm() + along @ t["out"]
    return made


def test_several_operations_with_several_choices_of_tokens(bridge: TransformerBridge) -> None:
    hook = bridge.hook_dict["blocks.1.hook_resid_post"]
    operations = [
        AddScaled(draw(D), 0.3, positions=slice(0, 4)),
        Add(draw(D, seed=2)),
        ProjectOut(draw(D, seed=3), positions=-1),
        Scale(0.5),
        Zero(part="generated", features=[0, 1]),
    ]
    edit = lower([(hook, operation) for operation in operations], {hook.name: STREAM}, 1)
    x, prompt = draw(9, D, seed=4), 6
    wanted = x[None]
    for operation in operations:
        chosen: dict[str, Any] = (
            {"positions": slice(0, 4)}
            if isinstance(operation, AddScaled)
            else {"positions": None, "part": "all"}
        )
        if isinstance(operation, ProjectOut):
            chosen = {"positions": prompt - 1}  # a run's prompt is all of it
        if isinstance(operation, Zero):
            chosen = {"positions": slice(prompt, None), "part": "all"}
        wanted = replace(operation, **chosen)(wanted, hook)
    (rows,) = edit.sites
    assert torch.allclose(applied(rows, x, prompt), wanted[0], atol=1e-5)
    ((again,),) = (made.sites for made in unpacked(*packed([edit])))
    assert (
        torch.equal(applied(again, x, prompt), applied(rows, x, prompt))
        and again.choices == rows.choices
    )


def test_the_key_is_of_what_is_done(bridge: TransformerBridge) -> None:
    hook = bridge.hook_dict["blocks.1.hook_resid_post"]
    keys = [
        lower([(hook, operation)], {hook.name: STREAM}, 1).key
        for operation in (Add(draw(D)), Add(draw(D)), Add(draw(D), positions=0), Add(draw(D), 0.5))
    ]
    assert keys[0] == keys[1] and len(set(keys)) == 3


def test_what_no_row_holds_is_refused_by_name(bridge: TransformerBridge) -> None:
    hook, places = (
        bridge.hook_dict["blocks.1.hook_resid_post"],
        {"blocks.1.hook_resid_post": STREAM},
    )
    with pytest.raises(
        ValueError, match=r"Clamp at blocks.1.hook_resid_post is not available in an engine"
    ):
        lower([(hook, Clamp(0.0, 1.0))], places, 1)
    assert {kind.__name__ for kind in LOWERED} <= set(OPERATIONS)
    with pytest.raises(TypeError, match="a function"):
        lower([(hook, lambda x, hook: x)], places, 1)
    with pytest.raises(
        ValueError, match=r"2 directions, and this engine has room for 1: Engine\(rank=\)"
    ):
        lower([(hook, ProjectOut(draw(2, D)))], places, 1)
    with pytest.raises(ValueError, match="AddScaled can only be the first"):
        lower([(hook, Scale(2.0)), (hook, AddScaled(draw(D)))], places, 1)
    with pytest.raises(
        ValueError, match=r"Cap at .*: a cap or a feature that is changed by an earlier"
    ):
        lower([(hook, ProjectOut(draw(D))), (hook, Cap(draw(D, seed=1), 0.0))], places, 2)
    with pytest.raises(ValueError, match="too many choices of tokens"):
        lower([(hook, Add(1.0, positions=slice(place, None))) for place in range(9)], places, 1)
    with pytest.raises(
        ValueError, match="63 choices of tokens at one place of an engine, which takes 62"
    ):
        lower([(hook, Add(1.0, positions=place)) for place in range(63)], places, 1)
    with pytest.raises(ValueError, match="a part of a tensor"):
        row_of(AddScaled(draw(D_HEAD)), bridge.hook_dict["blocks.1.attn.hook_q"], QUERIES)
    with pytest.raises(IndexError, match="a position is 7, and there are 5"):
        lower([(hook, Add(1.0, positions=7))], places, 1).check_prompt(5)


def test_which_points_an_engine_may_have(bridge: TransformerBridge) -> None:
    hooks = [hook for name, hook in bridge.hook_dict.items() if name.startswith("blocks.1.")]
    like = rows_like(bridge, hooks)
    said = {
        hook.name: engine_point(hook, bridge.original_model, like.get(hook.name)) for hook in hooks
    }
    query = said["blocks.1.attn.hook_q"]
    assert (
        isinstance(query, dict)
        and query["path"] == "layers.1.self_attn.q_proj"
        and query["shape"] == [4, 8]
    )
    assert query["columns"] == list(range(32)) and not query["through"]
    middle = said["blocks.1.hook_resid_mid"]
    assert isinstance(middle, dict) and middle["through"] and middle["width"] == 32
    assert said["blocks.1.attn.hook_pattern"] == {
        "path": "layers.1.self_attn",
        "kind": "attention",
        "key": "pattern",
    }
    assert "computed" in said["blocks.1.attn.hook_result"]
    assert "computed" in said["blocks.1.ln1.hook_normalized"]


def test_another_version_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.19.1")
    assert vllm_version() == "0.19.1"
    with pytest.raises(
        VersionError, match=r"works with vLLM 0\.31 and 0\.32, and 0\.19\.1 is installed"
    ):
        check_vllm()


@pytest.mark.parametrize(
    "option",
    ["pipeline_parallel_size", "data_parallel_size", "quantization"],
)
def test_what_was_not_tried_is_refused_by_name(option: str) -> None:
    with pytest.raises(ValueError, match=f"not tried with {option}"):
        check_options({option: 2})
    with pytest.raises(ValueError, match="not tried with speculative_config of method eagle"):
        check_options({"speculative_config": {"method": "eagle", "model": "somewhere"}})
    with pytest.raises(
        ValueError, match="not tried with speculative_config of method that vLLM chooses"
    ):
        check_options({"speculative_config": {"model": "somewhere", "num_speculative_tokens": 3}})
    for ours in (
        "extra_args",
        "skip_reading_prefix_cache",
        "max_tokens",
        "ignore_eos",
        "output_kind",
    ):
        with pytest.raises(TypeError, match=f"{ours} is not an argument"):
            sampling(4, True, False, {"capture": [], "read": []}, {ours: None})
    check_options({"speculative_config": {"method": "ngram"}, "tensor_parallel_size": 2})
    for ours in ("model_impl", "enable_lora"):
        with pytest.raises(TypeError, match=ours):
            check_options({ours: True})


def test_the_library_does_not_import_vllm() -> None:
    code = (
        "import sys, bridge, bridge.engine; bridge.engine.Engine; assert 'vllm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def edit_of(key: str) -> EngineEdit:
    """One row at a site."""
    return EngineEdit(key, (SiteRows(0, (), (0,), {"add": torch.zeros(1, 4)}),))


class Worker:
    """What a server's engine does: keeps the edits that it was sent last; it can fail, or be left
    while it is asked.
    """

    def __init__(self) -> None:
        self.there: list[str] = []
        self.fails: BaseException | None = None

    async def collective_rpc(self, name: str, args: tuple[str, bytes]) -> None:
        await asyncio.sleep(0)
        if self.fails is not None:
            raise self.fails
        self.there = [key for key, _ in json.loads(args[0])]

    async def generate(self, prompt: Any, params: Any) -> AsyncIterator[list[str]]:
        yield self.there


@pytest.mark.unchecked
def test_an_edit_is_there_when_its_request_begins_also_after_one_that_failed_or_was_left(
    monkeypatch,
):
    worker, edits = Worker(), SavedEdits(SimpleNamespace(), [], rows=1)
    monkeypatch.setattr(edits, "edit", edit_of)
    edits.around(worker)

    async def asks(name: str) -> list[str]:
        params = SimpleNamespace(
            extra_args={"interventions": name}, skip_reading_prefix_cache=False
        )
        return await anext(worker.generate({"prompt_token_ids": [1]}, params))

    async def run() -> None:
        for error in (RuntimeError("no worker"), asyncio.CancelledError()):
            worker.fails = error
            with pytest.raises(type(error)):
                await asks("one")
            worker.fails = None
            assert await asks("one") == ["one"]
            assert await asyncio.wait_for(asks("two"), 5) == ["two"]

    asyncio.run(run())


def test_placeholders_have_a_row_each(bridge: TransformerBridge) -> None:
    """Vectors at many tokens: these never meet, so a row is one vector, also beside an edit of all
    tokens.
    """
    hook = bridge.hook_dict["blocks.1.hook_resid_post"]
    vectors = draw(40, D, seed=3)
    pairs = [(hook, AddScaled(vector, positions=place)) for place, vector in enumerate(vectors)]
    pairs += [(hook, Scale(0.5)), (hook, Add(1.0, part="generated"))]
    (rows,) = lower(pairs, {hook.name: STREAM}, 1).sites
    assert len(rows.codes) == 40 + 2
    x = draw(45, D, seed=4)
    wanted = x.clone()
    wanted[:40] += vectors * (x[:40].norm(dim=-1) / vectors.norm(dim=-1))[:, None]
    wanted *= 0.5
    wanted[42:] += 1
    assert torch.allclose(applied(rows, x, 42), wanted, atol=1e-5)


NAMES = [
    f"blocks.{layer}.{name}"
    for layer in range(2)
    for name in ("hook_resid_pre", "attn.hook_q", "hook_resid_post")
]
PLACES = {
    name: replace(QUERIES if "attn" in name else STREAM, site=number)
    for number, name in enumerate(NAMES)
}


def test_a_condition_asks_the_column_of_its_probe(bridge: TransformerBridge) -> None:
    sure, late = Probe(draw(D), "sure", bias=0.5), Probe(draw(D, seed=1), "late")
    specs = [
        (NAMES[0], sure),
        (NAMES[2], late),
        (NAMES[2], Add(1.0, where=sure < 2.0, positions=1)),
        (NAMES[4], Zero(heads=1, where=late > -1.0)),
    ]
    edit = lower([(bridge.hook_dict[name], fn) for name, fn in specs], PLACES, 1, NAMES, 3)
    first, third, fifth = edit.sites
    assert first.codes == (0,) and third.codes == (
        0,
        1,
    )  # of tokens that no operation chooses, probes read, too
    assert first.tables["probes"].tolist() == [[1.0, 0.0, 0.0]] and third.tables["probes"][
        0
    ].tolist() == [
        0.0,
        1.0,
        0.0,
    ]
    assert (
        torch.equal(first.tables["probe"][0, 0], draw(D))
        and float(first.tables["probe_bias"][0, 0]) == 0.5
    )
    assert third.tables["asks"].tolist() == [[0.0] * 3, [-1.0, 0.0, 0.0]]
    assert third.tables["level"].tolist() == [-torch.inf, -2.0]
    assert fifth.tables["asks"].tolist() == [[0.0, 1.0, 0.0]] and fifth.tables[
        "level"
    ].tolist() == [-1.0]
    ((again, _, _),) = (made.sites for made in unpacked(*packed([edit])))
    assert torch.equal(again.tables["probe"], first.tables["probe"])


def test_conditions_that_no_pass_can_hold_are_refused(bridge: TransformerBridge) -> None:
    sure = Probe(draw(D), "sure")

    def made(*specs: tuple[str, Operation], probes: int = 1) -> EngineEdit:
        return lower([(bridge.hook_dict[name], fn) for name, fn in specs], PLACES, 1, NAMES, probes)

    for specs, why in (
        (
            [(NAMES[2], sure), (NAMES[0], Add(1.0, where=sure > 0.0))],
            "no such probe is at a point that comes before",
        ),
        (
            [(NAMES[2], Add(1.0, where=sure > 0.0)), (NAMES[2], sure)],
            "no such probe is at a point that comes before",
        ),
        ([(NAMES[2], Add(1.0, where=sure > 0.0))], "no such probe is at a point that comes before"),
        ([(NAMES[2], Add(1.0)), (NAMES[2], sure)], "a probe reads before anything is changed"),
        (
            [(NAMES[0], sure), (NAMES[2], Add(1.0)), (NAMES[2], Zero(where=sure > 0.0))],
            "needs the same condition",
        ),
        (
            [(NAMES[0], sure), (NAMES[2], Probe(draw(D), "b"))],
            r"2 probes, and .* room for 1: Engine\(probes=\)",
        ),
    ):
        with pytest.raises(ValueError, match=why):
            made(*specs)
    rows = Probe(draw(D), "sure", over="rows")
    with pytest.raises(ValueError, match="a prompt may be in several passes"):
        made((NAMES[0], rows), (NAMES[2], Zero(where=rows > 0.0)))
    with pytest.raises(ValueError, match=r"room for 0: Engine\(probes=\)"):
        made((NAMES[0], sure), probes=0)
