"""A probe copy computes what its model does, shares its parameters, and has nothing of what is
attached to it.
"""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from adapters.observe import probe_copy as module
from adapters.observe.probe_copy import probe_copy, trivial_parameters, why_no_probe_copy
from bridge import TransformerBridge
from tests.adapters.test_verify_all import tiny
from tests.tiny_models import tiny_model

TOKENS = torch.arange(3, 12)[None]


@pytest.mark.parametrize(
    "case", ["gpt2", "llama-gqa", "gemma3-gqa", "qwen2_moe-gqa", "gpt_oss-gqa", "bert", "bloom"]
)
def test_it_computes_the_same(case: str) -> None:
    model = tiny(case)
    with torch.no_grad(), probe_copy(model) as other:
        assert not {id(m) for m in model.modules()} & {id(m) for m in other.modules()}
        assert all(a is b for a, b in zip(model.parameters(), other.parameters(), strict=True))
        assert torch.equal(other(TOKENS)[0], model(TOKENS)[0])


def test_hooks_stay_with_the_model() -> None:
    model = tiny("llama-gqa")
    bridge = TransformerBridge(model)
    with torch.no_grad():
        plain = model(TOKENS)[0]
        model.model.layers[0].register_forward_hook(lambda module, args, output: output * 2)
        bridge.add_hook("blocks.1.attn.hook_pattern", lambda x, hook: x * 0.5)
        with probe_copy(model) as other:
            assert torch.equal(other(TOKENS)[0], plain)
        assert not torch.equal(model(TOKENS)[0], plain)


def test_what_proves_nothing_is_replaced() -> None:
    model = tiny("gpt2")
    nn.init.ones_(model.transformer.ln_f.weight)
    nn.init.zeros_(model.transformer.h[0].attn.c_attn.bias)
    assert trivial_parameters(model) == [
        "transformer.h.0.attn.c_attn.bias",
        "transformer.ln_f.weight",
    ]
    with probe_copy(model) as other:
        pass
    own = {name for name, p in other.named_parameters() if p is not model.get_parameter(name)}
    assert own == set(trivial_parameters(model))
    assert trivial_parameters(other) == []
    assert len(trivial_parameters(model)) == 2
    assert (
        other.get_output_embeddings().weight is other.get_input_embeddings().weight
    )  # tied as before


def test_half_precision_becomes_single() -> None:
    model = tiny("llama-gqa", dtype=torch.bfloat16)
    with probe_copy(model) as other:
        pass
    assert {p.dtype for p in other.parameters()} == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    for name, parameter in model.named_parameters():
        assert torch.equal(other.get_parameter(name), parameter.float())


def test_methods_and_lists_of_modules_are_the_twins() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.also, self.run = [self.inner], self.compute

        def compute(self, x: Tensor) -> Tensor:
            return self.also[0](x)

    model = Odd()
    with probe_copy(model) as other:
        pass
    assert isinstance(other, Odd)
    assert other.also[0] is other.inner is not model.inner
    assert other.run.__self__ is other


def test_a_packed_parameter_is_named() -> None:
    class Packed(nn.Parameter):
        pass

    model = nn.Linear(2, 2)
    assert why_no_probe_copy(model) == ""
    model.weight = Packed(torch.zeros(2, 2))
    assert why_no_probe_copy(model) == "weight is a Packed"


def test_weights_that_are_brought_make_the_same_and_the_same_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In pieces of a few rows, in one place: outputs, and gradients of what enters, of a copy in
    single precision.
    """
    monkeypatch.setattr(module, "ROOM", 0)
    monkeypatch.setattr(module, "_AT_ONCE", 200)  # six rows of 32 columns, or of 48 four
    model = tiny_model("phi").to(torch.bfloat16)  # with biases
    single = deepcopy(model).float()
    embedded = single.get_input_embeddings()(TOKENS).detach()
    found = []
    with probe_copy(model) as other:
        assert other.lm_head.weight is model.lm_head.weight
        for subject in (single, other):
            given = embedded.clone().requires_grad_()
            logits = subject(inputs_embeds=given)[0]
            found.append((logits.detach(), *torch.autograd.grad(logits.square().sum(), given)))
    assert not trivial_parameters(model)  # of which the copy would have others
    for expected, seen in zip(*found, strict=True):
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-5)
