"""Runs inside of a user's checkpoint: backward computes them again with the hooks of the forward
pass, whatever is open by then, or the run is refused.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from adapters.imports import checkpointing_method
from bridge import TransformerBridge
from bridge.bases import Directions
from bridge.interventions import Scale
from tests.conftest import tiny

Z = "blocks.1.attn.hook_z"


def halved(x, hook):
    return x * 0.5


def doubled(x, hook):
    return x * 2


@pytest.fixture
def bridge() -> TransformerBridge:
    return TransformerBridge(tiny("llama"))


def gradient(bridge, tokens, run, around=None) -> Tensor:
    """The gradient of a number that depends on all logits, at the embeddings that go in; backward
    runs inside of another ``with`` statement.
    """
    embeddings = bridge.original_model.get_input_embeddings()(tokens).detach().requires_grad_()
    loss = run(embeddings)[:, -1].logsumexp(-1).sum()
    with around or nullcontext():
        loss.backward()
    return embeddings.grad


class ByHand(Function):
    """Recomputation by hand: the forward runs without a graph, the backward runs again."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, upstream):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        torch.autograd.backward(y, upstream)
        return None, x.grad


class WithoutContext(Function):
    """The same, written with `setup_context`."""

    @staticmethod
    def forward(function, x):
        with torch.no_grad():
            return function(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.function = inputs[0]
        ctx.save_for_backward(inputs[1])

    backward = ByHand.backward


REGIONS = {
    "not reentrant": lambda f, x: checkpoint(f, x, use_reentrant=False),
    "reentrant": lambda f, x: checkpoint(f, x, use_reentrant=True),
    "by hand": ByHand.apply,
    "nested": lambda f, x: checkpoint(
        lambda y: checkpoint(f, y, use_reentrant=False), x, use_reentrant=False
    ),
    "nested in a reentrant one": lambda f, x: checkpoint(
        lambda y: checkpoint(f, y, use_reentrant=False), x, use_reentrant=True
    ),
    "saved elsewhere": lambda f, x: _offloaded(f, x),
}


def _offloaded(f, x):
    with torch.autograd.graph.save_on_cpu():
        return checkpoint(f, x, use_reentrant=False)


@pytest.fixture(params=REGIONS)
def region(request):
    return REGIONS[request.param]


@pytest.mark.parametrize("hook", [halved, Scale(0.5)], ids=["function", "operation"])
@pytest.mark.parametrize("name", [Z, "blocks.1.attn.hook_pattern", "blocks.0.ln2.hook_scale"])
def test_hooks_of_the_forward_pass_come_back(bridge, tokens, region, name, hook):
    def run(x, again):
        with bridge.hooks(fwd_hooks=[(name, hook)]):
            return region(bridge, x) if again else bridge(x)

    expected = gradient(bridge, tokens, lambda x: run(x, False))
    plain = gradient(bridge, tokens, bridge)
    assert not torch.allclose(expected, plain, atol=1e-6)
    torch.testing.assert_close(gradient(bridge, tokens, lambda x: run(x, True)), expected)
    around = bridge.hooks(fwd_hooks=[(name, doubled)])
    torch.testing.assert_close(gradient(bridge, tokens, lambda x: run(x, True), around), expected)
    around = bridge.hooks(fwd_hooks=[(name, doubled)])
    torch.testing.assert_close(gradient(bridge, tokens, lambda x: region(bridge, x), around), plain)
    assert not bridge.wiring.listening


def test_hooks_that_the_region_opens_are_opened_anew(bridge, tokens, region):
    def run(x):
        def inside(u):
            factor = u.mean().sigmoid()
            with bridge.hooks(fwd_hooks=[(Z, lambda z, hook: z * factor)]):
                return bridge(u)

        with bridge.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", halved)]):
            return region(inside, x)

    def unrepeated(x):
        factor = x.mean().sigmoid()
        hooks = [(Z, lambda z, hook: z * factor), ("blocks.0.hook_mlp_out", halved)]
        return bridge.run_with_hooks(x, fwd_hooks=hooks)

    torch.testing.assert_close(gradient(bridge, tokens, run), gradient(bridge, tokens, unrepeated))


def test_each_run_of_a_region_has_its_own_hooks(bridge, tokens, region):
    stored = []

    def inside(u):
        return bridge(u) + bridge.run_with_hooks(u, fwd_hooks=[(Z, halved)]) + stored[0](u)

    other = TransformerBridge(tiny("llama"))
    stored.append(other)

    def run(x, around):
        with bridge.hooks(fwd_hooks=[(Z, doubled)]), other.hooks(fwd_hooks=[(Z, halved)]):
            return around(inside, x)

    expected = gradient(bridge, tokens, lambda x: run(x, lambda f, y: f(y)))
    torch.testing.assert_close(gradient(bridge, tokens, lambda x: run(x, region)), expected)


def test_a_cache_and_layers_inside_of_a_region(bridge, tokens, region):
    for inner in (
        lambda u: bridge.run_with_cache(u)[0],
        lambda u: bridge(u, start_at_layer=0),
        lambda u: bridge(u, stop_at_layer=2),
    ):

        def run(x, around, inner=inner):
            with bridge.hooks(fwd_hooks=[(Z, halved)]):
                return around(inner, x)

        expected = gradient(bridge, tokens, lambda x: run(x, lambda f, y: f(y)))
        torch.testing.assert_close(gradient(bridge, tokens, lambda x: run(x, region)), expected)


def test_added_hooks_that_changed_are_an_error(bridge, tokens, region):
    bridge.add_hook(Z, halved)
    embeddings = bridge.original_model.get_input_embeddings()(tokens).detach().requires_grad_()
    expected = gradient(bridge, tokens, bridge)
    torch.testing.assert_close(gradient(bridge, tokens, lambda x: region(bridge, x)), expected)
    loss = region(bridge, embeddings).sum()
    bridge.reset_hooks()
    with pytest.raises(RuntimeError, match="hooks were added or removed since its forward pass"):
        loss.backward()
    assert not bridge.wiring.listening


def test_a_function_without_a_context_is_refused(bridge, tokens):
    embeddings = bridge.original_model.get_input_embeddings()(tokens).detach().requires_grad_()
    with (
        bridge.hooks(fwd_hooks=[(Z, halved)]),
        pytest.raises(RuntimeError, match=r"autograd\.Function WithoutContext"),
    ):
        WithoutContext.apply(bridge, embeddings)
    torch.testing.assert_close(
        gradient(bridge, tokens, lambda x: WithoutContext.apply(bridge, x)),
        gradient(bridge, tokens, bridge),
    )
    loss = WithoutContext.apply(bridge, embeddings).sum()
    with (
        bridge.hooks(fwd_hooks=[(Z, halved)]),
        pytest.raises(RuntimeError, match="whose forward has no ctx"),
    ):
        loss.backward()


def test_the_model_itself_in_a_region_is_refused(bridge, tokens, region):
    model = bridge.original_model
    embeddings = model.get_input_embeddings()(tokens).detach().requires_grad_()

    def call(x):
        return model(inputs_embeds=x, use_cache=False).logits

    with bridge.hooks(fwd_hooks=[(Z, halved)]), pytest.raises(RuntimeError, match=Z):
        region(call, embeddings)
    loss = region(call, embeddings).sum()
    with (
        bridge.hooks(fwd_hooks=[(Z, halved)]),
        pytest.raises(RuntimeError, match="backward"),
    ):
        loss.backward()


def test_a_block_that_another_checkpoint_wraps_is_refused(bridge, tokens):
    from torch.distributed._composable import checkpoint as composable

    model = tiny("llama")
    composable(model.model.layers[1])
    wrapped = TransformerBridge(model)
    with pytest.raises(RuntimeError, match=f"{Z} lies in a part of the model"):
        wrapped.run_with_hooks(tokens, fwd_hooks=[(Z, halved)])
    hooks = [("blocks.0.attn.hook_z", halved)]
    found = gradient(wrapped, tokens, lambda x: wrapped.run_with_hooks(x, fwd_hooks=hooks))
    expected = gradient(bridge, tokens, lambda x: bridge.run_with_hooks(x, fwd_hooks=hooks))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_block_that_the_user_calls_in_a_checkpoint_is_refused(bridge, tokens, reentrant):
    model = bridge.original_model.model
    x = model.embed_tokens(tokens).detach().requires_grad_()
    positions = model.rotary_emb(x, torch.arange(tokens.shape[1])[None])

    def block(x):
        return model.layers[1](x, position_embeddings=positions, attention_mask=None)

    with (
        bridge.hooks(fwd_hooks=[(Z, halved)]),
        pytest.raises(RuntimeError, match=f"{Z} lies in a part of the model"),
    ):
        checkpoint(block, x, use_reentrant=reentrant)


def test_a_hook_of_backward_may_run_the_model(bridge, tokens):
    """A gradient's hook that runs the model repeats nothing: it sees the hooks that are open."""
    seen = []

    def run_again(gradient, hook=None):
        seen.append(bridge(tokens))

    with bridge.hooks(bwd_hooks=[("blocks.1.hook_resid_post", run_again)]):
        bridge(tokens, return_type="loss").backward()
    loss = bridge.run_with_hooks(
        tokens, bwd_hooks=[("blocks.1.hook_resid_post", run_again)], return_type="loss"
    )
    with bridge.hooks(fwd_hooks=[(Z, halved)]):
        loss.backward()
    assert len(seen) == 2
    assert all(torch.equal(logits, bridge(tokens)) for logits in seen)


def test_a_basis_that_is_gone_by_then_is_named(tokens):
    model = tiny("llama").train()
    getattr(model, checkpointing_method())()
    bridge = TransformerBridge(model)
    embeddings = model.get_input_embeddings()(tokens).detach().requires_grad_()
    columns = Directions(torch.randn(bridge.cfg.d_model, 3))
    with bridge.basis("blocks.0.hook_resid_post", "some", columns) as point:
        loss = bridge.run_with_hooks(embeddings, fwd_hooks=[(point, halved)]).sum()
    with pytest.raises(
        RuntimeError, match=r"blocks.0.hook_resid_post.some was removed.*checkpoint"
    ):
        loss.backward()
