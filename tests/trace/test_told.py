"""What would be lost without a word in a trace is told, or refused before it runs."""

from __future__ import annotations

import copy

import pytest
import torch

from bridge.trace.coroutine import OutOfStepError
from tests.conftest import torch_hooks

A, B = "blocks.0.hook_mlp_out", "blocks.1.hook_mlp_out"
LATE = "changed in place after the model had gone on"
GIVEN = {"max_new_tokens": 3, "do_sample": False}


@pytest.fixture(autouse=True)
def _nothing_left(bridge):
    yield
    assert not torch_hooks(bridge.original_model)
    assert not bridge.wiring.listening


def path_of_mlp(bridge):
    return bridge.hook_dict[A].point.site.path


@pytest.mark.parametrize("what", ["output", "input"])
def test_late_edits_of_modules(bridge, tokens, what):
    with pytest.raises(OutOfStepError, match=f"{LATE}"), bridge.trace(tokens) as run:
        value = getattr(run.module(path_of_mlp(bridge)), what)
        run[B]
        value *= 0


def test_late_edits_of_what_was_assigned_to_itself(bridge, tokens):
    path = path_of_mlp(bridge)
    with pytest.raises(OutOfStepError, match=LATE), bridge.trace(tokens) as run:
        run[A] *= 2
        value = run[A]
        run[B]
        value *= 0
    with pytest.raises(OutOfStepError, match=LATE), bridge.trace(tokens) as run:
        value = run.module(path).output
        run.module(path).output = value
        run[B]
        value *= 0
    with bridge.trace(tokens) as run:  # what another tensor stands for is the user's again
        value = run[A]
        run[A] = torch.zeros_like(value)
        run[B]
        value *= 0


def test_late_edits_of_what_is_gone(bridge, tokens):
    def edit(run):
        z = run["blocks.0.attn.hook_z"]
        run[B]
        z[:, :, 0] = 0

    with pytest.raises(OutOfStepError, match=r"hook_z was changed"), bridge.trace(tokens) as run:
        edit(run)
    with pytest.raises(OutOfStepError, match=LATE):
        bridge.trace_edit(edit)
    hooks = bridge.trace_edit(edit, points=["blocks.0.attn.hook_z", B])
    with pytest.raises(OutOfStepError, match=LATE):
        bridge.run_with_hooks(tokens, fwd_hooks=hooks)


def test_late_edits_in_inference_mode(bridge, tokens):
    with torch.inference_mode():
        with bridge.trace(tokens) as run:
            run[A][0, 0, 0] = torch.nan  # not equal to itself, and not changed either
            kept = run[A]
            run[B]
        assert kept.isnan().sum() == 1
        with pytest.raises(OutOfStepError, match=LATE), bridge.trace(tokens) as run:
            kept = run[A]
            run[B]
            kept *= 0


def test_values_of_an_edit_are_the_bodys_own(bridge, tokens):
    """A model that writes to its own tensors does not write to those that the body holds."""
    seen = []

    def body(run):
        before = run["blocks.0.hook_resid_post"]
        kept = before.clone()
        run[B] = run[B] + before
        seen.append(torch.equal(before, kept))

    hooks = bridge.trace_edit(body)
    block = bridge.original_model.get_submodule(bridge.block_paths[1])
    handle = block.register_forward_pre_hook(lambda module, args: (args[0].mul_(2),))
    try:
        with torch.no_grad():
            bridge.run_with_hooks(tokens, fwd_hooks=hooks)
    finally:
        handle.remove()
    assert seen == [True, True]


def test_an_edit_attached_twice(bridge, tokens):
    hooks = bridge.trace_edit(lambda run: run[A].mul_(0.5))
    with pytest.raises(RuntimeError, match="came twice"):
        bridge.run_with_hooks(tokens, fwd_hooks=[*hooks, *hooks])


def test_skipping_what_is_listened_to(bridge, tokens):
    named = [(B, lambda x, hook: x * 2)]
    silent = pytest.raises(ValueError, match=r"does not run with skip\(1, 1\)")
    with bridge.hooks(fwd_hooks=named), silent, bridge.trace(tokens) as run:
        run.skip(1)
    with (
        pytest.raises(ValueError, match="is captured, and would not run"),
        bridge.trace(tokens, capture=[B]) as run,
    ):
        run.skip(1)
    with (
        torch.no_grad(),
        bridge.trace(tokens) as run,
        bridge.hooks(fwd_hooks=named),
    ):  # for runs of the body alone
        run.skip(1)
    with torch.no_grad():
        streams = bridge.run_with_cache(tokens, names_filter="blocks.1.hook_resid_pre")[1]
        rest = bridge(streams["blocks.1.hook_resid_pre"], start_at_layer=2)
    assert torch.equal(run.logits, rest)


@pytest.mark.parametrize("stop", [1, None])
def test_skipping_where_the_run_stops(bridge, tokens, stop):
    stop = bridge.cfg.n_layers if stop is None else stop
    ends = pytest.raises(ValueError, match=f"with stop_at_layer={stop} the run ends")
    with ends, bridge.trace(tokens, stop_at_layer=stop) as run:
        run.skip(0, bridge.cfg.n_layers - 1)


def test_assigning_to_a_captured_point_that_has_passed(bridge, tokens):
    with (
        pytest.raises(OutOfStepError, match=r"has passed|the model is at"),
        bridge.trace(tokens, capture=[A]) as run,
    ):
        run[B]
        run[A] = torch.zeros_like(run[A])


def test_modules_take_their_own_type(bridge, tokens):
    with pytest.raises(TypeError, match=r"torch.int64 was assigned"), bridge.trace(tokens) as run:
        module = run.module(path_of_mlp(bridge))
        module.output = torch.zeros_like(module.output, dtype=torch.long)


@pytest.mark.parametrize("name", ["blocks.1.hook_resid_pre", "blocks.1.hook_mlp_out"])
def test_a_module_and_a_hook_point_at_one_place(bridge, tokens, name):
    site = bridge.hook_dict[name].point.site
    what = "output" if site.kind == "output" else "inputs"
    together = pytest.raises(OutOfStepError, match="under one of the two")
    with torch.no_grad(), bridge.trace(tokens) as run:
        run[name]
        with together:
            getattr(run.module(site.path), what)
        run["blocks.1.hook_resid_post"]  # the model has not gone on
    with torch.no_grad(), bridge.trace(tokens) as run:
        getattr(run.module(site.path), what)
        with together:
            run[name] *= 2
    assert torch.equal(run.logits, bridge(tokens))


OTHERS = {
    "another": lambda run: run.__setitem__(B, run[A]),
    "a part of another": lambda run: run[B].__setitem__((..., 0), run[A][..., 0]),
    "another part": lambda run: run[B].__setitem__((slice(None), -1), run[B][:, 0]),
    "a part": lambda run: run.__setitem__(B, run[B][:, :1]),
    "added": lambda run: run[B].__iadd__(run[A]),
    "added by a method": lambda run: run[B].add_(run[A]),
    "a loop": lambda run: list(run[B]),
    "a comparison": lambda run: run[B] == run[A],
    "a length": lambda run: len(run[B]),
    "a power": lambda run: run.__setitem__(B, run[B] ** 2),
}


@pytest.mark.parametrize("what", OTHERS)
def test_edits_of_every_step_read_nothing(bridge, tokens, what):
    refused = pytest.raises(RuntimeError, match="stands for every step")
    with refused, bridge.trace_generate(tokens[:1], **GIVEN) as run:
        OTHERS[what](run)


def test_edits_of_every_step_keep_their_operands(bridge, tokens):
    change = torch.zeros(bridge.cfg.d_model)
    plain, edited = [], []
    for values, adds in ((plain, False), (edited, True)):
        change.zero_()
        with bridge.trace_generate(tokens[:1], **GIVEN) as run:
            if adds:
                run[A].add_(change)
            for step in run.steps:
                values.append(step[A].clone())
                change.fill_(1e6)
    assert all(torch.equal(x, y) for x, y in zip(plain, edited, strict=True))
    with (
        pytest.raises(AttributeError, match="data"),
        bridge.trace_generate(tokens[:1], **GIVEN) as run,
    ):
        run[A].data = change


def test_edits_of_every_step_keep_their_indices(bridge, tokens):
    index, seen = torch.tensor([0]), []
    with torch.no_grad(), bridge.trace_generate(tokens[:1], **GIVEN) as run:
        run[A][..., index] = 7.0
        run[A].index_fill_(-1, index, 7.0)
        for step in run.steps:
            seen.append(step[A][0, -1, :2].eq(7).tolist())
            index.fill_(1)
    assert seen == [[True, False]] * 3


def test_parts_outside_of_the_loop(bridge, tokens):
    def generation():
        return bridge.trace_generate(tokens[:1], **GIVEN)

    for ask in (
        lambda: bridge.blocks[1].output,
        lambda: setattr(bridge.blocks[1], "output", torch.zeros(1)),
    ):
        with pytest.raises(RuntimeError, match="of one step, and the loop"), generation():
            ask()
    with pytest.raises(RuntimeError, match="is at none"), generation() as run:
        for _ in run.steps:
            break
        bridge.blocks[1].output *= 2
    with generation() as run:
        shapes = [bridge.blocks[1].output.shape[1] for _ in run.steps]
    assert shapes == [tokens.shape[1], 1, 1]


def test_shapes_leave_caches_and_hooks_alone(bridge, tokens):
    with torch.no_grad():
        first = bridge.original_model(tokens[:, :3], use_cache=True).past_key_values
        before = copy.deepcopy(first)
        seen = []
        with bridge.hooks(fwd_hooks=[(A, lambda x, hook: seen.append(x))]):
            found = bridge.shapes(tokens[:, 3:], past_key_values=first)
            edit = bridge.trace_edit(lambda run: run[A])
        assert not seen
        assert [name for name, _ in edit] == [A]
        assert found["blocks.1.attn.hook_pattern"].shape[-1] == tokens.shape[1]
        assert first.get_seq_length() == 3
        given = tokens[:, 3:]
        assert torch.equal(
            bridge.original_model(given, past_key_values=first).logits,
            bridge.original_model(given, past_key_values=before).logits,
        )


def test_hooks_around_and_in_the_body(bridge, tokens):
    """Those around act first; scoped ones of the body are for its own runs, added ones for every
    run.
    """
    order = []

    def named(name, factor):
        return lambda x, hook: (order.append(name), x * factor)[1]

    with torch.no_grad():
        whole = bridge.run_with_cache(tokens, names_filter=B)[1][B]
        handle = bridge.hook_dict[B].add_hook(named("added", 2))
        with bridge.hooks(fwd_hooks=[(B, named("scoped", 4))]), bridge.trace(tokens) as run:
            seen = run[B]
        handle.remove()
        assert torch.equal(seen, whole * 8)
        assert order == ["added", "scoped"]
        with bridge.trace(tokens) as run, bridge.hooks(fwd_hooks=[(B, named("late", 2))]):
            seen = run[B]
        assert torch.equal(seen, whole)
        with bridge.trace(tokens) as run:
            run[A]
            handle = bridge.hook_dict[B].add_hook(named("added late", 2))
            seen = run[B]
        handle.remove()
        assert torch.equal(seen, whole * 2)


def test_a_captured_point_that_is_not_computed(bridge, tokens, monkeypatch):
    last = bridge.original_model.get_submodule(bridge.block_paths[-1])
    never = f"blocks.{bridge.cfg.n_layers - 1}.hook_mlp_out"
    monkeypatch.setattr(last, "forward", lambda hidden_states, *args, **kwargs: hidden_states)
    with bridge.trace(tokens, capture=[never]) as run:
        pass
    with pytest.raises(OutOfStepError, match="never came in this run"):
        run[never]


@pytest.mark.parametrize("when", ["before", "after"])
def test_runs_of_the_body_with_hooks_at_the_same_point(bridge, tokens, when):
    """Their hooks go when they end, and what feeds queries, keys and values with the edit of the
    trace stays.
    """
    name = "blocks.1.hook_attn_in"
    hooks = [(name, lambda x, hook: x * 0.5)]
    with torch.no_grad():
        by_hook = bridge.run_with_hooks(tokens, fwd_hooks=hooks)
        with bridge.trace(tokens) as run:
            value = run[name]
            if when == "before":
                bridge.run_with_hooks(tokens, fwd_hooks=hooks)
            value *= 0.5
            if when == "after":
                bridge.run_with_hooks(tokens, fwd_hooks=hooks)
    assert torch.equal(run.logits, by_hook)
    assert not torch.equal(by_hook, bridge(tokens))
