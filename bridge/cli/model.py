"""The model that a command names, and the text that it is given."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers.distributed import DistributedConfig

from adapters.imports import check_tensor_parallel
from adapters.spread import SpreadModelError
from bridge.bridge import TransformerBridge
from bridge.embedded import MODEL_DIR


class CommandError(Exception):
    """What a command was given cannot be done: the message is for its user, and the exit status is 2."""


def named_model(name: str, tp: bool = False, **options: Any) -> TransformerBridge:
    """Loads a model in evaluation mode.

    Args:
        name: a hub name, a folder, or ``embedded``.
        tp: spread it over the processes of torchrun.
        options: further arguments of `TransformerBridge.boot_transformers`; those that are None are left out.

    Raises:
        CommandError: there are no processes, or the model cannot be spread.
    """
    given = {key: value for key, value in options.items() if value is not None}
    if tp:
        try:
            return _spread_model(name, given)
        except (ValueError, SpreadModelError) as error:  # what transformers says of a model without a plan, and we
            raise CommandError(f"--tp: {error}") from error
    if name == "embedded" and not given:
        found = TransformerBridge.boot_embedded()
    else:
        found = TransformerBridge.boot_transformers(name, **given)
    found.eval()
    return found


def _spread_model(name: str, given: dict[str, Any]) -> TransformerBridge:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes < 2:
        raise CommandError(
            "--tp spreads the model over several processes: start them with torchrun --nproc-per-node 2 -m bridge ..."
        )
    check_tensor_parallel()
    config = DistributedConfig(tp_plan="auto", tp_size=processes)
    place = str(MODEL_DIR) if name == "embedded" else name
    bridge = TransformerBridge.boot_transformers(place, distributed_config=config, **given)
    if name == "embedded":
        bridge.cfg.model_name = name
    bridge.eval()
    torch.manual_seed(0)  # who samples draws the same everywhere
    return bridge


def check_prompt(bridge: TransformerBridge, prompt: str) -> None:
    """Refuses a prompt that the model cannot read.

    Args:
        bridge: the model.
        prompt: the text.

    Raises:
        CommandError: it is empty, the model has no tokenizer, or words of it are unknown to the tokenizer.
    """
    if not prompt.strip():
        raise CommandError("the prompt is empty: give a text of one word at least")
    if bridge.tokenizer is None:
        raise CommandError(f"{bridge.cfg.model_name} has no tokenizer, so it reads no text")
    facts = bridge.tokenizer_facts
    unknown = facts.unknown_words(prompt, facts.encode(prompt, prepend_bos=False, keep_ending=False))
    if not unknown:
        return
    hint = ""
    if bridge.cfg.model_name == "embedded":
        hint = (
            ". The shipped model reads the English that it was trained on: names, places, things, colours, numbers and "
            "some facts. bridge.embedded.prompts gives texts of it, such as 'The capital of France is'"
        )
    raise CommandError(facts.explain_unknown(unknown) + hint)
