"""A program does what a run with the same captures and hooks does, bit by bit, for every hook point
of every family.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bridge import TransformerBridge
from bridge.interventions import Add
from bridge.programs.lower import shell_of
from tests.adapters.test_verify_all import ALIKE, USUAL, tiny


def bridge_of(case: str) -> TransformerBridge:
    return TransformerBridge(tiny(case))


def batch(
    bridge: TransformerBridge, rows: int = 2, length: int = 9, seed: int = 1
) -> tuple[Tensor, dict[str, Any]]:
    """Tokens of which the first row is padded in front, and what else the model takes."""
    torch.manual_seed(seed)
    tokens = torch.randint(3, 61, (rows, length))
    mask = torch.ones_like(tokens)
    mask[0, : length // 3] = 0
    more: dict[str, Any] = {"attention_mask": mask}
    if bridge.core.config.is_encoder_decoder:
        more["decoder_input_ids"] = torch.randint(3, 61, (rows, length // 2 + 1))
    return tokens, more


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("case", [*USUAL, *ALIKE])
def test_everything_captured_is_what_a_cache_holds(case: str):
    bridge = bridge_of(case)
    tokens, more = batch(bridge)
    names = list(bridge.hook_dict)
    made = bridge.program(capture=names)(tokens, **more)
    logits, cache = bridge.run_with_cache(tokens, names_filter=names, **more)
    assert list(made) == ["logits", *names]
    assert torch.equal(made["logits"], logits)
    assert [name for name in names if not same(made[name], cache[name])] == []


@pytest.mark.parametrize(
    "case",
    [
        "gpt2",
        "gpt_neox",
        "opt",
        "bloom",
        "llama-gqa",
        "gemma2-gqa",
        "bert",
        "t5",
        "qwen2_moe-gqa",
        "gpt_oss-gqa",
    ],
)
def test_an_edit_anywhere_gives_what_it_gives_in_a_run(case: str):
    bridge = bridge_of(case)
    tokens, more = batch(bridge)
    plain = bridge(tokens, **more)
    unlike, moved = [], 0
    for name in bridge.hook_dict:
        if name.count(".") > 1 and not name.startswith(("blocks.1.", "decoder.1.")):
            continue

        def halve(activation: Tensor, hook: object) -> Tensor:
            return activation // 2 if not activation.is_floating_point() else activation * 0.5

        wanted = bridge.run_with_hooks(tokens, fwd_hooks=[(name, halve)], **more)
        got = bridge.program(interventions=[(name, halve)])(tokens, **more)["logits"]
        moved += not same(got, plain)
        if not same(wanted, got):
            unlike.append(name)
    assert unlike == []
    assert moved > 15
    assert torch.equal(bridge(tokens, **more), plain)  # the model has seen nothing of it


def test_several_edits_on_one_stream_and_what_is_captured_between_them(bridge: TransformerBridge):
    tokens, more = batch(bridge)

    def add(activation: Tensor, hook: Any) -> Tensor:
        return activation + hook.layer() + 1

    def in_place(activation: Tensor, hook: Any) -> None:
        activation[:, -1] *= 0.5

    edits = [
        ("blocks.0.hook_resid_post", add),
        ("blocks.1.hook_attn_in", in_place),
        ("blocks.1.attn.hook_z", in_place),
    ]
    edits += [
        ("blocks.1.hook_resid_pre", add),
        ("blocks.0.ln1.hook_scale", add),
        ("blocks.1.hook_resid_post", in_place),
    ]
    names = [name for name in bridge.hook_dict if name.startswith("blocks.1")]
    made = bridge.program(capture=names, interventions=edits)(tokens, **more)
    with bridge.hooks(fwd_hooks=edits):
        logits, cache = bridge.run_with_cache(tokens, names_filter=names, **more)
    assert torch.equal(made["logits"], logits)
    assert [name for name in names if not same(made[name], cache[name])] == []


def test_hooks_that_a_run_would_see_are_part_of_it():
    bridge = bridge_of("llama-gqa")
    tokens, more = batch(bridge)
    bridge.add_hook("blocks.0.hook_mlp_out", lambda activation, hook: activation * 0.1)
    with bridge.hooks([("blocks.1.hook_mlp_out", lambda activation, hook: activation * 0.2)]):
        wanted = bridge(tokens, **more)
        program = bridge.program()
    bridge.reset_hooks()
    assert torch.equal(program(tokens, **more)["logits"], wanted)
    assert not torch.equal(bridge(tokens, **more), wanted)


def test_hooks_of_gradients_are_refused():
    bridge = bridge_of("llama-gqa")
    bridge.add_hook("blocks.0.hook_mlp_out", lambda gradient, hook: None, "bwd")
    with pytest.raises(
        ValueError, match=r"blocks\.0\.hook_mlp_out has a hook or a rule of gradients"
    ):
        bridge.program()


def test_declared_inputs_go_to_the_functions_that_name_them():
    bridge = bridge_of("llama-gqa")
    tokens, more = batch(bridge)
    vector, mask = torch.randn(32), torch.tensor([1.0, 0.0, 1.0, 1.0])

    def steer(activation: Tensor, hook: object, vector: Tensor, strength: Tensor) -> Tensor:
        return activation + strength * vector

    def heads(activation: Tensor, hook: object, **given: Tensor) -> Tensor:
        assert set(given) == {"vector", "strength", "keep"}
        return activation * given["keep"][:, None]

    program = bridge.program(
        interventions=[("blocks.0.hook_resid_post", steer), ("blocks.1.attn.hook_z", heads)],
        inputs={"vector": vector, "strength": 1.0, "keep": mask},
    )
    for strength in (0.0, 2.5):
        wanted = bridge.run_with_hooks(
            tokens,
            fwd_hooks=[
                (
                    "blocks.0.hook_resid_post",
                    lambda activation, hook, s=strength: activation + s * vector,
                ),
                ("blocks.1.attn.hook_z", lambda activation, hook: activation * mask[:, None]),
            ],
            **more,
        )
        got = program(tokens, vector=vector, strength=strength, keep=mask, **more)["logits"]
        assert torch.equal(got, wanted)


def test_what_is_asked_for_and_not_there_is_refused_by_name():
    bridge = bridge_of("gpt2")
    tokens = torch.tensor([[3, 4, 5]])

    def steer(activation: Tensor, hook: object, vector: Tensor) -> Tensor:
        return activation + vector

    at = [("blocks.0.hook_resid_post", steer)]
    with pytest.raises(TypeError, match=r"declare vector in inputs"):
        bridge.program(interventions=at)
    with pytest.raises(TypeError, match=r"Did you mean vectors"):
        bridge.program(interventions=at, inputs={"vectors": torch.zeros(32)})
    with pytest.raises(
        ValueError, match="no function of the interventions takes the input 'strength'"
    ):
        bridge.program(interventions=at, inputs={"vector": torch.zeros(32), "strength": 1.0})
    with pytest.raises(ValueError, match="'attention_mask' cannot be the name of an input"):
        bridge.program(inputs={"attention_mask": torch.zeros(1)})
    with pytest.raises(KeyError, match=r"blocks\.0\.hook_resid_post"):
        bridge.program(capture=["blocks.0.hook_resid_pots"])
    with pytest.raises(TypeError, match="give it a second parameter named `hook`"):
        bridge.program(interventions=[("blocks.0.hook_resid_post", lambda activation: activation)])
    program = bridge.program(interventions=at, inputs={"vector": torch.zeros(32)})
    with pytest.raises(TypeError, match="the program needs vector="):
        program(tokens)
    with pytest.raises(TypeError, match="'vektor' is neither an input of the program"):
        program(tokens, vector=torch.zeros(32), vektor=1)
    with pytest.raises(ValueError, match=r"has shape \[1, 32\]; it was declared with \[32\]"):
        program(tokens, vector=torch.zeros(1, 32))
    with pytest.raises(ValueError, match=r"whole numbers \[batch, pos\]"):
        program(tokens[0], vector=torch.zeros(32))
    with pytest.raises(ValueError, match="41 positions"):
        program(torch.ones(1, 41, dtype=torch.long), vector=torch.zeros(32))
    with pytest.raises(ValueError, match="returned shape"):
        bridge.program(interventions=[("blocks.0.hook_resid_post", lambda a, hook: a[:1, :1])])(
            tokens
        )


def test_the_model_and_its_hooks_are_left_alone_and_parameters_are_shared():
    model = tiny("llama-gqa")
    seen: list[Tensor] = []
    model.model.layers[0].register_forward_hook(lambda module, args, output: seen.append(output))
    bridge = TransformerBridge(model)
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    tokens = torch.tensor([[3, 4, 5]])
    program = bridge.program(
        capture=["blocks.0.attn.hook_pattern"],
        interventions=[("blocks.0.hook_resid_post", lambda a, hook: a * 0)],
    )
    assert before == {name: dict(module.__dict__) for name, module in model.named_modules()}
    assert not any(module in set(model.modules()) for module in program.modules())
    first = program(tokens)["logits"]
    assert len(seen) == 1  # the user's own hook
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    torch.testing.assert_close(program(tokens)["logits"], 2 * first)
    model.lm_head.weight = nn.Parameter(
        torch.zeros_like(model.lm_head.weight)
    )  # another one in its place
    assert not program(tokens)["logits"].any()
    assert isinstance(program, nn.Module) and isinstance(program.model, type(model))


def test_gradients_flow_through_it():
    bridge = bridge_of("llama-gqa")
    tokens = torch.tensor([[3, 4, 5]])
    vector = torch.zeros(32, requires_grad=True)
    program = bridge.program(
        capture=["blocks.1.hook_resid_post"],
        interventions=[
            ("blocks.0.hook_resid_post", lambda activation, hook, vector: activation + vector)
        ],
        inputs={"vector": vector},
    )
    program(tokens, vector=vector)["logits"].sum().backward()
    layer = bridge.core.model.layers[0]
    wanted = torch.zeros(32, requires_grad=True)
    handle = layer.register_forward_hook(lambda module, args, output: output + wanted)
    bridge.core(tokens).logits.sum().backward()
    handle.remove()
    assert vector.grad is not None and vector.grad.abs().sum() > 0
    torch.testing.assert_close(vector.grad, wanted.grad)


def test_threads_do_not_mix():
    bridge = bridge_of("llama-gqa")
    program = bridge.program(
        capture=["blocks.1.hook_resid_post"],
        interventions=[
            ("blocks.0.hook_resid_post", lambda activation, hook, strength: activation * strength)
        ],
        inputs={"strength": 1.0},
    )
    tokens = torch.randint(3, 61, (2, 12))
    wanted = [program(tokens, strength=s / 4) for s in range(8)]
    found: dict[int, list[dict[str, Tensor]]] = {}

    def work(s: int) -> None:
        found[s] = [program(tokens, strength=s / 4) for _ in range(8)]

    threads = [threading.Thread(target=work, args=(s,)) for s in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for s in range(8):
        assert all(torch.equal(one[name], wanted[s][name]) for one in found[s] for name in one)


def test_a_program_inside_a_function_of_a_program_is_another_pass():
    bridge = bridge_of("llama-gqa")
    tokens = torch.tensor([[3, 4, 5]])
    inner = bridge.program(capture=["blocks.0.hook_resid_post"])

    def swap(activation: Tensor, hook: object) -> Tensor:
        return inner(tokens.flip(-1))["blocks.0.hook_resid_post"]

    outer = bridge.program(
        capture=["blocks.0.hook_resid_post"], interventions=[("blocks.0.hook_resid_post", swap)]
    )
    made = outer(tokens)
    assert torch.equal(
        made["blocks.0.hook_resid_post"], inner(tokens.flip(-1))["blocks.0.hook_resid_post"]
    )


def test_a_program_that_a_function_or_a_body_calls_counts_its_own_tokens():
    bridge = TransformerBridge(tiny("gpt2"))
    tokens, mask = (
        torch.tensor([[5, 6, 7, 8], [0, 0, 9, 10]]),
        torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]),
    )
    edits = [("blocks.1.hook_resid_post", Add(2.0, positions=slice(0, 2)))]
    program = bridge.program(interventions=edits)
    expected = program(input_ids=tokens)["logits"]
    assert torch.equal(expected, bridge.run_with_hooks(tokens, fwd_hooks=edits))
    found = []

    def calls(x: Tensor, hook: Any) -> None:
        found.append(program(input_ids=tokens)["logits"])

    with bridge.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", calls)]):
        bridge(tokens, attention_mask=mask)
        bridge.generate(tokens[:1, :2], 2, do_sample=False, verbose=False, stop_at_eos=False)
    with bridge.trace(tokens, attention_mask=mask):
        found.append(program(input_ids=tokens)["logits"])
    assert len(found) == 4 and all(torch.equal(one, expected) for one in found)


def test_embeddings_in_place_of_tokens():
    for case in ("gpt2", "llama-gqa"):
        bridge = bridge_of(case)
        embeddings = torch.randn(2, 5, 32)
        names = (
            ["hook_pos_embed", "blocks.1.hook_resid_post"]
            if case == "gpt2"
            else ["blocks.1.hook_resid_post"]
        )
        made = bridge.program(capture=names)(inputs_embeds=embeddings)
        logits, cache = bridge.run_with_cache(embeddings, names_filter=names)
        assert torch.equal(made["logits"], logits)
        assert all(torch.equal(made[name], cache[name]) for name in names)


def test_keys_and_values_of_the_past_are_an_output_where_they_are_asked_for():
    bridge = bridge_of("llama-gqa")
    program = bridge.program(interventions=[("blocks.0.hook_resid_post", lambda a, hook: a * 0.5)])
    tokens = torch.randint(3, 61, (1, 8))
    whole = program(tokens)["logits"]
    first = program(tokens[:, :5], use_cache=True)
    second = program(tokens[:, 5:], past_key_values=first["past_key_values"])
    assert set(program(tokens)) == {"logits"}
    torch.testing.assert_close(second["logits"], whole[:, 5:])


def test_a_kernel_that_is_no_torch_function_is_refused():
    bridge = bridge_of("llama-gqa")
    bridge.core.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(ValueError, match=r"blocks\.0\.attn\.hook_pattern is inside a kernel"):
        bridge.program(capture=["blocks.0.attn.hook_pattern"])
    bridge.program(capture=["blocks.0.attn.hook_z"])


def test_modules_that_stand_in_attributes_are_those_of_the_program():
    """In a list, a dictionary or a method that a module keeps, where torch does not see them."""

    class Around(torch.nn.Module):
        def __init__(self, mlp: torch.nn.Module) -> None:
            super().__init__()
            self.inside = mlp
            self.__dict__ |= {
                "alone": mlp,
                "many": [mlp],
                "pair": (mlp, 1),
                "named": {"mlp": mlp},
                "called": mlp.forward,
            }

        def forward(self, x: Tensor) -> Tensor:
            many = self.alone(x) + self.many[0](x) + self.pair[0](x) + self.named["mlp"](x)
            return many + self.called(x) + self.inside(x)

    model = tiny("gpt2")
    model.transformer.h[1].mlp = Around(model.transformer.h[1].mlp)
    shell = shell_of(model)
    mine, own = shell.transformer.h[1].mlp, model.transformer.h[1].mlp
    assert mine is not own and mine.inside is not own.inside
    for there in (mine.alone, mine.many[0], mine.pair[0], mine.named["mlp"], mine.called.__self__):
        assert there is mine.inside
    assert mine.called.__func__ is own.called.__func__ and mine.pair[1] == 1
    assert own.alone is own.inside and own.many == [own.inside]
    tokens = torch.randint(0, 61, (2, 7), generator=torch.Generator().manual_seed(0))
    assert torch.equal(shell(tokens).logits, model(tokens).logits)


def test_a_forward_of_somebody_elses_is_refused():
    model = tiny("llama-gqa")
    bridge = TransformerBridge(model)
    own = model.model.norm.forward
    model.model.norm.forward = lambda *args: own(*args)
    with pytest.raises(ValueError, match=r"model\.norm \(LlamaRMSNorm\) has a forward of its own"):
        bridge.program()


def test_around_a_model_that_was_compiled():
    model = tiny("llama-gqa")
    tokens = torch.tensor([[3, 4, 5]])
    wanted = model(tokens).logits
    for wrapped in (torch.compile(model, backend="eager"), model):
        bridge = TransformerBridge(wrapped)
        program = bridge.program(capture=["blocks.1.attn.hook_pattern"])
        assert torch.equal(program(tokens)["logits"], wanted)
        model.forward = torch.compile(model.forward, backend="eager")


def test_generation_by_a_program():
    bridge = bridge_of("llama-gqa")
    program = bridge.program(
        interventions=[("blocks.0.hook_resid_post", lambda act, hook, vector: act + vector)],
        inputs={"vector": torch.zeros(32)},
    )
    tokens, vector = torch.randint(3, 61, (2, 6)), torch.randn(32)
    options: dict[str, Any] = {
        "max_new_tokens": 9,
        "do_sample": False,
        "verbose": False,
        "stop_at_eos": False,
    }
    with bridge.hooks([("blocks.0.hook_resid_post", lambda act, hook: act + vector)]):
        wanted = bridge.generate(tokens, **options)
    assert torch.equal(
        bridge.generate(tokens, program=program, inputs={"vector": vector}, **options), wanted
    )
    assert not torch.equal(bridge.generate(tokens, **options), wanted)
    with pytest.raises(TypeError, match="the program needs vector="):
        bridge.generate(tokens, program=program, **options)
    with pytest.raises(TypeError, match="vektor was not declared"):
        bridge.generate(tokens, program=program, inputs={"vektor": vector}, **options)
    with pytest.raises(ValueError, match="return_cache is not available with a program"):
        bridge.generate(
            tokens, program=program, inputs={"vector": vector}, return_cache=True, **options
        )
    with pytest.raises(ValueError, match="has an encoder"):
        bridge_of("t5").generate(tokens, program=bridge_of("t5").program(), **options)


def test_the_body_of_an_edit_runs_in_step():
    bridge = bridge_of("llama-gqa")
    tokens, more = batch(bridge)
    ran: list[str] = []

    def body(run: Any) -> None:
        ran.append("once")
        if run["blocks.0.hook_resid_post"].norm() > 0:
            run["blocks.1.attn.hook_z"][:, :, 1] = 0
        run["blocks.1.hook_resid_post"] += run["blocks.1.hook_resid_post"].mean()

    edit = bridge.trace_edit(body)
    program = bridge.program(capture=["blocks.1.hook_resid_post"], interventions=edit)
    ran.clear()
    made = program(tokens, **more)
    assert ran == ["once"]
    assert torch.equal(made["logits"], bridge.run_with_hooks(tokens, fwd_hooks=edit, **more))
