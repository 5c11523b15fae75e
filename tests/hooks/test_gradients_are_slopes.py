"""The gradient at a hook point is the slope of an edit there, also where the tensor has another reader elsewhere."""

import pytest
import torch
from torch import nn

from bridge import TransformerBridge
from tests.tiny_models import tiny_model

TOKENS = torch.randint(3, 60, (1, 7), generator=torch.Generator().manual_seed(0))


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x, first):
        return x + self.down(torch.relu(self.up(self.norm(x)))) + 0.3 * torch.tanh(first)


class KeepsTheFirstStream(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(60, 16), nn.ModuleList(Reader() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 60, bias=False)

    def forward(self, tokens):
        x = first = self.embed(tokens)
        for block in self.blocks:
            x = block(x, first)
        return self.head(self.norm(x))


def made(kind):
    if kind != "plain":
        return tiny_model(kind)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return KeepsTheFirstStream().eval()


@pytest.mark.parametrize("kind", ["plain", "gemma4_text", "zamba2", "gpt2", "llama"])
def test_a_gradient_is_the_slope_of_an_edit(kind):
    bridge = TransformerBridge(made(kind))
    ends = ("hook_resid_pre", "hook_resid_mid", "hook_resid_post", "hook_attn_out", "hook_mlp_out", "attn.hook_z")
    names = [name for name in bridge.hook_dict if name.endswith(ends)]
    assert "blocks.0.hook_resid_pre" in names
    logits = bridge(TOKENS)
    weights = torch.linspace(-1, 1, logits.numel()).view(logits.shape)
    for name in names:
        gradients = []
        with bridge.hooks(bwd_hooks=[(name, lambda gradient, hook, seen=gradients: seen.append(gradient.clone()))]):
            (bridge(TOKENS) * weights).sum().backward()
        edit = torch.zeros_like(gradients[0], requires_grad=True)
        edited = bridge.run_with_hooks(TOKENS, fwd_hooks=[(name, lambda act, hook, edit=edit: act + edit)])
        (slope,) = torch.autograd.grad((edited * weights).sum(), edit)
        torch.testing.assert_close(gradients[0], slope, atol=1e-4, rtol=1e-3, msg=name)
