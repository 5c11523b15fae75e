"""Checkpointing that is not transformers' own: hooks in what backward computes again are refused,
never dropped.
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from bridge import TransformerBridge
from tests.conftest import tiny, torch_hooks

NAMES = ["blocks.1.hook_mlp_out", "blocks.1.attn.hook_pattern", "blocks.1.mlp.hook_post"]


def half(x, hook):
    return x * 0.5


def checkpointed(model: torch.nn.Module, part: str, reentrant: bool) -> torch.nn.Module:
    """The model, with parts of its second block computed again in backward, as training code does
    it.
    """
    block = model.model.layers[1]
    module = block if part == "block" else block.get_submodule(part)
    own = module.forward

    def forward(*args, **kwargs):
        keys = list(kwargs)

        def positional(*given):
            n = len(args)
            return own(*given[:n], **dict(zip(keys, given[n:], strict=True)))

        return checkpoint(positional, *args, *kwargs.values(), use_reentrant=reentrant)

    module.forward = forward
    return model


@pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad:UserWarning"
)  # without gradients
@pytest.mark.parametrize("kind", ["fwd_hooks", "bwd_hooks"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_hooks_in_a_checkpointed_block_are_refused(tokens, name, reentrant, kind):
    model = checkpointed(tiny("llama"), "block", reentrant)
    before = torch_hooks(model)
    bridge = TransformerBridge(model)
    with pytest.raises(
        RuntimeError, match=rf"{name} lies in a part of the model that torch.utils.checkpoint"
    ):
        bridge.run_with_hooks(tokens, **{kind: [(name, half)]}, return_type="loss", use_cache=False)
    with (
        bridge.hooks(**{kind: [(name, half)]}),
        pytest.raises(RuntimeError, match=r"torch\.utils\.checkpoint"),
    ):
        model(tokens, use_cache=False)
    assert torch_hooks(model) == before
    with torch.no_grad():  # nothing is computed again
        bridge.run_with_hooks(tokens, **{kind: [(name, half)]}, use_cache=False)
    _, cache = bridge.run_with_cache(tokens, names_filter=name, use_cache=False)
    assert cache[name].shape[0] == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_hooks_beside_a_checkpointed_part_are_right(tokens, reentrant):
    gradients = []
    for part in (None, "mlp"):
        model = tiny("llama") if part is None else checkpointed(tiny("llama"), part, reentrant)
        hooks = [("blocks.1.hook_resid_pre", half), ("blocks.0.attn.hook_pattern", half)]
        TransformerBridge(model).run_with_hooks(
            tokens, fwd_hooks=hooks, return_type="loss"
        ).backward()
        gradients.append([p.grad for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_whole_run_may_be_computed_again(reentrant):
    gradients = []
    for again in (False, True):
        model = tiny("llama")
        bridge = TransformerBridge(model)
        embeddings = torch.randn(
            2, 5, 32, generator=torch.Generator().manual_seed(0)
        ).requires_grad_()

        def run(x, bridge=bridge):
            return bridge.run_with_hooks(x, fwd_hooks=[(name, half) for name in NAMES])

        out = checkpoint(run, embeddings, use_reentrant=reentrant) if again else run(embeddings)
        out.pow(2).sum().backward()
        gradients.append([embeddings.grad, *(p.grad for p in model.model.layers.parameters())])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_models_own_call_computed_again_is_refused(tokens, reentrant):
    model = tiny("llama")
    embeddings = torch.randn(2, 5, 32).requires_grad_()
    with (
        TransformerBridge(model).hooks(fwd_hooks=[(NAMES[0], half)]),
        pytest.raises(RuntimeError, match=r"torch\.utils\.checkpoint"),
    ):
        checkpoint(lambda x: model(inputs_embeds=x).logits, embeddings, use_reentrant=reentrant)
