"""Wrong declarations are refused, each by a claim that it breaks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from adapters import Architecture, Attention, Block, Norm, verify
from adapters.norms import LAYER_NORM
from adapters.proofs.facts import LEFT_OUT as LEFT_OUT
from adapters.proofs.feed_forward import CHOICE, GATED
from adapters.proofs.feed_forward import CLAIM as NORMS
from adapters.proofs.projections import CLAIM as COLUMNS
from adapters.proofs.scores import MASK, SCORES, VALUES
from adapters.proofs.stream import CHAIN, ENDS, LOGITS, READS
from adapters.registry import declaration_for
from bridge import TransformerBridge
from tests.adapters.mutations import NOT_CLAIMS, Mutation, declared_as, mutations, tried
from tests.adapters.test_verify_all import ALIKE, OTHER, USUAL, tiny
from tests.tiny_models import tiny_model

FIRES = "every hook point fires once, with its declared shape"
MHA = "llama-mha-tied"

#: The seven wrong Llamas of before, and what each is refused by.
SEVEN = {
    "blocks: Attention: q and k exchanged": {COLUMNS, SCORES},
    "blocks: Attention: k and v exchanged": {COLUMNS, SCORES, VALUES},
    "blocks: MLP: gate and up exchanged": {GATED},
    "blocks: MLP: gate left out": {GATED, LEFT_OUT},
    "blocks: Attention: rotary is not": {SCORES},
    "blocks: MLP: parallel": {READS},
    "blocks: Attention: pre norm left out": {READS, LEFT_OUT},
}
#: One change of each sort, and a claim that it breaks.
EACH = {
    ("gpt2", "blocks: Attention: q shifted by one head"): COLUMNS,
    ("gpt2", "blocks: Attention: v doubled"): VALUES,
    ("gpt2", "blocks: MLP: factor times 2.0"): "resid_mid + mlp_out = resid_post",
    ("gpt2", "cfg.act_fn = 'gelu'"): GATED,
    ("gpt2", "cfg.scale_attn_by_inverse_layer_idx = True"): SCORES,
    ("gpt2", "positions of the embedding left out"): ENDS,
    ("bloom", "embedding times 2"): ENDS,
    ("gpt2", "blocks: second output"): CHAIN,
    ("gpt2", "blocks: longer output"): CHAIN,
    ("gpt_neo", "cfg.window_size = 5"): MASK,
    ("gpt_neo", "cfg.use_attn_scale = True"): SCORES,
    ("gptj", "cfg.rotary_adjacent_pairs = False"): SCORES,
    ("gptj", "cfg.rotary_dim = 6"): SCORES,
    ("gptj", "blocks: MLP: sequential for parallel"): "resid_mid + mlp_out = resid_post",
    ("bert", "cfg.attention_dir = 'causal'"): MASK,
    ("bert", "blocks: Attention: stream_norm norm left out"): LEFT_OUT,
    ("qwen3-gqa", "blocks: Attention: q_norm left out"): LEFT_OUT,
    ("qwen3-gqa", "blocks: Attention: q_norm and k_norm exchanged"): FIRES,
    ("gemma2-gqa", "blocks: MLP: post: post_feedforward_layernorm is RMS"): NORMS,
    ("gemma2-gqa", "cfg.attn_scores_soft_cap = 5.0"): SCORES,
    ("gemma2-gqa", "cfg.output_logits_soft_cap = -1.0"): LOGITS,
    ("gemma2-gqa", "soft cap left out"): LOGITS,
    ("gpt2", "factor_in times 2"): ENDS,
    ("gpt2", "another soft cap"): LOGITS,
    ("bert", "head before the logits left out"): ENDS,
    ("bert", "norm of the embedding left out"): ENDS,
    ("gemma3-gqa", "cfg.rotary_base_local = 1000.0"): SCORES,
    ("gpt_oss-gqa", "blocks: Attention: sinks left out"): FIRES,
    ("gpt_oss-gqa", "blocks: MoE: chosen by probabilities"): CHOICE,
    ("mixtral-gqa", "blocks: MoE: chosen by logits"): CHOICE,
    ("qwen2_moe-gqa", "blocks: MoE: shared gate left out"): CHOICE,
    ("qwen2_moe-gqa", "blocks: MoE: shared: gate and up exchanged"): GATED,
    ("t5", "cfg.relative_attention_max_distance = 256"): SCORES,
    ("t5", "cfg.relative_attention_max_distance = 127"): SCORES,
    ("gemma2-gqa", "cfg.attn_scores_soft_cap = 50.24999999999999"): SCORES,
    ("gpt2", "blocks: Attention: q and k shifted by one column alike"): COLUMNS,
    ("bert", "blocks: Attention: q and k shifted by one column alike"): COLUMNS,
}


def found(case: str, name: str) -> tuple[PreTrainedModel, Mutation]:
    model = tiny(case)
    return model, next(mutation for mutation in mutations(model) if mutation.name == name)


@pytest.mark.parametrize("name", SEVEN)
def test_the_seven_wrong_llamas(name: str) -> None:
    report = tried(*found(MHA, name), level="full")
    assert not isinstance(report, Exception)
    assert SEVEN[name] <= {check.name for check in report.failed}, str(report)


@pytest.mark.parametrize(("case", "name"), EACH)
def test_one_of_each_sort(case: str, name: str) -> None:
    report = tried(
        *found(case, name), level="full" if EACH[case, name] == COLUMNS else "quick first"
    )
    assert not isinstance(report, Exception)
    assert EACH[case, name] in {check.name for check in report.failed}, str(report)


def test_every_fact_is_claimed_or_is_none() -> None:
    """A field of cfg that nobody changes is one that nobody proves."""
    changed: set[str] = set()
    for case in ("t5", "gemma3-gqa", "qwen2_moe-gqa", "gpt2"):
        names = (mutation.name for mutation in mutations(tiny(case)) if not mutation.same)
        changed |= {
            name.removeprefix("cfg.").split(" ")[0] for name in names if name.startswith("cfg.")
        }
    cfg = TransformerBridge(tiny("gpt2")).cfg.to_dict().keys() - {"device", "dtype", "n_params"}
    assert cfg - NOT_CLAIMS.keys() - changed == set()


#: Of what only some families claim, one change of each sort.
NEWER = {
    ("afmoe", "blocks: MoE: factor times 2"): CHOICE,
    ("laguna", "blocks: Attention: gate through another function"): VALUES,
    ("granite_swa", "blocks: Attention: no SinkGate of z"): VALUES,
    ("granite_swa", "embedding times 2"): ENDS,
    ("granite", "factor_out left out"): LOGITS,
    ("cohere", "factor_out left out"): LOGITS,
    ("falcon_h1", "factor_out left out"): LOGITS,
    ("minicpm3", "factor_in left out"): ENDS,
    ("mbart", "norm of the embedding left out"): ENDS,
    ("blenderbot-small", "norm of the embedding left out"): ENDS,
    ("modernbert-decoder", "head before the logits left out"): ENDS,
    ("megatron-bert", "head before the logits left out"): ENDS,
    ("llama", "blocks: final norm left out"): ENDS,
    ("deepseek_v3", "blocks: Attention: latents exchanged"): SCORES,
    ("hunyuan_v1_moe", "blocks: Attention: norms before or behind the rotation"): SCORES,
}


@pytest.mark.parametrize(("model_type", "name"), NEWER)
def test_what_only_some_families_claim(model_type: str, name: str) -> None:
    model = tiny_model(model_type)
    mutation = next(each for each in mutations(model) if each.name == name)
    report = tried(model, mutation)
    assert not isinstance(report, Exception)
    assert NEWER[model_type, name] in {check.name for check in report.failed}, str(report)


def accepted(model: PreTrainedModel) -> list[str]:
    """The changes that make another model, and are not refused."""
    found = []
    for mutation in mutations(model):
        if not mutation.same:
            report = tried(model, mutation)
            if not isinstance(report, Exception) and report.passed:
                found.append(mutation.name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["granite_swa", "hyperclovax"])
def test_every_change_of_a_relative_is_refused(model_type: str) -> None:
    assert not accepted(tiny_model(model_type))


@pytest.mark.slow
@pytest.mark.parametrize("case", [*USUAL, *ALIKE, *OTHER])
def test_every_change_is_refused(case: str) -> None:
    assert not accepted(tiny(case))


def test_a_choice_is_the_same_where_the_experts_are_given_it() -> None:
    """So "router returns logits" is no wrong declaration of a mixture whose router returns its
    choice.
    """
    model, mutation = found("qwen2_moe-gqa", "blocks: MoE: router returns logits")
    assert mutation.same
    declared, tokens = TransformerBridge(model), torch.arange(3, 21).reshape(2, 9)
    with declared_as(mutation.declared):
        other = TransformerBridge(model)
    names = [name for name in declared.hook_dict if ".mlp." in name]
    caches = [bridge.run_with_cache(tokens, names_filter=names)[1] for bridge in (declared, other)]
    assert names and all(torch.equal(*(cache[name] for cache in caches)) for name in names)
    for name in ("router_logits", "expert_weights", "topk_weights", "expert_indices"):
        hook = (f"blocks.1.mlp.hook_{name}", lambda x, hook: x.flip(-1))
        runs = [bridge.run_with_hooks(tokens, fwd_hooks=[hook]) for bridge in (declared, other)]
        assert torch.equal(*runs) and not torch.equal(runs[0], model(tokens).logits), name


def changed_step(model: PreTrainedModel, index: int, **fields: Any) -> Architecture:
    declared = declaration_for(model)
    steps = list(declared.stack.block.steps)
    steps[index] = replace(steps[index], **fields)
    return replace(declared, stacks=(replace(declared.stack, block=Block(tuple(steps))),))


def test_it_says_what_was_seen() -> None:
    model = tiny(MHA)
    part = declaration_for(model).stack.block.steps[0].part
    assert isinstance(part, Attention)
    with declared_as(changed_step(model, 0, part=replace(part, q=part.k, k=part.q))):
        (check,) = [
            check for check in verify(TransformerBridge(model)).failed if check.name == COLUMNS
        ]
    assert "blocks.0.attn.hook_q: nothing of it reaches the scores" in check.detail
    with declared_as(changed_step(model, 1, pre=Norm("post_attention_layernorm", LAYER_NORM))):
        (check,) = [
            check for check in verify(TransformerBridge(model)).failed if check.name == NORMS
        ]
    assert (
        "post_attention_layernorm computes an RMS norm, and a layer norm is declared"
        in check.detail
    )


def test_initial_values_are_proved_on_a_twin() -> None:
    """Norms of one and biases of zero are proved on a probe copy, and the model stays as it is."""
    config = tiny("gpt2").config
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = type(tiny("gpt2"))(config).eval()
    before = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    report = verify(TransformerBridge(model))
    assert report.passed, str(report)
    assert "a probe copy with the model's parameters, random numbers in" in str(report)
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0] and torch.equal(parameter, before[name][1])
