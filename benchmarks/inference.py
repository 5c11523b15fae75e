"""What it takes to infer, and prove, what plays which part in a model; and to prove it again when
it was kept.

    [THREADS=N] python benchmarks/inference.py [NAME ...]

Seconds, and the memory above the model's own at the highest (Linux), each model in a process of its
own, where it is wrapped three times: the first infers (and imports what that needs), the others
read what was kept. Wide layers of half precision stand for a model of 7 billion parameters, which
has 32 of them: two counts of layers say what one more takes.
"""

from __future__ import annotations

import logging
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable

import torch
import transformers
from transformers import (
    BambaConfig,
    HubertConfig,
    LlamaConfig,
    Olmo2Config,
    PreTrainedConfig,
    Qwen3MoeConfig,
    ViTConfig,
    Wav2Vec2Config,
)

from bridge import TransformerBridge


def bamba(layers: int, attention: list[int]) -> PreTrainedConfig:
    """A hybrid of so many layers, some of them with attention."""
    return BambaConfig(
        hidden_size=1024,
        num_hidden_layers=layers,
        attn_layer_indices=attention,
        num_attention_heads=16,
        num_key_value_heads=8,
        intermediate_size=3072,
        mamba_n_heads=32,
        mamba_d_head=64,
        mamba_expand=2,
        mamba_d_state=64,
        mamba_chunk_size=16,
        vocab_size=32000,
    )


WIDE = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 11008,
}
#: Each model: its class, its configuration, and the type of its weights.
MODELS: dict[str, tuple[str, Callable[[], PreTrainedConfig], torch.dtype]] = {
    "Llama": (
        "LlamaForCausalLM",
        lambda: LlamaConfig(
            hidden_size=1024,
            num_hidden_layers=18,
            num_attention_heads=16,
            num_key_value_heads=16,
            intermediate_size=2816,
            vocab_size=32000,
        ),
        torch.float32,
    ),
    "post-norm": (
        "Olmo2ForCausalLM",
        lambda: Olmo2Config(
            hidden_size=1024,
            num_hidden_layers=18,
            num_attention_heads=16,
            num_key_value_heads=4,
            intermediate_size=2816,
            vocab_size=32000,
        ),
        torch.float32,
    ),
    "mixture": (
        "Qwen3MoeForCausalLM",
        lambda: Qwen3MoeConfig(
            hidden_size=768,
            num_hidden_layers=8,
            num_attention_heads=12,
            num_key_value_heads=4,
            head_dim=64,
            moe_intermediate_size=768,
            num_experts=16,
            num_experts_per_tok=4,
            vocab_size=32000,
        ),
        torch.float32,
    ),
    "hybrid": ("BambaForCausalLM", lambda: bamba(12, [3, 9]), torch.float32),
    "Llama of 1.5 billion": (
        "LlamaForCausalLM",
        lambda: LlamaConfig(
            hidden_size=2048,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            intermediate_size=8192,
            vocab_size=128256,
        ),
        torch.bfloat16,
    ),
    "vocabulary of 262,144": (
        "LlamaForCausalLM",
        lambda: LlamaConfig(
            hidden_size=1024,
            num_hidden_layers=12,
            num_attention_heads=16,
            num_key_value_heads=4,
            intermediate_size=2816,
            vocab_size=262144,
        ),
        torch.float32,
    ),
    "hybrid of 537 million": ("BambaForCausalLM", lambda: bamba(30, [9, 18, 27]), torch.float32),
    "images (ViT-B)": ("ViTForImageClassification", ViTConfig, torch.float32),
    "sound (Wav2Vec2)": ("Wav2Vec2Model", Wav2Vec2Config, torch.float32),
    "sound (HuBERT)": ("HubertModel", HubertConfig, torch.float32),
    "7B, 2 layers": (
        "LlamaForCausalLM",
        lambda: LlamaConfig(num_hidden_layers=2, **WIDE),
        torch.bfloat16,
    ),
    "7B, 8 layers": (
        "LlamaForCausalLM",
        lambda: LlamaConfig(num_hidden_layers=8, **WIDE),
        torch.bfloat16,
    ),
}


def memory(of: str) -> float:
    """What this process holds (``VmRSS``), or held at the highest (``VmHWM``), in megabytes."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(of)) / 1024


def model_of(name: str) -> transformers.PreTrainedModel:
    """One of the models, with random weights."""
    cls, config, dtype = MODELS[name]
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(0)
        return getattr(transformers, cls)(config()).eval()
    finally:
        torch.set_default_dtype(default)


def measure(name: str) -> None:
    """Prints the row of one model."""
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(int(os.environ.get("THREADS", "2")))
    model = model_of(name)
    if name.startswith("7B"):
        from adapters.observe import probe_copy

        probe_copy.ROOM = 0  # as of a model that has no room in float32
    parameters = sum(p.numel() for p in model.parameters())
    own = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
    seconds, processor = [], []
    before = memory("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    for _ in range(3):
        wall, cpu = time.perf_counter(), time.process_time()
        bridge = TransformerBridge(model, automatic="always")
        seconds.append(time.perf_counter() - wall)
        processor.append(time.process_time() - cpu)
        if len(seconds) == 1:
            more = memory("VmHWM") - before
    print(
        f"| {name} | {parameters / 1e6:.0f} M | {len(bridge.hook_dict)} | {seconds[0]:.1f} |"
        f" {processor[0]:.1f} | {more:.0f} MB, {1 + more / own:.2f} | {min(seconds[1:]):.2f} |"
        f" {min(processor[1:]):.2f} |",
        flush=True,
    )


def main(names: list[str]) -> None:
    print(
        "| model | parameters | points | inferred, s | processor, s | memory more, ratio | again, s"
        " | processor, s |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name in names or MODELS:
        with tempfile.TemporaryDirectory() as cache:
            around = {**os.environ, "TRANSFORMER_BRIDGE_CACHE": cache}
            subprocess.run([sys.executable, __file__, "--one", name], check=True, env=around)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        measure(sys.argv[2])
    else:
        main(sys.argv[1:])
