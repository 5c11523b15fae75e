"""The demonstration as a page of pictures: what a model answers, where that comes up, and which heads carry it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bridge import pictures
from bridge.analysis.logit_lens import head_contributions, logit_lens
from bridge.bridge import TransformerBridge
from bridge.cli.demo import ANSWERS, PROMPT, difference, name, strongest
from bridge.cli.model import check_prompt, named_model
from bridge.patching import patch_everything
from bridge.patching.patching import texts_of
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
    who = bridge.cfg.model_name if model else "the shipped model"
    with torch.no_grad():
        return pictures.page(f"How {who} answers {prompt!r}", list(_told(bridge, prompt, ready_made)))


def _told(bridge: TransformerBridge, prompt: str, ready_made: bool) -> Iterator[str | pictures.Picture]:
    """What is told of a prompt; of the ready-made one also what patching and ablating show."""
    cfg, tokens = bridge.cfg, bridge.to_tokens(prompt)
    words = texts_of(bridge, tokens[0])
    lens = logit_lens(bridge, tokens)
    best = lens[-1, 0, -1].float().softmax(-1).topk(5)
    said = [bridge.to_single_str_token(int(token)) for token in best.indices]
    good, bad = ANSWERS if ready_made else said[:2]
    measure = f"logit({visible(good)}) - logit({visible(bad)})"
    likely = [f"{text!r} ({float(share):.3f})" for text, share in zip(said, best.values, strict=True)]
    yield f"The model has {cfg.n_layers} layers of {cfg.n_heads} heads. The prompt has {len(words)} tokens."
    yield (
        f"It answers {said[0]!r} with probability {round(float(best.values[0]), 3)}. Less likely are "
        f"{', '.join(likely[1:])}."
    )
    yield "## Where the answer comes up"
    yield (
        "Each column is a token of the prompt, each row a layer. A cell shows what the model would say next if it "
        "ended there (the logit lens). Look at the last column."
    )
    yield pictures.logit_lens(lens, words, bridge)
    pair = torch.tensor([bridge.to_single_token(good)]), torch.tensor([bridge.to_single_token(bad)])
    direct = head_contributions(bridge, tokens, *pair)[0]
    top = strongest(direct, 3)
    yield "## Which heads write it"
    yield (
        f"Each number is what one head adds directly to {measure} at the last position. "
        f"The largest are {', '.join(f'{name([head])} ({direct[head]:+.2f})' for head in top)}."
    )
    yield pictures.heads(direct, measure=measure, title="Direct contribution of each head")
    layer, head = top[0]
    point = f"blocks.{layer}.attn.hook_pattern"
    pattern = bridge.run_with_cache(tokens, names_filter=point)[1][point]
    row = pattern[0, head, -1]
    yield "## What they look at"
    yield (
        f"From the last token, {name([top[0]])} attends most to {words[int(row.argmax())]!r} "
        f"(position {int(row.argmax())}, weight {row.max():.2f}). These are all heads of layer {layer}."
    )
    yield pictures.attention(pattern, words, title=f"Attention in layer {layer}")
    if not ready_made:
        return
    found = patch_everything(bridge, tokens, bridge.to_tokens(CORRUPTED), (good, bad))
    ends: dict[str, Any] = {"clean": found.clean, "corrupted": found.corrupted}
    yield "## How the answer travels"
    yield (
        f"In {CORRUPTED!r} the other name is right: {measure} is {found.corrupted:+.2f} there and "
        f"{found.clean:+.2f} in the first prompt. Each cell puts one activation of the first run into the second. "
        "0 changes nothing, 1 brings the first answer back."
    )
    blocks = torch.stack([found.stream, found.attn_out, found.mlp_out])
    yield pictures.patching(blocks, "layer pos", words, panels=["resid_pre", "attn_out", "mlp_out"], **ends)
    one, other = (
        f"{name([best])} ({(float(found.heads[best]) - found.corrupted) / (found.clean - found.corrupted):.0%})"
        for best in strongest(found.heads, 2)
    )
    yield f"The same with the output of one head at a time. Most is brought back by {one} and {other}."
    yield pictures.patching(found.heads, "layer head", title="Patching each head's output", **ends)
    base = difference(bridge, tokens, pair)
    effects = torch.tensor(
        [[difference(bridge, tokens, pair, [(i, j)]) - base for j in range(cfg.n_heads)] for i in range(cfg.n_layers)]
    )
    worst = strongest(-effects, 3)
    yield "## What happens without a head"
    yield (
        f"Without any change, {measure} is {base:+.2f}. Each number is how it changes when the output of one "
        f"head is set to zero. It falls most without "
        f"{', '.join(f'{name([head])} ({effects[head]:+.2f})' for head in worst)}."
    )
    yield pictures.heads(effects, measure="change", title="Ablating each head")
    yield f"Without these three together, it is {difference(bridge, tokens, pair, worst):+.2f}."
