"""The model that engines are tried with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bridge import TransformerBridge


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random weights, with heads of a size that vLLM's kernel on processors
    has.
    """
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=199,
        max_position_embeddings=256,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(place := tmp_path_factory.mktemp("models") / "llama")
    return place


@pytest.fixture(scope="module")
def bridge(folder: Path) -> TransformerBridge:
    return TransformerBridge(
        LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), None
    )
