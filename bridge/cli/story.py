"""The demonstration as a page of pictures: what a model answers, where that comes up, and which heads carry it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bridge import pictures
from bridge.analysis.logit_lens import head_contributions, logit_lens
from bridge.cli.demo import ANSWERS, PROMPT, difference, name, strongest
from bridge.cli.model import check_prompt, named_model
from bridge.patching import get_act_patch_attn_head_out_all_pos, get_act_patch_block_every
from bridge.pictures.style import visible

#: The same prompt, but for who gives: the other name is the answer.
CORRUPTED = "When Mary and John went to the store, Mary gave a drink to"


def story(model: str | None = None, prompt: str | None = None, gguf_file: str | None = None, tp: bool = False) -> str:
    """The page, as HTML that needs nothing but itself.

    Args:
        model: a hub name or folder; None: the shipped model.
        prompt: the text to study; None: an indirect-object prompt.
        gguf_file: of the model.
        tp: spread the model over processes.

    Example:
        >>> from bridge.cli.story import story
        >>> story(prompt="The capital of France is").startswith("<!doctype html>")
        True
    """
    bridge = named_model(model or "embedded", tp, gguf_file=gguf_file)
    ready_made = model is None and prompt is None
    prompt = PROMPT if prompt is None else prompt
    check_prompt(bridge, prompt)
    with torch.no_grad():
        told = _Story(bridge, prompt, ANSWERS if ready_made else None)
        parts = [*told.answer(), *told.heads()]
        if ready_made:
            parts += [*told.patching(), *told.ablation()]
    who = bridge.cfg.model_name if model else "the shipped model"
    return pictures.page(f"How {who} answers {told.prompt!r}", parts)


class _Story:
    """What is told of one model and prompt."""

    def __init__(self, bridge: Any, prompt: str, answers: tuple[str, str] | None) -> None:
        self.bridge, self.prompt = bridge, prompt
        self.tokens: Tensor = bridge.to_tokens(prompt)
        self.words: list[str] = bridge.to_str_tokens(self.tokens[0])
        self.lens = logit_lens(bridge, self.tokens)
        odds = self.lens[-1, 0, -1].float().softmax(-1)
        self.best = odds.topk(5)
        likeliest = [bridge.to_single_str_token(int(token)) for token in self.best.indices]
        self.good: str = answers[0] if answers else likeliest[0]
        self.bad: str = answers[1] if answers else likeliest[1]
        self.said = likeliest
        good, bad = (torch.tensor([bridge.to_single_token(text)]) for text in (self.good, self.bad))
        self.pair = good, bad
        self.measure = f"logit({visible(self.good)}) - logit({visible(self.bad)})"

    def difference(self, logits: Tensor) -> float:
        """How much likelier the one answer is than the other."""
        last = logits[0, -1].float()
        return (last[self.pair[0]] - last[self.pair[1]]).item()

    def answer(self) -> Iterator[str | pictures.Picture]:
        first = round(float(self.best.values[0]), 3)
        likely = zip(self.said[1:], self.best.values[1:], strict=True)
        others = ", ".join(f"{text!r} ({float(share):.3f})" for text, share in likely)
        cfg = self.bridge.cfg
        yield f"The model has {cfg.n_layers} layers of {cfg.n_heads} heads. The prompt has {len(self.words)} tokens."
        yield f"It answers {self.said[0]!r} with probability {first}. Less likely are {others}."
        yield "## Where the answer comes up"
        yield (
            "Each column is a token of the prompt, each row a layer. A cell shows what the model would say next if it "
            "ended there (the logit lens). Look at the last column."
        )
        yield pictures.logit_lens(self.lens, self.words, self.bridge)

    def heads(self) -> Iterator[str | pictures.Picture]:
        direct = head_contributions(self.bridge, self.tokens, *self.pair)[0]
        top = strongest(direct, 3)
        yield "## Which heads write it"
        yield (
            f"Each number is what one head adds directly to {self.measure} at the last position. "
            f"The largest are {', '.join(f'{name([head])} ({direct[head]:+.2f})' for head in top)}."
        )
        yield pictures.heads(direct, measure=self.measure, title="Direct contribution of each head")
        layer, head = top[0]
        _, cache = self.bridge.run_with_cache(self.tokens, names_filter=f"blocks.{layer}.attn.hook_pattern")
        pattern = cache["pattern", layer]
        row = pattern[0, head, -1]
        yield "## What they look at"
        yield (
            f"From the last token, {name([top[0]])} attends most to {self.words[int(row.argmax())]!r} "
            f"(position {int(row.argmax())}, weight {row.max():.2f}). These are all heads of layer {layer}."
        )
        yield pictures.attention(pattern, self.words, title=f"Attention in layer {layer}")

    def patching(self) -> Iterator[str | pictures.Picture]:
        corrupted = self.bridge.to_tokens(CORRUPTED)
        _, cache = self.bridge.run_with_cache(self.tokens)
        clean_end, corrupted_end = (self.difference(self.bridge(tokens)) for tokens in (self.tokens, corrupted))
        given = (self.bridge, corrupted, cache, self.difference)
        blocks = get_act_patch_block_every(*given, verbose=False)
        heads = get_act_patch_attn_head_out_all_pos(*given, verbose=False)
        yield "## How the answer travels"
        yield (
            f"In {CORRUPTED!r} the other name is right: {self.measure} is {corrupted_end:+.2f} there and "
            f"{clean_end:+.2f} in the first prompt. Each cell puts one activation of the first run into the second. "
            "0 changes nothing, 1 brings the first answer back."
        )
        yield pictures.patching(
            blocks,
            "layer pos",
            self.words,
            panels=["resid_pre", "attn_out", "mlp_out"],
            clean=clean_end,
            corrupted=corrupted_end,
        )
        best = strongest(heads, 2)
        share = [(float(heads[head]) - corrupted_end) / (clean_end - corrupted_end) for head in best]
        yield (
            "The same with the output of one head at a time. Most is brought back by "
            f"{name([best[0]])} ({share[0]:.0%}) and {name([best[1]])} ({share[1]:.0%})."
        )
        yield pictures.patching(
            heads, "layer head", title="Patching each head's output", clean=clean_end, corrupted=corrupted_end
        )

    def ablation(self) -> Iterator[str | pictures.Picture]:
        base = self._ablated([])
        cfg = self.bridge.cfg
        effects = torch.tensor(
            [[self._ablated([(i, j)]) - base for j in range(cfg.n_heads)] for i in range(cfg.n_layers)]
        )
        worst = strongest(-effects, 3)
        named = ", ".join(f"{name([head])} ({effects[head]:+.2f})" for head in worst)
        yield "## What happens without a head"
        yield (
            f"Without any change, {self.measure} is {base:+.2f}. Each number is how it changes when the output of one "
            f"head is set to zero. It falls most without {named}."
        )
        yield pictures.heads(effects, measure="change", title="Ablating each head")
        together = self._ablated(worst)
        yield f"Without these three together, it is {together:+.2f}."

    def _ablated(self, heads: list[tuple[int, int]]) -> float:
        return difference(self.bridge, self.tokens, self.pair, heads)
