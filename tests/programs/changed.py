"""A compiled program is stale nowhere: whatever changes, the next call shows it. `test_compiled`
runs these too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from bridge import TransformerBridge
from tests.adapters.test_verify_all import tiny
from tests.programs.compiled import (
    _no_grad,  # noqa: F401 - a fixture of all
    assert_same,
    nothing_compiled_before,  # noqa: F401 - a fixture of all
)
from tests.programs.shared import AT, NAMES, SIZES, graphs
from tests.programs.test_programs import batch


def test_whatever_else_changes_the_next_call_shows_it():
    bridge = TransformerBridge(tiny("llama-gqa"))
    tokens, more = batch(bridge)
    kept: dict[str, Any] = {"vector": torch.randn(32), "scale": 1, "mode": "add", "layers": [1.0]}
    pair = [torch.randn(32)] * 2

    def function(act: Tensor, hook: object) -> Tensor:
        change = kept["vector"] * kept["scale"] * sum(kept["layers"]) + pair[0] - pair[1]
        return act + change if kept["mode"] == "add" else act - change

    def other(act: Tensor, hook: object) -> Tensor:
        return act * 0.25 + kept["vector"] - pair[0]

    program = bridge.program(NAMES, [(AT, function)])
    compiled = program.compile(backend="eager")
    before = program(tokens, **more)
    assert_same(compiled(tokens, **more), before)
    config, mlp = bridge.core.config, bridge.core.model.layers[1].mlp
    changes: dict[str, Callable[[], object]] = {
        "other values": lambda: kept["vector"].neg_(),
        "another tensor": lambda: kept.update(vector=torch.randn(32)),
        "another shape": lambda: kept.update(vector=torch.randn(1, 1, 32)),
        "rows of its own": lambda: kept.update(vector=torch.randn(2, 1, 32)),
        "one for all rows again": lambda: kept.update(vector=torch.randn(1, 32)),
        "another type": lambda: kept.update(vector=torch.randint(-3, 3, (32,))),
        "a whole number": lambda: kept.update(scale=3),
        "a word": lambda: kept.update(mode="subtract"),
        "a longer list": lambda: kept["layers"].append(0.5),
        "two tensors where one was": lambda: pair.__setitem__(1, torch.randn(32)),
        "the function's code": lambda: setattr(function, "__code__", other.__code__),
        "a parameter's values": lambda: mlp.down_proj.weight.mul_(2),
        "another parameter": lambda: setattr(
            mlp.down_proj, "weight", nn.Parameter(torch.randn_like(mlp.down_proj.weight))
        ),
        "the model's type": lambda: bridge.core.double(),
        "its configuration": lambda: setattr(config, "hidden_act", "relu"),
    }
    seen = []
    for what, change in changes.items():
        change()
        wanted = program(tokens, **more)
        assert_same(compiled(tokens, **more), wanted)
        if torch.equal(wanted["logits"], before["logits"]):
            seen.append(what)
        before = wanted
    assert seen == ["its configuration"]  # modules have read it when they were made


def test_a_change_in_any_of_the_blocks_that_are_compiled_once_is_seen():
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=61,
    )
    model = LlamaForCausalLM(config).eval()
    bridge = TransformerBridge(model)
    names = [f"blocks.{layer}.hook_resid_post" for layer in range(4)]
    program = bridge.program(names, [(AT, lambda act, hook: act * 0.5)])
    tokens, more = batch(bridge)
    blocks = model.model.layers
    compiled = program.compile(backend="eager")
    assert_same(compiled(tokens, **more), program(tokens, **more))
    changes: list[Callable[[], object]] = [
        lambda: setattr(blocks[2].mlp.down_proj, "bias", nn.Parameter(torch.randn(32))),
        lambda: setattr(blocks[3].mlp.down_proj, "weight", nn.Parameter(torch.randn(32, 48))),
        lambda: blocks[3].self_attn.o_proj.weight.mul_(50),
        lambda: setattr(program.model.model.layers[2].input_layernorm, "variance_epsilon", 0.5),
        lambda: setattr(program.model.model.layers[3].self_attn, "scaling", 20.0),
    ]
    for change in changes:
        before = program(tokens, **more)["logits"]
        change()
        wanted = program(tokens, **more)
        assert (wanted["logits"] - before).abs().max() > 1e-5
        assert_same(compiled(tokens, **more), wanted)


def test_programs_that_differ_where_torch_does_not_look_share_nothing():
    """torch's guards leave out a module's torch hooks, and ours how the program's modules are
    built.
    """
    model = tiny("llama-gqa")
    bridge = TransformerBridge(model)
    tokens, more = batch(bridge)

    def fresh() -> Tensor:
        program = bridge.program(NAMES)
        wanted = program(tokens, **more)
        assert_same(program.compile(backend="eager")(tokens, **more), wanted)
        return wanted["logits"]

    plain = fresh()
    handle = model.model.layers[0].mlp.register_forward_hook(
        lambda module, args, output: output * 2
    )
    assert not torch.equal(fresh(), plain)
    handle.remove()
    assert torch.equal(fresh(), plain)
    mlp = model.model.layers[1].mlp
    own, mlp.act_fn = mlp.act_fn, nn.ReLU()
    assert not torch.equal(fresh(), plain)
    mlp.act_fn = own
    assert torch.equal(fresh(), plain)
    assert graphs() == 3


def test_more_programs_than_torch_keeps_graphs_for():
    bridge = TransformerBridge(tiny("llama-gqa"))
    tokens, more = batch(bridge)

    class Mode:
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, act: Tensor, hook: object) -> Tensor:
            return act * len(self.name)

    with torch._dynamo.config.patch(recompile_limit=2):
        for n in range(5):
            program = bridge.program(NAMES, [(AT, Mode("a" * n))])
            assert_same(program.compile(backend="eager")(tokens, **more), program(tokens, **more))


def test_what_cannot_be_of_any_size_is_told_and_compiled_as_torch_does_it(
    caplog: pytest.LogCaptureFixture,
):
    bridge = TransformerBridge(tiny("llama-gqa"))
    numbers = torch.randn(32).numpy()  # with guards of our choice, torch 2.13 fails on arrays
    program = bridge.program(NAMES, [(AT, lambda act, hook: act + torch.from_numpy(numbers))])
    compiled = program.compile(backend="eager")
    with caplog.at_level(logging.WARNING, "bridge"):
        for rows, length in SIZES:
            tokens, more = batch(bridge, rows, length)
            assert_same(compiled(tokens, **more), program(tokens, **more))
    told = [record.getMessage() for record in caplog.records if record.name == "bridge"]
    assert [message.split(":")[0] for message in told] == ["LlamaForCausalLM"]
    numbers *= -2
    assert_same(compiled(tokens, **more), program(tokens, **more))
