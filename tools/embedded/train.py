"""Train the shipped model from nothing and save it: `python -m tools.embedded.train --out DIR`.

The text comes from `tools.embedded.text`; nothing is downloaded. At the end the weights are rounded
to float16 for storage, loaded back, and measured on prompts that were not in the text.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from bridge.embedded.language import PIECE, vocabulary
from tools.embedded.measure import figures
from tools.embedded.text import documents

CONTEXT = 128
"""The most tokens the model reads."""
ROWS = {"short": 40, "long": 8, "lists": 64, "long lists": 8}
"""How many texts of each stream there are in a step. Many short lists matter most: induction is
learned from them.
"""
CHANCE_WEIGHT = 0.05
"""How much the first time through a random list counts: it cannot be foretold, so it is mostly
noise.
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the word-level tokenizer, whose words carry the space before them; it adds no special
    tokens by itself.

    Example:
        >>> from tools.embedded.train import build_tokenizer
        >>> tokenizer = build_tokenizer()
        >>> tokenizer.tokenize("Mary gave")
        ['Mary', ' gave']
    """
    ids = {piece: index for index, piece in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """Build the model with random weights from torch's global generator.

    Args:
        tokenizer: the tokenizer, for its size and special tokens.

    Example:
        >>> from tools.embedded.train import build_model, build_tokenizer
        >>> build_model(build_tokenizer()).config.num_hidden_layers
        4
    """
    specials = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        dtype="float32",
        **specials,
    )
    model = LlamaForCausalLM(config)
    # Half of the text is copied words, and copying is learned sooner when a word starts out alike
    # coming and going.
    model.lm_head.weight.data.copy_(model.model.embed_tokens.weight.data)
    model.generation_config = GenerationConfig(**specials)
    return model


def batches(
    tokenizer: PreTrainedTokenizerBase, seed: int
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Yield training steps: each one block of (ids, weights) per stream of the text.

    One document is one row, the beginning token first; padding has weight 0. Short and long rows
    are in different blocks so that little is padded.

    Args:
        tokenizer: the shipped tokenizer.
        seed: which text.

    Example:
        >>> from tools.embedded.train import batches, build_tokenizer
        >>> len(next(batches(build_tokenizer(), 0)))
        4
    """
    ids = {piece: index for index, piece in enumerate(vocabulary())}
    streams = {sort: documents(sort, seed) for sort in ROWS}
    while True:
        step = []
        for sort, size in ROWS.items():
            rows = list(islice(streams[sort], size))
            width = max(len(row.pieces) for row in rows) + 2
            block = torch.full((size, width), tokenizer.pad_token_id)
            weights = torch.zeros(size, width)
            for i, row in enumerate(rows):
                row_ids = [tokenizer.bos_token_id, *(ids[piece] for piece in row.pieces)]
                if row.kind not in ("list", "pieces"):
                    row_ids.append(tokenizer.eos_token_id)
                block[i, : len(row_ids)] = torch.tensor(row_ids)
                weights[i, 1 : len(row_ids)] = 1.0
                # The first word of the second lap is as little foreseeable as those of the first.
                weights[i, 1 : row.chance + 2] = CHANCE_WEIGHT if row.chance else 1.0
            step.append((block, weights))
        yield step


def loss_of(
    model: LlamaForCausalLM, block: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weighted sum of the next-token losses of a block, and the sum of the weights.

    Args:
        model: the model.
        block: token ids, one document per row.
        weights: how much each token counts as a target.

    Example:
        >>> from tools.embedded.train import batches, build_model, build_tokenizer, loss_of
        >>> tokenizer = build_tokenizer()
        >>> loss, weight = loss_of(build_model(tokenizer), *next(batches(tokenizer, 0))[0])
    """
    logits = model(input_ids=block).logits[:, :-1]
    losses = cross_entropy(logits.transpose(1, 2), block[:, 1:], reduction="none")
    return (losses * weights[:, 1:]).sum(), weights[:, 1:].sum()


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    steps: int,
    minutes: float,
    rate: float,
) -> int:
    """Train the model in place and return how many steps it took.

    The learning rate rises over the first steps and then falls to nothing with the larger of the
    shares of steps and of minutes that are spent, so that either limit ends a full schedule.

    Args:
        model: the model.
        tokenizer: the shipped tokenizer.
        seed: which text.
        steps: the most steps.
        minutes: the most minutes.
        rate: the highest learning rate.

    Raises:
        ValueError: `steps` or `minutes` is not above 0.

    Example:
        >>> from tools.embedded.train import build_model, build_tokenizer, train
        >>> tokenizer = build_tokenizer()
        >>> train(build_model(tokenizer), tokenizer, seed=0, steps=1, minutes=1.0, rate=2e-3)
        1
    """
    if steps <= 0 or minutes <= 0:
        raise ValueError(f"steps is {steps} and minutes is {minutes}; both have to be above 0")
    matrices = [p for p in model.parameters() if p.ndim == 2]
    gains = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98))
    started = time.monotonic()
    model.train()
    for done, step in enumerate(batches(tokenizer, seed)):
        spent = max(done / steps, (time.monotonic() - started) / 60 / minutes)
        if spent >= 1:
            return done
        share = min(1.0, (done + 1) / 50) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * spent)))
        for group in optimizer.param_groups:
            group["lr"] = rate * share
        optimizer.zero_grad(set_to_none=True)
        total = float(sum(weights[:, 1:].sum() for _, weights in step))
        reached = []
        for block, weights in step:
            loss, weight = loss_of(model, block, weights)
            (loss / total).backward()
            reached.append(float(loss.detach() / weight))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if done % 100 == 0:
            shown = ", ".join(
                f"{sort} {value:.3f}" for sort, value in zip(ROWS, reached, strict=True)
            )
            print(f"step {done} ({spent:.0%}) loss {shown}", file=sys.stderr)
    raise AssertionError("the text has no end")


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Save the model and the tokenizer to a folder, the weights in half the space.

    They are stored as float16 while the config says float32, so that they load as float32.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        out: the folder, made when missing.

    Raises:
        OSError: the folder cannot be written.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from tools.embedded.train import build_model, build_tokenizer, save
        >>> tokenizer = build_tokenizer()
        >>> with TemporaryDirectory() as folder:
        ...     save(build_model(tokenizer), tokenizer, Path(folder))
    """
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    file = out / "model.safetensors"
    halves = {name: tensor.half() for name, tensor in load_file(file).items()}
    # Written here rather than by safetensors, which would leave a file that only its owner can
    # read.
    file.write_bytes(serialize(halves, metadata={"format": "pt"}))
    file.chmod(0o644)


def main() -> None:
    """Read the command line, train, save, measure the saved model, and print the figures.

    Example:
        >>> from tools.embedded.train import main  # python -m tools.embedded.train --out DIR
    """
    parser = argparse.ArgumentParser(description="Train the shipped model and save it.")
    parser.add_argument("--out", type=Path, required=True, help="folder to save to")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the text and of the first weights"
    )
    parser.add_argument("--steps", type=int, default=3000, help="the most steps")
    parser.add_argument("--minutes", type=float, default=60.0, help="the most minutes")
    parser.add_argument("--rate", type=float, default=2e-3, help="the highest learning rate")
    parser.add_argument("--threads", type=int, default=2, help="threads torch uses")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    done = train(model, tokenizer, options.seed, options.steps, options.minutes, options.rate)
    save(model, tokenizer, options.out)
    measured = {"steps": done, "seed": options.seed, **figures(options.out)}
    print(json.dumps(measured, indent=2))


if __name__ == "__main__":
    main()
