"""Compiled code runs the hooks that are there, or gives way to the model as it was written."""

import functools

import pytest
import torch
from torch._dynamo.eval_frame import TorchPatcher

from bridge import TransformerBridge
from bridge.wiring.compiled import ever_compiled
from tests.conftest import tiny, torch_hooks

pytestmark = [
    pytest.mark.unchecked,  # the checks of annotations are no code that torch compiles
    pytest.mark.filterwarnings("ignore:Dynamo:UserWarning"),  # it says what it leaves to Python
]

NAMES = ["hook_embed", "blocks.1.hook_mlp_out", "blocks.1.attn.hook_pattern", "unembed.hook_out"]


def half(x, hook):
    return x * 0.5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("when", ["before", "inside"])
@torch.no_grad()
def test_a_compiled_model_called_inside_hooks(tokens, name, when):
    model = tiny("llama")
    bridge = TransformerBridge(model)
    expected = bridge.run_with_hooks(tokens, fwd_hooks=[(name, half)])
    plain = bridge(tokens)
    compiled = torch.compile(model, backend="eager")
    if when == "before":
        torch.testing.assert_close(compiled(tokens).logits, plain)
    for _ in range(2):
        with bridge.hooks(fwd_hooks=[(name, half)]):
            torch.testing.assert_close(compiled(tokens).logits, expected)
        torch.testing.assert_close(compiled(tokens).logits, plain)
    handle = bridge.add_hook(name, half)[0]
    torch.testing.assert_close(compiled(tokens).logits, expected)
    handle.remove()
    torch.testing.assert_close(compiled(tokens).logits, plain)


@torch.no_grad()
def test_a_model_whose_forward_is_compiled_called_inside_hooks(tokens):
    model = tiny("llama")
    model.forward = torch.compile(model.forward, backend="eager")
    model(tokens)
    bridge = TransformerBridge(model)
    plain, own = bridge(tokens), model.forward
    with bridge.hooks(fwd_hooks=[("blocks.1.hook_mlp_out", half)]):
        torch.testing.assert_close(model(tokens).logits, bridge(tokens))
        assert not torch.equal(model(tokens).logits, plain)
    assert model.__dict__["forward"] is own


@pytest.mark.parametrize(
    "use", ["run_with_hooks", "hooks", "run_with_cache", "add_hook", "generate"]
)
def test_hooks_inside_a_compiled_function_are_refused(tokens, use):
    bridge = TransformerBridge(tiny("llama"))
    point = "blocks.1.hook_mlp_out"

    def run(tokens):
        if use == "run_with_hooks":
            return bridge.run_with_hooks(tokens, fwd_hooks=[(point, half)])
        if use == "run_with_cache":
            return bridge.run_with_cache(tokens, names_filter=point)[0]
        if use == "generate":
            return bridge.generate(
                tokens, max_new_tokens=2, do_sample=False, verbose=False, return_cache=True
            )[0]
        if use == "add_hook":
            bridge.add_hook(point, half)
            return bridge(tokens)
        with bridge.hooks(fwd_hooks=[(point, half)]):
            return bridge(tokens)

    compiled = torch.compile(run, backend="eager")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"inside a function that torch.compile runs"):
            compiled(tokens)
        assert torch_hooks(bridge.original_model) == 0
    assert run(tokens) is not None
    bridge.reset_hooks()


@torch.no_grad()
def test_compiling_around_a_plain_run(tokens):
    bridge = TransformerBridge(tiny("llama"))
    torch.testing.assert_close(
        torch.compile(lambda given: bridge(given), backend="eager")(tokens), bridge(tokens)
    )


def test_two_bridges_keep_compiled_code_away_together(tokens):
    model = tiny("llama")
    one, other = TransformerBridge(model), TransformerBridge(model)
    first = one.add_hook("blocks.0.hook_mlp_out", half)[0]
    second = other.add_hook("blocks.1.hook_mlp_out", half)[0]
    first.remove()
    assert "forward" in model.__dict__
    second.remove()
    assert "forward" not in model.__dict__


@pytest.mark.parametrize("how", ["module", "forward", "wrapped"])
@torch.no_grad()
def test_the_first_model_that_is_compiled_is_noticed(monkeypatch, tokens, how):
    # As in a process in which nothing was compiled: what torch does for the first is still to be
    # done.
    monkeypatch.setattr(TorchPatcher, "patch", staticmethod(functools.cache(lambda: None)))
    model = tiny("llama")
    bridge, hooks = TransformerBridge(model), [("blocks.1.hook_resid_post", half)]
    expected = bridge.run_with_hooks(tokens, fwd_hooks=hooks)
    torch.compiler.disable(lambda: None)()
    assert not ever_compiled()
    layers, runs = model.model.layers, []

    def backend(graph, inputs):
        runs.append(graph)
        return graph.forward

    if how == "module":
        layers[1].compile(backend=backend)
    elif how == "forward":
        layers[1].forward = torch.compile(layers[1].forward, backend=backend)
    else:
        layers[1].mlp = torch.compile(layers[1].mlp, backend=backend)
    assert ever_compiled()
    torch.testing.assert_close(bridge.run_with_hooks(tokens, fwd_hooks=hooks), expected)
    with bridge.trace(tokens) as run:
        run["blocks.1.hook_resid_post"] *= 0.5
    torch.testing.assert_close(run.logits, expected)
    assert not runs
