"""Promise 2: a hook point that nobody listens to costs nothing."""

import subprocess
import sys
import time

import pytest
import torch
from torch.overrides import TorchFunctionMode

from bridge import TransformerBridge
from tests.conftest import tiny, torch_hooks


def test_wrapping_attaches_nothing(hf):
    before = torch_hooks(hf)
    TransformerBridge(hf)
    assert torch_hooks(hf) == before == 0


def test_one_name_attaches_one_torch_hook(bridge):
    ends = 3  # torch hooks: where a pass begins and ends, and what keeps compiled code away
    handle = bridge.blocks[1].hook_resid_pre.add_hook(lambda x, hook: None)
    assert torch_hooks(bridge.original_model) == 1 + ends
    bridge.blocks[1].hook_resid_pre.add_hook(lambda x, hook: None)
    assert torch_hooks(bridge.original_model) == 1 + ends
    handle.remove()
    assert torch_hooks(bridge.original_model) == 1 + ends
    bridge.reset_hooks()
    assert torch_hooks(bridge.original_model) == 0


class Kernels(TorchFunctionMode):
    """Counts how often the kernel was called."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.nn.functional.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


def test_one_layers_pattern_leaves_the_others_on_their_kernel(bridge, tokens):
    halve = [("blocks.1.attn.hook_pattern", lambda pattern, hook: pattern * 0.5)]
    with Kernels() as kernels:
        bridge(tokens)
        assert kernels.count == 3
        bridge.run_with_hooks(tokens, fwd_hooks=halve)
        assert kernels.count == 5
        _, cache = bridge.run_with_cache(tokens, names_filter="blocks.1.attn.hook_pattern")
        assert kernels.count == 8
    assert list(cache) == ["blocks.1.attn.hook_pattern"]


def test_heavy_points_are_left_out_until_switched_on(bridge, tokens):
    heavy = {
        "attn.hook_result": bridge.set_use_attn_result,
        "hook_q_input": bridge.set_use_split_qkv_input,
        "hook_attn_in": bridge.set_use_attn_in,
        "hook_mlp_in": bridge.set_use_hook_mlp_in,
    }
    _, plain = bridge.run_with_cache(tokens)
    for name, switch in heavy.items():
        full = f"blocks.0.{name}"
        assert full not in plain
        assert full in bridge.run_with_cache(tokens, names_filter=full)[1]
        switch(True)
        assert full in bridge.run_with_cache(tokens)[1]
        switch(False)
        assert full not in bridge.run_with_cache(tokens)[1]


@pytest.mark.unchecked
def test_wrapping_is_quick():
    # An upper bound far above what it takes, so that a busy machine cannot fail it: it would if
    # wrapping ran the model.
    hf = tiny("llama")
    TransformerBridge(hf)
    best = min(_timed(lambda: TransformerBridge(hf)) for _ in range(5))
    assert best < 0.2


def _timed(fn):
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def test_import_is_lazy():
    loaded = (
        "import sys, bridge; print([m for m in ('torch', 'transformers', 'adapters') if m in"
        " sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
