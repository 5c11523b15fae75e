"""What runs leave behind: nothing. After a thousand of each kind as many objects live as after a
hundred.

By default there are a hundred of each; ``MATRIX=all`` in the environment makes it a thousand.
"""

from __future__ import annotations

import copy
import gc
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from bridge import TransformerBridge
from bridge.patching import get_act_patch_resid_pre

TOKENS = torch.tensor([[1, 2, 3, 4]])
SIZES = {
    "n_layers": 1,
    "d_model": 8,
    "n_heads": 2,
    "d_head": 4,
    "d_vocab": 10,
    "n_ctx": 8,
    "act_fn": "gelu",
}
NEW = {"max_new_tokens": 1, "do_sample": False, "verbose": False}


def refused(call: Callable[[], Any]) -> None:
    try:
        call()
    except (ValueError, KeyError, RuntimeError):
        return
    raise AssertionError("it was to be refused")


def broken(x: torch.Tensor, hook: Any) -> None:
    raise ValueError("a hook's own error")


def in_a_thread(call: Callable[[], Any]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def added(bridge: TransformerBridge) -> None:
    bridge.add_hook("blocks.0.attn.hook_pattern", lambda x, hook: x * 0.5)
    bridge(TOKENS)
    bridge.reset_hooks()


def cached_for_good(bridge: TransformerBridge) -> None:
    bridge.add_caching_hooks(lambda name: "resid" in name)
    bridge(TOKENS)
    bridge.reset_hooks()


HALVE = [
    ("blocks.0.attn.hook_pattern", lambda x, hook: x * 0.5),
    ("blocks.0.hook_resid_pre", lambda x, hook: x * 0.5),
]
ALL = [
    "hook_embed",
    "blocks.0.hook_resid_mid",
    "blocks.0.attn.hook_result",
    "blocks.0.attn.hook_pattern",
]
KINDS: dict[str, Callable[[TransformerBridge], Any]] = {
    "run": lambda b: b(TOKENS),
    "loss": lambda b: b(TOKENS, return_type="loss").backward(),
    "cache": lambda b: b.run_with_cache(TOKENS),
    "cache-no-grad": lambda b: torch.no_grad()(b.run_with_cache)(TOKENS),
    "cache-inference": lambda b: torch.inference_mode()(b.run_with_cache)(TOKENS),
    "cache-some": lambda b: b.run_with_cache(TOKENS, names_filter=ALL, pos_slice=-1),
    "cache-gradients": lambda b: b.run_with_cache(TOKENS, return_type="loss", incl_bwd=True),
    "callback": lambda b: b.run_with_callback(TOKENS, lambda x, point: None),
    "hooks": lambda b: b.run_with_hooks(TOKENS, fwd_hooks=HALVE),
    "gradient-hooks": (
        lambda b: b.run_with_hooks(
            TOKENS, bwd_hooks=[(ALL, lambda x, hook: None)], return_type="loss"
        ).backward()
    ),
    "graph-dropped": lambda b: b.run_with_hooks(
        TOKENS, bwd_hooks=[(ALL, lambda x, hook: x)], return_type="loss"
    ),
    "added-hooks": added,
    "caching-hooks": cached_for_good,
    "layers": lambda b: b(b(TOKENS, stop_at_layer=1), start_at_layer=1),
    "error-in-hook": lambda b: refused(lambda: b.run_with_hooks(TOKENS, fwd_hooks=[(ALL, broken)])),
    "refused": lambda b: refused(lambda: b.run_with_cache(TOKENS, names_filter="blocks.9.hook_z")),
    "thread": lambda b: in_a_thread(lambda: b.run_with_cache(TOKENS)),
    "generate": lambda b: b.generate(TOKENS, **NEW),
    "generate-cache": lambda b: b.generate(TOKENS, return_cache=True, **NEW),
    "stream": lambda b: list(b.generate_stream(TOKENS, **NEW)),
    "stream-left": lambda b: next(iter(b.generate_stream(TOKENS, **NEW))),
    "weights": lambda b: (b.W_Q, b.b_U, b.blocks[0].attn.OV),
    "copy": lambda b: copy.deepcopy(b),
    "new-bridge": lambda b: TransformerBridge(b.original_model).run_with_cache(TOKENS),
    "patching": lambda b: get_act_patch_resid_pre(
        b, TOKENS, b.run_with_cache(TOKENS.flip(-1))[1], lambda logits: logits.mean()
    ),
}
TIMES = 1000 if os.environ.get("MATRIX") == "all" else 100
#: Those that make bridges or copies of models, whose parts know each other; or are made of torch's
#: own cycles.
MAKES_CYCLES = ("copy", "new-bridge")
#: Those that take several milliseconds each run a tenth as often, with the same bound.
SLOW = ("stream", "stream-left", "generate", "generate-cache", "patching", "copy", "new-bridge")


def alive() -> tuple[int, int]:
    """How many tensors there are, and how many objects that the collector knows."""
    gc.collect()
    objects = gc.get_objects()
    return sum(issubclass(type(x), torch.Tensor) for x in objects), len(objects)


@pytest.fixture(scope="module", autouse=True)
def _only_what_is_new() -> None:
    """What is there by now is not looked at: to go through all of it takes longer than the runs."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def small() -> TransformerBridge:
    return TransformerBridge.boot_native(SIZES).eval()


@pytest.mark.unchecked
@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_flat(small, kind):
    run, times = KINDS[kind], TIMES // 10 if kind in SLOW else TIMES
    for _ in range(max(times // 10, 10)):
        run(small)
    tensors, objects = alive()
    for _ in range(times):
        run(small)
    more_tensors, more_objects = alive()
    assert more_tensors <= tensors
    assert more_objects - objects < max(
        times // 10, 10
    )  # caches of Python's own; a leak is one in each run


@pytest.mark.unchecked
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in MAKES_CYCLES])
def test_nothing_waits_for_a_collection(small, kind):
    """What a run held, a user's function and all that it holds, is free when the run is over, not
    some time later.
    """
    KINDS[kind](small)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        KINDS[kind](small)
        gc.collect()
        left = [type(x) for x in gc.garbage if type(x).__module__.partition(".")[0] == "bridge"]
        assert not left and not [x for x in gc.garbage if issubclass(type(x), torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.unchecked
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_outlives_the_model(kind):
    """No module, tensor or thread is alive after the bridge, the model and what a run returned are
    dropped.
    """
    threads = threading.active_count()
    bridge = TransformerBridge.boot_native(SIZES).eval()
    result = KINDS[kind](bridge)
    gone: list[weakref.ref[Any]] = [weakref.ref(bridge)]
    gone += [weakref.ref(module) for module in bridge.original_model.modules()]
    gone += [weakref.ref(parameter) for parameter in bridge.original_model.parameters()]
    if isinstance(result, tuple) and isinstance(result[1], Mapping):
        gone += [weakref.ref(value) for value in result[1].values()]
    later = weakref.ref(bridge.wiring)  # small, and in a circle with its hook points
    gc.collect()
    gc.disable()
    try:
        del bridge, result
        if kind not in MAKES_CYCLES:
            assert not [x() for x in gone if x() is not None], (
                "a model's memory is free at once, not some time later"
            )
    finally:
        gc.enable()
    gc.collect()
    assert not [x() for x in (*gone, later) if x() is not None]
    assert threading.active_count() == threads


def test_what_is_kept_of_a_bridge_keeps_what_it_needs():
    """A component reads its weights; hooks stay on a model whose bridge nobody holds; a hook point
    is of a model.
    """
    model = TransformerBridge.boot_native(SIZES).eval().original_model
    plain = model(TOKENS).logits
    (handle,) = TransformerBridge(model).add_hook("blocks.0.hook_resid_post", lambda x, hook: x * 0)
    assert not torch.equal(model(TOKENS).logits, plain)
    handle.remove()
    assert torch.equal(model(TOKENS).logits, plain)
    block = TransformerBridge.boot_native(SIZES).blocks[0]
    assert block.attn.W_Q.shape == (2, 8, 4)
    point = TransformerBridge.boot_native(SIZES).hook_dict["blocks.0.hook_resid_post"]
    gc.collect()
    with pytest.raises(RuntimeError, match="the model is gone: keep the bridge, or the model"):
        point.add_hook(lambda x, hook: None)
    assert not point.fwd_hooks
