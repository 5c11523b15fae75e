"""Every operation, saved and loaded, does in each kind of run what the function by hand does."""

import contextlib
import json
import subprocess
import sys
from dataclasses import fields

import numpy as np
import pytest
import torch

from bridge import TransformerBridge
from bridge.harvest import harvest
from bridge.interventions import OPERATIONS, Interventions, Mean, Set, load
from tests.conftest import tiny
from tests.harvest.common import TEXTS, numbers, read
from tests.interventions.cases import LENGTH, NAMES, PATTERN, by_hand, cases
from tests.tiny_models import tiny_model

TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [15, 3, 17, 18, 4, 20, 21]])
assert TOKENS.shape[1] == LENGTH


@pytest.fixture(params=NAMES)
def case(request, tmp_path):
    """A bridge, a loaded intervention, the same by hand, and the file."""
    bridge = TransformerBridge(tiny("llama", dtype=torch.float64))
    point, operation, change = cases(bridge.cfg.d_model, bridge.cfg.n_heads)[request.param]
    file = tmp_path / "one.safetensors"
    Interventions([(point, operation)], bridge).save(file)
    loaded = load(file, bridge)
    assert loaded[0][1] == operation
    return bridge, loaded, [(point, by_hand(change))], file


def assert_same(made, expected):
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-6)


def wanted(bridge, hand):
    with torch.no_grad():
        edited = bridge.run_with_hooks(TOKENS, fwd_hooks=hand)
        assert (edited - bridge(TOKENS)).abs().max() > 1e-4  # it does something
    return edited


def test_every_operation_has_a_case():
    """But for the one that changes nothing: test_conditions.py."""
    assert {type(operation).__name__ for _, operation, _ in cases(32, 4).values()} == set(
        OPERATIONS
    ) - {"Probe"}


def test_run_hooks_and_added_hooks(case):
    bridge, loaded, hand, _ = case
    with torch.no_grad():
        expected = wanted(bridge, hand)
        assert_same(bridge.run_with_hooks(TOKENS, fwd_hooks=loaded), expected)
        with bridge.hooks(fwd_hooks=loaded):
            assert_same(bridge(TOKENS), expected)
        ((point, operation),) = loaded
        bridge.add_hook(point, operation)
        assert_same(bridge(TOKENS), expected)


def test_trace_and_edit(case):
    bridge, loaded, hand, _ = case
    ((point, operation),) = loaded

    def body(acts):
        acts[point] = operation(acts[point], bridge.hook_dict[point])

    with torch.no_grad():
        expected = wanted(bridge, hand)
        torch.testing.assert_close(
            bridge.run_with_hooks(TOKENS, fwd_hooks=bridge.trace_edit(body, points=[point])),
            expected,
            rtol=0,
            atol=1e-6,
        )
        with bridge.trace(TOKENS) as trace:
            trace[point] = operation(trace[point], bridge.hook_dict[point])
    assert_same(trace.logits, expected)


def test_program(case):
    bridge, loaded, hand, _ = case
    with torch.no_grad():
        made = bridge.program(interventions=loaded)(TOKENS)["logits"]
        assert_same(made, wanted(bridge, hand))


def in_every_step(bridge, prompt, name, new):
    """A generation that processes the whole sequence anew in each step, the function by hand
    on it.
    """
    point, operation, change = cases(bridge.cfg.d_model, bridge.cfg.n_heads)[name]
    of_prompt = operation.chooses_tokens and point != PATTERN
    tokens, logits = prompt, []
    for _ in range(new):
        hooks = [(point, by_hand(lambda x: change(x[:, :LENGTH]) if of_prompt else change(x)))]
        logits.append(bridge.run_with_hooks(tokens, fwd_hooks=hooks)[:, -1])
        tokens = torch.cat([tokens, logits[-1].argmax(-1, keepdim=True)], 1)
    return tokens, torch.stack(logits, 1)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox", "gemma2", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("name", NAMES)
def test_generation_with_and_without_a_cache_and_a_batch(name, family):
    """The keys and values of an edited prompt are the edited ones, with windows, mixtures and sinks
    too.
    """
    bridge = TransformerBridge(
        tiny_model(
            family, attn_implementation="eager" if family in ("gpt_oss", "gemma2") else "sdpa"
        )
    )
    point, operation, _ = cases(bridge.cfg.d_model, bridge.cfg.n_heads)[name]
    pairs = Interventions([(point, operation)], bridge)
    with torch.no_grad():
        tokens, logits = in_every_step(bridge, TOKENS, name, 4)
        for cached in (True, False):
            with bridge.hooks(fwd_hooks=pairs):
                made = bridge.generate(
                    TOKENS,
                    4,
                    do_sample=False,
                    verbose=False,
                    stop_at_eos=False,
                    use_past_kv_cache=cached,
                    output_logits=True,
                )
            assert torch.equal(made.sequences, tokens)
            torch.testing.assert_close(torch.stack(made.logits, 1), logits, rtol=0, atol=1e-5)
        answers = bridge.generate_batch(
            TOKENS,
            4,
            interventions=pairs,
            do_sample=False,
            verbose=False,
            stop_at_eos=False,
            output_logits=True,
        )
        for answer in answers:
            assert answer.error is None
            assert torch.equal(answer.tokens, tokens[answer.index, LENGTH:])
            torch.testing.assert_close(answer.logits, logits[answer.index], rtol=0, atol=1e-5)


def test_harvest(case, tmp_path):
    _, loaded, _, _ = case
    bridge = TransformerBridge.boot_embedded()
    name = next(name for name in NAMES if cases(32, 4)[name][1] == loaded[0][1])
    point, operation, change = cases(bridge.cfg.d_model, bridge.cfg.n_heads)[name]
    options = {
        "context_size": LENGTH,
        "dtype": "float32",
        "max_tokens": 4 * LENGTH,
        "hook_points": ["blocks.2.hook_resid_post"],
    }
    harvest(
        bridge,
        TEXTS[:4],
        out=tmp_path / "data",
        interventions=Interventions([(point, operation)]),
        **options,
    )
    harvest(
        bridge,
        TEXTS[:4],
        out=tmp_path / "hand",
        interventions=[(point, by_hand(change))],
        **options,
    )
    harvest(bridge, TEXTS[:4], out=tmp_path / "none", **options)
    data, by, none = (
        numbers(read(tmp_path / folder), "blocks.2.hook_resid_post")
        for folder in ("data", "hand", "none")
    )
    np.testing.assert_allclose(data, by, rtol=0, atol=1e-5)
    assert np.abs(data - none).max() > 1e-3


def test_repr_is_code(case):
    _, loaded, _, _ = case
    names = {"torch": torch, "Interventions": Interventions, **OPERATIONS}
    assert eval(repr(loaded), names) == loaded


def test_what_a_file_says(case):
    """Tensors and JSON: another program reads it without this one."""
    _, loaded, _, file = case
    code = (
        "import sys, safetensors; print(safetensors.safe_open(sys.argv[1],"
        " 'pt').metadata()[sys.argv[2]])"
    )
    said = json.loads(
        subprocess.run(
            [sys.executable, "-c", code, str(file), "transformer_bridge_interventions"],
            capture_output=True,
            check=True,
        ).stdout
    )
    assert said["version"] == 2
    assert said["model"]["kind"] == "LlamaForCausalLM"
    (entry,) = said["interventions"]
    assert set(entry) == {"point", "operation", *(field.name for field in fields(loaded[0][1]))} - {
        "where"
    }  # it has none


def test_a_pass_that_was_left_behind_says_nothing_of_another_ones_rows():
    """Neither of a model that an interrupt left, nor of one whose hooks another thread took away
    midway.
    """
    bridge, other = TransformerBridge(tiny("llama")), TransformerBridge(tiny("llama"))
    tokens, point = (
        torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10], [0, 3, 4, 5]]),
        "blocks.1.hook_resid_post",
    )
    mask, operation = (tokens > 0).long(), Set(torch.ones(32), positions=0)
    x = torch.zeros(3, 4, 32)
    live = []

    def interrupted(x, hook):
        raise KeyboardInterrupt

    def taken_away(x, hook):
        for handle in handles:
            handle.remove()

    for function in (interrupted, taken_away):
        handles = bridge.add_hook(point, function)
        with contextlib.suppress(KeyboardInterrupt):
            bridge.original_model(tokens, attention_mask=mask)
        for handle in handles:
            handle.remove()
        made = operation(x, bridge.hook_dict[point])
        assert made[:, 0].all() and not made[:, 1:].any(), function
        watch = Mean(over="features", positions=0)  # a pass of the other model knows its own rows
        with other.hooks(
            fwd_hooks=[(point, watch), (point, lambda x, hook: live.append(x.clone()))]
        ):
            other.original_model(torch.tensor([[5, 6, 7], [8, 9, 10]]))
        first = live.pop()[:, 0]
        torch.testing.assert_close(first, first.mean(-1, keepdim=True).expand_as(first))
