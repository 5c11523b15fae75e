"""The demonstration as a page of pictures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bridge import pictures
from bridge.analysis.logit_lens import head_contributions, logit_lens
from bridge.bridge import TransformerBridge
from bridge.cli.demo import ANSWERS, PROMPT, answers_against, difference, name, strongest
from bridge.cli.model import check_prompt, named_model
from bridge.patching import patch_everything
from bridge.patching.patching import texts_of
from bridge.pictures.style import visible

#: The same prompt with the other giver, so that the other name is the answer.
CORRUPTED = "When Mary and John went to the store, Mary gave a drink to"


def story(
    model: str | None = None,
    prompt: str | None = None,
    gguf_file: str | None = None,
    tp: bool = False,
    against: str | None = None,
) -> str:
    """Return the page as self-contained HTML.

    Args:
        model: a hub name or folder; None: the shipped model.
        prompt: the text to study; None: an indirect-object prompt.
        gguf_file: the model's GGUF file.
        tp: spread the model over processes.
        against: the answer that the model's own is compared with; None: the second likeliest.

    Raises:
        CommandError: as `bridge.cli.demo.demo`.

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
        answers = ANSWERS if ready_made else None
        if against is not None:
            answers = answers_against(bridge, prompt, against)
        sections = list(_sections(bridge, prompt, answers, ready_made))
        return pictures.page(f"How {who} answers {prompt!r}", sections)


@dataclass(frozen=True)
class _Study:
    """A prompt under study.

    Attributes:
        bridge: the bridge.
        tokens: ``[1, pos]``.
        words: the text of each token.
        answers: the correct next token and a wrong one.
    """

    bridge: TransformerBridge
    tokens: torch.Tensor
    words: list[str]
    answers: tuple[str, str]

    @property
    def measure(self) -> str:
        """Return the name of the logit difference."""
        good, bad = map(visible, self.answers)
        return f"logit({good}) - logit({bad})"

    @property
    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids of the answers, ``[1]`` each."""
        good, bad = (self.bridge.to_single_token(answer) for answer in self.answers)
        return torch.tensor([good], device="cpu"), torch.tensor([bad], device="cpu")


#: The texts and pictures of the page.
_Parts = Iterator[str | pictures.Picture]


def _sections(
    bridge: TransformerBridge, prompt: str, answers: tuple[str, str] | None, ready_made: bool
) -> _Parts:
    """Yield the sections of a prompt's page; for the ready-made prompt, patching and ablation
    too.
    """
    cfg = bridge.cfg
    tokens = bridge.to_tokens(prompt)
    words = texts_of(bridge, tokens[0])
    lens = logit_lens(bridge, tokens)
    best = lens[-1, 0, -1].float().softmax(-1).topk(5)
    texts = [bridge.to_single_str_token(token) for token in best.indices.tolist()]
    shares = best.values.tolist()
    likely = [f"{text!r} ({share:.3f})" for text, share in zip(texts, shares, strict=True)]
    yield (
        f"The model has {cfg.n_layers} layers of {cfg.n_heads} heads. The prompt has {len(words)}"
        " tokens."
    )
    yield (
        f"It answers {texts[0]!r} with probability {round(shares[0], 3)}. Less likely"
        f" are {', '.join(likely[1:])}."
    )
    yield "## Where the answer comes up"
    yield (
        "Each column is a token of the prompt, each row a layer. A cell shows what the model would"
        " say next if it ended there (the logit lens). Look at the last column."
    )
    yield pictures.logit_lens(lens, words, bridge)
    study = _Study(bridge, tokens, words, answers or (texts[0], texts[1]))
    yield from _heads(study)
    if ready_made:
        yield from _patching(study)
        yield from _ablation(study)


def _heads(study: _Study) -> _Parts:
    """Yield the heads' direct contributions, and the attention of the largest one's layer."""
    bridge = study.bridge
    tokens = study.tokens
    words = study.words
    direct = head_contributions(bridge, tokens, *study.pair)[0]
    top = strongest(direct, 3)
    largest = ", ".join(f"{name([head])} ({direct[head]:+.2f})" for head in top)
    yield "## Which heads change the difference"
    yield (
        f"Each number is what one head adds directly to {study.measure} at the last position. "
        f"The largest are {largest}. A head may raise the first logit or lower the second:"
        " the difference does not say which."
    )
    yield pictures.heads(direct, measure=study.measure, title="Direct contribution of each head")
    layer, head = top[0]
    point = f"blocks.{layer}.attn.hook_pattern"
    pattern = bridge.run_with_cache(tokens, names_filter=point)[1][point]
    row = pattern[0, head, -1]
    position = int(row.argmax())
    yield "## What they look at"
    yield (
        f"From the last token, {name([top[0]])} attends most to {words[position]!r}"
        f" (position {position}, weight {row.max():.2f}). These are all heads of layer"
        f" {layer}."
    )
    yield pictures.attention(pattern, words, title=f"Attention in layer {layer}")


def _patching(study: _Study) -> _Parts:
    """Yield the effects of patching activations of the prompt into the corrupted one."""
    bridge = study.bridge
    words = study.words
    patches = patch_everything(bridge, study.tokens, bridge.to_tokens(CORRUPTED), study.answers)
    clean = patches.clean
    corrupted = patches.corrupted
    ends: dict[str, Any] = {"clean": clean, "corrupted": corrupted}
    yield "## How the answer travels"
    yield (
        f"In {CORRUPTED!r} the other name is right: {study.measure} is {corrupted:+.2f} there and"
        f" {clean:+.2f} in the first prompt. Each cell puts one activation of the first run"
        " into the second. 0 changes nothing, 1 brings the first answer back."
    )
    blocks = torch.stack([patches.stream, patches.attn_out, patches.mlp_out])
    panels = ["resid_pre", "attn_out", "mlp_out"]
    yield pictures.patching(blocks, "layer pos", words, panels=panels, **ends)
    shares = []
    for head in strongest(patches.heads, 2):
        share = (float(patches.heads[head]) - corrupted) / (clean - corrupted)
        shares.append(f"{name([head])} ({share:.0%})")
    yield (
        f"The same with the output of one head at a time. Most is brought back by {shares[0]} and"
        f" {shares[1]}."
    )
    title = "Patching each head's output"
    yield pictures.patching(patches.heads, "layer head", title=title, **ends)


def _ablation(study: _Study) -> _Parts:
    """Yield the effects of ablating heads."""
    bridge = study.bridge
    tokens = study.tokens
    pair = study.pair
    cfg = bridge.cfg
    base = difference(bridge, tokens, pair)
    effects = torch.empty(cfg.n_layers, cfg.n_heads, device="cpu")
    for layer in range(cfg.n_layers):
        for head in range(cfg.n_heads):
            effects[layer, head] = difference(bridge, tokens, pair, [(layer, head)]) - base
    worst = strongest(-effects, 3)
    listed = ", ".join(f"{name([head])} ({effects[head]:+.2f})" for head in worst)
    yield "## What happens without a head"
    yield (
        f"Without any change, {study.measure} is {base:+.2f}. Each number is how it changes when"
        " the output of one head is set to zero. It falls most without"
        f" {listed}."
    )
    yield pictures.heads(effects, measure="change", title="Ablating each head")
    without = difference(bridge, tokens, pair, worst)
    yield f"Without these three together, it is {without:+.2f}."
