"""The gradient at a hook point is the slope of an edit there, also where the tensor has another
reader elsewhere.
"""

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
    ends = (
        "hook_resid_pre",
        "hook_resid_mid",
        "hook_resid_post",
        "hook_attn_out",
        "hook_mlp_out",
        "attn.hook_z",
    )
    names = [name for name in bridge.hook_dict if name.endswith(ends)]
    assert "blocks.0.hook_resid_pre" in names
    logits = bridge(TOKENS)
    weights = torch.linspace(-1, 1, logits.numel()).view(logits.shape)
    for name in names:
        gradients = []
        with bridge.hooks(
            bwd_hooks=[(name, lambda gradient, hook, seen=gradients: seen.append(gradient.clone()))]
        ):
            (bridge(TOKENS) * weights).sum().backward()
        edit = torch.zeros_like(gradients[0], requires_grad=True)
        edited = bridge.run_with_hooks(
            TOKENS, fwd_hooks=[(name, lambda act, hook, edit=edit: act + edit)]
        )
        (slope,) = torch.autograd.grad((edited * weights).sum(), edit)
        torch.testing.assert_close(gradients[0], slope, atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize(
    ("kind", "name", "norm"),
    [
        ("gptj", "blocks.1.hook_mlp_in", "blocks.1.ln2"),
        ("cohere", "blocks.1.hook_mlp_in", "blocks.1.ln2"),
        ("falcon_h1", "blocks.1.ln1_attn.hook_in", "blocks.1.ln1_attn"),
    ],
)
def test_what_a_part_alone_reads_of_the_stream_goes_through_a_norm_that_others_share(
    kind, name, norm
):
    """An edit there, and its gradient, hold whoever else looks at the norm; and the norm shows what
    was edited.
    """
    bridge = TransformerBridge(tiny_model(kind))
    behind = [f"{norm}.hook_scale", f"{norm}.hook_normalized", f"{norm}.hook_out"]

    def doubled(act, hook):
        return act * 2 + torch.linspace(-1, 1, act.shape[-1]).square()

    alone = bridge.run_with_hooks(TOKENS, fwd_hooks=[(name, doubled)])
    assert not torch.allclose(alone, bridge(TOKENS), atol=1e-4)
    for other in behind:
        for hooks in ([(name, doubled), (other, copied)], [(other, copied), (name, doubled)]):
            torch.testing.assert_close(
                bridge.run_with_hooks(TOKENS, fwd_hooks=hooks), alone, msg=f"{name}, {other}"
            )
    with bridge.hooks(fwd_hooks=[(name, doubled)]):
        _, cache = bridge.run_with_cache(TOKENS, names_filter=[name, *behind])
    entered = cache[name].double()
    if kind != "falcon_h1":  # a layer norm
        entered = entered - entered.mean(-1, keepdim=True)
    scale = entered.pow(2).mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(cache[behind[0]].double(), scale, atol=1e-4, rtol=1e-4)
    module = bridge.core.get_submodule(bridge.hook_dict[name].point.sources[0].path)
    torch.testing.assert_close(cache[behind[2]], module.forward(cache[name]))
    if kind == "falcon_h1":
        torch.testing.assert_close(cache[behind[1]].double(), entered / scale, atol=1e-4, rtol=1e-4)

    def gradient(names):
        seen = []
        hooks = [
            (each, lambda grad, hook: seen.append(grad.clone()) if hook.name == name else None)
            for each in names
        ]
        with bridge.hooks(bwd_hooks=hooks):
            bridge(TOKENS).square().sum().backward()
        return sum(seen)

    assert gradient([name]).any()
    torch.testing.assert_close(gradient([name, *behind]), gradient([name]), atol=1e-4, rtol=1e-3)


def copied(act, hook):
    return act.clone()
