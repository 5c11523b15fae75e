"""gim-explain and lxt: attributions with other gradients, beside gradient rules."""

import gim
import lxt.explicit.functional as lrp
import pytest
import torch
from torch.nn.functional import silu

from bridge import Rules, TransformerBridge
from bridge.features import token_attribution
from tests.tiny_models import tiny_model

TOKENS = torch.randint(10, 60, (1, 9), generator=torch.Generator().manual_seed(1))
PLAIN = {"freeze_norm": False, "softmax_temperature": 1.0}
PLAIN |= {"q_scale": 1.0, "k_scale": 1.0, "v_scale": 1.0}


@pytest.mark.parametrize(
    ("kernel", "rules"),
    [
        ("eager", {"norms": "held"}),
        ("eager", {"softmax": 2.0}),
        ("eager", {"norms": "held", "softmax": 2.0}),
        ("sdpa", {"norms": "held"}),
        ("sdpa", {"q": 0.25, "k": 0.25, "v": 0.5}),
        ("sdpa", {"norms": "held", "q": 0.25, "k": 0.25, "v": 0.5}),
    ],
)
def test_gim(kernel, rules):
    """It patches the softmax of eager attention, and queries, keys and values of sdpa only."""
    model = tiny_model("gpt2", attn_implementation=kernel)
    names = {"norms": "freeze_norm", "softmax": "softmax_temperature"}
    names |= {letter: f"{letter}_scale" for letter in "qkv"}
    options = {names[name]: value == "held" or value for name, value in rules.items()}
    theirs = gim.explain(model, TOKENS, baseline_token_id=5, **(PLAIN | options))
    metric = lambda logits: logits[0, -1].max()
    bridge = TransformerBridge(model)
    ours = token_attribution(bridge, TOKENS, metric, Rules(**rules), baseline=5)[0]
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()
    plain = token_attribution(bridge, TOKENS, metric, baseline=5)[0]
    assert (plain - theirs).abs().max() > 1e-3 * theirs.abs().max()


def test_gim_as_a_whole():
    """All of its rules at once, by its own functions in hooks."""
    bridge = TransformerBridge(tiny_model("llama"))
    kept = []

    def softmax(pattern, hook):
        return gim.context.softmax._softmax_bwT(kept[-1], dim=-1, T=2.0)

    def scores(x, hook):
        kept.append(x)
        return x

    hooks = [(lambda name: name.endswith("hook_scale"), lambda x, hook: x.detach())]
    for end, factor in (("hook_rot_q", 0.25), ("hook_rot_k", 0.25), ("hook_v", 0.5)):
        scale = lambda x, hook, factor=factor: gim.context.attention.scale_grad(x, factor)
        hooks.append((lambda name, end=end: name.endswith(end), scale))
    hooks.append((lambda name: name.endswith("hook_attn_scores"), scores))
    hooks.append((lambda name: name.endswith("hook_pattern"), softmax))
    metric = lambda logits: logits[0, -1].max()
    with bridge.hooks(fwd_hooks=hooks):
        theirs = token_attribution(bridge, TOKENS, metric, baseline=5)
    ours = token_attribution(bridge, TOKENS, metric, "gim", baseline=5)
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


class _Passed(torch.autograd.Function):
    """A function of one input whose relevance is that of its output (the identity rule)."""

    @staticmethod
    def forward(ctx, x, value):
        return value

    @staticmethod
    def backward(ctx, relevance):
        return relevance, None


def passed(x, value):
    return _Passed.apply(x, value.detach())


def test_lxt():
    """A Llama by the pure functions of AttnLRP, whose gradients are relevances. Rotary embeddings
    are a linear layer at each position.
    """
    model = tiny_model("llama").double()
    bridge = TransformerBridge(model)
    ours = token_attribution(bridge, TOKENS, lambda logits: logits[0, -1, 3], "attnlrp")
    x = model.get_input_embeddings()(TOKENS).detach().requires_grad_()
    logits = by_lxt(model, x)
    assert torch.allclose(logits, bridge(TOKENS), rtol=0, atol=1e-5)
    target = logits[0, -1, 3]
    (relevance,) = torch.autograd.grad(target, x, target.detach())
    theirs = relevance.sum(-1)
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


def by_lxt(model, x):
    """The logits, by functions whose backward pass is AttnLRP's."""
    tiny = {"epsilon": 1e-12}
    config, length = model.config, x.shape[1]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    rotations = rotation_matrices(model, x)

    def linear(module, x):
        return lrp.linear_epsilon(x, module.weight, None, **tiny)

    def norm(module, x):
        return lrp.rms_norm_identity(x, module.weight, module.variance_epsilon)

    def heads(module, read):
        return linear(module, read).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)

    def rotated(x):
        by_position = zip(x.unbind(2), rotations, strict=True)
        return torch.stack(
            [lrp.linear_epsilon(y, turn, None, **tiny) for y, turn in by_position], 2
        )

    for layer in model.model.layers:
        attn, mlp = layer.self_attn, layer.mlp
        read = norm(layer.input_layernorm, x)
        q, k = rotated(heads(attn.q_proj, read)), rotated(heads(attn.k_proj, read))
        v = heads(attn.v_proj, read)
        k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
        scores = lrp.matmul(q, k.mT, **tiny)
        scores = passed(scores, scores * config.head_dim**-0.5).masked_fill(future, -1e9)
        z = lrp.matmul(lrp.softmax(scores, dim=-1), v, **tiny)
        x = lrp.add2(x, linear(attn.o_proj, z.transpose(1, 2).flatten(-2)), **tiny)
        read = norm(layer.post_attention_layernorm, x)
        gate = linear(mlp.gate_proj, read)
        post = lrp.mul2(passed(gate, silu(gate)), linear(mlp.up_proj, read))
        x = lrp.add2(x, linear(mlp.down_proj, post), **tiny)
    return linear(model.lm_head, norm(model.model.norm, x))


def rotation_matrices(model, x):
    """The matrix by which rotary embeddings multiply a head at each position, ``[pos, d, d]``."""
    cos, sin = (part[0] for part in model.model.rotary_emb(x, torch.arange(x.shape[1])[None]))
    width = cos.shape[-1]
    half = torch.zeros(width, width, dtype=x.dtype)
    half[: width // 2, width // 2 :] = -torch.eye(width // 2)
    half[width // 2 :, : width // 2] = torch.eye(width // 2)
    return torch.diag_embed(cos) + sin[..., None] * half
