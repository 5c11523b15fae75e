"""How later text depends on a sentence: suppressed attention to it, and continuations from it.

Input: a bridge and the spans of a chat. `suppression` runs the chat once for each sentence, with
attention to its tokens masked for all later tokens in every layer: the operation `Set` writes minus
infinity to these scores, in chunks of queries. It keeps the residual stream at the end, and
computes logits for a chunk of positions at a time. `rollouts` keeps the keys and values of the text
before a sentence, and generates from them.

Only attention is masked. A model that passes information forward in another way (a recurrence, a
convolution) raises an error. This is tested: with attention to the first sentence masked, replacing
its tokens must not change the streams after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from bridge.arguments import check_positive, refuse_wrong_types
from bridge.bridge import TransformerBridge
from bridge.interventions import Set
from bridge.run.inputs import HookSpec
from bridge.run.spans import Chat, Span, Spans

#: The maximum number of logits in memory, for a chunk of positions.
_LOGITS = 2**20


@refuse_wrong_types
@torch.no_grad()
def suppression(
    bridge: TransformerBridge, chat: Chat | Spans, *, temperature: float = 0.6, log: bool = True
) -> Float[Tensor, "sentence suppressed"]:
    """Measure how the predictions in each sentence change if attention to an earlier one is masked
    (Bogdan et al. 2025, "Thought Anchors").

    Args:
        bridge: the bridge.
        chat: a chat, all of whose sentences are used; or the sentences, such as
            ``bridge.spans(chat).thinking``.
        temperature: divides the logits.
        log: average the logarithms of the divergences (plus 1e-9), as in the paper; False: average
            the divergences.

    Returns:
        The mean, over the tokens of a sentence, of the divergence KL(run || suppressed run) between
        the next-token predictions; NaN where the suppressed sentence is not an earlier one.

    Raises:
        ValueError: fewer than two sentences; a model in which tokens influence later ones by
            more than attention, or whose attention is not causal.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.patching import suppression
        >>> bridge = TransformerBridge.boot_embedded()
        >>> bridge.tokenizer.chat_template = "{{ messages[0].content }}"
        >>> text = "Mary and John went to the store. John gave a drink to Mary."
        >>> suppression(bridge, [{"role": "user", "content": text}], log=False)[1, 0] > 0.01
        tensor(True)
    """
    spans = chat if isinstance(chat, Spans) else bridge.spans(chat).sentences()
    ordered = all(one.end <= other.start for one, other in pairwise(spans))
    if len(spans) < 2 or not ordered:
        raise ValueError(f"{spans!r}: give at least two sentences, each after the one before")
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; it must be positive")
    points = _score_points(bridge)
    tokens = spans.tokens.to(bridge.cfg.device)
    _check_cut(bridge, tokens, points, spans[0])
    before = _stream(bridge, tokens, ())
    result = torch.full((len(spans), len(spans)), torch.nan, device="cpu")
    for column, suppressed in enumerate(spans[:-1]):
        stream = _stream(bridge, tokens, _masks(points, suppressed))
        for row in range(column + 1, len(spans)):
            places = slice(spans[row].start, spans[row].end)
            divergences = _divergences(bridge, before[:, places], stream[:, places], temperature)
            values = (divergences + 1e-9).log() if log else divergences
            result[row, column] = values.mean()
    return result


def _score_points(bridge: TransformerBridge) -> list[str]:
    """Return the hook points of all attention scores.

    Raises:
        ValueError: a layer has none, or attention is not causal.
    """
    points = [name for name in bridge.hook_dict if name.endswith(".attn.hook_attn_scores")]
    layers = {f"blocks.{layer}.attn.hook_attn_scores" for layer in range(bridge.cfg.n_layers)}
    name = bridge.cfg.model_name
    if bridge.cfg.attention_dir != "causal" or bridge.core.config.is_encoder_decoder:
        raise ValueError(f"{name} is no causal decoder: earlier tokens see later ones")
    if missing := sorted(layers - set(points)):
        raise ValueError(f"{name} has no {missing[0]}: attention cannot be masked in every layer")
    return points


def _masks(points: Sequence[str], span: Span) -> list[HookSpec]:
    """Return hooks that mask attention from later tokens to a span."""
    mask = Set(float("-inf"), positions=slice(span.end, None), keys=slice(span.start, span.end))
    return [(point, mask) for point in points]


def _stream(bridge: TransformerBridge, tokens: Tensor, hooks: Sequence[HookSpec]) -> Tensor:
    """Return the residual stream at the end, ``[1 pos d_model]``."""
    stream: Tensor = bridge.run_with_hooks(
        tokens, fwd_hooks=list(hooks), stop_at_layer=bridge.cfg.n_layers
    )
    return stream


def _check_cut(
    bridge: TransformerBridge, tokens: Tensor, points: Sequence[str], span: Span
) -> None:
    """Raise an error if tokens after a span depend on it although they do not attend to it."""
    places = slice(span.start, span.end)
    others = tokens.clone()
    others[:, places] = (others[:, places] + 1) % bridge.cfg.d_vocab
    hooks = _masks(points, span)
    one, other = (_stream(bridge, x, hooks)[:, span.end :] for x in (tokens, others))
    distance = (one - other).abs().max()
    if not bool(distance <= 1e-3 * one.abs().max()):
        raise ValueError(
            f"{bridge.cfg.model_name} carries tokens forward by more than attention (a recurrence,"
            f" a convolution): with attention to {span.text!r} masked, the text after it still"
            " depends on it"
        )


def _divergences(
    bridge: TransformerBridge, one: Tensor, other: Tensor, temperature: float
) -> Float[Tensor, " pos"]:
    """Return the divergence between the predictions of two streams at each position."""
    n, size = bridge.cfg.n_layers, max(1, _LOGITS // bridge.cfg.d_vocab_out)
    wide = torch.float32 if one.device.type == "mps" else torch.float64
    parts = []
    for pair in zip(one.split(size, 1), other.split(size, 1), strict=True):
        p, q = (
            (bridge(stream, start_at_layer=n)[0].to(wide) / temperature).log_softmax(-1)
            for stream in pair
        )
        parts.append((p.exp() * (p - q)).sum(-1).clamp(min=0))
    return torch.cat(parts)


@refuse_wrong_types
def rollouts(
    bridge: TransformerBridge,
    spans: Spans,
    sentence: Span,
    n: int,
    max_new_tokens: int = 100,
    **options: Any,
) -> list[str]:
    """Generate several continuations from the start of a sentence; the text before it runs once.

    Args:
        bridge: the bridge.
        spans: the spans of the chat, or some of them.
        sentence: the sentence that is replaced. To keep it, pass the next one.
        n: the number of continuations.
        max_new_tokens, options: as for `TransformerBridge.generate`, such as ``temperature=``.

    Returns:
        The new texts.

    Raises:
        ValueError: there is no text before the sentence, or it belongs to another chat; the model
            keeps no keys and values; or hooks are active, which would count positions in the text
            before the sentence.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.patching import rollouts
        >>> bridge = TransformerBridge.boot_embedded()
        >>> bridge.tokenizer.chat_template = "{{ messages[0].content }}"
        >>> text = "Mary and John went to the store. John gave a drink to Mary."
        >>> spans = bridge.spans([{"role": "user", "content": text}])
        >>> rollouts(bridge, spans, spans.sentences()[1], 2, 6, do_sample=False)
        [' There John showed a cake to', ' There John showed a cake to']
    """
    check_positive("n", n)
    if sentence.start < 1:
        raise ValueError("there is no text before the sentence: choose a later one")
    spans.check_has(sentence)
    if bridge.wiring.listening:
        raise ValueError(
            "hooks are active, and the text before the sentence runs by itself: generate from"
            f" spans.tokens[:, :{sentence.start}] by bridge.generate(..., num_return_sequences={n})"
        )
    prompt = spans.tokens[:, : sentence.start].to(bridge.cfg.device)
    more: dict[str, Any] = {
        "verbose": False,
        "attention_mask": torch.ones_like(prompt).expand(n, -1),
    }
    if sentence.start > 1:
        with torch.no_grad():
            _, past = bridge(prompt[:, :-1], return_type="logits_and_cache")
        past.batch_repeat_interleave(n)
        more["past_key_values"] = past
    texts = bridge.generate(
        prompt.expand(n, -1), max_new_tokens, return_type="str", **(more | options)
    )
    tokenizer = bridge.tokenizer_facts.tokenizer
    # As in the texts of generations, special tokens aside.
    before: Any = tokenizer.decode(
        prompt[0].tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return [text[len(before) :] for text in texts]
