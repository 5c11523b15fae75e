"""Modules of plain torch: what goes in and comes out, what is refused, and what stays as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from adapters import UnsupportedModelError
from adapters.multihead import OpenMultiheadAttention, open_multihead
from bridge import TransformerBridge
from tests.adapters.unknown_classes.compared import TOKENS
from tests.adapters.unknown_classes.parts import D_MODEL, D_VOCAB, N_HEADS, randomised
from tests.adapters.unknown_classes.plain_modules import HundredLines, NanoGPT
from tests.adapters.unknown_classes.torch_modules import EncoderLayersAfter, Multihead
from tests.tiny_models import tiny_model


@pytest.mark.parametrize("cls", [HundredLines, NanoGPT, Multihead, EncoderLayersAfter])
def test_without_hooks_the_logits_are_the_modules_own(cls: type[nn.Module]) -> None:
    module = randomised(cls())
    with torch.no_grad():
        own = module(TOKENS)
        bridge = TransformerBridge(module)
        assert torch.equal(bridge(TOKENS), own[0] if isinstance(own, tuple) else own)
        again = module(TOKENS)
    assert torch.equal(
        again[0] if isinstance(again, tuple) else again, own[0] if isinstance(own, tuple) else own
    )
    assert bridge.original_model.module is module


def test_a_generation_is_that_of_a_loop_by_hand() -> None:
    module = randomised(HundredLines())
    bridge, tokens = TransformerBridge(module), TOKENS
    with torch.no_grad():
        for _ in range(4):
            tokens = torch.cat([tokens, module(tokens)[:, -1].argmax(-1, keepdim=True)], 1)
        made = bridge.generate(
            TOKENS, max_new_tokens=4, do_sample=False, verbose=False, return_type="tokens"
        )
    assert torch.equal(made, tokens)


def test_states_have_the_modules_own_names() -> None:
    module = randomised(Multihead())
    before = {name: x.clone() for name, x in module.state_dict().items()}
    bridge = TransformerBridge(module)
    assert bridge.state_dict().keys() == before.keys() == module.state_dict().keys()
    bridge.load_state_dict({name: x + 1 for name, x in before.items()})
    assert all(torch.equal(x, before[name] + 1) for name, x in module.state_dict().items())


def test_further_arguments_are_passed_on() -> None:
    bridge = TransformerBridge(randomised(NanoGPT()))
    assert torch.equal(bridge(TOKENS, targets=TOKENS), bridge(TOKENS))
    with pytest.raises(
        TypeError, match="'targetz' is an argument of neither the bridge nor PlainModel"
    ):
        bridge(TOKENS, targetz=TOKENS)


def test_a_run_from_a_layer_on() -> None:
    bridge = TransformerBridge(randomised(HundredLines()))
    stream = bridge(TOKENS, stop_at_layer=1)
    torch.testing.assert_close(bridge(stream, start_at_layer=1), bridge(TOKENS))


def test_a_copy_is_a_model_of_its_own() -> None:
    bridge = TransformerBridge(randomised(Multihead()))
    other = copy.deepcopy(bridge)
    with torch.no_grad():
        for parameter in other.original_model.parameters():
            parameter.zero_()
        _, cache = bridge.run_with_cache(TOKENS)
        _, empty = other.run_with_cache(TOKENS)
    assert (
        cache["blocks.1.attn.hook_q"].abs().sum() > 0 == empty["blocks.1.attn.hook_q"].abs().sum()
    )


class Sums(nn.Module):
    """No logits come out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(D_VOCAB, D_MODEL)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens).sum((1, 2))


class Encodes(nn.Sequential):
    """A list of modules around a model, which takes a dictionary, as sentence-transformers' models
    do.
    """

    def __init__(self) -> None:
        super().__init__(nn.Module())
        self[0].auto_model = tiny_model("bert", "masked").base_model

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        return self[0].auto_model(**features).last_hidden_state.mean(1)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Linear(3, 4), "Linear is not a transformers model, and does not run on tokens alone"),
        (nn.Identity(), "Identity has no weights"),
        (
            Sums(),
            (
                r"Sums returns a tensor of shape \[1\] for tokens: logits, \[batch, pos, d_vocab\],"
                r" are needed"
            ),
        ),
        (HundredLines().to("meta"), "HundredLines has no weights"),
        (
            nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)),
            (
                "in which each runs once: so what plays which part in Sequential could"
                " not be inferred"
            ),
        ),
        (
            Encodes(),
            (
                r"Encodes is not a transformers model.*It holds a BertModel, which can be wrapped:"
                r" its get_submodule\('0.auto_model'\)"
            ),
        ),
    ],
)
def test_what_is_no_language_model_is_refused(module: nn.Module, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        TransformerBridge(module)


@pytest.mark.parametrize("first", [False, True], ids=["positions first", "batch first"])
@pytest.mark.parametrize("weights", [False, True], ids=["no weights", "weights"])
@pytest.mark.parametrize("mask", ["none", "bool", "float", "heads", "padding", "both"])
def test_an_opened_attention_computes_what_torchs_does(
    mask: str, weights: bool, first: bool
) -> None:
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(D_MODEL, N_HEADS, batch_first=first).eval()
    nn.init.normal_(plain.in_proj_bias)
    opened = copy.deepcopy(plain)
    open_multihead(nn.ModuleList([opened]))
    assert isinstance(opened, OpenMultiheadAttention)
    x = torch.randn(2, 7, D_MODEL) if first else torch.randn(7, 2, D_MODEL)
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[0, 5:] = True
    of_heads = torch.randn(2 * N_HEADS, 7, 7)
    given = {
        "none": {},
        "bool": {"attn_mask": hidden},
        "float": {"attn_mask": torch.randn(7, 7)},
        "heads": {"attn_mask": of_heads},
        "padding": {"key_padding_mask": padding},
        "both": {"attn_mask": hidden, "key_padding_mask": padding},
    }[mask]
    expected = plain(x, x, x, need_weights=weights, **given)
    assert torch.equal(
        opened(x, x, x, need_weights=weights, **given)[0], expected[0]
    )  # nobody looks
    handle = opened.in_proj.register_forward_hook(lambda module, args, output: None)
    made = opened(x, x, x, need_weights=weights, **given)
    handle.remove()
    torch.testing.assert_close(made[0], expected[0], atol=1e-6, rtol=1e-5)
    assert (made[1] is None) == (expected[1] is None)
    if weights:
        torch.testing.assert_close(made[1], expected[1], atol=1e-6, rtol=1e-5)


def test_attentions_that_have_more_are_left_as_they_are() -> None:
    others = nn.ModuleList(
        [
            nn.MultiheadAttention(D_MODEL, N_HEADS, add_bias_kv=True),
            nn.MultiheadAttention(D_MODEL, N_HEADS, add_zero_attn=True),
            nn.MultiheadAttention(D_MODEL, N_HEADS, kdim=5),
        ]
    )
    open_multihead(others)
    assert {type(each) for each in others} == {nn.MultiheadAttention}


class _DefaultNorms(NanoGPT):
    def __init__(self) -> None:
        super().__init__()
        for module in list(self.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.LayerNorm):
                    norm = nn.RMSNorm(D_MODEL)  # with torch's own epsilon
                    if isinstance(module, nn.ModuleDict):
                        module[name] = norm
                    else:
                        setattr(module, name, norm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_with_torchs_default_epsilon_are_declared(dtype: torch.dtype) -> None:
    offered = TransformerBridge(randomised(_DefaultNorms()).to(dtype)).offered()
    assert "blocks.0.ln1.hook_scale" in offered.names and not offered.not_offered
