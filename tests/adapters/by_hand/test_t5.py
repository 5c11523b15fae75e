"""T5 against a computation by hand: values, effects of halving, gradients; its names; what it
cannot do.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from bridge import TransformerBridge
from tests.adapters.by_hand.encoder_decoder import EncoderDecoderRun, Mode, t5_by_hand

#: Sizes that cannot be mistaken for one another, and fewer position biases than there are
#: distances.
SIZES = {
    "vocab_size": 61,
    "d_model": 32,
    "d_kv": 6,
    "d_ff": 28,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 6,
}
RELU, GATED = SIZES, SIZES | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "relu": ("T5ForConditionalGeneration", RELU),
    "gated": ("T5ForConditionalGeneration", GATED),
    "relu-encoder": ("T5EncoderModel", RELU),
}
MODES: tuple[Mode, ...] = ("plain", "split", "joint")
TOKENS = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(2))
DECODER_TOKENS = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(3))


@cache
def tiny(case: str) -> TransformerBridge:
    """The bridge of a case; no parameter is left at a trivial value."""
    cls, fields = CASES[case]
    with torch.random.fork_rng():
        torch.manual_seed(len(case))
        model = getattr(transformers, cls)(transformers.T5Config(**fields))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Gates multiply, layer after layer: with larger weights single precision alone
                # would differ.
                parameter.normal_(
                    0.0, 0.15 if ".wi_" in name else 0.25 if "Attention" not in name else 0.35
                )
                if parameter.ndim == 1:
                    parameter.add_(1.0)
    return TransformerBridge(model.eval())


def with_decoder(case: str) -> dict[str, Tensor]:
    return {} if "encoder" in case else {"decoder_input_ids": DECODER_TOKENS}


def run(case: str, mode: Mode, **more: Any) -> EncoderDecoderRun:
    decoder_tokens = with_decoder(case).get("decoder_input_ids")
    return EncoderDecoderRun(
        t5_by_hand(tiny(case).original_model), TOKENS, decoder_tokens, 8, 6, mode, **more
    )


@cache
def computed(case: str, mode: Mode) -> EncoderDecoderRun:
    """A run by hand, and the gradients of a number made from its output."""
    with torch.enable_grad():
        result = run(case, mode)
        outcome(result.logits).backward()
    return result


def outcome(output: Tensor) -> Tensor:
    return (output[:, -1, 5] - output[:, -1, 9]).sum()


def names(case: str) -> dict[str, Mode]:
    """The activations that are computed by hand, and the run that has them."""
    found: dict[str, Mode] = {}
    for mode in MODES:
        found |= {name: mode for name in computed(case, mode).seen if name not in found}
    return found


def comparable(case: str, output: Tensor) -> Tensor:
    return output if "encoder" in case else output.log_softmax(-1)


def agree(ours: Tensor, right: Tensor, atol: float = 5e-5) -> bool:
    """Ours is computed in single precision: it may differ by a small part of the largest value."""
    largest = right[right.isfinite()].abs().max().item()
    atol *= max(1.0, largest)
    return ours.shape == right.shape and torch.allclose(
        ours.to(right.dtype), right, atol=atol, rtol=1e-4
    )


@pytest.mark.parametrize("case", CASES)
def test_every_hook_point_is_computed_by_hand(case: str) -> None:
    points = tiny(case).hook_dict.values()
    assert set(names(case)) == {hook.name for hook in points if hook.point.group != "extra"}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("case", CASES)
def test_values(case: str, implementation: str) -> None:
    bridge = tiny(case)
    bridge.original_model.set_attn_implementation(implementation)
    with torch.no_grad():
        output, cache = bridge.run_with_cache(
            TOKENS, names_filter=list(names(case)), **with_decoder(case)
        )
    bridge.original_model.set_attn_implementation("sdpa")
    assert agree(output, computed(case, "plain").logits)
    wrong = [
        name
        for name, mode in names(case).items()
        if not agree(cache[name], computed(case, mode).seen[name][0])
    ]
    assert not wrong


@pytest.mark.parametrize("case", CASES)
def test_effects_of_halving(case: str) -> None:
    wrong = []
    with torch.no_grad():
        for name, mode in names(case).items():
            ours = tiny(case).run_with_hooks(
                TOKENS, fwd_hooks=[(name, lambda x, hook: x * 0.5)], **with_decoder(case)
            )
            right = run(case, mode, edits={name: lambda x: x * 0.5}).logits
            if not agree(comparable(case, ours), comparable(case, right), atol=2e-4):
                wrong.append(name)
    assert not wrong


@pytest.mark.parametrize("case", CASES)
def test_a_pattern_put_in_place_of_the_models_own_takes_effect(case: str) -> None:
    def uniform(x: Tensor) -> Tensor:
        return torch.full_like(x, 1 / x.shape[-1])

    patterns = [name for name in names(case) if name.endswith("hook_pattern")]
    assert len(patterns) == (2 if "encoder" in case else 2 + 2 * 3)
    for name in patterns:
        with torch.no_grad():
            ours = tiny(case).run_with_hooks(
                TOKENS, fwd_hooks=[(name, lambda x, hook: uniform(x))], **with_decoder(case)
            )
        right = run(case, "plain", edits={name: uniform}).logits
        assert agree(comparable(case, ours), comparable(case, right), atol=2e-4), name
        assert (right - computed(case, "plain").logits).abs().max() > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_gradients(case: str) -> None:
    found: dict[str, Tensor] = {}
    wrong = []
    for mode in dict.fromkeys(names(case).values()):
        # The norm before self attention is computed for queries first; its gradient arrives last,
        # and stays.
        seen = {
            name: computed(case, mode).seen[name][0].grad
            for name, needs in names(case).items()
            if needs == mode
        }
        right = {
            name: gradient for name, gradient in seen.items() if gradient is not None
        }  # None: nothing after it
        keep = [
            (name, lambda gradient, hook: found.__setitem__(hook.name, gradient.clone()))
            for name in right
        ]
        outcome(tiny(case).run_with_hooks(TOKENS, bwd_hooks=keep, **with_decoder(case))).backward()
        for name, gradient in right.items():  # some are of the order of ten, and rounded as such
            if not agree(found[name], gradient, atol=2e-4 * max(1.0, gradient.abs().max().item())):
                wrong.append(name)
    assert len(found) > 40
    assert not wrong


def test_the_norm_before_self_attention_has_a_gradient_for_each_of_its_readers() -> None:
    """HookedTransformer runs it for queries, keys and values in turn; backward, in the opposite
    order.
    """
    for name in ("encoder.1.ln1.hook_normalized", "decoder.1.ln1.hook_scale"):
        found: list[Tensor] = []
        hooks = [(name, lambda gradient, hook, found=found: found.append(gradient.clone()))]
        outcome(
            tiny("relu").run_with_hooks(TOKENS, bwd_hooks=hooks, **with_decoder("relu"))
        ).backward()
        right = [x.grad for x in reversed(computed("relu", "plain").seen[name])]
        assert len(found) == 3
        assert all(agree(a, b, atol=1e-4) for a, b in zip(found, right, strict=True))


def test_padding_is_not_attended_to() -> None:
    mask = torch.ones_like(TOKENS)
    mask[0, -3:] = 0
    with torch.no_grad():
        _, cache = tiny("relu").run_with_cache(TOKENS, attention_mask=mask, **with_decoder("relu"))
        short = {"decoder_input_ids": DECODER_TOKENS[:1]}
        _, alone = tiny("relu").run_with_cache(TOKENS[:1, :-3], **short)
    for name in ("encoder.1.attn.hook_pattern", "decoder.2.cross_attn.hook_pattern"):
        assert cache[name][0, ..., -3:].abs().max() == 0
        assert (cache[name.replace("pattern", "attn_scores")][0, ..., -3:] == -torch.inf).all()
    # Scores without a scale are large, and so is what another order of summing makes of them in the
    # kernel.
    torch.testing.assert_close(
        cache["decoder.2.hook_resid_post"][:1],
        alone["decoder.2.hook_resid_post"],
        atol=3e-5,
        rtol=1e-4,
    )


def test_every_name_has_its_form_below_encoder_blocks_and_decoder_blocks() -> None:
    found = tiny("gated").names
    in_blocks = {
        name
        for name in (*found.points, *found.aliases)
        if name.startswith(("encoder.", "decoder."))
    }
    assert len(in_blocks) > 200
    for name in in_blocks:
        stack, rest = name.split(".", 1)
        other = f"{stack}_blocks.{rest}"
        assert found.find(other) is found.find(name)
        if stack == "decoder":
            assert found.find(other.replace(".attn.", ".self_attn.")) is found.find(name)


def test_other_names_are_accepted_wherever_names_are() -> None:
    bridge = tiny("relu")
    pairs = {
        "encoder_blocks.0.attn.q.hook_out": "encoder.0.attn.hook_q",
        "decoder_blocks.2.self_attn.o.hook_in": "decoder.2.attn.hook_z",
        "decoder_blocks.1.cross_attn.hook_pattern": "decoder.1.cross_attn.hook_pattern",
        "decoder_blocks.1.hook_resid_mid2": "decoder.1.hook_resid_mid_cross",
        "decoder_blocks.0.mlp.in.hook_out": "decoder.0.mlp.hook_pre",
    }
    with torch.no_grad():
        _, cache = bridge.run_with_cache(TOKENS, names_filter=list(pairs), **with_decoder("relu"))
        plain = bridge(TOKENS, **with_decoder("relu"))
        assert set(cache.keys()) == set(pairs.values())
        for alias, name in pairs.items():
            hooked = bridge.run_with_hooks(
                TOKENS, fwd_hooks=[(alias, lambda x, hook: x * 0)], **with_decoder("relu")
            )
            assert cache[alias] is cache[name]
            assert not torch.allclose(hooked, plain)
    assert bridge.encoder_blocks[1].attn.hook_z is bridge.encoder[1].attn.hook_z


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("argument", ["start_at_layer", "stop_at_layer"])
def test_a_run_cannot_start_or_stop_at_a_layer(case: str, argument: str) -> None:
    with pytest.raises(
        ValueError, match=r"cannot start or stop at a layer: .* position bias.* encoder's output"
    ):
        tiny(case)(torch.zeros(2, 9, 32), **{argument: 1}, **with_decoder(case))


def test_facts() -> None:
    cfg = tiny("gated").cfg
    expected = {
        "n_layers": 2,
        "n_heads": 4,
        "d_model": 32,
        "d_head": 6,
        "d_mlp": 28,
        "normalization_type": "RMS",
        "eps": 1e-6,
        "gated_mlp": True,
        "attention_dir": "bidirectional",
        "relative_attention_num_buckets": 8,
        "positional_embedding_type": "relative_positional_bias",
        "attn_scale": 1.0,
        "decoder_start_token_id": 0,
    }
    assert {name: getattr(cfg, name) for name in expected} == expected
