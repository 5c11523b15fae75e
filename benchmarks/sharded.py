"""What it costs to look into a model that two processes share, as ratios to the same model without
a bridge.

    PYTHONPATH=. torchrun --nproc-per-node 2 benchmarks/sharded.py

A Llama of d_model 512, 8 layers and 8 heads, one prompt of 128 tokens, on the CPU; the runs
alternate in one process.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from bridge import TransformerBridge

ROUNDS = 41


def runs(
    bridge: TransformerBridge, unasked: TransformerBridge, tokens: Tensor
) -> dict[str, Callable[[], object]]:
    """What is timed, of a bridge and of one that does not compare edits. The second run of the
    model is the null.
    """
    streams = [name for name in bridge.hook_dict if name.endswith("hook_resid_post")]
    heads = [name for name in bridge.hook_dict if name.endswith("hook_z")]

    def knock(z: Tensor, hook: object) -> None:
        z[:, :, 1] = 0

    def steer(x: Tensor, hook: object) -> None:
        x += 0.1

    return {
        "the model alone": lambda: bridge.original_model(tokens),
        "the model alone, once more": lambda: bridge.original_model(tokens),
        "nobody listens": lambda: bridge(tokens),
        "all residual streams cached": lambda: bridge.run_with_cache(tokens, names_filter=streams),
        "one residual stream edited": lambda: bridge.run_with_hooks(
            tokens, fwd_hooks=[(streams[3], steer)]
        ),
        "one head edited": lambda: bridge.run_with_hooks(tokens, fwd_hooks=[(heads[3], knock)]),
        "one residual stream edited, not compared": lambda: unasked.run_with_hooks(
            tokens, fwd_hooks=[(streams[3], steer)]
        ),
        "one head edited, not compared": lambda: unasked.run_with_hooks(
            tokens, fwd_hooks=[(heads[3], knock)]
        ),
        "one pattern cached": lambda: bridge.run_with_cache(
            tokens, names_filter="blocks.3.attn.hook_pattern"
        ),
        "everything cached": lambda: bridge.run_with_cache(tokens),
    }


def _load(folder: Path) -> PreTrainedModel:
    config = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    return model.eval()


def ratios(rounds: int = ROUNDS) -> dict[str, float]:
    """What each run takes, as a ratio to the model alone: the medians. All processes have to ask.

    Args:
        rounds: how many.
    """
    logging.disable_progress_bar()
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        sizes: dict[str, Any] = {
            "hidden_size": 512,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "intermediate_size": 1408,
        }
        LlamaForCausalLM(
            LlamaConfig(vocab_size=2048, num_key_value_heads=max(4, dist.get_world_size()), **sizes)
        ).save_pretrained(folder[0])
    dist.barrier()
    order = random.Random(0)
    bridge = TransformerBridge(_load(Path(folder[0])))
    tokens = torch.randint(3, 2048, (1, 128), generator=torch.Generator().manual_seed(0)).to(
        bridge.cfg.device
    )
    unasked = TransformerBridge(bridge.original_model, compare_edits=False)
    timed = runs(bridge, unasked, tokens)
    found: dict[str, list[float]] = {name: [] for name in timed}
    with torch.no_grad():
        for run in timed.values():
            run()
        for _ in range(rounds):
            took = {}
            for name, run in order.sample(list(timed.items()), len(timed)):
                dist.barrier()
                start = time.perf_counter()
                run()
                if tokens.is_cuda:
                    torch.cuda.synchronize()
                took[name] = time.perf_counter() - start
            for name, seconds in took.items():
                found[name].append(seconds / took["the model alone"])
    return {name: statistics.median(each) for name, each in found.items()}


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    dist.init_process_group("gloo")
    for name, ratio in ratios().items():
        if dist.get_rank() == 0:
            print(f"{name:<42} {ratio:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
