"""What generation starts from, and what it returns: padding in front of rows, texts, rows without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Int, Shaped
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapters.inputs.arguments import takes
from adapters.offloaded import input_device
from bridge.analysis.requirements import AnalysedModel
from bridge.hooks.arguments import check_choice
from bridge.hooks.hook_point import HookPoint
from bridge.hooks.names import NamesFilter
from bridge.run.checks import as_tokens, check_embeddings, check_ids, texts_in
from bridge.run.model_inputs import check_zero_or_one
from bridge.run.protocol import Input
from bridge.run.tokenization import HasTokenizer, TextOptions, batch_of
from bridge.wiring.wiring import Wiring

#: Arguments of the model's own `generate`.
Arguments = dict[str, Any]


class Generates(AnalysedModel, HasTokenizer, Protocol):
    """What generation needs of a bridge.

    Attributes:
        original_model: the model, with what wraps it.
        core: the Hugging Face model.
        wiring: its hook points and what they stand on.
        tokenizer: its tokenizer, if it has one.
    """

    original_model: nn.Module
    core: PreTrainedModel
    wiring: Wiring
    tokenizer: PreTrainedTokenizerBase | None

    def select_hooks(self, names: NamesFilter | HookPoint) -> list[HookPoint]:
        """The hook points that a filter chooses."""
        ...


@dataclass
class GenerationPrompt:
    """What generation starts from.

    Attributes:
        kwargs: the prompt as arguments of the model's `generate`.
        tokens: ``[batch, pos]``, with padding in front; None for embeddings.
        padding: how many tokens of padding come before each row.
        to_the_right: the user wants padding behind the rows.
        kind: ``"str"``, ``"list"`` or ``"tokens"``: what the user passed.
    """

    kwargs: Arguments
    tokens: Tensor | None
    padding: list[int]
    to_the_right: bool
    kind: str


def prompt_of(
    bridge: Generates,
    input: Input,
    options: TextOptions,
    mask: Shaped[Tensor, "batch pos"] | None = None,
) -> GenerationPrompt:
    """The prompt with padding in front, where generation needs it.

    Args:
        bridge: the bridge.
        input: as for `TransformerBridge.generate`.
        options: how text becomes tokens; its side is that of what is returned.
        mask: ``[batch, pos]``, 1 for tokens and 0 for padding.

    Raises:
        ValueError: an unknown side; a mask that does not fit; no tokens.
    """
    where = input_device(bridge.core)
    if takes(bridge.core).main is not None:
        return _behind_images_or_sound(bridge, input, options, mask)
    if mask is not None:
        check_zero_or_one("attention_mask", mask)
        mask = mask.long()
    padding_side = options.padding_side
    check_choice("padding_side", padding_side, (None, "left", "right"))
    if isinstance(input, Tensor) and input.is_floating_point():
        check_embeddings(bridge.core, input)
        embeddings = {"inputs_embeds": (input if input.ndim == 3 else input[None]).to(where)}
        mask_too = {} if mask is None else {"attention_mask": mask.to(where)}
        return GenerationPrompt(embeddings | mask_too, None, [0] * input.shape[0], False, "tokens")
    texts = texts_in(input)
    if texts is not None:
        kind = "str" if isinstance(input, str) else "list"
        batch = batch_of(bridge, texts, options._replace(padding_side="left"))
        tokens, mask = batch.tokens, batch.mask
        if mask is None and len(tokens):
            # Without it transformers would take a padding token for one that is not meant.
            mask = torch.ones_like(tokens)
    else:
        tokens, kind = as_tokens(input), "tokens"
        if padding_side is None and mask is not None and bool((mask[:, -1] == 0).any()):
            padding_side = "right"
        tokens, mask = to_the_left(tokens, mask)
    check_ids(bridge.wiring.embedding, bridge.cfg, tokens, "the prompt")
    kwargs = {"input_ids": tokens.to(where)}
    if mask is not None:
        kwargs["attention_mask"] = mask.to(where)
    padding = [0] * len(tokens) if mask is None else (mask.cumsum(-1) == 0).sum(-1).tolist()
    return GenerationPrompt(kwargs, kwargs["input_ids"], padding, padding_side == "right", kind)


def _behind_images_or_sound(
    bridge: Generates, input: Input, options: TextOptions, mask: Tensor | None
) -> GenerationPrompt:
    """The prompt of a model whose first blocks read images or sound: these, or what its decoder begins with.

    Raises:
        TypeError: text or tokens for a model that reads none.
    """
    taken, where = takes(bridge.core), input_device(bridge.core)
    given: Arguments = {} if mask is None else {"attention_mask": mask.to(where)}
    if isinstance(input, Tensor) and input.is_floating_point():
        return GenerationPrompt({taken.main or "": input.to(where), **given}, None, [0] * len(input), False, "tokens")
    if isinstance(input, str) and not input:  # the images or the sound alone, by their name
        return GenerationPrompt(given, None, [0], False, "str")
    texts = texts_in(input)
    if texts is not None:
        batch = batch_of(bridge, texts, options._replace(padding_side="left"))
        tokens, kind = batch.tokens, "str" if isinstance(input, str) else "list"
        if batch.mask is not None:
            given["decoder_attention_mask"] = batch.mask.to(where)
    else:
        tokens, kind = as_tokens(input), "tokens"
    check_ids(bridge.wiring.embedding, bridge.cfg, tokens, "the prompt")
    given["decoder_input_ids"] = tokens.to(where)
    return GenerationPrompt(given, given["decoder_input_ids"], [0] * len(tokens), False, kind)


def check_return_type(return_type: str | None) -> None:
    """Refuses what `generate` cannot return.

    Raises:
        ValueError: it is none of the known ones.
    """
    check_choice("return_type", return_type, ("input", "str", "tokens", None))


def is_as_text(return_type: str | None, prompt: GenerationPrompt) -> bool:
    """Whether text is to be returned."""
    return return_type == "str" or (return_type == "input" and prompt.kind != "tokens")


def decode(bridge: HasTokenizer, ids: Sequence[int]) -> str:
    """The text of a row of tokens, without those that are no text."""
    tokenizer = bridge.tokenizer_facts.tokenizer
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def rows_of(
    bridge: Generates, prompt: GenerationPrompt, sequences: Int[Tensor, "batch pos"], copies: int
) -> list[Tensor]:
    """Each row without the padding in front of it.

    Args:
        bridge, prompt: what generated, and from what.
        sequences: what was generated.
        copies: how many rows each row of the prompt was continued to.
    """
    if bridge.core.config.is_encoder_decoder or prompt.tokens is None:
        return list(sequences)
    return [row[prompt.padding[i // copies] :] for i, row in enumerate(sequences)]


def texts_of(bridge: Generates, rows: Sequence[Tensor], prompt: GenerationPrompt) -> str | list[str]:
    """The text of each row; of one text, its text alone."""
    texts = [decode(bridge, row.tolist()) for row in rows]
    return texts[0] if prompt.kind == "str" and len(texts) == 1 else texts


def aligned(
    rows: Sequence[Tensor], sequences: Int[Tensor, "batch pos"], prompt: GenerationPrompt
) -> Int[Tensor, "batch pos"]:
    """The sequences, with the padding of the prompt on the side that was asked for."""
    if not prompt.to_the_right:
        return sequences
    # The prompt's own padding moves from the front to the back.
    fills = [sequence[: len(sequence) - len(row)] for sequence, row in zip(sequences, rows, strict=True)]
    return torch.stack([torch.cat([row, fill]) for row, fill in zip(rows, fills, strict=True)])


def to_the_left(
    tokens: Int[Tensor, "batch pos"], mask: Int[Tensor, "batch pos"] | None
) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"] | None]:
    """Rows with their padding moved to the front, where generation needs it.

    Args:
        tokens: the rows.
        mask: 1 for tokens and 0 for padding; None: no padding.

    Raises:
        ValueError: the mask does not fit.
    """
    if mask is None:
        return tokens, None
    if mask.shape != tokens.shape:
        raise ValueError(f"attention_mask has shape {list(mask.shape)}; the tokens have {list(tokens.shape)}")
    # A stable sort by the mask keeps the tokens' order, and that of the padding.
    order = mask.to(torch.int8).argsort(dim=-1, stable=True)
    return tokens.gather(1, order), mask.gather(1, order)
