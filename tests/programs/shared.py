"""What takes no other compilation: other numbers of rows and positions, other values of what
functions keep.

`test_compiled` runs these in a process of its own: what checks types in the other tests cannot be
compiled.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from bridge import TransformerBridge
from bridge.interventions import Add, Scale, Set
from tests.adapters.test_verify_all import tiny
from tests.programs.compiled import (
    _no_grad,  # noqa: F401 - a fixture of all
    assert_same,
    nothing_compiled_before,  # noqa: F401 - a fixture of all
)
from tests.programs.test_programs import batch

AT = "blocks.0.hook_resid_post"
NAMES = ["blocks.1.attn.hook_pattern", "blocks.1.hook_resid_post"]
SIZES = [(1, 12), (3, 12), (5, 9), (1, 7), (2, 2), (9, 9)]


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    "case",
    ["gpt2", "llama-gqa", "gpt_neox", "opt", "bloom", "gemma2-gqa", "gpt_oss-gqa", "bert", "t5"],
)
def test_one_compilation_for_rows_positions_and_padding(case: str):
    bridge = TransformerBridge(tiny(case))
    stack = "decoder" if case == "t5" else "blocks"
    at = f"{stack}.0.hook_mlp_out"
    names = [
        name
        for name in (f"{stack}.1.attn.hook_pattern", f"{stack}.1.hook_mlp_out")
        if name in bridge.hook_dict
    ]
    vector = torch.randn(32)
    program = bridge.program(names, [(at, lambda act, hook: act + vector)])
    compiled = program.compile(backend="eager")
    for padded in (True, False):
        for rows, length in SIZES:
            tokens, more = batch(bridge, rows, length, seed=rows)
            if not padded:
                del more["attention_mask"]
            assert_same(compiled(tokens, **more), program(tokens, **more))
    assert graphs() == (2 if case == "t5" else 1)  # T5's decoder asks whether there is one row


def test_one_position_is_a_graph_of_its_own():
    bridge = TransformerBridge(tiny("llama-gqa"))
    program = bridge.program(NAMES)
    compiled = program.compile(backend="eager")
    for rows, length in ((2, 1), (1, 1), (4, 1), (2, 6), (1, 6)):
        tokens = torch.randint(3, 61, (rows, length))
        assert_same(compiled(tokens), program(tokens))
    assert graphs() == 2


def closure(vector: Tensor) -> Callable[..., Tensor]:
    return lambda act, hook: act + vector


def default(vector: Tensor) -> Callable[..., Tensor]:
    return lambda act, hook, vector=vector: act + vector


def keyword_default(vector: Tensor) -> Callable[..., Tensor]:
    def steer(act: Tensor, hook: object, *, vector: Tensor = vector) -> Tensor:
        return act + vector

    return steer


def added(act: Tensor, hook: object, vector: Tensor) -> Tensor:
    return act + vector


def nested(vector: Tensor) -> Callable[..., Tensor]:
    inner = closure(vector)
    return lambda act, hook: inner(act, hook)


def in_place(vector: Tensor) -> Callable[..., None]:
    def steer(act: Tensor, hook: object) -> None:
        act[:, -1] += vector

    return steer


class Steering:
    def __init__(self, vector: Tensor) -> None:
        self.vector = vector

    def __call__(self, act: Tensor, hook: object) -> Tensor:
        return act + self.vector

    def method(self, act: Tensor, hook: object) -> Tensor:
        return act - self.vector


class Module(nn.Module):
    def __init__(self, vector: Tensor) -> None:
        super().__init__()
        self.vector = nn.Buffer(vector)

    def forward(self, act: Tensor, hook: object) -> Tensor:
        return act + self.vector


KEEPS: dict[str, Callable[[Tensor], Any]] = {
    "closure": closure,
    "default": default,
    "keyword default": keyword_default,
    "partial": lambda vector: functools.partial(added, vector=vector),
    "function in a closure": nested,
    "in place": in_place,
    "object": Steering,
    "method": lambda vector: Steering(vector).method,
    "module": Module,
    "list": lambda vector: (lambda kept: lambda act, hook: act + kept[0])([vector]),
    "dictionary": lambda vector: (lambda kept: lambda act, hook: act + kept["vector"])(
        {"vector": vector}
    ),
    "Add": lambda vector: Add(vector, 0.5),
    "Set": lambda vector: Set(vector, rows=0),
    "Scale": lambda vector: Scale(vector),
}


@pytest.mark.parametrize("kept", KEEPS)
def test_a_tensor_that_a_function_keeps_is_an_input(kept: str):
    bridge = TransformerBridge(tiny("llama-gqa"))
    tokens, more = batch(bridge)
    before = bridge(tokens, **more)
    for _ in range(3):
        vector = torch.randn(32)
        function = KEEPS[kept](vector)
        compiled = bridge.program(NAMES, [(AT, function)]).compile(backend="eager")
        for _ in range(2):
            with bridge.hooks([(AT, function)]):
                logits, cache = bridge.run_with_cache(tokens, names_filter=NAMES, **more)
            assert_same(
                compiled(tokens, **more), {"logits": logits} | {name: cache[name] for name in NAMES}
            )
            assert (logits - before).abs().max() > 1e-4
            before = logits
            vector.mul_(-3)
    assert graphs() == 1


def test_a_body_of_an_edit_keeps_inputs_too():
    bridge = TransformerBridge(tiny("llama-gqa"))
    tokens, more = batch(bridge)

    def edit(vector: Tensor) -> Any:
        def body(run: Any) -> None:
            run[AT] += vector
            run["blocks.1.hook_mlp_out"] = run["blocks.1.hook_mlp_out"] * vector

        return bridge.trace_edit(body)

    for _ in range(3):
        hooks = edit(torch.randn(32))
        made = bridge.program(interventions=hooks).compile(backend="eager")(tokens, **more)[
            "logits"
        ]
        torch.testing.assert_close(made, bridge.run_with_hooks(tokens, fwd_hooks=hooks, **more))
    assert graphs() == 1


@pytest.mark.parametrize("case", ["gpt2", "qwen2_moe-gqa"])
def test_of_points_of_all_kinds_at_once(case: str):
    """Also inside attention and a router, whose code stands in the place of a module's forward."""
    bridge = TransformerBridge(tiny(case))
    tokens, more = batch(bridge)
    ends = (
        "hook_resid_mid",
        "attn.hook_pattern",
        "attn.hook_z",
        "ln1.hook_scale",
        "mlp.hook_router_probs",
    )
    names = [
        name for name in bridge.hook_dict if name.startswith("blocks.1") and name.endswith(ends)
    ]
    for strength in (0.5, 2.0):
        factor = torch.tensor(strength)
        program = bridge.program(names, [(names, lambda act, hook, factor=factor: act * factor)])
        assert_same(program.compile(backend="eager")(tokens, **more), program(tokens, **more))
    assert graphs() == 1


def test_numbers_that_a_function_keeps_become_inputs():
    bridge = TransformerBridge(tiny("llama-gqa"))
    tokens, more = batch(bridge)
    for strength in (0.5, -1.5, 2.5, 3.25, 7.0):
        program = bridge.program(NAMES, [(AT, lambda act, hook, strength=strength: act * strength)])
        assert_same(program.compile(backend="eager")(tokens, **more), program(tokens, **more))
    assert graphs() == 2  # the second number tells torch that it changes


def test_tokens_are_left_as_they_are():
    bridge = TransformerBridge(tiny("llama-gqa"))
    tokens, more = batch(bridge)
    bridge.program(NAMES).compile(backend="eager")(tokens, **more)
    assert not tokens.__dict__ and not more["attention_mask"].__dict__


def test_a_model_is_let_go_of_with_its_programs():
    bridge = TransformerBridge(tiny("llama-gqa"))
    tokens, more = batch(bridge)
    vector = torch.randn(32)
    bridge.program(NAMES, [(AT, lambda act, hook: act + vector)]).compile(backend="eager")(
        tokens, **more
    )
    model = weakref.ref(bridge.original_model)
    del bridge
    gc.collect()
    assert model() is None
