"""The model that a command names, and its input text."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers.distributed import DistributedConfig

from adapters.imports import check_tensor_parallel
from adapters.spread import SpreadModelError
from bridge.bridge import TransformerBridge
from bridge.cli.commands import CommandError
from bridge.embedded import MODEL_DIR


def named_model(name: str, tp: bool = False, **options: Any) -> TransformerBridge:
    """Load a model in evaluation mode.

    Args:
        name: a hub name, a folder, or ``embedded``.
        tp: spread the model over the processes of torchrun.
        options: further arguments of `TransformerBridge.boot_transformers`; options that are None
            are omitted.

    Raises:
        CommandError: the model cannot be spread.
    """
    chosen = {option: value for option, value in options.items() if value is not None}
    if tp:
        try:
            return _spread_model(name, chosen)
        except (ValueError, SpreadModelError) as error:  # the model has no sharding plan
            raise CommandError(f"--tp: {error}") from error
    if name == "embedded" and not chosen:
        bridge = TransformerBridge.boot_embedded()
    else:
        bridge = TransformerBridge.boot_transformers(name, **chosen)
    bridge.eval()
    return bridge


def _spread_model(name: str, options: dict[str, Any]) -> TransformerBridge:
    check_tensor_parallel()
    config = DistributedConfig(tp_plan="auto", tp_size=int(os.environ["WORLD_SIZE"]))
    place = str(MODEL_DIR) if name == "embedded" else name
    bridge = TransformerBridge.boot_transformers(place, distributed_config=config, **options)
    if name == "embedded":
        bridge.cfg.model_name = name
    bridge.eval()
    torch.manual_seed(0)  # sample the same tokens in every process
    return bridge


def check_prompt(bridge: TransformerBridge, prompt: str) -> None:
    """Check that the model can read a prompt.

    Args:
        bridge: the model.
        prompt: the text.

    Raises:
        CommandError: the model has no tokenizer, or the tokenizer does not know some of its words.
    """
    if bridge.tokenizer is None:
        raise CommandError(f"{bridge.cfg.model_name} has no tokenizer, so it reads no text")
    facts = bridge.tokenizer_facts
    tokens = facts.encode(prompt, prepend_bos=False, keep_ending=False)
    unknown = facts.unknown_words(prompt, tokens)
    if not unknown:
        return
    hint = ""
    if bridge.cfg.model_name == "embedded":
        hint = (
            ". The shipped model reads the English that it was trained on: names, places, things,"
            " colours, numbers and some facts. bridge.embedded.prompts gives texts of it, such as"
            " 'The capital of France is'"
        )
    raise CommandError(facts.explain_unknown(unknown) + hint)
