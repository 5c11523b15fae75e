"""A compiled program: one graph, few recompilations, equal to the bridge's run.

`test_compiled` runs these in a process of its own: what checks types in the other tests cannot be
compiled.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from bridge import TransformerBridge
from tests.adapters.test_verify_all import tiny
from tests.bases.common import KINDS
from tests.bases.common import cases as basis_cases
from tests.interventions.cases import LENGTH, NAMES, by_hand, cases
from tests.programs.test_programs import batch


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def assert_same(made: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Equal up to rounding: compiled code keeps no keys and values, and a product of other strides
    rounds otherwise.
    """
    assert list(made) == list(wanted)
    for name in wanted:
        torch.testing.assert_close(
            made[name], wanted[name], rtol=1e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def halve(activation: Tensor, hook: object) -> Tensor:
    return activation * 0.5


@pytest.mark.parametrize("case", ["llama-gqa", "gpt_oss-gqa", "t5"])
def test_all_points_at_once_with_an_edit_of_each_kind(case: str):
    bridge = TransformerBridge(tiny(case))
    tokens, more = batch(bridge)
    stack = "decoder.1" if case == "t5" else "blocks.1"
    edited = [
        f"{stack}.{name}"
        for name in (
            "hook_resid_mid",
            "attn.hook_pattern",
            "attn.hook_q",
            "hook_v_input",
            "hook_mlp_out",
        )
    ]
    edited = [name for name in edited if name in bridge.hook_dict]
    program = bridge.program(
        capture=[
            name for name in bridge.hook_dict if name.startswith(stack) and ".experts." not in name
        ],
        interventions=[(name, halve) for name in edited],
    )
    wanted = program(tokens, **more)
    made = program.compile(backend="eager")(tokens, **more)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert_same(made, wanted)


def test_other_values_and_sizes_need_no_other_code():
    bridge = TransformerBridge(tiny("llama-gqa"))

    def steer(activation: Tensor, hook: object, vector: Tensor, strength: Tensor) -> Tensor:
        return activation + vector * strength

    program = bridge.program(
        capture=["blocks.0.attn.hook_pattern", "blocks.1.hook_resid_post"],
        interventions=[("blocks.0.hook_resid_post", steer)],
        inputs={"vector": torch.zeros(32), "strength": 0.0},
    )
    compiled = program.compile(backend="eager")
    for i in range(100):
        tokens, more = batch(
            bridge, rows=(2, 1, 3, 5, 4)[i % 5], length=(9, 6, 12, 20, 15)[i // 5 % 5], seed=i
        )
        given: dict[str, Any] = {"vector": torch.randn(32), "strength": i / 10, **more}
        made = compiled(tokens, **given)
        if i % 9 == 0:
            wanted = program(tokens, **given)
            assert_same(made, wanted)
    assert counters["stats"]["unique_graphs"] <= 3  # the first, and at most two recompilations


@pytest.mark.slow
def test_by_inductor():
    bridge = TransformerBridge(tiny("llama-gqa"))
    tokens, more = batch(bridge)
    program = bridge.program(
        capture=["blocks.1.attn.hook_pattern", "blocks.1.hook_resid_post"],
        interventions=[("blocks.0.hook_resid_mid", halve)],
    )
    made = program.compile()(tokens, **more)
    assert_same(made, program(tokens, **more))


def test_points_inside_experts():
    bridge = TransformerBridge(tiny("mixtral-gqa"))
    names = [
        f"blocks.1.mlp.experts.{e}.hook_{part}" for e in range(4) for part in ("in", "post", "out")
    ]
    program = bridge.program(
        capture=names, interventions=[("blocks.1.mlp.experts.2.hook_post", halve)]
    )
    compiled = program.compile(backend="eager")
    for seed, length in ((1, 9), (2, 6), (3, 12)):
        tokens, _ = batch(bridge, length=length, seed=seed)
        wanted = bridge.run_with_hooks(
            tokens, fwd_hooks=[("blocks.1.mlp.experts.2.hook_post", halve)]
        )
        made = compiled(tokens)
        assert_same(made, program(tokens))
        torch.testing.assert_close(made["logits"], wanted)
    assert counters["stats"]["unique_graphs"] == 1


def test_generation_by_compiled_code():
    bridge = TransformerBridge(tiny("llama-gqa"))
    vector = torch.randn(32)
    program = bridge.program(
        interventions=[("blocks.0.hook_resid_post", lambda act, hook, vector: act + vector)],
        inputs={"vector": vector},
    ).compile(backend="eager")
    tokens = torch.randint(3, 61, (2, 6))
    options: dict[str, Any] = {
        "max_new_tokens": 12,
        "do_sample": False,
        "verbose": False,
        "stop_at_eos": False,
    }
    for strength in (1.0, 0.0):
        with bridge.hooks(
            [("blocks.0.hook_resid_post", lambda act, hook, s=strength: act + vector * s)]
        ):
            wanted = bridge.generate(tokens, **options)
        made = bridge.generate(
            tokens, program=program, inputs={"vector": vector * strength}, **options
        )
        assert torch.equal(made, wanted)
    assert counters["stats"]["unique_graphs"] == 2  # the prompt, and one token more


def test_the_body_of_an_edit_is_part_of_the_code():
    bridge = TransformerBridge(tiny("llama-gqa"))
    tokens, more = batch(bridge)

    def body(run: Any) -> None:
        early = run["blocks.0.hook_mlp_out"]
        early *= 0.5
        run["blocks.1.hook_resid_mid"] = run["blocks.1.hook_resid_mid"] + early
        run["blocks.1.hook_resid_post"][:, -1] += early[:, 0]

    edit = bridge.trace_edit(body)
    wanted = bridge.run_with_hooks(tokens, fwd_hooks=edit, **more)
    program = bridge.program(interventions=edit)
    assert torch.equal(program(tokens, **more)["logits"], wanted)
    assert torch.equal(program.compile(backend="eager")(tokens, **more)["logits"], wanted)
    assert not torch.equal(bridge(tokens, **more), wanted)


def test_a_body_of_several_points_draws_no_random_numbers():
    bridge = TransformerBridge(tiny("llama-gqa"))
    tokens, _ = batch(bridge)

    def body(run: Any) -> None:
        noise = torch.randn(32)
        run["blocks.0.hook_resid_post"] += noise
        run["blocks.1.hook_resid_post"] -= noise

    program = bridge.program(interventions=bridge.trace_edit(body))
    program(tokens)
    with pytest.raises(Exception, match="draws random numbers"):
        program.compile(backend="eager")(tokens)


def test_many_programs_in_one_process():
    """torch compiles each code object a few times only: each program has one of its own."""
    bridge = TransformerBridge(tiny("llama-gqa"))
    tokens, _ = batch(bridge)
    with torch._dynamo.config.patch(recompile_limit=2):
        for end in ("hook_resid_mid", "hook_mlp_out", "hook_resid_post"):
            names = [f"blocks.1.{end}"]
            program = bridge.program(capture=names, interventions=[(names, halve)])
            assert_same(program.compile(backend="eager")(tokens), program(tokens))


@pytest.mark.parametrize("name", NAMES)
def test_every_operation_compiled(name: str):
    bridge = TransformerBridge(tiny("llama-gqa"))
    point, operation, change = cases(32, 4)[name]
    tokens = torch.randint(3, 61, (2, LENGTH))
    made = bridge.program(interventions=[(point, operation)]).compile()(tokens)["logits"]
    wanted = bridge.run_with_hooks(tokens, fwd_hooks=[(point, by_hand(change))])
    torch.testing.assert_close(made, wanted, rtol=1e-5, atol=2e-6)
    assert (wanted - bridge(tokens)).abs().max() > 1e-4


def test_a_compiled_program_generates_no_edit_of_some_tokens():
    bridge = TransformerBridge(tiny("llama-gqa"))
    point, operation, _ = cases(32, 4)["Set"]
    program = bridge.program(interventions=[(point, operation)]).compile()
    with pytest.raises(ValueError, match="with generate, compiled, a program does not know"):
        bridge.generate(
            torch.tensor([[5, 6, 7]]), 3, program=program, do_sample=False, verbose=False
        )


@pytest.mark.filterwarnings(
    "ignore:`treespec.children_specs` is deprecated:FutureWarning"
)  # torch's own, of export
@pytest.mark.parametrize("kind", KINDS)
def test_points_in_a_basis_compiled_and_exported(kind: str):
    bridge = TransformerBridge(tiny("gpt2"))
    tokens, _ = batch(bridge)
    hook = basis_cases(bridge)[kind].place(bridge)
    program = bridge.program(capture=[hook.name], interventions=[(hook, halve)])
    wanted = program(tokens)
    assert_same(torch.compile(program, backend="aot_eager", fullgraph=True)(tokens), wanted)
    assert_same(program.export({"input_ids": tokens})(input_ids=tokens), wanted)


def test_why_a_program_finds_its_pass_otherwise_than_a_run():
    """torch.compile cannot trace a context variable, which is where a run's pass is: a graph would
    end there.
    """
    here: ContextVar[Tensor] = ContextVar("here")
    here.set(torch.ones(2))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"ContextVar"):
        torch.compile(lambda x: x + here.get(), fullgraph=True, backend="eager")(torch.ones(2))
    local = threading.local()
    local.here = torch.ones(2)
    assert torch.compile(lambda x: x + local.here, fullgraph=True, backend="eager")(
        torch.ones(2)
    ).tolist() == [2, 2]
