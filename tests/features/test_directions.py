"""Directions: found where one was put, and hooks against the same arithmetic and against
weights.
"""

import pytest
import torch
from torch import Tensor

from bridge import TransformerBridge
from bridge.features import direction, write_into_weights, written_points
from bridge.features.directions import _fit
from bridge.interventions import Add, Cap, ProjectOut
from tests.conftest import tiny
from tests.tiny_models import tiny_model

POINT = "blocks.1.hook_resid_post"
TOKENS = torch.tensor([[5, 17, 2, 30, 11, 44], [8, 3, 50, 12, 7, 21]])


def sets(n: int = 40) -> tuple[Tensor, Tensor]:
    """Random prompts that end in one of two tokens."""
    drawn = torch.randint(3, 61, (2 * n, 6), generator=torch.Generator().manual_seed(1))
    drawn[:n, -1], drawn[n:, -1] = 1, 2
    return drawn[:n], drawn[n:]


@pytest.mark.parametrize("how", ["mean", "pca", "probe"])
def test_a_direction_is_found_and_the_control_finds_none(
    bridge: TransformerBridge, how: str
) -> None:
    positives, negatives = sets()
    found = direction(bridge, positives, negatives, "blocks.0.hook_resid_pre", how)
    assert found.accuracy == 1 and found.shuffled < 0.75
    assert float(found.vector.norm()) == pytest.approx(1, abs=1e-5)
    if how == "mean":
        rows = torch.tensor([[3, 4, 5, 6, 7, 1], [3, 4, 5, 6, 7, 2]])
        with torch.no_grad():
            start = bridge.run_with_cache(rows)[1]["hook_embed"][:, -1]
        right = start[0] - start[1]
        assert float(found.vector @ right / right.norm()) > 0.9999


def test_texts_are_prompts_of_their_own_lengths() -> None:
    """In texts it is what it is in their tokens; a longer text is taken at its own last token."""
    bridge = TransformerBridge.boot_embedded()
    capital, language = (
        [text.format(country) for country in ("France", "Spain", "Italy", "Germany", "Japan")]
        for text in ("In {}, the capital is", "The language of {} is")
    )
    found = direction(bridge, capital, language, POINT)
    rows = direction(bridge, bridge.to_tokens(capital), bridge.to_tokens(language), POINT)
    torch.testing.assert_close(found.vector, rows.vector, rtol=0, atol=1e-5)
    longer = [text if at else f"It was a cold day. {text}" for at, text in enumerate(capital)]
    mixed = direction(bridge, longer, language, POINT)
    assert 0.9 < float(mixed.vector @ found.vector) < 1
    removed, by_hand = TransformerBridge.boot_embedded(), TransformerBridge.boot_embedded()
    write_into_weights(removed, found)
    write_into_weights(by_hand, found.vector)
    assert torch.equal(removed(capital[0]), by_hand(capital[0]))


@torch.no_grad()
def test_steering_is_what_the_words_say(bridge: TransformerBridge) -> None:
    vector = torch.randn(bridge.cfg.d_model, generator=torch.Generator().manual_seed(0))
    act = bridge.run_with_cache(TOKENS, names_filter=POINT)[1][POINT]
    unit = vector / vector.norm()
    hook = bridge.hook_dict[POINT]
    removed = ProjectOut(vector * 7)(act, hook)
    assert (removed @ unit).abs().max() < 1e-5
    capped = Cap(vector, 0.1)(act, hook)
    assert torch.allclose(capped @ unit, (act @ unit).clamp(max=0.1), atol=1e-5)
    with pytest.raises(ValueError, match="Cap is along one direction"):
        Cap(torch.eye(2), 0.1)


@torch.no_grad()
@pytest.mark.parametrize("positions", [None, [0, 3]])
def test_steering_while_generating(bridge: TransformerBridge, positions: list[int] | None) -> None:
    vector = torch.randn(bridge.cfg.d_model, generator=torch.Generator().manual_seed(0))
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "return_type": "tokens",
        "verbose": False,
        "stop_at_eos": False,
    }
    steer = Add(vector, 50.0, positions=positions)
    with bridge.hooks(fwd_hooks=[(POINT, steer)]):
        cached = bridge.generate(TOKENS, **options)
        uncached = bridge.generate(TOKENS, use_past_kv_cache=False, **options)
    assert torch.equal(cached, uncached)
    changed = bridge.run_with_hooks(TOKENS, fwd_hooks=[(POINT, steer)])
    assert not torch.allclose(changed, bridge(TOKENS), atol=1e-2)


@torch.no_grad()
def test_the_weights_do_what_the_hook_did(family: str) -> None:
    bridge = TransformerBridge(tiny(family, dtype=torch.float64))
    vector = torch.randn(
        bridge.cfg.d_model, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    hooks = [(name, ProjectOut(vector)) for name in written_points(bridge)]
    plain, wanted = bridge(TOKENS), bridge.run_with_hooks(TOKENS, fwd_hooks=hooks)
    write_into_weights(bridge, vector)
    assert torch.allclose(bridge(TOKENS), wanted, rtol=0, atol=1e-11)
    assert not torch.allclose(wanted, plain, atol=1e-3)
    _, cache = bridge.run_with_cache(
        TOKENS, names_filter=lambda name: name.endswith("hook_resid_post")
    )
    assert all((act @ vector).abs().max() < 1e-11 for act in cache.values())


@torch.no_grad()
@pytest.mark.parametrize("kind", ["granitemoe", "falcon_h1", "qwen3_next", "mamba2"])
def test_nothing_is_left_along_a_direction_in_the_stream(kind: str) -> None:
    """Mixers write, too, and a constant behind a matrix turns no direction."""
    bridge = TransformerBridge(tiny_model(kind, "causal"))
    vector = torch.nn.functional.normalize(torch.randn(bridge.cfg.d_model), dim=0)
    streams = [name for name in bridge.hook_dict if name.endswith("hook_resid_post")]
    with bridge.hooks(fwd_hooks=[(name, ProjectOut(vector)) for name in written_points(bridge)]):
        _, hooked = bridge.run_with_cache(TOKENS, names_filter=streams)
    write_into_weights(bridge, vector)
    _, written = bridge.run_with_cache(TOKENS, names_filter=streams)
    assert all(
        (cache[name] @ vector).abs().max() < 1e-5 for cache in (hooked, written) for name in streams
    )


@torch.no_grad()
def test_what_writes_and_is_not_known_is_told_by_what_is_left() -> None:
    bridge = TransformerBridge(tiny_model("rwkv", "causal"))
    vector, before = torch.randn(bridge.cfg.d_model), bridge(TOKENS)
    with bridge.hooks(fwd_hooks=[(name, ProjectOut(vector)) for name in written_points(bridge)]):
        _, cache = bridge.run_with_cache(TOKENS)
    assert all(
        (x @ vector).abs().max() < 1e-5
        for name, x in cache.items()
        if name.endswith("hook_resid_post")
    )
    with pytest.raises(ValueError, match="is left along it: something else writes to its stream"):
        write_into_weights(bridge, vector)
    assert torch.equal(bridge(TOKENS), before)


def test_what_cannot_be_is_refused(bridge: TransformerBridge) -> None:
    with pytest.raises(ValueError, match="each set needs four"):
        direction(bridge, TOKENS, TOKENS, POINT)
    with pytest.raises(ValueError, match="there is no direction between them"):
        direction(bridge, TOKENS[[0] * 8], TOKENS[[0] * 8], POINT)


def test_prompts_of_unequal_length_are_read_at_their_own_last_tokens():
    bridge, point = TransformerBridge.boot_embedded(), "blocks.2.hook_resid_post"
    texts_of = (
        [
            "Mary went to the store",
            "Mary",
            "John gave Mary a drink",
            "Mary and John went",
            "When Mary went",
        ],
        ["Tom and James", "Tom went", "The drink", "James went to the store", "Tom"],
    )
    generator, means = torch.Generator().manual_seed(0), []
    for texts in texts_of:
        chosen = torch.randperm(5, generator=generator)[1:]
        last = [
            bridge.run_with_cache(texts[i], names_filter=point)[1][point][0, -1].double()
            for i in chosen
        ]
        means.append(torch.stack(last).mean(0))
    right = torch.nn.functional.normalize(means[0] - means[1], dim=0)
    batches = [
        bridge.batch_of(texts, padding_side=side)
        for texts, side in zip(texts_of, ("left", "right"), strict=True)
    ]
    tokens = [batch.tokens for batch in batches]
    unknown = [
        batch.tokens.masked_fill(batch.mask == 0, 7) for batch in batches
    ]  # padding that no token tells
    masks = tuple(batch.mask for batch in batches)
    for given, more in ((texts_of, {}), (tokens, {}), (unknown, {"attention_mask": masks})):
        found = direction(bridge, *given, point, held_out=0.2, **more)
        assert float(found.vector.double() @ right) > 0.9999
    assert (
        abs(float(direction(bridge, *unknown, point, held_out=0.2).vector.double() @ right)) < 0.99
    )
    with pytest.raises(ValueError, match="position is 3, and the shortest prompt has 2 tokens"):
        direction(bridge, *texts_of, point, position=3)


@pytest.fixture
def chatty():
    """The shipped model with a chat template, and two sets of chats of different lengths."""
    bridge = TransformerBridge.boot_embedded()
    bridge.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    )
    places = ("store", "park", "bank", "school", "office")
    sets = [
        [
            [
                {"role": "user", "content": f"Mary went to the {place}. {start}."},
                {"role": "assistant", "content": answer},
            ]
            for place in places
            for start in ("Then John left", "John and Mary were there")
        ]
        for answer in ("Mary had a cake.", "John.")
    ]
    return bridge, sets


def mean_of(bridge, chats, choose):
    """The mean activation of chosen tokens, chat by chat."""
    means = []
    for chat in chats:
        with torch.no_grad():
            _, cache = bridge.run_with_cache(chat, names_filter=POINT)
        means.append(cache[POINT][0, choose(bridge.spans(chat)).positions].mean(0))
    return torch.stack(means)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_direction_between_chats(chatty, side):
    bridge, sets = chatty
    bridge.tokenizer.padding_side = side

    def choose(spans):
        return spans["assistant"].content

    result = direction(bridge, *sets, POINT, position=choose, held_out=0.2)
    means = torch.cat([mean_of(bridge, chats, choose) for chats in sets])
    labels = torch.arange(20) < 10
    vector, _ = _fit(means, labels, "mean", 0.2, torch.Generator().manual_seed(0))
    torch.testing.assert_close(result.vector, vector.to(result.vector), rtol=1e-4, atol=1e-5)
    assert result.accuracy == 1.0
    # The same positions of every chat, and a single one.
    span = bridge.spans(sets[0][0])["assistant"].find("Mary had")
    one = direction(bridge, *sets, POINT, position=span)
    other = direction(bridge, *sets, POINT, position=span.positions)
    assert torch.equal(one.vector, other.vector)
    last = direction(bridge, *sets, POINT)
    assert torch.equal(last.vector, direction(bridge, *sets, POINT, position=[-1]).vector)


def test_positions_of_chats_that_are_refused(chatty):
    bridge, sets = chatty
    with pytest.raises(ValueError, match="has no tokens"):
        direction(bridge, *sets, POINT, position=lambda spans: spans.thinking)
    with pytest.raises(TypeError, match="which chooses spans of chats: give chats"):
        direction(bridge, ["Mary"] * 4, ["John"] * 4, POINT, position=lambda spans: spans)
    with pytest.raises(ValueError, match="position is empty"):
        direction(bridge, *sets, POINT, position=[])
    with pytest.raises(TypeError, match=r"positives is .*; direction takes"):
        direction(bridge, sets[0][0], sets[1], POINT)  # one chat


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_direction_out_of_the_weights_in_each_precision(dtype):
    """It is out of the streams; if something else writes along it, the weights are as they were."""
    bridge = TransformerBridge(tiny_model("llama").to(dtype))
    vector = torch.randn(bridge.cfg.d_model, generator=torch.Generator().manual_seed(0)).to(dtype)
    block = bridge.original_model.model.layers[1]
    before = {name: x.clone() for name, x in bridge.original_model.state_dict().items()}
    handle = block.mlp.register_forward_hook(lambda module, args, output: output + vector)
    with pytest.raises(ValueError, match="something else writes to its stream"):
        write_into_weights(bridge, vector)
    handle.remove()
    for name, x in bridge.original_model.state_dict().items():
        assert torch.equal(x, before[name])
    write_into_weights(bridge, vector)
    _, cache = bridge.run_with_cache(torch.arange(3, 9)[None])
    unit = vector.double() / vector.double().norm()
    for layer in range(2):
        stream = cache["resid_post", layer].double()
        assert (stream @ unit).abs().max() < 1e-2 * stream.abs().max()
