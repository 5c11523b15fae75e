"""64 requests of mixed lengths in vLLM: plain, with hook points that nobody asks, with a capture
and an edit for each.

    python benchmarks/engine.py [--eager] [--turns 5] [--width 256] [--points 1] [--harvest]

Both engines stand at once and take turns. Seconds are those of processors, of this process and
those that it started, so that a busy machine counts little; a ratio is the median over turns of
plain vLLM's to ours. (`generate_batch` needs a later transformers than vLLM 0.32 takes, so it
cannot be timed beside them.) `make engine` runs it.

With --harvest: documents of 20 to 300 tokens, harvested by the engine and by a bridge (of the same
folder, in float32).
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import torch
import vllm
from transformers import LlamaConfig, LlamaForCausalLM

from bridge import TransformerBridge
from bridge.engine import Engine
from bridge.harvest import harvest
from bridge.interventions import Add

LAYERS, NEW, REQUESTS = 6, 16, 64


def save_model(folder: Path, width: int) -> None:
    """A Llama with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=LAYERS,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        vocab_size=1024,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def spent() -> float:
    """Seconds that processors worked for this process, and for those that it started."""
    own = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (own, *own.children(recursive=True)))


def timed(ways: dict[str, Callable[[], object]], turns: int) -> dict[str, list[float]]:
    """Seconds of each way in each turn, but for the first."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, way in ways.items():
            begin = spent()
            way()
            if turn:
                found[name].append(spent() - begin)
    return found


def harvests(width: int, eager: bool, turns: int) -> None:
    """Measures `harvest` of an engine and of a bridge, and prints a table."""
    drawn, point = random.Random(0), f"blocks.{LAYERS - 1}.hook_resid_post"
    documents = [
        [drawn.randrange(3, 1000) for _ in range(drawn.randint(20, 300))] for _ in range(200)
    ]
    tokens = sum(map(len, documents))
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder) / "model", width)
        engine = Engine(
            f"{folder}/model",
            [point],
            dtype=torch.float32,
            enforce_eager=eager,
            max_model_len=256,
            max_num_batched_tokens=4096,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.1,
        )
        bridge = TransformerBridge(LlamaForCausalLM.from_pretrained(f"{folder}/model").eval(), None)
        number = count()

        def made(model: Engine | TransformerBridge, pack: bool) -> Callable[[], object]:
            out = f"{folder}/out"
            return lambda: harvest(
                model,
                documents,
                hook_points=[point],
                out=f"{out}{next(number)}",
                context_size=128,
                pack=pack,
            )

        ways = {
            f"{name}, {'packed' if pack else 'a document in each input'}": made(model, pack)
            for pack in (True, False)
            for name, model in (("bridge", bridge), ("engine", engine))
        }
        found = timed(ways, turns)
        engine.close()
    how = "eager" if eager else "compiled"
    print(f"\n{how}, {LAYERS} layers of {width}; {tokens} tokens of {len(documents)} documents")
    for name, seconds in found.items():
        middle = statistics.median(seconds)
        rate = f"{tokens / middle:.0f} tokens a second"
        print(f"{name:48} {middle:.3f} s ({min(seconds):.3f} to {max(seconds):.3f}), {rate}")


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument(
        "--points", type=int, default=1, help="in how many layers there is a hook point"
    )
    parser.add_argument("--harvest", action="store_true", help="time harvests in place of requests")
    given = parser.parse_args()
    if given.harvest:
        return harvests(given.width, given.eager, given.turns)
    drawn = random.Random(3)
    prompts = [
        [drawn.randrange(3, 1000) for _ in range(drawn.randint(4, 100))] for _ in range(REQUESTS)
    ]
    points = [f"blocks.{layer}.hook_resid_post" for layer in range(given.points)]
    options: dict[str, Any] = {
        "enforce_eager": given.eager,
        "max_model_len": 256,
        "max_num_seqs": REQUESTS,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.1,
    }
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), given.width)
        plain = vllm.LLM(
            folder, dtype="float32", model_impl="transformers", skip_tokenizer_init=True, **options
        )
        ours = Engine(folder, points, dtype=torch.float32, rows=REQUESTS, **options)
        assert ours.offered() == points, ours.refused
        greedy = vllm.SamplingParams(
            temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        each = [[(point, Add(0.1 * torch.randn(given.width))) for point in points] for _ in prompts]

        def engine(**more: Any) -> Callable[[], object]:
            return lambda: ours.generate(prompts, NEW, stop_at_eos=False, **more)

        ways = {
            "plain vLLM": lambda: plain.generate(asked, greedy, use_tqdm=False),
            "ours, nothing asked": engine(),
            "ours, an edit for each": engine(each=each),
            "ours, a capture": engine(capture=points),
            "ours, a capture and an edit for each": engine(each=each, capture=points),
        }
        found = timed(ways, given.turns)
        ours.close()
    how, tokens = "eager" if given.eager else "compiled", sum(map(len, prompts)) + REQUESTS * NEW
    print(
        f"\n{how}, {LAYERS} layers of {given.width}, {len(points)} points; {tokens} tokens of"
        f" {REQUESTS} requests"
    )
    for name, seconds in found.items():
        ratios = [a / b for a, b in zip(found["plain vLLM"], seconds, strict=True)]
        print(
            f"{name:48} {statistics.median(seconds):.3f} s,"
            f" {tokens / statistics.median(seconds):.0f} tokens a second,"
            f" {statistics.median(ratios):.2f} of plain ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
