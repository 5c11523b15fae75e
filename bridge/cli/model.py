"""The model that a command names, and the text that it is given."""

from __future__ import annotations

from typing import Any

from bridge.bridge import TransformerBridge


class CommandError(Exception):
    """What a command was given cannot be done: the message is for its user, and the exit status is 2."""


def named_model(name: str, **options: Any) -> TransformerBridge:
    """Loads a model in evaluation mode.

    Args:
        name: a hub name, a folder, or ``embedded``.
        options: further arguments of `TransformerBridge.boot_transformers`; those that are None are left out.
    """
    given = {key: value for key, value in options.items() if value is not None}
    if name == "embedded" and not given:
        found = TransformerBridge.boot_embedded()
    else:
        found = TransformerBridge.boot_transformers(name, **given)
    found.eval()
    return found


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
