"""EAP and EAP-IG as their published code computes them, hook by hook on a HookedTransformer (Hanna
et al. 2024).

Against gradients of a GPT-2 that is computed head by head, in float64.
"""

import pytest
import torch

from bridge.circuits import Graph, logit_difference
from bridge.legacy import HookedTransformer
from tests.circuits.by_hand import ByHand
from tests.circuits.test_attribution import by_hand, gradients
from tests.conftest import tiny

CLEAN = torch.randint(0, 61, (2, 5), generator=torch.Generator().manual_seed(1))
CORRUPTED = torch.cat([CLEAN[:, :2], (CLEAN[:, 2:3] + 7) % 61, CLEAN[:, 3:]], dim=1)
METRIC = logit_difference(torch.tensor([5, 8]), torch.tensor([9, 2]))


@pytest.fixture(scope="module")
def model():
    model = HookedTransformer(tiny("gpt2", dtype=torch.float64))
    for switch in (
        "use_attn_result",
        "use_split_qkv_input",
        "use_hook_mlp_in",
    ):  # as the package asks for
        getattr(model, f"set_{switch}")(True)
    return model


def writers(model):
    """Each sender's hook point, and the head that it is there."""
    found = {"embed": ("hook_embed", None)}
    for layer in range(model.cfg.n_layers):
        found |= {
            f"L{layer}H{head}": (f"blocks.{layer}.attn.hook_result", head)
            for head in range(model.cfg.n_heads)
        }
        found[f"L{layer}MLP"] = (f"blocks.{layer}.hook_mlp_out", None)
    return found


def readers(model):
    """Each receiver's hook point, and the head that it is there."""
    found = {"logits": (f"blocks.{model.cfg.n_layers - 1}.hook_resid_post", None)}
    for layer in range(model.cfg.n_layers):
        for letter in "qkv":
            for head in range(model.cfg.n_heads):
                found[f"L{layer}H{head}.{letter}"] = (f"blocks.{layer}.hook_{letter}_input", head)
        found[f"L{layer}MLP"] = (f"blocks.{layer}.hook_mlp_in", None)
    return found


def eap(model, graph, steps):
    """The package's own procedure: activations of both runs by forward hooks, gradients by backward
    hooks, of the clean run, or of `steps` runs whose embeddings lie between those of the corrupted
    and of the clean one.
    """
    wrote = {}
    for tokens, sign in ((CORRUPTED, 1), (CLEAN, -1)):
        for sender, (name, head) in writers(model).items():

            def keep(x, hook, sender=sender, head=head, sign=sign):
                wrote[sender] = (
                    wrote.get(sender, 0) + sign * (x if head is None else x[:, :, head]).detach()
                )

            model.add_hook(name, keep)
        model(tokens)
        model.reset_hooks()
    found = torch.zeros(graph.exists.shape, dtype=torch.float64)
    names = ["hook_embed", "hook_pos_embed"]
    ends = [
        model.run_with_cache(tokens, names_filter=names)[1]["hook_embed"]
        for tokens in (CORRUPTED, CLEAN)
    ]
    for step in range(1, steps + 1):
        at = ends[0] + step / steps * (ends[1] - ends[0])
        with model.hooks(
            fwd_hooks=[("hook_embed", lambda x, hook, at=at: at.clone().requires_grad_())],
            bwd_hooks=[
                (name, add(graph, wrote, found, receiver, head))
                for receiver, (name, head) in readers(model).items()
            ],
        ):
            METRIC(model(CLEAN)).backward()
    model.zero_grad()
    return found / steps


def add(graph, wrote, found, receiver, head):
    row = graph.receivers.index(receiver)

    def hook(gradient, hook):
        at = gradient if head is None else gradient[:, :, head]
        for column in graph.exists[row].nonzero().flatten().tolist():
            found[row, column] += (wrote[graph.senders[column]] * at).sum()

    return hook


@pytest.mark.parametrize("steps", [1, 5])
def test_scores_are_those_by_hand(model, steps):
    graph = Graph.of(model)
    hand = ByHand(model.original_model, graph)
    wrote = []
    for tokens in (CORRUPTED, CLEAN):
        hand(tokens)
        wrote.append({name: value.detach() for name, value in hand.wrote.items()})
    change = [wrote[0][name] - wrote[1][name] for name in graph.senders]
    right = 0
    for step in range(1, steps + 1):
        embed = wrote[0]["embed"] + step / steps * (wrote[1]["embed"] - wrote[0]["embed"])
        right = (
            right
            + by_hand(graph, change, gradients(hand, graph, CLEAN, METRIC, embed=embed)) / steps
        )
    found = eap(model, graph, steps)
    torch.testing.assert_close(found, right, atol=1e-12, rtol=1e-9)
    assert right.abs().max() > 1e-3 and (right != 0).sum() > 100
