"""An engine's requests are what each is alone in the library, whoever is in its passes: `make
engine` runs these.
"""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from bridge import TransformerBridge
from bridge.engine import Engine, LensTop
from bridge.engine import engine as of_engine
from bridge.harvest import Activations, HarvestError, MixError, TopK, harvest
from bridge.interventions import (
    Add,
    AddScaled,
    FittedProbe,
    Interventions,
    Operation,
    ProjectOnto,
    ProjectOut,
    Scale,
    Set,
    Zero,
)
from bridge.lens import TunedLens
from tests.engine.test_tables import SAE

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore"),  # those of vLLM, as it is imported
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: `make engine`"
    ),
]
D, D_HEAD, LAYERS = 64, 32, 2
POINTS = [
    "hook_resid_pre",
    "hook_resid_mid",
    "hook_resid_post",
    "hook_attn_out",
    "hook_mlp_out",
    "attn.hook_q",
    "attn.hook_k",
]
POINTS += [
    "attn.hook_rot_q",
    "attn.hook_rot_k",
    "attn.hook_v",
    "attn.hook_z",
    "mlp.hook_pre",
    "mlp.hook_pre_linear",
    "mlp.hook_post",
]
#: Those that are computed from captured queries and keys.
COMPUTED = ["attn.hook_attn_scores", "attn.hook_pattern"]
#: Small, so that passes hold chunks of prompts, and requests that do not fit are preempted.
OPTIONS: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "block_size": 32,
    "num_gpu_blocks_override": 14,
    "gpu_memory_utilization": 0.05,
    "disable_log_stats": False,
}


def named(names: list[str] = POINTS) -> list[str]:
    return [f"blocks.{layer}.{name}" for layer in range(LAYERS) for name in names]


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    made = Engine(
        folder,
        [*named([*POINTS, *COMPUTED]), "blocks.0.attn.hook_result"],
        rows=8,
        rank=4,
        **OPTIONS,
    )
    yield made
    made.close()


def prompts_of(drawn: random.Random, count: int, most: int = 70) -> list[list[int]]:
    return [[drawn.randrange(3, 199) for _ in range(drawn.randint(4, most))] for _ in range(count)]


def operation_at(drawn: random.Random, point: str) -> Operation:
    """A random operation that fits a point."""
    head = "attn" in point and "hook_attn_out" not in point
    width = D_HEAD if head else 96 if ".mlp." in point else D
    vector = torch.randn(width, generator=torch.Generator().manual_seed(drawn.randrange(10**6)))
    where: dict[str, Any] = drawn.choice(
        [
            {},
            {"part": "generated"},
            {"part": "prompt"},
            {"positions": -1},
            {"positions": slice(1, 3)},
            {"from_step": 2},
        ]
    )
    if head and drawn.random() < 0.5:
        where["heads"] = 0
    kinds = [Add(vector, 0.7, **where), Scale(0.3, **where), Set(vector, **where), Zero(**where)]
    if (
        not head or "heads" in where or point.endswith(("hook_k", "rot_k", "hook_v"))
    ):  # as many directions as tables have room for
        kinds += [ProjectOut(vector, **where), ProjectOnto(vector, **where)]
    return drawn.choice(
        [*kinds, AddScaled(vector, 0.5, **where)]
        if point.split(".")[-1].startswith("hook_resid")
        else kinds
    )


def edits_of(drawn: random.Random, names: list[str] | None = None) -> Interventions | None:
    points = drawn.sample(names or named(), drawn.choice([0, 1, 1, 2, 3]))
    return (
        Interventions([(point, operation_at(drawn, point)) for point in points]) if points else None
    )


def alone(
    bridge: TransformerBridge,
    prompt: list[int],
    edits: Interventions | None,
    new: int,
    capture: list[str],
) -> tuple[list[int], dict[str, torch.Tensor]]:
    """What `bridge.generate` says of one request."""
    with bridge.hooks(fwd_hooks=list(edits or ())):
        out, cache = bridge.generate(
            torch.tensor([prompt]),
            new,
            do_sample=False,
            stop_at_eos=False,
            verbose=False,
            return_type="tokens",
            return_cache=True,
            names_filter=capture or ["hook_embed"],
        )
    return out[0, -new:].tolist(), {name: cache[name][0] for name in capture}


def assert_alone(
    engine: Engine,
    bridge: TransformerBridge,
    prompts: list[list[int]],
    each: list[Interventions | None],
    new: int,
    capture: list[str],
) -> None:
    """Every request of a batch has the tokens, and what was captured of it, that it has alone."""
    answers = engine.generate(prompts, new, each, capture, stop_at_eos=False)
    for answer, prompt, edits in zip(answers, prompts, each, strict=True):
        tokens, seen = alone(bridge, prompt, edits, new, capture)
        assert answer.tokens.tolist() == tokens, (answer.index, edits)
        for name in capture:
            wanted = seen[name]
            assert answer.activations[name].shape == wanted.shape
            most = 1e-4 * max(1.0, float(wanted[wanted.isfinite()].abs().max()))
            assert torch.allclose(answer.activations[name], wanted, rtol=0, atol=most), name


def test_all_of_them_are_offered_and_the_others_are_refused_by_name(engine: Engine) -> None:
    assert engine.offered() == [
        name for name in engine.bridge.hook_dict if name in named([*POINTS, *COMPUTED])
    ]
    assert set(engine.refused) == {"blocks.0.attn.hook_result"}
    with pytest.raises(
        ValueError, match="hook_result is not offered in this engine: it is computed from"
    ):
        engine.generate([[5, 6]], 2, capture=["blocks.0.attn.hook_result"])
    with pytest.raises(
        ValueError, match="hook_pattern is computed from queries and keys when an engine is done"
    ):
        engine.generate([[5, 6]], 2, [[("blocks.0.attn.hook_pattern", Scale(2.0))]])
    with pytest.raises(ValueError, match="not among the points that this engine was started with"):
        engine.generate([[5, 6]], 2, [[("hook_embed", Scale(2.0))]])
    with pytest.raises(ValueError, match="each has 1 entries, and there are 2 prompts"):
        engine.generate([[5, 6], [7]], 2, [None])


def test_every_point_is_a_runs_at_every_token(engine: Engine, bridge: TransformerBridge) -> None:
    prompts = prompts_of(random.Random(0), 9)
    assert_alone(engine, bridge, prompts, [None] * 9, 5, engine.offered())


@pytest.mark.parametrize("seed", range(12))
def test_random_batches_are_token_for_token_what_each_is_alone(
    engine: Engine, bridge: TransformerBridge, seed: int
) -> None:
    drawn = random.Random(seed)
    prompts = prompts_of(drawn, drawn.randint(2, 20))
    each = [edits_of(drawn) for _ in prompts]
    assert_alone(
        engine,
        bridge,
        prompts,
        each,
        6,
        drawn.sample(named([*POINTS, *COMPUTED]), drawn.choice([0, 1, 2])),
    )


@pytest.mark.slow
def test_two_hundred_random_batches(engine: Engine, bridge: TransformerBridge) -> None:
    """Some minutes: 2 to 64 requests, each with up to three random operations at random points."""
    for seed in range(100, 300):
        drawn = random.Random(seed)
        prompts = prompts_of(drawn, drawn.randint(2, 64))
        assert_alone(engine, bridge, prompts, [edits_of(drawn) for _ in prompts], 4, [])
        print(seed, len(prompts), flush=True)


def test_requests_that_were_preempted_and_computed_again_are_what_they_are_alone(
    engine: Engine, bridge: TransformerBridge
) -> None:
    def preempted() -> int:
        return sum(
            int(metric.value)
            for metric in engine._vllm.get_metrics()
            if metric.name == "vllm:num_preemptions"
        )

    drawn, before = random.Random(5), preempted()
    prompts = prompts_of(drawn, 8, most=60)
    each = [edits_of(drawn) for _ in prompts]
    assert_alone(engine, bridge, prompts, each, 50, ["blocks.1.hook_resid_post"])
    assert preempted() > before


def test_a_prefix_is_shared_by_requests_of_the_same_edit_alone(
    engine: Engine, bridge: TransformerBridge
) -> None:
    """An edited request before, between and after plain ones with the same prompt, and the same
    again.
    """
    (prompt,) = prompts_of(random.Random(1), 1, most=4)
    prompt = [*prompt, *range(3, 90)]
    vector = torch.randn(D, generator=torch.Generator().manual_seed(3))
    add = Interventions([("blocks.0.hook_resid_post", Add(vector))])
    other = Interventions([("blocks.0.hook_resid_post", Add(-vector))])
    for each in ([add, None, add], [None], [add], [None, other, add, None], [other]):
        for edits in each:  # one after the other, so that there is a prefix to share
            assert_alone(engine, bridge, [prompt], [edits], 4, [])
        assert_alone(engine, bridge, [prompt] * len(each), list(each), 4, [])
        assert_alone(engine, bridge, [prompt] * len(each), list(each), 4, ["blocks.1.hook_mlp_out"])


def test_a_prefix_is_shared_at_all(engine: Engine) -> None:
    def hits() -> int:
        names = ("vllm:prefix_cache_hits",)
        return sum(
            int(metric.value) for metric in engine._vllm.get_metrics() if metric.name in names
        )

    each = [[("blocks.0.hook_resid_post", Add(3.5))]]
    prompt = list(range(3, 100))
    engine.generate([prompt], 1, each)
    before = hits()
    engine.generate([prompt], 1, each)
    assert hits() > before


def test_several_samples_have_captures_of_their_own(
    engine: Engine, bridge: TransformerBridge
) -> None:
    name, edits = (
        "blocks.1.hook_resid_post",
        Interventions([("blocks.0.hook_mlp_out", Scale(0.2, part="generated"))]),
    )
    answers = engine.generate(
        [[5, 6, 7, 8], [9, 10]], 6, [edits, None], [name], stop_at_eos=False, n=3, temperature=2.0
    )
    assert [(a.index, a.sample) for a in answers] == [(i, s) for i in range(2) for s in range(3)]
    assert len({tuple(answer.tokens.tolist()) for answer in answers}) > 2
    for answer in answers:
        prompt = [[5, 6, 7, 8], [9, 10]][answer.index]
        tokens = torch.tensor([[*prompt, *answer.tokens.tolist()[:-1]]])
        own = (
            [("blocks.0.hook_mlp_out", Scale(0.2, positions=slice(4, None)))]
            if answer.index == 0
            else []
        )
        with bridge.hooks(fwd_hooks=own):
            wanted = bridge.run_with_cache(tokens, names_filter=[name])[1][name][0]
        assert torch.allclose(answer.activations[name], wanted, atol=1e-4)


def test_what_is_no_number_stays_with_its_request(
    engine: Engine, bridge: TransformerBridge
) -> None:
    broken = Interventions([("blocks.0.hook_resid_pre", Add(float("nan")))])
    drawn = random.Random(7)
    prompts = prompts_of(drawn, 6)
    each = [broken if index % 2 else None for index in range(6)]
    for _ in range(3):  # its blocks of keys and values are others' afterwards
        answers = engine.generate(prompts, 4, each, ["blocks.1.hook_resid_post"], stop_at_eos=False)
        assert all(
            bool(a.activations["blocks.1.hook_resid_post"].isnan().all()) == bool(a.index % 2)
            for a in answers
        )
        for answer in answers[::2]:
            assert answer.tokens.tolist() == alone(bridge, prompts[answer.index], None, 4, [])[0]
        fresh = prompts_of(drawn, 6)
        assert_alone(engine, bridge, fresh, [None] * 6, 4, ["blocks.1.hook_resid_post"])


def test_who_leaves_a_stream_leaves_nothing_behind(
    engine: Engine, bridge: TransformerBridge
) -> None:
    prompts = prompts_of(random.Random(2), 12, most=30)
    stream = engine.stream(
        prompts, 20, [[("blocks.0.hook_resid_post", Scale(0.1))]] * 12, stop_at_eos=False
    )
    first = next(stream)
    assert len(first.tokens) == 20
    with pytest.raises(ValueError, match="another stream of this engine is under way"):
        engine.generate(prompts, 2)
    stream.close()
    assert_alone(engine, bridge, prompts, [None] * 12, 4, ["blocks.0.hook_resid_post"])


def test_more_edits_than_rows_are_done_in_turn(engine: Engine, bridge: TransformerBridge) -> None:
    prompts = prompts_of(random.Random(3), 20, most=20)
    each = [
        Interventions([("blocks.1.hook_resid_mid", Add(0.1 * i, features=[i]))]) for i in range(20)
    ]
    assert_alone(engine, bridge, prompts, list(each), 3, [])


def test_the_second_start_compares_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was proved is kept; a place in the tree that is another is found, and kept as
    refused.
    """
    monkeypatch.setenv("TRANSFORMER_BRIDGE_CACHE", str(tmp_path))
    found = of_engine.engine_point

    def moved(hook: Any, *rest: Any) -> Any:
        """One point's place is that of another layer's."""
        said = found(hook, *rest)
        return {**said, "path": "layers.0.mlp"} if hook.name == "blocks.1.hook_mlp_out" else said

    monkeypatch.setattr(of_engine, "engine_point", moved)
    points = ["blocks.0.hook_resid_post", "blocks.1.hook_mlp_out"]
    made = Engine(folder, points, **OPTIONS)
    made.close()
    assert made.offered() == points[:1]
    assert "its value is off by" in made.refused[points[1]]
    monkeypatch.setattr(of_engine, "EngineProof", None)
    again = Engine(folder, points, **OPTIONS)
    again.close()
    assert again.refused == made.refused


def test_the_page_shows_what_happens(tmp_path: Path) -> None:
    """The first result of docs/engine.md, on the shipped model."""
    page = (Path(__file__).parents[2] / "docs" / "engine.md").read_text()
    (tmp_path / "first.py").write_text(page.split("```text\n# first.py\n")[1].split("```")[0])
    found = subprocess.run(
        [sys.executable, "first.py"], cwd=tmp_path, capture_output=True, text=True, timeout=900
    )
    assert found.returncode == 0, found.stderr
    offered, *lines = found.stdout.strip().splitlines()
    assert offered == "['blocks.1.hook_resid_post', 'blocks.3.attn.hook_z'] {}"
    assert (
        len(lines) == 3
        and lines[0].startswith(" Mary")
        and all("4, 32])" in line for line in lines)
    )


def test_the_page_shows_an_engine_in_an_event_loop(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "engine.md").read_text()
    (tmp_path / "own.py").write_text(page.split("```text\n# own.py\n")[1].split("```")[0])
    found = subprocess.run(
        [sys.executable, "own.py"], cwd=tmp_path, capture_output=True, text=True, timeout=900
    )
    assert found.returncode == 0, found.stderr
    lines = sorted(found.stdout.strip().splitlines())
    assert len(lines) == 2 and lines[0].startswith("0.5 ") and lines[1].startswith("1.0  Mary"), (
        lines
    )
    assert all("128])" in line for line in lines)


def test_features_of_a_basis_are_seen_and_changed(
    engine: Engine, bridge: TransformerBridge
) -> None:
    """Requests with changes of features beside plain ones; what is decoded goes on as in a run."""
    name = "blocks.0.hook_resid_post.sae"
    for model in (engine.bridge, bridge):
        model.add_basis("blocks.0.hook_resid_post", "sae", SAE("jump", D).requires_grad_(False))
    drawn = random.Random(6)
    prompts = prompts_of(drawn, 10)
    changes = [
        Zero(features=[0, 3, 5]),
        Scale(-2.0, features=[8]),
        Add(4.0, features=[1, 2]),
        Set(3.0, features=[40]),
    ]
    changes += [
        Zero(features=[7], part="generated"),
        Scale(3.0, features=[4, 5, 6, 7], positions=slice(1, 3)),
    ]
    each = [Interventions([(name, change)], bridge) for change in changes] + [None] * 4
    seen = ["blocks.1.hook_resid_post", "blocks.0.hook_mlp_out"]
    assert_alone(engine, bridge, prompts, each, 5, seen)
    add = Interventions([("blocks.0.hook_resid_post", Add(0.3))])
    assert_alone(
        engine, bridge, prompts, [add, None] * 5, 5, [*seen, name, "blocks.0.hook_resid_post"]
    )
    for other in (name, "blocks.0.hook_resid_post"):
        with pytest.raises(
            ValueError, match=f"{other} cannot be captured in an engine from a request that changes"
        ):
            engine.generate(prompts, 5, each, [other])
    plain = engine.generate(prompts, 5, None, seen, stop_at_eos=False)
    edited = engine.generate(prompts, 5, each, seen, stop_at_eos=False)
    assert any(a.tokens.tolist() != b.tokens.tolist() for a, b in zip(plain, edited, strict=True))
    with pytest.raises(ValueError, match=r"5 directions, and this engine has room for 4"):
        engine.generate([[5, 6]], 1, [[(name, Zero(features=slice(0, 5)))]])
    for model in (engine.bridge, bridge):
        model.remove_basis(name)


POST, Z = "blocks.1.hook_resid_post", "blocks.0.attn.hook_z"


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"pack": False},
        {"rows": "mean", "pack": False},
        {"reduce": {POST: TopK(3)}},
        {"interventions": [("blocks.0.hook_resid_mid", Add(torch.ones(D), positions=slice(2, 9)))]},
        {"hook_points": [f"blocks.0.{name}" for name in COMPUTED], "pack": False},
    ],
)
def test_a_harvest_has_the_rows_of_a_bridges(
    engine: Engine, bridge: TransformerBridge, tmp_path: Path, more: dict[str, Any]
) -> None:
    """The same shards, with the same tokens, and values within the engine's rounding."""
    options: dict[str, Any] = {
        "hook_points": [POST, Z],
        "context_size": 30,
        "dtype": "float32",
        "tokens_per_shard": 200,
        **more,
    }
    documents = prompts_of(random.Random(4), 16)
    made = [
        harvest(model, documents, out=tmp_path / str(i), **options)
        for i, model in enumerate((engine, bridge))
    ]
    ours, theirs = (Activations(tmp_path / str(i)) for i in range(2))
    assert made[0].shards == made[1].shards > 2 and len(ours) == len(theirs)
    a, b = (found.read(range(len(found))) for found in (ours, theirs))
    assert list(a) == list(b)
    for name, wanted in b.items():
        assert torch.allclose(a[name].double(), wanted.double(), atol=1e-4, rtol=1e-4), name


def test_a_harvest_goes_on_with_its_own_engine_alone(
    engine: Engine, bridge: TransformerBridge, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "hook_points": [POST],
        "context_size": 30,
        "dtype": "float32",
        "tokens_per_shard": 100,
    }
    documents = prompts_of(random.Random(4), 8)
    first = harvest(engine, documents, out=tmp_path / "a", **options)
    before = Activations(tmp_path / "a").read(range(first.rows))[POST]
    (tmp_path / "a" / "shard-000001.arrow").unlink()
    assert harvest(engine, documents, out=tmp_path / "a", **options).made == 1
    assert torch.allclose(
        Activations(tmp_path / "a").read(range(first.rows))[POST], before, atol=1e-4
    )
    with pytest.raises(MixError, match="engine: it has 'vllm', given was None"):
        harvest(bridge, documents, out=tmp_path / "a", **options)
    function = [("blocks.0.hook_resid_mid", lambda x, hook: x)]
    for wrong, error, match in (
        (
            {"hook_points": ["blocks.0.attn.hook_result"]},
            ValueError,
            "hook_result is not offered in this engine",
        ),
        ({"interventions": function}, TypeError, "an engine's pass holds no Python"),
        ({"context_size": 128}, HarvestError, "has a context of 127 in this engine"),
        ({"engine": "ray"}, HarvestError, "this model is in vLLM|needs Ray"),
        ({"model_dtype": "float32"}, HarvestError, "start an engine with what it takes"),
    ):
        with pytest.raises(error, match=match):
            harvest(engine, documents, out=tmp_path / "b", **{**options, **wrong})


def test_an_engine_whose_proof_fails_leaves_no_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(of_engine.EngineProof):
        def differences(self, answers: Any) -> dict[str, str]:
            raise RuntimeError("no proof")

    monkeypatch.setattr(of_engine, "EngineProof", Broken)
    monkeypatch.setattr(of_engine.kept, "folder", lambda: None)
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with pytest.raises(RuntimeError, match="no proof"):
        Engine(folder, [POST], **OPTIONS)
    left = [
        process
        for process in psutil.Process().children(recursive=True)
        if process.pid not in before
    ]
    assert not [
        process
        for process in psutil.wait_procs(left, timeout=120)[1]
        if "EngineCore" in process.name()
    ]


MID, POST = "blocks.0.hook_resid_mid", "blocks.1.hook_resid_post"
PRE = "blocks.1.hook_resid_pre"
EDITS = Interventions([(MID, Scale(0.5)), (POST, Add(0.1, part="generated"))])


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


#: One for each kind of aggregation that an engine's products are joined by.
PROBES = [
    FittedProbe(point=POST, values=numbers(1, D), over="ema", name="one", bias=0.3),
    FittedProbe(
        point=MID, values=numbers(3, D), queries=numbers(3, D) / 8, over="attention", name="a"
    ),
    FittedProbe(point=POST, values=numbers(2, D, seed=1), over="multimax", name="m"),
]


@pytest.fixture(scope="module")
def tuned(bridge: TransformerBridge) -> TunedLens:
    lens = TunedLens(2, D)
    for seed, parameter in enumerate(lens.parameters()):
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(seed))
    return lens


def test_readings_are_those_of_a_run_alone(engine: Engine, bridge: TransformerBridge) -> None:
    """Chunked prompts, preempted requests and edits in the same passes, and no activation in the
    answers.
    """
    prompts = prompts_of(random.Random(0), 24)
    each = [EDITS if number % 3 == 0 else None for number in range(24)]
    answers = engine.generate(prompts, 5, each, readings=PROBES, stop_at_eos=False)
    for answer, prompt, edits in zip(answers, prompts, each, strict=True):
        tokens, cache = alone(bridge, prompt, edits, 5, [MID, POST])
        assert answer.tokens.tolist() == tokens and not answer.activations
        for probe in PROBES:
            products = cache[probe.point].double() @ probe.weights.double().T
            read = answer.readings[probe.name]
            expected = products[:, 0] + probe.bias if probe.name == "one" else products
            assert torch.allclose(read.tokens.double(), expected, rtol=0, atol=1e-3)
            assert read.tokens.shape == expected.shape
            assert abs(read.value - probe.aggregate(products)) < 1e-3


def test_a_lens_reads_the_same_tokens_as_in_a_run(
    engine: Engine, bridge: TransformerBridge, tuned: TunedLens
) -> None:
    prompts = prompts_of(random.Random(1), 6)
    kinds = {"raw": "raw", "normed": "normed", "tuned": tuned}
    lenses = [LensTop(PRE, kind, 4, name) for name, kind in kinds.items()]
    answers = engine.generate(prompts, 1, readings=[*lenses, LensTop(POST, "normed", 1)])
    for answer, prompt in zip(answers, prompts, strict=True):
        assert not answer.activations
        for name, kind in kinds.items():
            top = bridge.lens(torch.tensor([prompt]), kind, layers=[1]).top(4)
            likely = answer.lens[name]
            assert torch.equal(likely.tokens, top.tokens[0, 0]), name
            difference = likely.probabilities.double() - top.probabilities[0, 0]
            assert difference.abs().max() < 1e-5
        assert answer.lens[POST].tokens[-1, 0] == answer.tokens[0]  # the end is the model's output


def test_decisions_over_ten_thousand_tokens(engine: Engine, bridge: TransformerBridge) -> None:
    prompts = prompts_of(random.Random(2), 290)
    readings = [reading["one"] for p in prompts for reading in bridge.readings([p], PROBES[:1])]
    level = float(torch.cat([reading.tokens for reading in readings]).median())
    probe = FittedProbe(point=POST, values=PROBES[0].values, over="max", bias=0.3, threshold=level)
    agreement = probe.compare(bridge, engine, prompts)
    assert agreement.decisions > 10_000 and 0.4 < agreement.positive / agreement.decisions < 0.6
    assert agreement.different == 0 and agreement.within_rounding <= 2
    assert agreement.largest < 1e-3


def test_what_no_reading_is_for_is_refused(engine: Engine, tuned: TunedLens) -> None:
    for sources, error, match in (
        ([PROBES[0], PROBES[0]], ValueError, "give each its own name"),
        (
            [FittedProbe(point="hook_embed", values=numbers(1, D), over="max")],
            ValueError,
            "Engine.poi",
        ),
        ([FittedProbe(point=POST, values=numbers(1, 7), over="max")], ValueError, "has 7 features"),
        ([POST], TypeError, "it takes a FittedProbe or a LensTop"),
        ([LensTop(MID)], ValueError, "reads the residual stream between layers"),
        ([LensTop(PRE, k=200)], ValueError, "the vocabulary has 199 tokens"),
        ([LensTop(PRE, TunedLens(3, D))], ValueError, "the lens is for 3 layers"),
    ):
        with pytest.raises(error, match=match):
            engine.generate([[5, 6]], 1, readings=sources)
    with pytest.raises(ValueError, match="kind is 'final'"):
        LensTop(PRE, "final")


@pytest.mark.slow
def test_compiled_it_is_the_same(folder: Path, bridge: TransformerBridge) -> None:
    """A minute or two: vLLM's compilation, with the tables in what is compiled."""
    made = Engine(folder, named(), rows=8, **{**OPTIONS, "enforce_eager": False})
    drawn = random.Random(11)
    assert made.offered() == [name for name in made.bridge.hook_dict if name in named()]
    prompts = prompts_of(drawn, 12)
    each = [edits_of(drawn) for _ in prompts]
    assert_alone(
        made, bridge, prompts, each, 6, ["blocks.1.hook_resid_post", "blocks.0.attn.hook_z"]
    )
    assert_alone(made, bridge, prompts, [None] * 12, 6, ["blocks.1.hook_resid_post"])
    made.close()


@pytest.mark.slow
def test_tokens_that_were_guessed_leave_nothing_behind(
    folder: Path, bridge: TransformerBridge
) -> None:
    """Speculative decoding: some guesses are accepted, most are not, and both are at places of
    their request.
    """
    guess = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
    made = Engine(folder, named(), rows=8, rank=4, speculative_config=guess, **OPTIONS)
    assert made.refused == {}
    for seed in range(6):
        drawn = random.Random(seed)
        prompts = [
            (prompt * 3)[:90] for prompt in prompts_of(drawn, drawn.randint(2, 16))
        ]  # whose continuation repeats
        each = [edits_of(drawn) for _ in prompts]
        assert_alone(made, bridge, prompts, each, 20, drawn.sample(named(), seed % 3))
    counted = {
        metric.name: int(metric.value)
        for metric in made._vllm.get_metrics()
        if metric.name in GUESSES
    }
    made.close()
    assert 0 < counted[GUESSES[0]] < counted[GUESSES[1]]


#: How many guessed tokens were accepted, and how many there were.
GUESSES = "vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_draft_tokens"
