"""Which tokens are meant: in padded rows, in generations, and where that cannot be known."""

import pytest
import torch

from bridge import TransformerBridge
from bridge.interventions import (
    Add,
    Clamp,
    Interventions,
    Mean,
    Probe,
    ProjectOut,
    Replace,
    Scale,
    Set,
    Zero,
)
from tests.conftest import tiny

POINT = "blocks.1.hook_resid_post"
ROWS = [[5, 6, 7, 8, 9, 10], [20, 21, 22], [30, 31]]


@pytest.fixture(scope="module")
def bridge():
    return TransformerBridge(tiny("llama"))


def padded(side):
    tokens, mask = torch.zeros(3, 6, dtype=torch.long), torch.zeros(3, 6, dtype=torch.long)
    for i, row in enumerate(ROWS):
        where = slice(6 - len(row), None) if side == "left" else slice(0, len(row))
        tokens[i, where], mask[i, where] = torch.tensor(row), 1
    return tokens, mask


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("positions", [0, -1, slice(1, None), slice(None, -1), (0, -2)])
def test_rows_of_a_padded_batch_are_edited_as_if_alone(bridge, side, positions):
    hooks = [(POINT, Add(2.0, positions=positions))]
    tokens, mask = padded(side)
    with torch.no_grad():
        together = bridge.run_with_hooks(tokens, fwd_hooks=hooks, attention_mask=mask)
        for i, row in enumerate(ROWS):
            alone = bridge.run_with_hooks(torch.tensor([row]), fwd_hooks=hooks)[0]
            torch.testing.assert_close(together[i][mask[i].bool()], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "where",
    [
        {"positions": 0},
        {"positions": -1},
        {"positions": slice(1, 3)},
        {"part": "prompt"},
        {"part": "generated"},
        {"from_step": 2},
    ],
)
def test_rows_of_a_padded_generation_are_edited_as_if_alone(bridge, side, where):
    hooks = [(POINT, Add(2.0 * torch.arange(32).sin(), **where))]
    tokens, mask = padded(side)
    greedy = {"do_sample": False, "verbose": False, "stop_at_eos": False, "output_logits": True}
    with bridge.hooks(fwd_hooks=hooks):
        together = torch.stack(bridge.generate(tokens, 4, attention_mask=mask, **greedy).logits, 1)
        alone = [
            torch.stack(bridge.generate(torch.tensor([row]), 4, **greedy).logits, 1)[0]
            for row in ROWS
        ]
    torch.testing.assert_close(together, torch.stack(alone), rtol=0, atol=1e-5)
    free = torch.stack(bridge.generate(tokens, 4, attention_mask=mask, **greedy).logits, 1)
    assert (free - together).abs().max() > 1e-3


def test_steps_are_those_of_the_bridge(bridge):
    """`part` and `from_step` against a function that asks which step it is in."""

    def by_hand(x, hook):
        if bridge.step >= 2:
            x += 1

    greedy = {"do_sample": False, "verbose": False, "stop_at_eos": False, "output_logits": True}
    made = []
    for hook in (by_hand, Add(1.0, from_step=2)):
        with bridge.hooks(fwd_hooks=[(POINT, hook)]):
            made.append(torch.stack(bridge.generate(torch.tensor([ROWS[0]]), 5, **greedy).logits))
    assert torch.equal(*made)


@pytest.mark.parametrize(
    "operation", [Add(1.0, positions=-1), Scale(0.5, part="prompt"), Zero(from_step=1)]
)
def test_what_cannot_be_known_is_refused(bridge, operation):
    hooks = [(POINT, operation)]
    tokens = torch.tensor([ROWS[0]])
    _, past = bridge(tokens, return_type="logits_and_cache")
    with pytest.raises(ValueError, match="does not know"):
        bridge.run_with_hooks(tokens[:, :1], fwd_hooks=hooks, past_key_values=past)
    with bridge.hooks(fwd_hooks=hooks), pytest.raises(ValueError, match="does not know"):
        bridge.original_model.generate(tokens, max_new_tokens=3, do_sample=False)
    program = bridge.program(interventions=hooks)
    with pytest.raises(ValueError, match="a program does not know"):
        program(tokens[:, :1], past_key_values=past)
    mask = torch.tensor([[0, 1, 1, 1, 1, 1]])
    with pytest.raises(ValueError, match="with padding a program does not"):
        program(tokens, attention_mask=mask)
    with (
        bridge.hooks(fwd_hooks=hooks),
        pytest.raises(ValueError, match="do not stay in the sequence"),
    ):
        bridge.generate(tokens, 3, do_sample=False, verbose=False, prompt_lookup_num_tokens=2)


def test_points_and_numbers_that_do_not_fit_are_refused_before_anything_runs(bridge):
    ran = []
    bridge.blocks[0].hook_resid_pre.add_hook(lambda x, hook: ran.append(1))
    tokens = torch.tensor([ROWS[0]])
    for name, operation, said in (
        (POINT, Zero(heads=1), "no heads among them"),
        (POINT, Zero(keys=1), "no keys among them"),
        ("blocks.1.attn.hook_pattern", Mean("features"), "no features among them"),
        ("blocks.1.attn.hook_pattern", ProjectOut(torch.ones(4)), "no features among them"),
        (POINT, Set(torch.ones(6, 32)), "one number for all positions"),
        (POINT, Replace(torch.ones(6, 32)), "needs the axes"),
    ):
        for run in (
            lambda: bridge.run_with_hooks(tokens, fwd_hooks=[(name, operation)]),  # noqa: B023
            lambda: bridge.add_hook(name, operation),  # noqa: B023
            lambda: bridge.program(interventions=[(name, operation)]),  # noqa: B023
            lambda: bridge.generate_batch([[1, 2]], interventions=[(name, operation)]),  # noqa: B023
            lambda: Interventions([(name, operation)], bridge),  # noqa: B023
        ):
            with pytest.raises(ValueError, match=said):
                run()
    assert not ran
    bridge.reset_hooks()
    with pytest.raises(IndexError, match="one of positions at"):
        bridge.run_with_hooks(tokens, fwd_hooks=[(POINT, Zero(positions=6))])
    for operation in (
        Add(torch.ones(33)),
        Set(torch.ones(1, 1, 31)),
        Scale(torch.ones(5)),
        ProjectOut(torch.ones(31)),
    ):
        with pytest.raises(
            ValueError, match=rf"has shape .* {POINT} has 32 entries along its last axis, d_model"
        ):
            bridge.run_with_hooks(tokens, fwd_hooks=[(POINT, operation)])
    with pytest.raises(ValueError, match="needs the positions of the prompt"):
        bridge.run_with_hooks(tokens, fwd_hooks=[(POINT, Replace(torch.ones(1, 5, 32)))])


@pytest.mark.unchecked
def test_arguments_that_mean_nothing_are_refused():
    for make, said in (
        (lambda: Add("two words"), "cannot be the name of an input"),
        (lambda: Add([1.0]), "must be a tensor"),
        (lambda: Zero(positions=[]), "chooses nothing"),
        (lambda: Zero(positions=1.5), "whole number"),
        (lambda: Zero(positions=1, part="prompt"), "give one of them"),
        (lambda: ProjectOut(torch.ones(2, 4)), "depend on each other"),
        (lambda: ProjectOut(torch.ones(2, 4, 4)), "has shape"),
        (lambda: Clamp(2.0, 1), "nothing is between them"),
        (lambda: Mean("positions"), "must be 'rows', 'heads' or 'features'"),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            make()


def test_inputs_by_name(bridge):
    tokens = torch.tensor([ROWS[0]])
    vector = torch.arange(32.0)
    made = Interventions([(POINT, Add("vector", "strength", positions=-1))], bridge)
    program = bridge.program(
        interventions=made, inputs={"vector": torch.zeros(32), "strength": 1.0}
    )
    wanted = bridge.run_with_hooks(tokens, fwd_hooks=made.with_inputs(vector=vector, strength=0.5))
    assert torch.equal(program(tokens, vector=vector, strength=0.5)["logits"], wanted)
    assert (wanted - bridge(tokens)).abs().max() > 0.1
    with pytest.raises(TypeError, match="asks for the input 'vector', which nobody gave"):
        bridge.run_with_hooks(tokens, fwd_hooks=made)
    with pytest.raises(TypeError, match="asks for the input 'strength': declare it"):
        bridge.program(interventions=made, inputs={"vector": torch.zeros(32)})
    with pytest.raises(TypeError, match="no operation asks for the input 'vektor'"):
        made.with_inputs(vektor=vector)


def test_a_vector_can_be_learned(bridge):
    """An operation keeps the tensor that it was given: gradients reach it."""
    vector = torch.zeros(32, requires_grad=True)
    bridge.run_with_hooks(torch.tensor([ROWS[0]]), fwd_hooks=[(POINT, Add(vector))])[
        0, -1
    ].max().backward()
    assert vector.grad is not None and vector.grad.abs().sum() > 0


# What an operation is called by may be a user's own: a function, the body of a trace, a run that a
# hook starts.


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("positions", [0, -1, slice(1, 3)])
def test_an_operation_that_a_function_or_a_body_calls_knows_the_padding(bridge, side, positions):
    operation, point = Add(2.0, positions=positions), bridge.hook_dict[POINT]
    tokens, mask = padded(side)
    expected = bridge.run_with_hooks(tokens, fwd_hooks=[(POINT, operation)], attention_mask=mask)
    called = [(POINT, lambda x, hook: operation(x, hook))]
    assert torch.equal(
        bridge.run_with_hooks(tokens, fwd_hooks=called, attention_mask=mask), expected
    )
    with bridge.trace(tokens, attention_mask=mask) as run:
        run[POINT] = operation(run[POINT], point)
    assert torch.equal(run.logits, expected)
    with bridge.trace(tokens, attention_mask=mask) as run:
        for i in range(len(ROWS)):
            run.rows(i)[POINT] = operation(run.rows(i)[POINT], point)  # without padding
    assert torch.equal(run.logits, expected)
    with bridge.trace(tokens, attention_mask=mask) as outer, bridge.trace(tokens) as inner:
        with pytest.raises(RuntimeError, match="2 traces are open that show blocks"):
            operation(inner[POINT], point)
        outer.stop()
    with bridge.trace(tokens[:1]) as outer, bridge.trace(tokens) as inner:
        outer[POINT] = operation(outer[POINT], point)
        inner[POINT] = operation(inner[POINT], point)
    assert torch.equal(inner.logits, bridge.run_with_hooks(tokens, fwd_hooks=[(POINT, operation)]))


@pytest.mark.parametrize("positions", [-1, slice(0, -1), [0, -2]])
def test_a_run_that_continues_another_does_not_know_the_prompts_end(bridge, positions):
    tokens = torch.tensor([ROWS[0]])
    _, past = bridge(tokens, return_type="logits_and_cache")
    called = [(POINT, lambda x, hook: Add(2.0, positions=positions)(x, hook))]
    with pytest.raises(ValueError, match="continues another one"):
        bridge.run_with_hooks(tokens[:, :2], fwd_hooks=called, past_key_values=past)


@pytest.mark.parametrize("cut", [2, 4])
@pytest.mark.parametrize("positions", [slice(0, 1), slice(1, 5), slice(3, None), slice(0, 6, 2)])
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("name", [POINT, "blocks.1.attn.hook_pattern"])
def test_a_run_that_continues_another_knows_its_positions(bridge, cut, positions, padding, name):
    hooks = [(name, Scale(0.5, positions=positions))]
    tokens, mask = padded("left")
    if not padding:
        tokens, mask = tokens[:1], torch.ones_like(tokens[:1])
    whole = bridge.run_with_hooks(tokens, fwd_hooks=hooks, attention_mask=mask)
    _, past = bridge.run_with_hooks(
        tokens[:, :cut],
        fwd_hooks=hooks,
        attention_mask=mask[:, :cut],
        return_type="logits_and_cache",
    )
    rest = bridge.run_with_hooks(
        tokens[:, cut:], fwd_hooks=hooks, attention_mask=mask, past_key_values=past
    )
    real = mask[:, cut:].bool()
    torch.testing.assert_close(rest[real], whole[:, cut:][real], rtol=0, atol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_run_of_another_bridge_says_what_is_padding(bridge, side):
    other, hooks = (
        TransformerBridge(bridge.original_model),
        [(POINT, Add(2.0, positions=slice(0, -1)))],
    )
    tokens, mask = padded(side)
    expected = bridge.run_with_hooks(tokens, fwd_hooks=hooks, attention_mask=mask)
    with bridge.hooks(fwd_hooks=hooks):
        assert torch.equal(other(tokens, attention_mask=mask), expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_operation_on_gradients_knows_the_padding(bridge, side):
    """Backward comes when the run is over."""
    hooks = [(POINT, Scale(0.5, positions=0))]
    tokens, mask = padded(side)

    def gradient(ids, mask):
        embeddings = bridge.original_model.model.embed_tokens(ids).detach().requires_grad_()
        logits = bridge.run_with_hooks(embeddings, bwd_hooks=hooks, attention_mask=mask)
        logits[mask.bool()].logsumexp(-1).sum().backward()
        return embeddings.grad[mask.bool()]

    alone = [
        gradient(torch.tensor([row]), torch.ones(1, len(row), dtype=torch.long)) for row in ROWS
    ]
    torch.testing.assert_close(gradient(tokens, mask), torch.cat(alone), rtol=0, atol=1e-4)


def test_a_mask_of_queries_and_keys_does_not_say_what_is_padding(bridge):
    tokens, mask = padded("left")
    sees = torch.ones(6, 6).tril().bool() & mask.bool()[:, None, :]
    given = torch.where(sees, 0.0, torch.finfo().min)[:, None]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    hooks = [(POINT, Add(2.0, positions=0))]
    with pytest.raises(ValueError, match="not which tokens are padding"):
        bridge.run_with_hooks(tokens, fwd_hooks=hooks, attention_mask=given, position_ids=positions)
    with (
        pytest.raises(ValueError, match="not which tokens are padding"),
        bridge.hooks(fwd_hooks=hooks),
    ):
        bridge.original_model(tokens, attention_mask=given, position_ids=positions)
    everywhere = [(POINT, Add(2.0))]
    expected = bridge.run_with_hooks(tokens, fwd_hooks=everywhere, attention_mask=mask)[mask.bool()]
    found = bridge.run_with_hooks(
        tokens, fwd_hooks=everywhere, attention_mask=given, position_ids=positions
    )
    torch.testing.assert_close(found[mask.bool()], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "where", [{"positions": -1}, {"part": "prompt"}, {"part": "generated"}, {"from_step": 2}]
)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_traced_generation_counts_as_one_that_is_not(bridge, where, side):
    operation = Add(2.0 * torch.arange(32).sin(), **where)
    hooks = [
        ("blocks.0.hook_resid_post", probe := Probe(torch.ones(32), "sure", over="rows")),
        (POINT, operation),
    ]
    hooks.append(("blocks.2.hook_resid_post", Add(0.5, where=probe > -100)))
    tokens, mask = padded(side)
    greedy = {"max_new_tokens": 4, "do_sample": False, "stop_at_eos": False, "attention_mask": mask}
    with bridge.hooks(fwd_hooks=hooks):
        expected = bridge.generate(tokens, return_type="tokens", verbose=False, **greedy)
        with bridge.trace_generate(tokens, **greedy) as run:
            pass
    assert torch.equal(run.tokens, expected)
    with bridge.trace_generate(tokens, **greedy) as run:
        for step in run.steps:
            for name, each in hooks:
                step[name] = each(step[name], bridge.hook_dict[name])
    assert torch.equal(run.tokens, expected)


def test_a_run_that_a_hook_of_a_generation_starts_is_no_step_of_it(bridge):
    """Its tokens are all its prompt, whatever step the generation is at."""
    tokens, mask = padded("left")
    other = torch.tensor([ROWS[0][::-1] * 2])
    hooks = [
        (POINT, Add(2.0, positions=-1)),
        ("blocks.2.hook_resid_post", Add(1.0, part="generated")),
    ]
    runs = (bridge, lambda x: bridge.original_model(x).logits)
    found, steps, running = [], [], []

    def runs_another(x, hook):
        if not running:
            running.append(1)
            found.extend(run(other) for run in runs)
            running.clear()
        steps.append(bridge.step)

    with bridge.hooks(fwd_hooks=hooks):
        expected = bridge(other)
        with bridge.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", runs_another)]):
            bridge.generate(
                tokens, 3, attention_mask=mask, do_sample=False, verbose=False, stop_at_eos=False
            )
    assert len(found) == 6 and all(torch.equal(one, expected) for one in found)
    assert steps == [None, None, 0, None, None, 1, None, None, 2]


@pytest.mark.parametrize("shape", [(1, 5, 32), (2, 32)])
def test_a_value_of_the_selected_heads_alone_is_refused(shape):
    bridge = TransformerBridge.boot_embedded()
    hooks = [("blocks.1.attn.hook_z", Set(torch.zeros(shape), heads=[1, 3]))]
    with pytest.raises(ValueError, match="does not broadcast over .* heads= and the other"):
        bridge.run_with_hooks("Mary and John went", fwd_hooks=hooks)
