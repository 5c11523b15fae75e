"""Probes and conditions, LoRA adapters, and requests that are made from others: each as it is alone
in the library.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import peft
import pytest
import torch
from transformers import LlamaForCausalLM

from bridge import TransformerBridge
from bridge.engine import Engine, EngineAnswer, FromAnswers
from bridge.interventions import Add, AddScaled, Interventions, Probe, Scale, Set, Zero
from tests.engine.test_engine import (
    OPTIONS,
    alone,
    assert_alone,
    named,
    prompts_of,
    pytestmark,  # noqa: F401
)

D = 64
PRE, MID, POST, Z = (
    "blocks.0.hook_resid_pre",
    "blocks.0.hook_resid_mid",
    "blocks.1.hook_resid_post",
    "blocks.1.attn.hook_z",
)
NAMES = (None, "tuned", "other")


@pytest.fixture(scope="module")
def adapters(folder: Path) -> dict[str, Path]:
    """Two LoRA adapters with random weights, of unlike ranks and modules."""
    found = {}
    for seed, (name, rank, modules) in enumerate(
        (
            ("tuned", 4, ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]),
            ("other", 10, ["k_proj", "up_proj"]),
        )
    ):
        model = peft.get_peft_model(
            LlamaForCausalLM.from_pretrained(folder),
            peft.LoraConfig(r=rank, target_modules=modules, lora_alpha=8),
        )
        torch.manual_seed(seed)
        for parameter_name, parameter in model.named_parameters():
            if "lora_" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(folder.parent / name)
        found[name] = folder.parent / name
    return found


@pytest.fixture(scope="module")
def bridges(folder: Path, adapters: dict[str, Path]) -> dict[str | None, TransformerBridge]:
    """The plain model, and one for each adapter, merged into its weights: no code of PEFT's layers
    is left in it.
    """
    found: dict[str | None, TransformerBridge] = {}
    for name in NAMES:
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        if name is not None:
            model = peft.PeftModel.from_pretrained(model, str(adapters[name])).merge_and_unload()
        found[name] = TransformerBridge(model, None)
    return found


@pytest.fixture(scope="module")
def engine(folder: Path, adapters: dict[str, Path]) -> Iterator[Engine]:
    made = Engine(folder, named(), rows=24, rank=2, probes=2, adapters=adapters, **OPTIONS)
    yield made
    made.close()


def test_all_points_are_offered_with_adapters_and_probes(engine: Engine) -> None:
    assert engine.refused == {}


def test_a_request_has_its_own_adapter_beside_edits_and_the_plain_model(
    engine: Engine, bridges: dict[str | None, TransformerBridge]
) -> None:
    """Adapters, edits and the same prompts in one batch: prefixes and passes are shared by requests
    that may.
    """
    drawn = random.Random(0)
    prompts = prompts_of(drawn, 4) * 6
    edits = [
        None,
        Interventions([(MID, Scale(0.4))]),
        Interventions([(Z, Zero(heads=1, part="generated"))]),
    ]
    names = [NAMES[i // 4 % 3] for i in range(24)]
    each = [edits[i // 8] for i in range(24)]
    for _ in range(2):
        answers = engine.generate(
            prompts, 5, each, [POST, Z], adapter_names=names, stop_at_eos=False
        )
        plain = engine.generate(
            prompts, 5, each, adapter_names=names, stop_at_eos=False
        )  # shares prefixes
        for answer, same in zip(answers, plain, strict=True):
            at = answer.index
            tokens, seen = alone(bridges[names[at]], prompts[at], each[at], 5, [POST, Z])
            assert answer.tokens.tolist() == same.tokens.tolist() == tokens, (at, names[at])
            for name, wanted in seen.items():
                assert torch.allclose(
                    answer.activations[name], wanted, atol=1e-4 * float(wanted.abs().max())
                )
    with pytest.raises(
        ValueError, match="there is no adapter 'third' in this engine, which has tuned, other"
    ):
        engine.generate([[5, 6]], 1, adapter_names=["third"])
    with pytest.raises(ValueError, match="adapter_names has 1 entries, and there are 2 prompts"):
        engine.generate([[5, 6], [7]], 1, adapter_names=["tuned"])


def test_conditions_hold_for_the_tokens_that_they_hold_for_alone(
    engine: Engine, bridges: dict[str | None, TransformerBridge]
) -> None:
    """Random probes and thresholds at random points, in prompts and in what is generated, beside
    plain requests.
    """
    drawn, bridge = random.Random(3), bridges[None]
    order = [PRE, MID, "blocks.0.hook_resid_post", "blocks.1.hook_mlp_out", POST]
    for seed in range(6):
        prompts = prompts_of(drawn, drawn.randint(4, 16), most=40)
        each: list[Interventions | None] = []
        for number in range(len(prompts)):
            vectors = torch.randn(
                4, D, generator=torch.Generator().manual_seed(1000 * seed + number)
            )
            first, second, third = sorted(drawn.sample(range(5), 3))
            one, two = Probe(vectors[0] / 8, "one", bias=0.1), Probe(vectors[1] / 8, "two")
            specs = [
                (order[first], one),
                (order[second], Add(vectors[2], where=one > drawn.uniform(-1, 1))),
                (order[second], Scale(0.5, where=one > 5.0, part="generated")),
                (Z, Zero(heads=0)),
            ]
            specs = drawn.choice([[specs[0], specs[1]], [specs[0], specs[2], specs[3]]])
            if drawn.random() < 0.5:
                specs = [
                    *specs,
                    (order[second - 1], two),
                    (order[third], Set(vectors[3], where=two < 0.0)),
                ]
            each.append(None if number % 4 == 3 else Interventions(specs, bridge))
        assert_alone(engine, bridge, prompts, each, 5, [POST] if seed % 2 else [])


def test_a_condition_acts_on_some_tokens_alone(engine: Engine) -> None:
    """So that the test before it compares something: of a prompt's tokens some are changed and some
    are not.
    """
    direction = torch.randn(D, generator=torch.Generator().manual_seed(5))
    probe = Probe(direction, "p")
    prompt = prompts_of(random.Random(9), 1)[0]
    pre = engine.generate([prompt], 1, capture=[PRE, "blocks.0.hook_mlp_out"])[0].activations
    held = (pre[PRE] @ direction) > 0
    edits = [(PRE, probe), ("blocks.0.hook_mlp_out", Set(0.25, where=probe > 0.0))]
    seen = engine.generate([prompt], 1, [edits], ["blocks.0.hook_mlp_out"])[0].activations[
        "blocks.0.hook_mlp_out"
    ]
    assert 0 < int(held.sum()) < len(held)
    assert bool((seen[held] == 0.25).all()) and not bool((seen[~held] == 0.25).any())


def test_a_request_is_made_from_others(
    engine: Engine, bridges: dict[str | None, TransformerBridge]
) -> None:
    """An oracle is asked about the difference of base and tuned at placeholder tokens, with the
    stream's own norm.
    """
    drawn = random.Random(4)
    prompts = prompts_of(drawn, 3, most=30)
    oracle, places = [*prompts[2], *range(3, 23)], range(2, 14)

    def about(base: EngineAnswer, tuned: EngineAnswer) -> list[tuple[str, AddScaled]]:
        apart = tuned.activations[POST][-1] - base.activations[POST][-1]
        return [(MID, AddScaled(apart * (1 if at % 2 else -1), 0.9, positions=at)) for at in places]

    asked = [prompts[0], oracle, prompts[0], oracle]
    each = [
        None,
        FromAnswers([0, 2], about),
        None,
        FromAnswers([1], lambda first: [(MID, Add(first.activations[MID][0]))]),
    ]
    names = [None, "other", "tuned", None]
    answers = engine.generate(asked, 6, each, [POST, MID], adapter_names=names, stop_at_eos=False)
    cache = {
        name: alone(bridges[name], prompts[0], None, 6, [POST])[1][POST][-1]
        for name in (None, "tuned")
    }
    apart = cache["tuned"] - cache[None]
    edits = [(MID, AddScaled(apart * (1 if at % 2 else -1), 0.9, positions=at)) for at in places]
    tokens, seen = alone(bridges["other"], oracle, Interventions(edits), 6, [POST, MID])
    assert answers[1].tokens.tolist() == tokens != alone(bridges["other"], oracle, None, 6, [])[0]
    assert torch.allclose(
        answers[1].activations[POST], seen[POST], atol=1e-4 * float(seen[POST].abs().max())
    )
    last, _ = alone(bridges[None], oracle, Interventions([(MID, Add(seen[MID][0]))]), 6, [])
    assert answers[3].tokens.tolist() == last


def test_what_cannot_be_made_from_others_is_refused_before_anything_runs(engine: Engine) -> None:
    nothing = lambda *answers: []
    for each, why in (
        ([FromAnswers([1], nothing), FromAnswers([0], nothing)], r"wait for each other's answers"),
        (
            [None, FromAnswers([2], nothing)],
            r"each\[1\] is made from request 2, and there are 2: 0 to 1",
        ),
    ):
        with pytest.raises(ValueError, match=why):
            engine.stream([[5, 6], [7, 8]], 1, each)
    with pytest.raises(ValueError, match="n=1"):
        engine.stream([[5, 6], [7, 8]], 1, [None, FromAnswers([0], nothing)], n=2)
    bad = FromAnswers([0], lambda first: [(MID, lambda x, hook: x)])
    with pytest.raises(TypeError, match="an engine's pass holds no Python"):
        engine.generate([[5, 6], [7, 8]], 1, [None, bad])
    assert len(engine.generate([[5, 6]], 1)) == 1  # and it goes on


def test_a_stream_shows_what_there_is_after_each_step(engine: Engine) -> None:
    prompts = [[5, 6, 7], [8, 9]]
    whole = engine.generate(prompts, 6, stop_at_eos=False, n=2, temperature=1.0, seed=3)
    seen: dict[tuple[int, int], list[list[int]]] = {}
    ended = []
    for answer in engine.stream(
        prompts, 6, None, [POST], steps=True, stop_at_eos=False, n=2, temperature=1.0, seed=3
    ):
        seen.setdefault((answer.index, answer.sample), []).append(answer.tokens.tolist())
        if answer.ended:
            ended.append(answer)
            assert answer.activations[POST].shape == (len(prompts[answer.index]) + 5, D)
        else:
            assert not answer.activations
    assert len(ended) == 4 and all(len(tokens) >= 6 for tokens in seen.values())
    for answer in whole:
        steps = seen[answer.index, answer.sample]
        assert steps[-1] == answer.tokens.tolist()
        assert all(step == steps[-1][: len(step)] for step in steps)


def _order(answers: Sequence[EngineAnswer]) -> list[int]:
    return [answer.index for answer in answers]


def test_many_that_are_made_from_many(
    engine: Engine, bridges: dict[str | None, TransformerBridge]
) -> None:
    """More than one wave, more edits than rows, and each answer once."""
    drawn, bridge = random.Random(8), bridges[None]
    prompts = prompts_of(drawn, 40, most=20)
    each: list[FromAnswers | None] = [None] * 20
    for number in range(20, 40):
        source = number - 20
        each.append(
            FromAnswers(
                [source], lambda it: [(MID, AddScaled(it.activations[POST][-1], positions=1))]
            )
        )
    answers = engine.generate(prompts, 3, each, [POST], stop_at_eos=False)
    assert _order(answers) == list(range(40))
    for number in (20, 27, 39):
        vector = alone(bridge, prompts[number - 20], None, 3, [POST])[1][POST][-1]
        edits = Interventions([(MID, AddScaled(vector, positions=1))])
        assert answers[number].tokens.tolist() == alone(bridge, prompts[number], edits, 3, [])[0]
