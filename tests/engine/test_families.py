"""Families that vLLM's Transformers backend takes: each with its points proved, and a batch that is
what each is alone.

`make engine` runs them; a start takes half a minute.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from bridge import TransformerBridge
from bridge.engine import Engine
from bridge.interventions import Add, Interventions, Scale
from tests.engine.test_engine import OPTIONS, assert_alone, prompts_of, pytestmark  # noqa: F401

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 199,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEAD = {**LLAMA, "head_dim": 32}
FAMILIES = {
    "GPT2Config": {
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 2,
        "vocab_size": 199,
        "n_positions": 256,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "MistralConfig": {**LLAMA, "sliding_window": None},
    "Qwen2Config": LLAMA,
    "Qwen3Config": HEAD,
    "GemmaConfig": HEAD,
    "Gemma2Config": {**HEAD, "query_pre_attn_scalar": 32, "sliding_window": 32},
    "Gemma3TextConfig": {**HEAD, "query_pre_attn_scalar": 32, "sliding_window": 32},
    "Phi3Config": LLAMA,
    "GPTNeoXConfig": {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"},
    "Olmo2Config": LLAMA,
    "GraniteConfig": {
        **LLAMA,
        "logits_scaling": 3.0,
        "residual_multiplier": 0.7,
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.2,
    },
    "MixtralConfig": {
        **LLAMA,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
}
#: The points that every one of them has.
EVERY = [
    "hook_resid_pre",
    "hook_resid_post",
    "hook_attn_out",
    "hook_mlp_out",
    "attn.hook_v",
    "attn.hook_z",
    "attn.hook_pattern",
]


#: What Granite's blocks multiply before they add it: no column of a module's output.
TIMES = ["hook_attn_out", "hook_mlp_out"]
#: The router's choice in a mixture of experts.
MIXTURE = ["hook_topk_weights", "hook_expert_indices"]


def saved(config: transformers.PretrainedConfig, folder: Path) -> torch.nn.Module:
    """A tiny model with random weights, in a folder."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    plain.save_pretrained(folder)
    return plain


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family(name: str, tmp_path: Path) -> None:
    plain = saved(getattr(transformers, name)(**FAMILIES[name]), tmp_path)
    bridge = TransformerBridge(plain, None)
    chosen = [
        f"blocks.{layer}.mlp.{point}"
        for layer in range(2)
        for point in MIXTURE
        if "Mixtral" in name
    ]
    points = dict.fromkeys([*(hook.name for hook in bridge.select_hooks(None)), *chosen])
    engine = Engine(tmp_path, list(points), rows=8, **OPTIONS)
    try:
        here = [point for point in EVERY if name != "GraniteConfig" or point not in TIMES]
        wanted = [f"blocks.{layer}.{point}" for layer in range(2) for point in here]
        assert {*wanted, *chosen} <= set(engine.offered()), {
            p: engine.refused.get(p) for p in [*wanted, *chosen]
        }
        drawn = random.Random(0)
        prompts = prompts_of(drawn, 8)
        points = drawn.choices(
            [point for point in wanted if "hook_resid" in point or "_out" in point], k=8
        )
        vectors = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
        each = [
            Interventions([(point, Add(vector, 0.5))])
            for point, vector in zip(points, vectors, strict=True)
        ]
        assert_alone(engine, bridge, prompts, each, 5, [*wanted, *chosen])
        if chosen:  # which experts a token goes to, and how much of each
            each = [
                Interventions([(chosen[i % 2 * 2], Scale(torch.tensor([0.1 * i, 1.0])))])
                for i in range(8)
            ]
            assert_alone(engine, bridge, prompts, each, 5, [*wanted, *chosen])
            with pytest.raises(
                ValueError, match="numbers of the experts that were chosen, which an engine shows"
            ):
                engine.generate(prompts[:1], 1, [[(chosen[1], Scale(2.0))]])
    finally:
        engine.close()


@pytest.mark.slow
def test_a_model_that_is_another_in_vllm_is_refused(tmp_path: Path) -> None:
    """vLLM is given another factor of the residual than the model on disk has; that factor itself
    is in no column.
    """
    config = transformers.GraniteConfig(
        **LLAMA, attention_multiplier=0.2, residual_multiplier=0.7, logits_scaling=2.0
    )
    saved(config, tmp_path)
    other = {"hf_overrides": {"residual_multiplier": 0.5}}
    engine = Engine(
        tmp_path, ["blocks.0.hook_resid_pre", "blocks.0.hook_mlp_out"], rows=8, **other, **OPTIONS
    )
    engine.close()
    assert engine.offered() == []
    assert "the effect of an edit there is off" in engine.refused["blocks.0.hook_resid_pre"]
    assert "computed from a tensor" in engine.refused["blocks.0.hook_mlp_out"]
