"""`AsyncEngine`: requests that come when they like, each token for token what `bridge.generate`
gives it alone.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
import torch

from bridge import TransformerBridge
from bridge.engine import AsyncEngine, EngineAnswer, FromAnswers
from bridge.interventions import Add, FittedProbe, Interventions, Scale
from tests.engine.test_engine import (  # noqa: F401
    OPTIONS,
    alone,
    edits_of,
    named,
    prompts_of,
    pytestmark,
)

POST = "blocks.1.hook_resid_post"


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[AsyncEngine]:
    made = AsyncEngine(folder, named(), rows=6, rank=4, **OPTIONS)
    assert (
        made.offered() == [name for name in made.bridge.hook_dict if name in named()]
        and made.refused == {}
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    """One for all tests: vLLM's client stays with the loop in which it was asked first."""
    with asyncio.Runner() as runner:
        yield runner


async def whole(stream: AsyncIterator[EngineAnswer], later: float = 0.0) -> list[EngineAnswer]:
    """All that a stream gives, begun later."""
    await asyncio.sleep(later)
    return [answer async for answer in stream]


async def leaves(engine: AsyncEngine) -> None:
    """Requests that are left in their loop, and cancelled while they wait."""
    edit = [(POST, Scale(0.1))]
    async with aclosing(engine.stream([5, 6, 7], 60, edit, [POST], stop_at_eos=False)) as answers:
        async for answer in answers:
            assert not answer.ended and not answer.activations
            if len(answer.tokens) > 2:
                break
    task = asyncio.create_task(whole(engine.stream([8, 9], 60, edit, stop_at_eos=False)))
    await asyncio.sleep(0.01)
    task.cancel()


def test_requests_come_and_go(
    engine: AsyncEngine, bridge: TransformerBridge, loop: asyncio.Runner
) -> None:
    """More edits than rows, captures, and others that leave, in one loop: as many at once as there
    are.
    """
    drawn = random.Random(3)
    prompts = prompts_of(drawn, 30, most=40)
    each = [edits_of(drawn) for _ in prompts]
    captures = [[POST] if number % 2 else [] for number in range(30)]

    async def main() -> list[list[EngineAnswer]]:
        asked = zip(prompts, each, captures, strict=True)
        streams = [
            engine.stream(p, 5, its or (), capture, stop_at_eos=False) for p, its, capture in asked
        ]
        answers = asyncio.gather(*[whole(stream, drawn.random()) for stream in streams])
        return (await asyncio.gather(answers, leaves(engine), leaves(engine)))[0]

    found = loop.run(main())
    assert sum(map(len, found)) > 40  # what comes while nobody looks comes together
    for number, steps in enumerate(found):
        tokens, seen = alone(bridge, prompts[number], each[number], 5, captures[number])
        assert [answer.ended for answer in steps] == [False] * (len(steps) - 1) + [True]
        assert all(answer.tokens.tolist() == tokens[: len(answer.tokens)] for answer in steps)
        assert steps[-1].tokens.tolist() == tokens, number
        for name, wanted in seen.items():
            most = 1e-4 * max(1.0, float(wanted.abs().max()))
            assert torch.allclose(steps[-1].activations[name], wanted, rtol=0, atol=most)


def test_one_request_is_made_of_what_another_gave(
    engine: AsyncEngine, bridge: TransformerBridge, loop: asyncio.Runner
) -> None:
    """Awaited, and given as numbers; two samples of it."""
    prompts, middle = prompts_of(random.Random(4), 2), "blocks.0.hook_resid_mid"

    async def main() -> list[EngineAnswer]:
        first = (await whole(engine.stream(prompts[0], 2, (), [POST], stop_at_eos=False)))[-1]
        edit = [(middle, Add(first.activations[POST][-1]))]
        stream = engine.stream(
            prompts[1], 4, edit, stop_at_eos=False, n=2, temperature=1.0, top_k=1
        )
        return [answer for answer in await whole(stream) if answer.ended]

    edit = Interventions([(middle, Add(alone(bridge, prompts[0], None, 2, [POST])[1][POST][-1]))])
    tokens, _ = alone(bridge, prompts[1], edit, 4, [])
    assert [(answer.sample, answer.tokens.tolist()) for answer in loop.run(main())] == [
        (0, tokens),
        (1, tokens),
    ]


def test_the_whole_answer_has_readings(
    engine: AsyncEngine, bridge: TransformerBridge, loop: asyncio.Runner
) -> None:
    """Two samples of a prompt; a partial answer has none."""
    prompt = prompts_of(random.Random(6), 1)[0]
    probe = FittedProbe(point=POST, values=torch.ones(1, 64), over="mean")
    options = {"stop_at_eos": False, "n": 2, "temperature": 1.0, "top_k": 1}
    *partial, first, second = loop.run(whole(engine.stream(prompt, 4, readings=[probe], **options)))
    _, cache = alone(bridge, prompt, None, 4, [POST])
    expected = cache[POST].sum(-1)
    assert partial and not any(answer.readings for answer in partial)
    for answer in (first, second):
        reading = answer.readings["probe"]
        assert torch.allclose(reading.tokens, expected, rtol=0, atol=1e-3)
        assert abs(reading.value - float(expected.mean())) < 1e-3


@pytest.mark.unchecked
def test_what_a_request_cannot_have_is_refused(engine: AsyncEngine, loop: asyncio.Runner) -> None:
    for wrong, error, why in (
        ({"interventions": [("hook_embed", Scale(2.0))]}, ValueError, "not among the points"),
        (
            {"interventions": [(POST, Scale(2.0, positions=9))]},
            IndexError,
            "a position is 9, and there are 1",
        ),
        (
            {"interventions": FromAnswers([0], lambda it: [])},
            TypeError,
            "there are no other answers here: await them",
        ),
        ({"capture": ["hook_embed"]}, ValueError, "not among the points"),
        (
            {"adapter_name": "tuned"},
            ValueError,
            "there is no adapter 'tuned' in this engine, which has none",
        ),
    ):
        with pytest.raises(error, match=why):
            loop.run(whole(engine.stream([5], 1, **wrong)))
