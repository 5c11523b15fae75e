"""64 requests of mixed lengths: one by one, in a padded batch, by transformers' own continuous
batching, and by ours.

Ours with an edit of its own for each request, with one captured activation, and with nothing. The
ways take turns in one process; seconds are the best (on a processor, of its own time), the ratio to
transformers' own is the median. With --compiled, plain requests are also compiled, as transformers
does it; with --prefix N all prompts begin alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import transformers
from transformers import CompileConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from bridge import TransformerBridge
from bridge.generation.batch import capacity_for
from bridge.interventions import Add


def model(width: int, device: str) -> TransformerBridge:
    """A Llama of six layers with random weights, which never ends a text."""
    config = LlamaConfig(
        hidden_size=width,
        num_hidden_layers=6,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        intermediate_size=width * 11 // 4,
        vocab_size=4096,
        max_position_embeddings=512,
        pad_token_id=0,
    )
    made = LlamaForCausalLM(config).eval().to(device)
    made.generation_config.eos_token_id = None
    return TransformerBridge(made)


def ways(
    bridge: TransformerBridge, prompts: list[list[int]], new: int, compiled: bool
) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    core, device = bridge.core, bridge.core.device
    point = f"blocks.{(bridge.cfg.n_layers - 1) // 2}.hook_resid_post"
    greedy = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": new, "min_new_tokens": new}
    each = [[(point, Add(torch.randn(bridge.cfg.d_model, device=device)))] for _ in prompts]
    ours = {"do_sample": False, "stop_at_eos": False, "verbose": False}

    def one_by_one() -> None:
        for prompt in prompts:
            core.generate(torch.tensor([prompt], device=device), **greedy)

    def padded() -> None:
        width = max(map(len, prompts))
        tokens, mask = torch.zeros(2, len(prompts), width, dtype=torch.long, device=device)
        for row, prompt in enumerate(prompts):
            tokens[row, -len(prompt) :], mask[row, -len(prompt) :] = (
                torch.tensor(prompt, device=device),
                1,
            )
        core.generate(tokens, attention_mask=mask, **greedy)

    varlen = CompileConfig(fullgraph=False, dynamic=True, mode="default")

    def own(compile_config: CompileConfig | None = None) -> None:
        config = GenerationConfig(
            max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        pages = capacity_for(core, [len(prompt) for prompt in prompts], new).config(
            len(prompts), True
        )
        pages.varlen_compile_config = compile_config
        core.generate_batch(
            prompts, generation_config=config, continuous_batching_config=pages, warmup=False
        )

    def of_ours(**more: object) -> Callable[[], object]:
        return lambda: list(bridge.generate_batch(prompts, new, **ours, **more))

    def of_ours_compiled() -> None:
        core.generation_config.compile_config = varlen
        try:
            of_ours()()
        finally:
            core.generation_config.compile_config = None

    both = {
        "transformers', compiled": lambda: own(varlen),
        "generate_batch, compiled": of_ours_compiled,
    }
    return {
        "one by one": one_by_one,
        "padded batch": padded,
        "transformers' generate_batch": own,
        "the same once more": own,
        "generate_batch": of_ours(),
        "generate_batch, one point kept": of_ours(capture=point),
        "generate_batch, an edit for each": of_ours(each=each),
        **(both if compiled else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument(
        "--prefix", type=int, default=0, help="so many tokens that all prompts begin with"
    )
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    bridge = model(given.width, given.device)
    prefix = torch.randint(3, 4096, (given.prefix,)).tolist()
    prompts = [
        prefix + torch.randint(3, 4096, (int(n),)).tolist() for n in torch.randint(4, 121, (64,))
    ]
    jobs = ways(bridge, prompts, given.new, given.compiled)
    clock = (
        time.process_time if given.device == "cpu" else time.perf_counter
    )  # of all threads: others may be busy
    took: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(given.turns + 1):  # the first warms up
        for name, job in jobs.items():
            began = clock()
            job()
            if given.device == "cuda":
                torch.cuda.synchronize()
            if turn:
                took[name].append(clock() - began)
    print(
        f"{len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens,"
        f" {given.new} new each,"
    )
    print(f"d_model {given.width}, 6 layers, {given.device}, {given.threads} threads")
    own = took["transformers' generate_batch"]
    for name, seconds in took.items():
        ratios = [mine / theirs for mine, theirs in zip(seconds, own, strict=True)]
        spread = f"{statistics.median(ratios):5.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(
            f"  {name:34s} {min(seconds):7.2f} s {64 * given.new / min(seconds):8.0f} tokens/s  "
            f" {spread}"
        )


if __name__ == "__main__":
    main()
