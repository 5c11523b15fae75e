"""Activation checkpointing: what backward computes again runs under the hooks of the forward
pass.
"""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch

from bridge import TransformerBridge
from tests.adapters.by_hand.families import tiny as any_tiny
from tests.conftest import FAMILIES, tiny, torch_hooks
from tests.tiny_models import checkpoint

EDITS = [
    [("blocks.1.attn.hook_z", lambda x, hook: x * 0.5)],
    [("blocks.1.attn.hook_pattern", lambda x, hook: x * 0.5)],
    [
        ("blocks.1.hook_resid_mid", lambda x, hook: x * 0.5),
        ("blocks.2.mlp.hook_post", lambda x, hook: x * 2),
    ],
    [("blocks.1.hook_attn_in", lambda x, hook: x * 0.5)],
]


def model_of(family: str, checkpointing: bool, reentrant: bool = False) -> torch.nn.Module:
    model = (tiny if family in FAMILIES else any_tiny)(family).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for name in ("attention_dropout", "attn_pdrop", "dropout", "activation_dropout"):
        if hasattr(model.config, name):
            setattr(model.config, name, 0.0)
    for module in model.modules():
        for name in ("attention_dropout", "dropout", "activation_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    if checkpointing:
        checkpoint(model, {"use_reentrant": reentrant})
    return model


def tokens_of(family: str) -> torch.Tensor:
    return torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(1))


def gradients(bridge: TransformerBridge) -> list[torch.Tensor]:
    found = [
        parameter.grad.clone() for parameter in bridge.parameters() if parameter.grad is not None
    ]
    bridge.original_model.zero_grad()
    return found


def run(bridge: TransformerBridge, tokens: torch.Tensor, edit: list) -> torch.Tensor:
    return bridge.run_with_hooks(tokens, fwd_hooks=edit, return_type="loss", use_cache=False)


def in_thread(fn) -> None:
    errors = []

    def work():
        try:
            fn()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("where", ["after the hooks", "inside them", "on another thread"])
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit[0][0])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradients_are_those_without_checkpointing(family, reentrant, edit, where):
    if family == "gpt_neox" and edit[0][0].endswith("resid_mid"):
        edit = [
            ("blocks.1.hook_mlp_in", lambda x, hook: x * 0.5)
        ]  # it has parallel attention and MLP
    tokens = tokens_of(family)
    plain = TransformerBridge(model_of(family, False))
    run(plain, tokens, edit).backward()
    expected = gradients(plain)
    bridge = TransformerBridge(model_of(family, True, reentrant))
    before = torch_hooks(
        bridge.original_model
    )  # transformers' own, which makes embeddings require gradients
    if where == "inside them":
        with bridge.hooks(fwd_hooks=edit):
            bridge(tokens, return_type="loss", use_cache=False).backward()
    else:
        loss = run(bridge, tokens, edit)
        in_thread(loss.backward) if where == "on another thread" else loss.backward()
    for ours, theirs in zip(gradients(bridge), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)
    assert torch_hooks(bridge.original_model) == before


@pytest.mark.parametrize("family", ["opt-no-bias", "mixtral-gqa", "gpt_oss-gqa", "qwen2_moe-gqa"])
def test_points_that_need_the_block_s_input(family):
    """Their rows are ``(batch pos)``: the batch size is known from the block's input, outside of
    what is recomputed.
    """
    tokens = tokens_of(family)
    name = "blocks.1.mlp.hook_expert_weights" if "opt" not in family else "blocks.1.mlp.hook_post"
    grads = []
    for checkpointing in (False, True):
        bridge = TransformerBridge(model_of(family, checkpointing))
        run(bridge, tokens, [(name, lambda x, hook: x * 0.5)]).backward()
        grads.append(gradients(bridge))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


def test_a_plain_run_beside_hooks_is_computed_again_without_them():
    tokens = tokens_of("llama")
    bridge = TransformerBridge(model_of("llama", True))
    bridge(tokens, return_type="loss", use_cache=False).backward()
    expected = gradients(bridge)
    loss = bridge(tokens, return_type="loss", use_cache=False)
    with (
        bridge.hooks(fwd_hooks=EDITS[0]),
        pytest.raises(RuntimeError, match=r"blocks\.1\.attn\.hook_z .* forward pass"),
    ):
        loss.backward()  # nothing says that the forward pass was without them
    bridge.original_model.zero_grad()
    with bridge.hooks(fwd_hooks=EDITS[0]):
        inside = bridge(tokens, return_type="loss", use_cache=False)
    in_thread(inside.backward)
    assert not torch.allclose(gradients(bridge)[0], expected[0])


def test_added_hooks_must_not_change_before_backward():
    tokens = tokens_of("llama")
    bridge = TransformerBridge(model_of("llama", True))
    plain = TransformerBridge(model_of("llama", False))
    for one in (bridge, plain):
        one.add_hook(*EDITS[0][0])
        one(tokens, return_type="loss", use_cache=False).backward()
    for ours, theirs in zip(gradients(bridge), gradients(plain), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)
    loss = bridge(tokens, return_type="loss", use_cache=False)
    bridge.reset_hooks()
    with pytest.raises(RuntimeError, match="hooks were added or removed since its forward pass"):
        loss.backward()


def test_the_models_own_call_brings_its_hooks_along():
    tokens = tokens_of("llama")
    grads = []
    for checkpointing in (False, True):
        bridge = TransformerBridge(model_of("llama", checkpointing))
        with bridge.hooks(fwd_hooks=EDITS[1]):
            loss = bridge.original_model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        grads.append(gradients(bridge))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


def test_backward_hooks_see_the_same_gradients():
    tokens = tokens_of("llama")
    seen = []
    for checkpointing in (False, True):
        bridge = TransformerBridge(model_of("llama", checkpointing))
        kept = []
        hooks = [("blocks.1.attn.hook_z", lambda g, hook, kept=kept: kept.append(g.clone()))]
        loss = bridge.run_with_hooks(tokens, bwd_hooks=hooks, return_type="loss", use_cache=False)
        loss.backward()
        seen.append(kept)
    assert len(seen[0]) == len(seen[1]) == 1
    torch.testing.assert_close(seen[0][0], seen[1][0], atol=1e-6, rtol=1e-4)


def test_nothing_stays_after_backward():
    tokens = tokens_of("llama")
    bridge = TransformerBridge(model_of("llama", True))
    own = [block._gradient_checkpointing_func for block in bridge.original_model.model.layers]

    class Hook:
        def __call__(self, x, hook):
            return x * 0.5

    fn = Hook()
    alive = weakref.ref(fn)
    loss = run(bridge, tokens, [("blocks.1.attn.hook_z", fn)])
    assert [
        block._gradient_checkpointing_func for block in bridge.original_model.model.layers
    ] == own
    loss.backward()
    del fn, loss
    gc.collect()
    assert alive() is None


def test_a_copy_made_meanwhile_has_its_own_function():
    bridge = TransformerBridge(model_of("llama", True))
    tokens = tokens_of("llama")
    copies = []
    with bridge.hooks(
        fwd_hooks=[("blocks.1.attn.hook_z", lambda x, hook: copies.append(copy.deepcopy(hook.ctx)))]
    ):
        bridge(tokens, return_type="loss", use_cache=False)
        other = copy.deepcopy(bridge.original_model)
    other(tokens, labels=tokens, use_cache=False).loss.backward()
    assert len(copies) == 1


def test_a_loss_is_enough_for_backward():
    """Whoever holds the graph alone holds what is computed again, hooks and all."""
    expected = {}
    for kept in (True, False):
        model = model_of("llama", checkpointing=True)
        parameters = dict(model.named_parameters())
        bridge = TransformerBridge(model)
        loss = bridge.run_with_hooks(tokens_of("llama"), return_type="loss", fwd_hooks=EDITS[0])
        if not kept:
            del bridge, model
            gc.collect()
        loss.backward()
        expected[kept] = {name: parameter.grad for name, parameter in parameters.items()}
    for name, gradient in expected[True].items():
        assert torch.equal(gradient, expected[False][name]), name


def test_hooks_of_two_models_are_each_brought_along_by_their_own():
    """A block that is computed again needs the hooks of every scope that was open, whichever bridge
    opened it.
    """
    edit, tokens = EDITS[0], tokens_of("gpt2")
    ours, other = (TransformerBridge(model_of("gpt2", True)) for _ in range(2))
    there = [torch_hooks(bridge.original_model) for bridge in (ours, other)]
    run(ours, tokens, edit).backward()
    expected = gradients(ours)
    with other.hooks(fwd_hooks=edit), ours.hooks(fwd_hooks=edit):
        loss = ours(tokens, return_type="loss", use_cache=False)
    loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(ours), expected, strict=True))
    assert [torch_hooks(bridge.original_model) for bridge in (ours, other)] == there
