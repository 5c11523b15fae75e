"""Operations that act where a probe at an earlier point says so, and numbers that are learned,
mapped over, refused.
"""

import pytest
import torch

from bridge import TransformerBridge
from bridge.interventions import (
    Add,
    AddScaled,
    Clamp,
    Condition,
    Interventions,
    Probe,
    ProjectOnto,
    ProjectOut,
    Scale,
    load,
)
from tests.conftest import tiny

EARLIER, POINT, LATER = (
    "blocks.0.hook_resid_post",
    "blocks.1.hook_resid_pre",
    "blocks.1.hook_resid_post",
)
LAST = "ln_final.hook_normalized"  # behind attention, whose kernel warns of vmap
TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10], [20, 21, 22, 23, 24, 25]])
GREEDY = {"do_sample": False, "verbose": False, "stop_at_eos": False}
DIRECTION, VECTOR = torch.randn(2, 32, generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def bridge():
    return TransformerBridge(tiny("llama"))


def readings(bridge, tokens=TOKENS):
    return bridge.run_with_cache(tokens, names_filter=EARLIER)[1][EARLIER] @ DIRECTION + 0.1


@pytest.fixture(scope="module")
def median(bridge):
    return float(readings(bridge).median()) + 1e-4


@pytest.mark.parametrize("above", [True, False])
def test_each_token_by_its_own_reading(bridge, median, above):
    probe = Probe(DIRECTION, "mine", 0.1)
    holds = (readings(bridge) > median) == above
    assert 0 < holds.sum() < holds.numel()
    pairs = Interventions(
        [(EARLIER, probe), (LATER, Add(VECTOR, where=probe > median if above else probe < median))]
    )
    expected = bridge.run_with_hooks(
        TOKENS, fwd_hooks=[(LATER, lambda x, hook: x + VECTOR * holds[..., None])]
    )
    torch.testing.assert_close(bridge.run_with_hooks(TOKENS, fwd_hooks=pairs), expected)


def test_heads_are_chosen_as_well(bridge, median):
    probe = Probe(DIRECTION, "mine", 0.1)
    holds = readings(bridge) > median

    def by_hand(z, hook):
        z[:, :, 1] *= torch.where(holds, 0.2, 1.0)[..., None]

    z = "blocks.1.attn.hook_z"
    pairs = [(EARLIER, probe), (z, Scale(0.2, heads=1, where=probe > median))]
    expected = bridge.run_with_hooks(TOKENS, fwd_hooks=[(z, by_hand)])
    torch.testing.assert_close(bridge.run_with_hooks(TOKENS, fwd_hooks=pairs), expected)


def test_a_row_by_its_highest_reading_and_padding_does_not_count(bridge):
    alone = [
        readings(bridge, row[None, :n]).max().item() for row, n in zip(TOKENS, (6, 3), strict=True)
    ]
    threshold = sum(alone) / 2
    probe = Probe(DIRECTION, "mine", 0.1, over="rows")
    pairs = [(EARLIER, probe), (LATER, Add(VECTOR, where=probe > threshold))]
    mask = torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])
    together = bridge.run_with_hooks(TOKENS, fwd_hooks=pairs, attention_mask=mask)
    for row, n, high, made in zip(TOKENS, (6, 3), alone, together, strict=True):
        hooks = [(LATER, Add(VECTOR))] if high > threshold else []
        torch.testing.assert_close(
            made[:n], bridge.run_with_hooks(row[None, :n], fwd_hooks=hooks)[0]
        )


@pytest.mark.parametrize("over", ["tokens", "rows"])
def test_in_generations_with_beams_and_in_batches_of_requests(bridge, median, over):
    """With keys and values kept, a step sees one token: what was read of a row before still
    counts.
    """
    probe = Probe(DIRECTION, "mine", 0.1, over=over)
    pairs = [(EARLIER, probe), (LATER, Add(3 * VECTOR, where=probe > median))]
    with bridge.hooks(fwd_hooks=pairs):
        cached = bridge.generate(TOKENS, 5, **GREEDY)
        assert torch.equal(bridge.generate(TOKENS, 5, use_past_kv_cache=False, **GREEDY), cached)
        beams = bridge.generate(TOKENS, 5, num_beams=3, **GREEDY)
        each = [bridge.generate(row[None], 5, num_beams=3, **GREEDY) for row in TOKENS]
    assert torch.equal(beams, torch.cat(each))
    answers = sorted(
        bridge.generate_batch(TOKENS, 5, each=[pairs, []], **GREEDY),
        key=lambda answer: answer.index,
    )
    assert answers[0].tokens.tolist() == cached[0, 6:].tolist()
    assert answers[1].tokens.tolist() == bridge.generate(TOKENS[1:], 5, **GREEDY)[0, 6:].tolist()


def test_what_it_asks_must_have_been_read(bridge, tmp_path):
    probe = Probe(DIRECTION, "mine")
    where = probe > 0.5
    for pairs in (
        [(LATER, Add(1.0, where=where))],
        [(EARLIER, Add(1.0, where=where)), (LATER, probe)],
    ):
        with pytest.raises(
            RuntimeError, match="the probe 'mine' read, and it has read nothing in this pass"
        ):
            bridge.run_with_hooks(TOKENS, fwd_hooks=pairs)
        with (
            bridge.hooks(fwd_hooks=pairs),
            pytest.raises(RuntimeError, match="has read nothing in this pass"),
        ):
            bridge.generate(TOKENS, 3, **GREEDY)
    with pytest.raises(TypeError, match="programs do not"):
        bridge.program(interventions=[(EARLIER, probe), (LATER, Add(1.0, where=where))])
    for wrong, said in (
        (lambda: Add(1.0, where=0.5), "as `probe > 0.5` makes it|where=0.5 violates"),
        (lambda: Probe(DIRECTION, "mine", positions=0), "a probe reads everywhere"),
        (lambda: Probe(torch.zeros(32), "mine"), "a vector of zeros"),
        (lambda: probe > float("inf"), "no reading can be compared with"),
        (lambda: probe > "a", "it must be a number|threshold='a' violates"),
        (
            lambda: Interventions([("blocks.0.attn.hook_z", probe)], bridge),
            r"a probe reads \[batch pos feature\]",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            wrong()
    made = Interventions(
        [(EARLIER, probe), (LATER, Scale(0.5, where=where)), (LATER, Scale(0.5))], bridge
    )
    made.save(tmp_path / "x")
    assert load(tmp_path / "x", bridge) == made
    assert (
        eval(
            repr(made),
            {
                "torch": torch,
                "Interventions": Interventions,
                "Probe": Probe,
                "Scale": Scale,
                "Condition": Condition,
            },
        )
        == made
    )


def test_a_scale_is_learned_from_one_and_broadcasts(bridge):
    scale = torch.tensor(1.0, requires_grad=True)
    bridge.run_with_hooks(TOKENS, fwd_hooks=[(LATER, Add(VECTOR, scale))])[0, -1, 5].backward()
    assert scale.grad.abs() > 0
    by_hand = bridge.run_with_hooks(
        TOKENS, fwd_hooks=[(LATER, lambda x, hook: x + VECTOR * DIRECTION)]
    )
    torch.testing.assert_close(
        bridge.run_with_hooks(TOKENS, fwd_hooks=[(LATER, Add(VECTOR, DIRECTION))]), by_hand
    )


@pytest.mark.parametrize("kind", [ProjectOut, ProjectOnto])
def test_directions_are_mapped_over(bridge, kind):
    several = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))

    def run(direction):
        return bridge.run_with_hooks(TOKENS, fwd_hooks=[(LAST, kind(direction))])

    with torch.no_grad():
        mapped = torch.vmap(run)(several)
        torch.testing.assert_close(mapped, torch.stack([run(one) for one in several]))


def test_what_is_no_number_is_refused_by_name(bridge, tmp_path):
    for wrong, said in (
        (lambda: Add(torch.full((32,), 1j)), "value is of torch.complex64"),
        (lambda: Add(None), 'value is None|value="None" violates'),
        (lambda: Add(1.0, None), 'scale is None|scale="None" violates'),
        (lambda: AddScaled(torch.zeros(32)), "a vector of zeros"),
        (lambda: AddScaled(2.0), "it must be a tensor|value=2.0 violates"),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            wrong()
    with pytest.raises(
        ValueError,
        match=r"max of Clamp at blocks.1.hook_resid_post is inf, which JSON does not know",
    ):
        Interventions([(LATER, Clamp(0.0, float("inf")))], bridge).save(tmp_path / "x")
    assert not (tmp_path / "x").exists()
    with pytest.raises((TypeError, ValueError), match=r"automatic(=| is )'alway'"):
        TransformerBridge(tiny("llama"), automatic="alway")
