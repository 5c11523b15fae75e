"""What is offered is what is proved: what a claim that fails names is withdrawn, with the claim as
its reason.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adapters import verify
from adapters.architecture import NOT_PROVED
from adapters.attention import Attention as AttentionPart
from adapters.model import map_model
from adapters.proofs.facts import FACTS
from adapters.proofs.feed_forward import GATED
from adapters.proofs.mechanics import ATTRIBUTED
from adapters.proofs.projections import WRITTEN
from adapters.proofs.scores import SCORES
from adapters.proofs.slopes import SLOPES
from adapters.registry import declaration_for
from adapters.views import Call, View
from bridge import ActivationCache, TransformerBridge
from tests.adapters.mutations import declared_as
from tests.adapters.test_verify import change, failing
from tests.conftest import tiny

TOKENS = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(1))


class Norm(nn.Module):
    def __init__(self, name: str = "weight") -> None:
        super().__init__()
        self.name = name
        setattr(self, name, nn.Parameter(torch.ones(32)))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * getattr(self, self.name)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(32, 32, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).view(*x.shape[:2], 4, 8).transpose(1, 2) for p in (self.wq, self.wk, self.wv)
        )
        return self.wo(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(32, 48), nn.Linear(48, 32), nn.Linear(32, 48)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, trick: str) -> None:
        super().__init__()
        self.trick, name = (
            trick,
            trick.removeprefix("named ") if trick.startswith("named ") else "weight",
        )
        self.attn, self.mlp, self.n1, self.n2 = Attention(), Mlp(), Norm(name), Norm(name)

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        if self.trick == "functional norms":
            x = x + self.attn(F.rms_norm(x, (32,)))
            return x + self.mlp(F.rms_norm(x, (32,)))
        if self.trick == "no number":
            x = x + (0 * x).abs().sqrt()  # zero, whose gradient is 0 times infinity
        x = x + self.attn(self.n1(x + 0.3 * first if self.trick == "reads the first stream" else x))
        return x + self.mlp(self.n2(x.detach() if self.trick == "detached" else x))


class Plain(nn.Module):
    def __init__(self, trick: str = "") -> None:
        super().__init__()
        self.trick, name = (
            trick,
            trick.removeprefix("named ") if trick.startswith("named ") else "weight",
        )
        self.embed, self.blocks = (
            nn.Embedding(96, 32),
            nn.ModuleList(Block(trick) for _ in range(3)),
        )
        self.norm, self.head = Norm(name), nn.Linear(32, 96, bias=False)
        if trick == "two heads":
            self.second = nn.Linear(32, 96, bias=False)

    def forward(self, tokens: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        streams = [x]
        for block in self.blocks:
            x = block(x, streams[0])
            streams.append(x)
        y = self.norm(x - 0.3 * streams[2] if self.trick == "takes a stream away" else x)
        return (self.head(y), self.second(y)) if self.trick == "two heads" else self.head(y)


def plain(trick: str = "") -> nn.Module:
    model, generator = Plain(trick), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator) * 0.3 + (parameter.ndim == 1)
            )
    return model.eval()


def wrapped(trick: str = "") -> TransformerBridge:
    return TransformerBridge(plain(trick), cache_declaration=False)


@pytest.mark.parametrize("trick", ["functional norms", "reads the first stream"])
def test_what_heads_read_stands_on_what_their_attention_reads(trick: str) -> None:
    bridge = wrapped(trick)
    for name in ("attn_in", "q_input", "k_input", "v_input"):
        assert f"blocks.1.hook_{name}" not in bridge.hook_dict
    assert (
        bridge.offered()
        .not_offered["blocks.1.hook_q_input"]
        .startswith("it stands on blocks.1.hook_attn_in: what")
    )
    assert {
        "blocks.1.hook_resid_pre",
        "blocks.1.attn.hook_q",
        "blocks.1.attn.hook_pattern",
    } <= bridge.hook_dict.keys()
    assert verify(bridge).passed


def test_the_unembedding_is_that_of_the_logits_or_is_not_offered() -> None:
    bridge = wrapped("two heads")
    with pytest.raises(AttributeError, match="W_U"):
        _ = bridge.W_U
    assert (
        bridge.offered()
        .not_offered["unembed.W_U"]
        .startswith("it stands on unembed.hook_out: an edit changes")
    )
    assert torch.equal(wrapped().W_U, plain().head.weight.T)


def test_a_lens_behind_the_last_block_is_the_logits_or_is_refused() -> None:
    with pytest.raises(ValueError, match="a run that starts at layer 3 gives different logits"):
        wrapped("takes a stream away").lens(TOKENS).stack()
    torch.testing.assert_close(wrapped().lens(TOKENS).stack()[-1], plain()(TOKENS))


@pytest.mark.parametrize("name", ["scale", "gamma"])
def test_no_name_of_a_parameter_decides(name: str) -> None:
    bridge, usual = wrapped(f"named {name}"), wrapped()
    assert bridge.hook_dict.keys() == usual.hook_dict.keys() and not bridge.offered().not_offered
    assert torch.equal(
        bridge.weights["blocks.1.ln1.w"], getattr(bridge.original_model.module.blocks[1].n1, name)
    )
    logits = bridge(TOKENS)
    bridge.process_weights(fold_ln=True, center_writing_weights=False, center_unembed=False)
    torch.testing.assert_close(
        bridge(TOKENS).log_softmax(-1), logits.log_softmax(-1), atol=1e-4, rtol=1e-4
    )
    assert bool((getattr(bridge.original_model.module.blocks[1].n1, name) == 1).all())


def test_a_point_whose_gradient_is_no_slope_is_withdrawn(caplog: pytest.LogCaptureFixture) -> None:
    """The model cuts its graph behind the second norm: what edits do before it, gradients do not
    say.
    """
    with caplog.at_level(logging.WARNING, "bridge"):
        bridge = wrapped("detached")
    (said,) = [record.getMessage() for record in caplog.records if record.name == "bridge"]
    assert NOT_PROVED in said and len(said.splitlines()) == 1
    reasons = bridge.offered().not_offered
    for name in ("blocks.1.attn.hook_q", "blocks.0.hook_resid_pre", "blocks.1.hook_attn_out"):
        assert name not in bridge.hook_dict and reasons[name].startswith(
            f"{NOT_PROVED}: {SLOPES}"
        ), name
    assert {
        "blocks.1.hook_mlp_in",
        "blocks.2.ln2.hook_out",
        "blocks.2.hook_resid_post",
    } <= bridge.hook_dict.keys()
    assert NOT_PROVED not in wrapped().offered().summary and verify(bridge).passed


def test_a_gradient_that_is_no_number_is_said() -> None:
    (slopes,) = [check for check in verify(wrapped("no number")).checks if check.name == SLOPES]
    assert "inconclusive: the gradient at blocks.0.hook_resid_pre is no number" in slopes.detail
    assert "blocks.2.hook_resid_post" not in slopes.detail  # behind it


def test_nothing_reaches_for_a_point_that_was_withdrawn() -> None:
    """The inputs of heads take over what is written at all of theirs; a norm has a gradient for
    each reader.
    """
    model, reason = plain(), "withdrawn"
    whole = map_model(
        TransformerBridge(model, cache_declaration=False).original_model, automatic=True
    )
    left = whole.without({"blocks.1.hook_k_input": reason, "blocks.2.attn.hook_v": reason})
    assert (
        left.not_offered["blocks.1.hook_attn_in"] == f"it stands on blocks.1.hook_k_input: {reason}"
    )
    points = {point.name: point for point in left.points}
    assert points["blocks.1.ln1.hook_out"].separate_consumers and "blocks.2.hook_attn_in" in points
    assert not points["blocks.2.ln1.hook_out"].separate_consumers


def test_what_was_not_proved_is_kept_with_the_declaration() -> None:
    bridge = wrapped("detached")
    again = TransformerBridge(plain("detached"), declaration=bridge.declaration())
    assert dict(again.offered().not_offered) == dict(bridge.offered().not_offered)


class _Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * 0.5


class HalfItsGradient(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(_Half.apply(x))


def test_a_gate_with_half_its_gradient_is_noticed() -> None:
    model = tiny("llama")
    model.model.layers[1].mlp.act_fn = HalfItsGradient()
    assert failing(TransformerBridge(model)) == [SLOPES]


class WrongFar(View):
    """A view that is wrong behind a position, or of numbers beyond a size."""

    identity = False

    def __init__(self, right: View, behind: int, beyond: float) -> None:
        self.right, self.behind, self.beyond = right, behind, beyond
        self.contextual = right.contextual

    def get(self, x: Tensor, call: Call) -> Tensor:
        seen = self.right.get(x, call)
        far = torch.arange(seen.shape[1]).view(-1, *(1 for _ in seen.shape[2:])) >= self.behind
        return torch.where(far | (seen.abs() > self.beyond), 0.5 * seen, seen)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return self.right.put(x, new, call)


@pytest.mark.parametrize(("behind", "beyond"), [(20, 1e9), (999, 20.0)], ids=["far", "large"])
@pytest.mark.parametrize(
    ("of", "claim"),
    [("mlp.hook_post", GATED), ("mlp.hook_pre_linear", WRITTEN), ("attn.hook_q", WRITTEN)],
)
def test_what_is_wrong_far_or_large_alone_is_noticed(
    of: str, claim: str, behind: int, beyond: float
) -> None:
    bridge, name = TransformerBridge(tiny("llama")), f"blocks.1.{of}"
    change(bridge, name, view=WrongFar(bridge.hook_dict[name].view, behind, beyond))
    assert claim in failing(bridge)


class Detached(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


@pytest.mark.parametrize("which", ["q_proj", "k_proj", "v_proj"])
def test_a_projection_that_is_detached_is_noticed(which: str) -> None:
    model = tiny("llama")
    getattr(model.model.layers[1].self_attn, which).__class__ = Detached
    assert SLOPES in failing(TransformerBridge(model))


@pytest.mark.parametrize("bound", [30.0, 1e6])
def test_a_clamp_that_never_acts_is_noticed(bound: float) -> None:
    model = tiny("llama")
    declared = declaration_for(model)
    (step, *others), block = declared.stack.block.steps, declared.stack.block
    assert isinstance(step.part, AttentionPart)
    steps = (replace(step, part=replace(step.part, clamp=(bound, "made"))), *others)
    wrong = replace(declared, stacks=(replace(declared.stack, block=replace(block, steps=steps)),))
    with declared_as(wrong):
        assert SCORES in failing(TransformerBridge(model))


def test_a_length_that_the_configuration_does_not_say_is_noticed() -> None:
    bridge = TransformerBridge(tiny("llama"))
    assert bridge.cfg.n_ctx is not None
    bridge.cfg.n_ctx //= 2
    assert failing(bridge) == [FACTS]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_what_all_terms_add_to_the_logits_is_the_logits(family: str) -> None:
    """A stream that goes on otherwise behind the last block: terms no longer sum to what is
    returned.
    """
    bridge = TransformerBridge(tiny(family))
    assert verify(bridge).passed
    decomposed = ActivationCache.decompose_resid

    def without_the_last(cache: ActivationCache, *args: Any, **kwargs: Any) -> Any:
        return decomposed(cache, *args, **kwargs)[:-1]

    with mock.patch.object(ActivationCache, "decompose_resid", without_the_last):
        assert failing(bridge) == [ATTRIBUTED]
