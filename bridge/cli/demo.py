"""The demonstration on one prompt: logit lens, important heads, and the effect of ablating them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from bridge.analysis.logit_lens import head_contributions
from bridge.bridge import TransformerBridge
from bridge.cli.commands import CommandError
from bridge.cli.model import check_prompt, named_model
from bridge.embedded import Prompt, prompts
from bridge.embedded.language import NAMES
from bridge.interventions import Interventions, Zero
from bridge.lens import lens as read

PROMPT = "When Mary and John went to the store, John gave a drink to"
#: The correct answer and the likely mistake.
ANSWERS = (" Mary", " John")


def demo(
    model: str | None = None,
    prompt: str | None = None,
    gguf_file: str | None = None,
    tp: bool = False,
    against: str | None = None,
) -> None:
    """Print the demonstration.

    Args:
        model: a hub name or folder; None: the shipped model.
        prompt: the text to study; None: an indirect-object prompt.
        gguf_file: the model's GGUF file.
        tp: spread the model over processes.
        against: the answer that the model's own is compared with; None: the second likeliest.

    Raises:
        CommandError: a prompt that the model cannot read, or an answer that is not one token.
    """
    bridge = named_model(model or "embedded", tp, gguf_file=gguf_file)
    prompt = PROMPT if prompt is None else prompt
    check_prompt(bridge, prompt)
    answers = ANSWERS if model is None and prompt == PROMPT else None
    with torch.no_grad():
        if against is not None:
            answers = answers_against(bridge, prompt, against)
        for line in report(bridge, prompt, answers):
            print(line)
        if model is None:
            for line in population(bridge):
                print(line)


def answers_against(bridge: TransformerBridge, prompt: str, other: str) -> tuple[str, str]:
    """Return the model's answer to a prompt, and another one to compare it with.

    Args:
        bridge: the bridge.
        prompt: the text.
        other: the other answer.

    Raises:
        CommandError: the other is not one token, or the model's own.
    """
    try:
        token = bridge.to_answer_token(other)
    except ValueError as error:
        raise CommandError(f"--against {other!r}: {error}") from error
    likeliest = int(bridge(prompt)[0, -1].argmax())
    if token == likeliest:
        raise CommandError(
            f"--against {other!r} is what the model says itself: give an answer to compare it with"
        )
    return bridge.to_single_str_token(likeliest), other


def report(
    bridge: TransformerBridge, prompt: str, answers: tuple[str, str] | None = None
) -> Iterable[str]:
    """Yield the demonstration on one prompt, line by line.

    Args:
        bridge: the bridge.
        prompt: the text.
        answers: the correct next token and a wrong one; None: the two most likely tokens.
    """
    yield _description(bridge)
    tokens = bridge.to_tokens(prompt)
    yield f"\nPrompt: {prompt!r} ({tokens.shape[1]} tokens)"
    lens = read(bridge, tokens, pos_slice=-1).stack()[:, 0, 0].float()
    likeliest = lens[-1].topk(2).indices.tolist()
    first, second = [bridge.to_single_str_token(token) for token in likeliest]
    yield f"Prediction: {first!r}, then {second!r}"
    good, bad = answers or (first, second)
    answer = bridge.to_single_token(good)
    other = bridge.to_single_token(bad)
    yield f"{_compared(lens[-1], good, answer, bad, other)}\n"
    yield "Logit lens at the last position (the five likeliest tokens after each layer)"
    yield from _lens_table(bridge, lens.softmax(-1), good, answer)

    pair = torch.tensor([answer], device="cpu"), torch.tensor([other], device="cpu")
    direct = head_contributions(bridge, tokens, *pair)[0]
    yield f"\nDirect contribution of each head to logit({good.strip()}) - logit({bad.strip()})"
    yield from _heads_table(direct)
    base = difference(bridge, tokens, pair)
    yield (
        "\nAblating the heads that contribute most (their z set to zero); the difference is"
        f" {base:+.2f} without"
    )
    top = strongest(direct, 3)
    rows = []
    for heads in [*([head] for head in top), top]:
        contribution = f"{direct[heads[0]]:+.2f}" if len(heads) == 1 else ""
        change = difference(bridge, tokens, pair, heads)
        rows.append([name(heads), contribution, f"{change:+.2f}"])
    yield from table(["heads", "direct", "difference"], rows)


def _compared(logits: Tensor, good: str, answer: int, bad: str, other: int) -> str:
    """Return a line with the logit difference of two answers and their probabilities."""
    shares = logits.softmax(-1)
    return (
        f"logit({good.strip()}) - logit({bad.strip()}): {logits[answer] - logits[other]:+.2f}"
        f" (probabilities {shares[answer]:.3f} and {shares[other]:.3f})"
    )


def _description(bridge: TransformerBridge) -> str:
    """Return a line about the model."""
    cfg = bridge.cfg
    mlp = "no MLPs" if cfg.attn_only else f"d_mlp {cfg.d_mlp} ({cfg.act_fn})"
    return (
        f"{cfg.model_name}: {cfg.original_architecture}, {cfg.n_params:,} parameters,"
        f" {cfg.n_layers} layers of {cfg.n_heads} heads, d_model {cfg.d_model}, {mlp},"
        f" {cfg.normalization_type} norms, {cfg.positional_embedding_type} positions,"
        f" {len(bridge.hook_dict)} hook points"
    )


def _lens_table(bridge: TransformerBridge, lens: Tensor, good: str, answer: int) -> Iterable[str]:
    """Yield the probability of an answer and the five likeliest tokens, after each layer."""
    rows = []
    for i, probabilities in enumerate(lens):
        row = ["embed" if i == 0 else str(i - 1), f"{probabilities[answer]:.3f}"]
        for token in probabilities.topk(5).indices.tolist():
            text = bridge.to_single_str_token(token).strip()
            row.append(f"{text} {probabilities[token]:.2f}")
        rows.append(row)
    yield from table(["layer", f"p({good.strip()})", "1", "2", "3", "4", "5"], rows)


def _heads_table(values: Tensor) -> Iterable[str]:
    """Yield a number for each head: layers down, heads across."""
    header = ["layer", *(f"head {head}" for head in range(values.shape[1]))]
    rows = []
    for layer, numbers in enumerate(values.tolist()):
        rows.append([str(layer), *(f"{number:+.2f}" for number in numbers)])
    yield from table(header, rows)


#: Prompts of one length: their tokens, their answers and the wrong names.
_Batch = tuple[Tensor, Tensor, Tensor]


def population(bridge: TransformerBridge, n: int = 100) -> Iterable[str]:
    """Yield lines about the heads that matter on many held-out prompts of the shipped model: their
    direct effects, and the effect of ablating them.
    """
    batches = _batches(bridge, n)
    answer, repeated = _added(bridge, batches)
    effects = {}
    n_layers, n_heads = answer.shape
    for head in itertools.product(range(n_layers), range(n_heads)):
        effects[head] = _effect(bridge, batches, [head])
    important = sorted(effects, key=lambda head: effects[head][0])[:5]

    rows = [["none", "", "", *_figures(_effect(bridge, batches, []))]]
    for head in important:
        added = f"{answer[head]:+.2f}", f"{repeated[head]:+.2f}"
        rows.append([name([head]), *added, *_figures(effects[head])])
    rows.append(["all five", "", "", *_figures(_effect(bridge, batches, important))])
    yield (
        f"\nOver {n} indirect-object prompts that were not in training: the five heads whose"
        " ablation matters most,\nand what each adds directly to the logit of the answer and of the"
        " repeated name, less that of an absent name"
    )
    yield from table(["ablated", "answer", "repeated", "difference", "right"], rows)
    yield (
        "\nA head adds to the difference by raising the answer or by lowering the repeated name."
        " Layer 1 raises\nboth names; L2H0, L2H2 and L2H3 lower the repeated one."
    )


def _added(bridge: TransformerBridge, batches: Sequence[_Batch]) -> tuple[Tensor, Tensor]:
    """Return what each head adds to the answer and to the other name, less the logit of a name that
    the prompt does not have: ``[layer, head]`` each.
    """
    rng = random.Random(0)
    people = [bridge.to_single_token(f" {person}") for person in NAMES]
    rows: list[tuple[Tensor, Tensor]] = []
    for tokens, answers, others in batches:
        absent = [
            rng.choice([person for person in people if person not in {*row, *pair}])
            for row, *pair in zip(tokens.tolist(), answers.tolist(), others.tolist(), strict=True)
        ]
        third = torch.tensor(absent, device="cpu")
        rows.append(
            (
                head_contributions(bridge, tokens, answers, third),
                head_contributions(bridge, tokens, others, third),
            )
        )
    answer, other = (torch.cat(column).mean(0) for column in zip(*rows, strict=True))
    return answer, other


def _batches(bridge: TransformerBridge, n: int) -> list[_Batch]:
    """Return indirect-object prompts in batches of equal length."""
    by_length: dict[int, list[Prompt]] = {}
    for prompt in prompts("ioi", n, seed=1):
        length = bridge.to_tokens(prompt.text).shape[1]
        by_length.setdefault(length, []).append(prompt)
    batches = []
    for group in by_length.values():
        tokens = bridge.to_tokens([prompt.text for prompt in group])
        answers = [bridge.to_single_token(prompt.answer) for prompt in group]
        others = [bridge.to_single_token(prompt.wrong or "") for prompt in group]
        batches.append(
            (tokens, torch.tensor(answers, device="cpu"), torch.tensor(others, device="cpu"))
        )
    return batches


def _effect(
    bridge: TransformerBridge, batches: Sequence[_Batch], heads: Sequence[tuple[int, int]]
) -> tuple[float, float]:
    """Return the mean logit difference and the accuracy, with some heads ablated."""
    n, right, total = 0, 0, 0.0
    for tokens, answers, others in batches:
        logits = logits_without(bridge, tokens, heads)
        rows = torch.arange(len(answers), device="cpu")
        total += (logits[rows, answers] - logits[rows, others]).sum().item()
        right += int((logits.argmax(-1) == answers).sum())
        n += len(answers)
    return total / n, right / n


def _figures(effect: tuple[float, float]) -> tuple[str, str]:
    difference, accuracy = effect
    return f"{difference:+.2f}", f"{accuracy:.0%}"


def strongest(direct: Tensor, n: int) -> list[tuple[int, int]]:
    """Return the `n` heads with the largest values, as (layer, head)."""
    best = direct.flatten().topk(min(n, direct.numel())).indices.tolist()
    return [divmod(index, direct.shape[1]) for index in best]


def name(heads: Sequence[tuple[int, int]]) -> str:
    """Return names of heads, such as ``L2H1 + L3H0``."""
    return " + ".join(f"L{layer}H{head}" for layer, head in heads)


def logits_without(
    bridge: TransformerBridge, tokens: Tensor, heads: Sequence[tuple[int, int]]
) -> Tensor:
    """Return the last position's logits with some heads' z set to zero, ``[batch, d_vocab]``."""
    zeroed = [(f"blocks.{layer}.attn.hook_z", Zero(heads=head)) for layer, head in heads]
    return bridge.run_with_hooks(tokens, fwd_hooks=Interventions(zeroed))[:, -1].float()


def difference(
    bridge: TransformerBridge,
    tokens: Tensor,
    pair: tuple[Tensor, Tensor],
    heads: Sequence[tuple[int, int]] = (),
) -> float:
    """Return the logit difference of two tokens, with some heads ablated."""
    logits = logits_without(bridge, tokens, heads)[0]
    return (logits[pair[0]] - logits[pair[1]]).item()


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    """Format rows of text in columns: numbers right-aligned, everything else left-aligned."""
    lines = [header, *rows]
    columns = list(zip(*lines, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numeric = [all(not cell.strip("+-.%0123456789") for cell in column[1:]) for column in columns]
    for i, line in enumerate(lines):
        if i == 1:
            yield "  " + "  ".join("-" * width for width in widths)
        padded = []
        for cell, width, is_number in zip(line, widths, numeric, strict=True):
            padded.append(cell.rjust(width) if is_number else cell.ljust(width))
        yield ("  " + "  ".join(padded)).rstrip()
