"""Classes that transformers does not contain: values, effects and gradients as each says them
itself.

Run as a script it prints the table of all: ``python -m
tests.adapters.unknown_classes.test_unknown_classes``.
"""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from adapters import UnsupportedModelError, verify
from adapters.plain_model import with_interface
from bridge import TransformerBridge
from tests.adapters.mutations import mutations, tried
from tests.adapters.unknown_classes import module_list_mixtures, odd_parts, placed_otherwise
from tests.adapters.unknown_classes.classes import CLASSES, FULL, PART, REFUSED
from tests.adapters.unknown_classes.compared import TOKENS, compare
from tests.adapters.unknown_classes.parts import D_HEAD, D_MODEL, D_VOCAB, N_HEADS, randomised


@pytest.mark.parametrize("name", FULL)
def test_all_of_it_is_offered_and_right(name: str) -> None:
    model = randomised(CLASSES[name]())
    bridge = TransformerBridge(model)
    assert not bridge.offered().not_offered, bridge.offered()
    found = compare(model, bridge)
    assert not found.wrong and not found.lacking and found.values >= 37
    assert {bridge.cfg.d_model, bridge.cfg.d_vocab} == {
        D_MODEL,
        D_VOCAB,
    } and not bridge.cfg.attn_only
    assert name == "OpenELM" or (bridge.cfg.n_heads, bridge.cfg.d_head) == (N_HEADS, D_HEAD)


@pytest.mark.parametrize("name", PART)
def test_what_of_it_is_offered_is_right_and_the_rest_has_a_reason(name: str) -> None:
    model = randomised(CLASSES[name]())
    bridge = TransformerBridge(model)
    assert set(bridge.offered().not_offered.values()) == (
        {PART[name][1]} if PART[name][1] else set()
    )
    assert PART[name][1] or {"blocks.0.hook_mixer_out"} <= bridge.hook_dict.keys()
    found = compare(model, bridge)
    assert not found.wrong and found.values > 15 and not bridge.cfg.attn_only


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSED[name][1]):
        TransformerBridge(randomised(CLASSES[name]()))


@pytest.mark.parametrize("name", [name for name in CLASSES if name not in REFUSED])
def test_what_is_inferred_is_proved(name: str) -> None:
    report = verify(TransformerBridge(randomised(CLASSES[name]())))
    assert report.passed, str(report)


@pytest.mark.parametrize(
    "name", ["nn.MultiheadAttention", "Dream", "LLaDA", "nn.TransformerEncoderLayer"]
)
def test_the_oracle_is_the_model(name: str) -> None:
    """What is computed by hand beside a class gives the logits of the class."""
    from tests.adapters.unknown_classes import shown

    model = randomised(CLASSES[name]())
    with torch.no_grad(), shown.looking(lambda at, x: x):
        by_hand = shown.logits_of(model, TOKENS)
    with torch.no_grad():
        torch.testing.assert_close(by_hand, shown.logits_of(model, TOKENS), atol=1e-4, rtol=1e-4)


#: One wrong claim of each kind that these structures have, and part of what it is refused by.
WRONG = {
    ("DeepSeek V3", "blocks: MoE: chosen by probabilities"): "every hook point fires once",
    ("DeepSeek V3", "blocks: MoE: factor times 2"): "experts are chosen and weighted as declared",
    (
        "DeepSeek V3",
        "blocks: MoE: shared expert left out",
    ): "experts are chosen and weighted as declared",
    ("old Mixtral", "blocks: MoE: factor times 2"): "experts are chosen and weighted as declared",
    (
        "Qwen MoE",
        "blocks: MoE: shared expert times 2",
    ): "experts are chosen and weighted as declared",
    ("MPT, both", "blocks: Attention: clamp left out"): "scores are queries times keys",
    ("MPT, both", "blocks: Attention: q_norm left out"): "",
    ("LLaDA", "blocks: Attention: q and k exchanged"): "",
    ("nn.TransformerEncoderLayer", "blocks: Attention: k and v exchanged"): "",
    ("softmax by hand", "blocks: Attention: v shifted by one head"): "",
    ("ChatGLM 2", "blocks: MLP: gate and up exchanged"): "act(pre) = post",
}


@pytest.mark.parametrize(("name", "change"), WRONG)
def test_a_wrong_declaration_of_it_is_refused(name: str, change: str) -> None:
    model = with_interface(randomised(CLASSES[name]()))
    report = tried(model, next(each for each in mutations(model) if each.name == change), "full")
    if isinstance(report, Exception):
        assert "as its configuration says" in str(report)
        return
    assert not report.passed
    assert WRONG[name, change] in " ".join(check.name for check in report.failed)


def test_the_facts_of_some() -> None:
    """By hand: what cfg says of directions, positions and ties."""
    facts = {
        "LLaDA": {
            "attention_dir": "bidirectional",
            "positional_embedding_type": "rotary",
            "n_key_value_heads": 2,
        },
        "Dream": {"attention_dir": "bidirectional"},
        "nanoGPT": {
            "tie_word_embeddings": True,
            "positional_embedding_type": "standard",
            "act_fn": "gelu",
        },
        "nn.TransformerEncoderLayer": {
            "positional_embedding_type": "standard",
            "attention_dir": "causal",
        },
        "MPT, both": {"positional_embedding_type": "alibi", "use_qk_norm": True},
        "phi-1": {"parallel_attn_mlp": True, "rotary_dim": 4},
        "Nemotron-H": {"act_fn": "relu2", "num_experts": 5, "experts_per_token": 2, "d_expert": 16},
        "DeepSeek V3": {"d_shared_expert": 32, "gated_mlp": True},
        "one block called several times": {"n_layers": 4},
        "two blocks in turn": {"n_layers": 4},
        "norms on both sides, capped scores": {
            "attn_scores_soft_cap": 5.0,
            "attn_scale": D_HEAD**0.5,
        },
    }
    for name, said in facts.items():
        cfg = TransformerBridge(randomised(CLASSES[name]())).cfg
        assert {field: getattr(cfg, field) for field in said} == said, name


@pytest.mark.parametrize("cls", [module_list_mixtures.OldMixtral, module_list_mixtures.DeepseekMoe])
def test_the_weights_of_experts_are_those_of_their_modules(cls: type[nn.Module]) -> None:
    model = randomised(cls())
    bridge = TransformerBridge(model)
    expert = model.model.layers[1].mlp.experts[3]
    first, up, down = expert.names
    parts = {"W_gate": first, "W_in": up, "W_out": down}
    for part, layer in parts.items():
        made = bridge.weights[f"blocks.1.mlp.experts.3.{part}.weight"]
        assert torch.equal(made, expert.get_submodule(layer).weight)


def test_padding_that_a_model_does_not_take_is_refused_before_it_runs() -> None:
    bridge = TransformerBridge(randomised(placed_otherwise.PhiSequential()))
    mask = torch.ones_like(TOKENS)
    assert torch.equal(bridge(TOKENS, attention_mask=mask), bridge(TOKENS))
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="PhiSequential takes no attention_mask"):
        bridge(TOKENS, attention_mask=mask)


def test_layers_run_alone_where_blocks_are_attributes() -> None:
    bridge = TransformerBridge(randomised(placed_otherwise.Attributes()))
    stream = bridge(TOKENS, stop_at_layer=2)
    torch.testing.assert_close(bridge(stream, start_at_layer=2), bridge(TOKENS))


def test_clamped_columns_are_never_left_out() -> None:
    """Where no column of some is found, the attention is left out: its queries are never a part of
    what they are.
    """
    for clip in (0.2, 0.7, 1.5):
        model = randomised(odd_parts.mpt(clip, False)())
        found = compare(model, TransformerBridge(model))
        assert not found.wrong, (clip, found.wrong)


def main() -> None:
    """Prints the table."""
    logging.getLogger("bridge").setLevel(logging.ERROR)
    print("| class | offered | values | effects | gradients | wrong | why not in full |")
    print("|---|---|---|---|---|---|---|")
    for name, cls in CLASSES.items():
        model = randomised(cls())
        try:
            bridge = TransformerBridge(model)
        except UnsupportedModelError as why:
            print(f"| {name} | refused | | | | | {str(why).partition(': so what')[0]} |")
            continue
        found, left = compare(model, bridge), bridge.offered().not_offered
        state = "part" if left or found.lacking else "full"
        numbers = f"{found.values} | {found.effects} | {found.gradients} | {len(found.wrong)}"
        print(f"| {name} | {state} | {numbers} | {next(iter(left.values()), '')} |")


if __name__ == "__main__":
    main()
