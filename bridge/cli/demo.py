"""The main job on one prompt: what the model is, its logit lens, the heads that matter, and what ablating them does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from bridge.analysis.logit_lens import head_contributions
from bridge.bridge import TransformerBridge
from bridge.cli.model import check_prompt, named_model
from bridge.embedded import Prompt, prompts
from bridge.interventions import Interventions, Zero
from bridge.lens import lens as read

PROMPT = "When Mary and John went to the store, John gave a drink to"
#: Its right answer, and the likely mistake.
ANSWERS = (" Mary", " John")


def demo(model: str | None = None, prompt: str | None = None, gguf_file: str | None = None, tp: bool = False) -> None:
    """Prints the demonstration.

    Args:
        model: a hub name or folder; None: the shipped model.
        prompt: the text to study; None: an indirect-object prompt.
        gguf_file: of the model.
        tp: spread the model over processes.

    Raises:
        CommandError: a prompt that the model cannot read.
    """
    bridge = named_model(model or "embedded", tp, gguf_file=gguf_file)
    prompt = PROMPT if prompt is None else prompt
    check_prompt(bridge, prompt)
    with torch.no_grad():
        for line in report(bridge, prompt, ANSWERS if model is None and prompt == PROMPT else None):
            print(line)
        if model is None:
            for line in population(bridge):
                print(line)


def report(bridge: TransformerBridge, prompt: str, answers: tuple[str, str] | None = None) -> Iterable[str]:
    """The demonstration on one prompt, line by line.

    Args:
        bridge: the bridge.
        prompt: the text.
        answers: the right next token and a wrong one; None: the two that the model finds likeliest.
    """
    cfg = bridge.cfg
    mlp = "no MLPs" if cfg.attn_only else f"d_mlp {cfg.d_mlp} ({cfg.act_fn})"
    yield (
        f"{cfg.model_name}: {cfg.original_architecture}, {cfg.n_params:,} parameters, {cfg.n_layers} layers of "
        f"{cfg.n_heads} heads, d_model {cfg.d_model}, {mlp}, {cfg.normalization_type} norms, "
        f"{cfg.positional_embedding_type} positions, {len(bridge.hook_dict)} hook points"
    )
    tokens = bridge.to_tokens(prompt)
    yield f"\nPrompt: {prompt!r} ({tokens.shape[1]} tokens)"
    lens = read(bridge, tokens, pos_slice=-1).stack()[:, 0, 0].float()
    first, second = (bridge.to_single_str_token(int(token)) for token in lens[-1].topk(2).indices)
    yield f"Prediction: {first!r}, then {second!r}\n"
    good, bad = answers or (first, second)
    answer, other = bridge.to_single_token(good), bridge.to_single_token(bad)
    yield "Logit lens at the last position (the five likeliest tokens after each layer)"
    yield from table(
        ["layer", f"p({good.strip()})", *(str(i) for i in range(1, 6))],
        (
            ["embed" if i == 0 else str(i - 1), f"{row[answer]:.3f}"]
            + [f"{bridge.to_single_str_token(int(t)).strip()} {row[t]:.2f}" for t in row.topk(5).indices]
            for i, row in enumerate(lens.softmax(-1))
        ),
    )
    pair = torch.tensor([answer]), torch.tensor([other])
    direct = head_contributions(bridge, tokens, *pair)[0]
    yield f"\nDirect contribution of each head to logit({good.strip()}) - logit({bad.strip()})"
    yield from table(
        ["layer", *(f"head {h}" for h in range(cfg.n_heads))],
        ([str(i), *(f"{value:+.2f}" for value in row)] for i, row in enumerate(direct.tolist())),
    )
    top = strongest(direct, 3)
    base = difference(bridge, tokens, pair)
    yield f"\nAblating the heads that contribute most (their z set to zero); the difference is {base:+.2f} without"
    rows = [(name([head]), f"{direct[head]:+.2f}", [head]) for head in top] + [(name(top), "", top)]
    changed = ([*row, f"{difference(bridge, tokens, pair, heads):+.2f}"] for *row, heads in rows)
    yield from table(["heads", "direct", "difference"], changed)


def population(bridge: TransformerBridge, n: int = 100) -> Iterable[str]:
    """Which heads matter over many held-out prompts of the shipped model: each one's direct part, and its ablation."""
    by_length: dict[int, list[Prompt]] = {}
    for p in prompts("ioi", n, seed=1):
        by_length.setdefault(bridge.to_tokens(p.text).shape[1], []).append(p)
    batches = [
        (
            bridge.to_tokens([p.text for p in group]),
            torch.tensor([bridge.to_single_token(p.answer) for p in group]),
            torch.tensor([bridge.to_single_token(p.wrong or "") for p in group]),
        )
        for group in by_length.values()
    ]
    direct = torch.cat([head_contributions(bridge, *batch) for batch in batches]).mean(0)

    def effect(heads: Sequence[tuple[int, int]]) -> tuple[float, float]:
        """The mean difference and the share of right answers, with some heads ablated."""
        right, total = 0, 0.0
        for tokens, answers, others in batches:
            logits = ablated(bridge, tokens, heads)
            rows = torch.arange(len(answers))
            total += (logits[rows, answers] - logits[rows, others]).sum().item()
            right += int((logits.argmax(-1) == answers).sum())
        return total / n, right / n

    every = [(layer, head) for layer in range(direct.shape[0]) for head in range(direct.shape[1])]
    effects = {head: effect([head]) for head in every}
    matter = sorted(every, key=lambda head: effects[head][0])[:5]
    rows = [["none", "", *_figures(effect([]))]]
    rows += [[name([head]), f"{direct[head]:+.2f}", *_figures(effects[head])] for head in matter]
    rows.append(["all five", "", *_figures(effect(matter))])
    yield f"\nOver {n} indirect-object prompts that were not in training: the five heads whose ablation matters most"
    yield from table(["ablated", "direct", "difference", "right"], rows)


def _figures(effect: tuple[float, float]) -> tuple[str, str]:
    return f"{effect[0]:+.2f}", f"{effect[1]:.0%}"


def strongest(direct: Tensor, n: int) -> list[tuple[int, int]]:
    """The `n` heads with the largest values, as (layer, head)."""
    best = direct.flatten().topk(min(n, direct.numel())).indices.tolist()
    return [divmod(index, direct.shape[1]) for index in best]


def name(heads: Sequence[tuple[int, int]]) -> str:
    """Such as ``L2H1 + L3H0``."""
    return " + ".join(f"L{layer}H{head}" for layer, head in heads)


def ablated(bridge: TransformerBridge, tokens: Tensor, heads: Sequence[tuple[int, int]]) -> Tensor:
    """The last position's logits with some heads' z set to zero, ``[batch, d_vocab]``."""
    zeroed = Interventions([(f"blocks.{layer}.attn.hook_z", Zero(heads=head)) for layer, head in heads])
    return bridge.run_with_hooks(tokens, fwd_hooks=zeroed)[:, -1].float()


def difference(
    bridge: TransformerBridge, tokens: Tensor, pair: tuple[Tensor, Tensor], heads: Sequence[tuple[int, int]] = ()
) -> float:
    """The logit of one token less that of another, with some heads ablated."""
    logits = ablated(bridge, tokens, heads)[0]
    return (logits[pair[0]] - logits[pair[1]]).item()


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    """Rows of text in columns: numbers to the right, everything else to the left."""
    cells = [list(header), *(list(row) for row in rows)]
    columns = list(zip(*cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(not cell.strip("+-.%0123456789") for cell in column[1:]) for column in columns]
    for index, row in enumerate(cells):
        if index == 1:
            yield "  " + "  ".join("-" * width for width in widths)
        padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        yield ("  " + "  ".join(padded)).rstrip()
