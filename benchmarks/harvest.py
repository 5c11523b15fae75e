"""What harvesting costs: above the bare forward, on Ray, when read back, and beside SAELens.

    python benchmarks/harvest.py                      # everything that is installed
    python benchmarks/harvest.py --device cuda        # the forward on a GPU
    python benchmarks/harvest.py --only forward

GPT-2's small size with random weights, one residual point, float16 shards. Ratios are taken of runs
that alternate in one process, and medians of them are printed. ``saelens`` needs sae-lens, which
wants an environment of its own (transformer-lens); ``ray`` needs the extra of that name.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from bridge import TransformerBridge
from bridge.embedded import MODEL_DIR
from bridge.harvest import Activations, harvest

LAYER = 5
POINT = f"blocks.{LAYER}.hook_resid_post"
CONTEXT, BATCH = 128, 16


def model(device: str) -> Any:
    """GPT-2's small size, random weights."""
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval().to(device)


def rows(count: int) -> list[list[int]]:
    """Random inputs of full length."""
    return torch.randint(
        1, 50000, (count, CONTEXT), generator=torch.Generator().manual_seed(1)
    ).tolist()


def wait(device: str) -> None:
    """Until the device has done what it was told."""
    if device != "cpu":
        torch.cuda.synchronize()


def timed(job: Callable[[], object], device: str) -> tuple[float, float]:
    """Seconds that a job takes, and seconds of all processors."""
    begin, used = time.perf_counter(), time.process_time()
    job()
    wait(device)
    return time.perf_counter() - begin, time.process_time() - used


def forward(device: str, rounds: int, batches: int) -> None:
    """A harvest beside the bare forward to the last needed layer: the model, its later blocks and
    head cut off.
    """
    whole = model(device)
    bridge = TransformerBridge(whole)
    bare = model(device).transformer
    bare.h = bare.h[: LAYER + 1]
    bare.ln_f = torch.nn.Identity()
    batch = BATCH if device == "cpu" else 256
    source = rows(batch * batches)
    with tempfile.TemporaryDirectory() as folder:

        def plain() -> None:
            with torch.no_grad():
                for place in range(0, len(source), batch):
                    bare(
                        torch.tensor(source[place : place + batch], device=device), use_cache=False
                    )

        def ours(number: int) -> None:
            harvest(
                bridge,
                source,
                hook_points=[POINT],
                out=f"{folder}/{number}",
                context_size=CONTEXT,
                batch_size=batch,
                prepend_bos=False,
                tokens_per_shard=CONTEXT * batch * 4,
            )

        plain()
        ours(-1)
        wall, cpu, rates = [], [], []
        for number in range(rounds):
            first, second, third = (
                timed(plain, device),
                timed(lambda number=number: ours(number), device),
                timed(plain, device),
            )
            wall.append(2 * second[0] / (first[0] + third[0]))
            cpu.append(2 * second[1] / (first[1] + third[1]))
            tokens = len(source) * CONTEXT
            rates.append((tokens / second[0], 2 * tokens / (first[0] + third[0])))
    print(
        f"forward, {device}: {tokens:,} tokens a round, {rounds} rounds, blocks 0 to {LAYER},"
        f" batches {batch}x{CONTEXT}"
    )
    print(
        f"  time of a harvest / time of the bare forward: {statistics.median(wall):.3f}"
        f" ({spread(wall)})"
    )
    print(
        f"  the same in CPU time, which other processes disturb less: {statistics.median(cpu):.3f}"
        f" ({spread(cpu)})"
    )
    harvested, bared = (statistics.median(rate) for rate in zip(*rates, strict=True))
    print(f"  tokens/s: harvest {harvested:,.0f}, bare {bared:,.0f}")


def spread(values: list[float]) -> str:
    """The smallest and largest value."""
    return f"{min(values):.3f} to {max(values):.3f}"


def reading(count: int) -> None:
    """Shuffled batches of 4096 x 768 in float16, from files that were written before."""
    with tempfile.TemporaryDirectory() as folder:
        small = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=12)).eval()
        source = torch.randint(
            1, 50000, (count // CONTEXT, CONTEXT), generator=torch.Generator().manual_seed(1)
        )
        bridge, start, used = TransformerBridge(small), time.perf_counter(), time.process_time()
        report = harvest(
            bridge,
            source,
            hook_points=["hook_embed"],
            out=folder,
            context_size=CONTEXT,
            prepend_bos=False,
            tokens_per_shard=2**16,
        )
        seconds, used = time.perf_counter() - start, time.process_time() - used
        print(
            f"writing, where the model only looks up embeddings: {report.tokens / seconds:,.0f}"
            " tokens/s",
            end=", ",
        )
        print(
            f"{report.size / seconds / 1e6:,.0f} MB/s with fsync; {report.tokens / used:,.0f}"
            " tokens per CPU second"
        )
        acts = Activations(folder)
        print(
            f"reading: {len(acts):,} rows of 768 x float16, batches of 4096, in"
            f" {len(acts.manifest.shards)} shards"
        )
        for name, kw in {
            "shuffled": {"shuffle": True, "memory": 2**28},
            "in order": {},
        }.items():
            rates = []
            for epoch in range(5):
                start, seen = time.perf_counter(), 0
                for batch in acts.batches(4096, columns=["hook_embed"], epoch=epoch, **kw):
                    seen += len(batch["hook_embed"])
                rates.append(seen / (time.perf_counter() - start))
            print(
                f"  {name}: {statistics.median(rates):,.0f} rows/s ({min(rates):,.0f} to"
                f" {max(rates):,.0f})"
            )
    print(
        "  largest resident memory of this process:"
        f" {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB"
    )


def ray_scaling(rounds: int, batches: int) -> None:
    """Two workers with a core each, beside one: from one whole shard to a later one, without
    starting up.
    """
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    source = rows(BATCH * batches)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "model")
        model("cpu").save_pretrained(place)
        rates: dict[int, list[float]] = {1: [], 2: []}
        for number in range(rounds):
            for workers in rates:
                out = Path(folder, f"{number}-{workers}")
                harvest(
                    str(place),
                    source,
                    hook_points=[POINT],
                    out=out,
                    context_size=CONTEXT,
                    batch_size=4,
                    prepend_bos=False,
                    tokens_per_shard=CONTEXT * 4,
                    engine="ray",
                    workers=workers,
                )
                # By when shards were written, but for the first (workers start) and the last (one
                # is idle).
                times = sorted(file.stat().st_mtime for file in out.glob("shard-*"))[
                    2 * workers : -workers
                ]
                rates[workers].append((len(times) - 1) * CONTEXT * 4 / (times[-1] - times[0]))
    ray.shutdown()
    ratio = statistics.median(two / one for one, two in zip(*rates.values(), strict=True))
    medians = {workers: statistics.median(values) for workers, values in rates.items()}
    print(
        f"ray: one worker {medians[1]:,.0f} tokens/s, two {medians[2]:,.0f}; ratio {ratio:.2f}"
        f" (median of {rounds})"
    )


#: What SAELens is compared on: blocks, of which the first so many are needed; heads; width;
#: positions.
SHAPES = {
    "GPT-2 small, six blocks": (12, LAYER + 1, 12, 768, 1024),
    "one block, d1024 (tiny-stories-1L-21M, which SAELens' tutorial harvests)": (
        1,
        1,
        16,
        1024,
        2048,
    ),
    "one block, d64": (1, 1, 1, 64, 1024),
}


def saelens(name: str, rounds: int, batches: int) -> None:
    """Beside SAELens' CacheActivationsRunner on the same inputs, with a Hugging Face model and with
    its own.

    "Bare" is the forward to the last needed layer and nothing else: no harvest is quicker. SAELens
    fills whole buffers of two batches, so an odd number of batches would be unfair.
    """
    import sae_lens.cache_activations_runner as theirs
    from datasets import Dataset
    from sae_lens.load_model import HookedProxyLM
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    blocks, needed, heads, width, positions = SHAPES[name]
    torch.manual_seed(0)
    whole = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=blocks, n_head=heads, n_embd=width, n_positions=positions)
    ).eval()
    point, module = f"blocks.{needed - 1}.hook_resid_post", f"transformer.h.{needed - 1}"
    bridge = TransformerBridge(whole)
    bare = copy.deepcopy(whole).transformer
    bare.h, bare.ln_f = bare.h[:needed], torch.nn.Identity()
    source = rows(BATCH * batches)
    data = Dataset.from_dict({"tokens": source})
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
    config = HookedTransformerConfig(
        n_layers=blocks,
        n_heads=heads,
        d_model=width,
        d_head=64,
        d_mlp=4 * width,
        n_ctx=positions,
        d_vocab=50257,
        act_fn="gelu_new",
        normalization_type="LN",
        device="cpu",
    )
    kinds = {
        "Hugging Face model": (HookedProxyLM(whole, tokenizer), module),
        "HookedTransformer": (HookedTransformer(config, tokenizer=tokenizer).eval(), point),
    }
    with tempfile.TemporaryDirectory() as folder:

        def ours(number: int) -> None:
            harvest(
                bridge,
                source,
                hook_points=[point],
                out=f"{folder}/ours{number}",
                context_size=CONTEXT,
                batch_size=BATCH,
                prepend_bos=False,
                tokens_per_shard=CONTEXT * BATCH * 2,
            )

        def forward_alone() -> None:
            with torch.no_grad():
                for place in range(0, len(source), BATCH):
                    bare(torch.tensor(source[place : place + BATCH]), use_cache=False)

        def runner(kind: str, number: int) -> None:
            loaded, hook = kinds[kind]
            theirs.load_model = lambda **_: loaded
            cfg = theirs.CacheActivationsRunnerConfig(
                dataset_path="",
                model_name="gpt2",
                model_batch_size=BATCH,
                hook_name=hook,
                d_in=width,
                training_tokens=len(source) * CONTEXT,
                context_size=CONTEXT,
                dtype="float16",
                device="cpu",
                new_cached_activations_path=f"{folder}/{kind}{number}",
                shuffle=False,
                prepend_bos=False,
                buffer_size_gb=CONTEXT * BATCH * 2 * width * 2 / 1e9 + 1e-6,
                streaming=False,
            )
            theirs.CacheActivationsRunner(cfg, override_dataset=data).run()

        ours(-1)
        wall: dict[str, list[float]] = {kind: [] for kind in [*kinds, "bare"]}
        cpu: dict[str, list[float]] = {kind: [] for kind in [*kinds, "bare"]}
        for number in range(rounds):
            own = timed(lambda number=number: ours(number), "cpu")  # type: ignore[misc]
            others = {
                kind: timed(lambda kind=kind, number=number: runner(kind, number), "cpu")
                for kind in kinds
            }  # type: ignore[misc]
            for kind, its in {**others, "bare": timed(forward_alone, "cpu")}.items():
                wall[kind].append(its[0] / own[0])
                cpu[kind].append(its[1] / own[1])
    print(
        f"saelens, {name}: {len(source) * CONTEXT:,} tokens a round, {rounds} rounds; time / ours"
    )
    for kind in wall:
        print(
            f"  {kind}: {statistics.median(wall[kind]):.2f} ({spread(wall[kind])}), in CPU time",
            end=" ",
        )
        print(f"{statistics.median(cpu[kind]):.2f} ({spread(cpu[kind])})")


def main() -> None:
    """Each part in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", choices=["forward", "reading", "ray", "saelens"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=8, help="forward passes in a round")
    given = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    if given.only == "forward":
        forward(given.device, given.rounds, given.batches)
    elif given.only == "reading":
        reading(2**18)
    elif given.only == "ray":
        ray_scaling(given.rounds, given.batches)
    elif given.only == "saelens":
        for name in SHAPES:
            saelens(name, given.rounds, given.batches)
    else:
        for part, needed in (
            ("forward", "bridge"),
            ("reading", "bridge"),
            ("ray", "ray"),
            ("saelens", "sae_lens"),
        ):
            if importlib.util.find_spec(needed) is None:
                print(f"{part}: left out, {needed} is not installed")
                continue
            command = [sys.executable, __file__, "--only", part, "--device", given.device]
            subprocess.run(
                [*command, "--rounds", str(given.rounds), "--batches", str(given.batches)],
                check=True,
                env=os.environ,
            )


if __name__ == "__main__":
    main()
