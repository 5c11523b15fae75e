"""What several threads attach and detach at once: each test fails without the lock that it is
about.

While they run, each line of the code that the lock is in hands over to another thread, so that no
luck is needed.
"""

import gc
import sys
import threading
import time

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bridge import TransformerBridge
from bridge.modules import Finder
from bridge.run import layer_range
from bridge.taps import attention_call as kernels
from bridge.taps import attention_tap
from bridge.taps import taps as patched_functions
from bridge.wiring import compiled, wiring
from bridge.wiring.compiled import ForcedEager, forced_eager, uncompiled
from tests.conftest import tiny, torch_hooks

pytestmark = (
    pytest.mark.unchecked
)  # checks of annotations would stand between a function and its lines

THREADS, TIMES = 4, 12


def at_once(module, job):
    """Runs a job several times in several threads, which take turns at every line of a file."""

    def line(frame, event, argument):
        if event == "line":
            time.sleep(1e-6)
        return line

    def call(frame, event, argument):
        return line if frame.f_code.co_filename == module.__file__ else None

    errors, barrier = [], threading.Barrier(THREADS)

    def work(index):
        sys.settrace(call)
        barrier.wait()
        try:
            with torch.no_grad():
                for _ in range(TIMES):
                    job(index)
        except BaseException as error:  # noqa: BLE001 - it is looked at where the threads have ended
            errors.append(error)
        finally:
            sys.settrace(None)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


def test_hooks_that_come_and_go(tokens):
    bridge = TransformerBridge(tiny("gpt2"))
    names = ["blocks.1.hook_mlp_out", "blocks.1.attn.hook_pattern", "blocks.0.hook_attn_in"]

    def job(index):
        with bridge.hooks([(names, lambda x, hook: x * 0.5)]):
            assert bridge.wiring.listening
        if index:
            bridge.add_hook(names[0], lambda x, hook: x * 0.5)[0].remove()

    at_once(wiring, job)
    assert not bridge.wiring.listening
    assert not any(hook.listeners for hook in bridge.hook_dict.values())
    assert torch_hooks(bridge.original_model) == 0


def test_caches_that_come_and_go(tokens):
    bridge = TransformerBridge(tiny("gpt2"))
    names = ["blocks.1.hook_mlp_out", "blocks.1.attn.hook_pattern"]

    def job(index):
        _, cache = bridge.run_with_cache(tokens[:, :3], names_filter=names)
        assert len(cache) == 2

    at_once(wiring, job)
    assert not bridge.wiring.listening
    assert torch_hooks(bridge.original_model) == 0


def test_runs_that_skip_blocks(tokens):
    bridge = TransformerBridge(tiny("gpt2"))
    residual = bridge(tokens, stop_at_layer=2)
    expected = bridge(residual, start_at_layer=2)

    def job(index):
        assert torch.equal(bridge(residual, start_at_layer=2), expected)

    at_once(layer_range, job)
    assert all(
        "_compiled_call_impl" not in module.__dict__ for module in bridge.original_model.modules()
    )


def test_attention_functions_that_are_watched(tokens):
    gc.collect()  # what other tests left: a bridge in a cycle, with hooks on
    bridge = TransformerBridge(tiny("llama"))
    own, there = ALL_ATTENTION_FUNCTIONS["sdpa"], dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
    name = "blocks.1.attn.hook_pattern"
    expected = bridge.run_with_hooks(tokens, fwd_hooks=[(name, lambda x, hook: x * 0.5)])

    def job(index):
        assert torch.equal(
            bridge.run_with_hooks(tokens, fwd_hooks=[(name, lambda x, hook: x * 0.5)]), expected
        )

    at_once(kernels, job)
    at_once(attention_tap, job)
    at_once(patched_functions, job)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own
    assert ALL_ATTENTION_FUNCTIONS._local_mapping == there


@pytest.mark.parametrize("when", ["before the kernel", "in the kernel"])
def test_a_hook_that_is_removed_while_its_module_runs(tokens, monkeypatch, when):
    """Nothing holds on to the attention function after the module's run."""
    bridge = TransformerBridge(tiny("llama"))
    own, looked_up = ALL_ATTENTION_FUNCTIONS["sdpa"], attention_tap.is_looked_up
    handles = bridge.add_hook("blocks.1.attn.hook_pattern", lambda x, hook: handles[0].remove())

    def removes(*args):
        handles[0].remove()
        return looked_up(*args)

    if when == "before the kernel":
        # The moment between the tap and its kernel has no place where a user's function runs.
        monkeypatch.setattr(attention_tap, "is_looked_up", removes)
    bridge(tokens)
    assert not bridge.wiring.listening
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own
    assert torch_hooks(bridge.original_model) == 0


def test_compiled_code_that_is_kept_away(tokens):
    model = torch.compile(tiny("gpt2"), backend="eager")

    def job(index):
        with uncompiled(model):
            assert torch._dynamo.eval_frame._stance.stance == "force_eager"

    at_once(compiled, job)
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_generations_that_begin_where_runs_end(tokens):
    """Both put a forward of their own in front of the model's: it stayed, and called itself."""
    bridge = TransformerBridge(tiny("gpt2"))
    expected = bridge(tokens)
    of_hooks = ForcedEager(Finder(bridge.original_model, ""))
    with bridge.hooks([("hook_embed", lambda x, hook: None)]):
        assert "forward" in bridge.original_model.__dict__

    def job(index):
        with forced_eager(Finder(bridge.original_model, "")):
            assert torch.equal(bridge(tokens), expected)

    at_once(compiled, job)
    of_hooks.attach()
    with forced_eager(
        Finder(bridge.original_model, "")
    ):  # a generation, while which hooks go and others come
        of_hooks.detach()
        of_hooks.attach()
        assert torch.equal(bridge(tokens), expected)
    assert torch.equal(bridge(tokens), expected)
    of_hooks.detach()
    assert "forward" not in bridge.original_model.__dict__
    assert torch.equal(bridge(tokens), expected)
