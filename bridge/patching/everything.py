"""Stream, attention, MLPs and heads patched in one call, with a picture of all."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bridge.bridge import TransformerBridge
from bridge.hooks.arguments import refuse_wrong_types
from bridge.patching.standard import get_act_patch_attn_head_out_all_pos, get_act_patch_block_every


@dataclass(frozen=True, eq=False)
class PatchedEverything:
    """What each activation of the clean run brings back in the corrupted one; in a notebook, a picture of it.

    Attributes:
        stream, attn_out, mlp_out: the logit difference with the stream before a layer, what its attention adds, or what
            its MLP adds, taken from the clean run at one position, ``[layer, pos]``.
        heads: the same for a head's output at all positions, ``[layer, head]``.
        clean, corrupted: the logit difference of both runs, unpatched.
        tokens: the text of each position of the clean prompt.
    """

    stream: Float[Tensor, "layer pos"]
    attn_out: Float[Tensor, "layer pos"]
    mlp_out: Float[Tensor, "layer pos"]
    heads: Float[Tensor, "layer head"]
    clean: float
    corrupted: float
    tokens: list[str]

    def draw(self, title: str = "Activation patching") -> Any:
        """One picture of all: 0 is the corrupted run, 1 the clean one.

        Args:
            title: over the picture.

        Raises:
            ImportError: what pictures need is not installed.
            ValueError: both runs have the same logit difference, so that there is nothing to be restored.
        """
        pictures = importlib.import_module("bridge.pictures")
        ends: dict[str, Any] = {"clean": self.clean, "corrupted": self.corrupted, "metric": "logit difference"}
        every = torch.stack([self.stream, self.attn_out, self.mlp_out])
        names = ["stream", "what attention adds", "what the MLP adds"]
        by_position = pictures.patching(every, "layer pos", self.tokens, panels=names, title="By position", **ends)
        by_head = pictures.patching(self.heads, "layer head", title="Each head's output, at all positions", **ends)
        return pictures.together([by_position, by_head], title)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> Any:
        return self.draw()._repr_mimebundle_()


@torch.no_grad()
@refuse_wrong_types
def patch_everything(
    model: TransformerBridge,
    clean: str | Int[Tensor, "1 pos"],
    corrupted: str | Int[Tensor, "1 pos"],
    answers: tuple[str, str] | tuple[int, int],
    verbose: bool = False,
) -> PatchedEverything:
    """Which activations carry the answer: the stream, attention and MLPs by position, and each head.

    Args:
        model: the bridge.
        clean: the prompt with the right answer.
        corrupted: one of as many tokens, with another answer.
        answers: the clean prompt's next token and the corrupted one's; their logits' difference is the metric.
        verbose: show progress bars.

    Raises:
        ValueError: prompts of different lengths, an answer that is not one token, two that are the same.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.patching import patch_everything
        >>> bridge = TransformerBridge.boot_embedded()
        >>> text = "When Mary and John went to the store, {} gave a drink to"
        >>> clean, corrupted = text.format("John"), text.format("Mary")
        >>> found = patch_everything(bridge, clean, corrupted, (" Mary", " John"))
        >>> found.heads.shape, found.clean > 0 > found.corrupted
        (torch.Size([4, 4]), True)
        >>> found.draw()
        Picture('Activation patching')
    """
    one, other = (model.to_tokens(each) if isinstance(each, str) else each for each in (clean, corrupted))
    if one.shape != other.shape:
        raise ValueError(
            f"clean has {one.shape[1]} tokens and corrupted {other.shape[1]}: prompts need one length, as an "
            "activation is put into its own place"
        )
    right, wrong = (model.to_single_token(each) if isinstance(each, str) else each for each in answers)
    if right == wrong:
        raise ValueError(f"answers are {answers!r}, one token: give the clean prompt's answer and the corrupted one's")

    def difference(logits: Tensor) -> float:
        return float(logits[0, -1, right] - logits[0, -1, wrong])

    logits, cache = model.run_with_cache(one)
    every = get_act_patch_block_every(model, other, cache, difference, verbose=verbose)
    heads = get_act_patch_attn_head_out_all_pos(model, other, cache, difference, verbose=verbose)
    return PatchedEverything(*every, heads, difference(logits), difference(model(other)), texts_of(model, one[0]))


def texts_of(model: TransformerBridge, tokens: Int[Tensor, " pos"]) -> list[str]:
    """The text of each token of a prompt; its number where there is no tokenizer.

    Args:
        model: the bridge.
        tokens: ``[pos]``.
    """
    if model.tokenizer is None:
        return [str(token) for token in tokens.tolist()]
    return [model.to_single_str_token(token) for token in tokens.tolist()]
