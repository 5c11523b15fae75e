"""Suppressed sentences and continuations from a sentence, beside computations by hand and beside
thought-anchors' functions, written again in float64.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM

from bridge import TransformerBridge
from bridge.analysis.patterns import PatternStatistics, kurtosis, vertical_scores
from bridge.interventions import Zero
from bridge.patching import (
    generic_activation_patch,
    layer_pos_patch_setter,
    rollouts,
    suppression,
)
from bridge.run.spans import Span, Spans
from tests.run.chats import TEMPLATES, tokenizer_of
from tests.taps.test_touching import peak_bytes
from tests.tiny_models import tiny_model

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
TEXT = (
    "Mary and John went to the store. John gave a drink to Mary. Then Mary went to the park. There"
    " Mary and John had a cake. Mary gave the cake to John. John was in the park."
)
CHAT = [{"role": "user", "content": TEXT}]


@pytest.fixture(scope="module")
def bridge():
    bridge = TransformerBridge.boot_embedded()
    bridge.tokenizer.chat_template = TEMPLATE
    return bridge


def masked_logits(bridge, tokens, span):
    """The logits with a span masked as padding: no token attends to it, and none after it could
    read what that changes in it.
    """
    mask = torch.ones_like(tokens)
    mask[:, span.start : span.end] = 0
    places = torch.arange(tokens.shape[1])[None]
    more = {"position_ids": places} if bridge.core.config.model_type != "bloom" else {}
    with torch.no_grad():
        return bridge.original_model(tokens, attention_mask=mask, **more).logits


def by_hand(bridge, spans, log, temperature=0.6, logits=masked_logits):
    """The divergences in float64, from logits of transformers' own masks."""
    tokens = spans.tokens
    with torch.no_grad():
        before = bridge.original_model(tokens).logits[0].double() / temperature
    result = np.full((len(spans), len(spans)), np.nan)
    for column, suppressed in enumerate(spans):
        after = logits(bridge, tokens, suppressed)[0].double() / temperature
        p, q = before.log_softmax(-1), after.log_softmax(-1)
        divergences = (p.exp() * (p - q)).sum(-1).clamp(min=0).numpy()
        values = np.log(divergences + 1e-9) if log else divergences
        for row in range(column + 1, len(spans)):
            result[row, column] = values[spans[row].start : spans[row].end].mean()
    return result


@pytest.mark.parametrize("log", [True, False])
def test_suppression_is_that_of_a_mask_of_transformers(bridge, log):
    spans = bridge.spans(CHAT).sentences()
    assert len(spans) == 6
    expected = by_hand(bridge, spans, log)
    values = suppression(bridge, CHAT, log=log)
    np.testing.assert_allclose(values.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert np.array_equal(np.isnan(expected), ~np.tril(np.ones((6, 6), bool), -1))
    some = suppression(bridge, spans[1:4], log=log, temperature=1.0)
    expected = by_hand(bridge, spans[1:4], log, 1.0)
    np.testing.assert_allclose(some.numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "gpt_neox", "opt", "gemma2", "mistral", "olmo3", "bloom"]
)
def test_suppression_of_other_attentions(bridge, family):
    """Sliding windows, soft caps, ALiBi, learned positions."""
    model = tiny_model(family)
    other = TransformerBridge(model, bridge.tokenizer)
    spans = of_vocabulary(bridge.spans(CHAT).sentences()[1:4], other)
    values = suppression(other, spans, log=False)
    if family == "bloom":  # its mask is not transformers' own: the pattern's entries are removed
        expected = by_hand(other, spans, False, logits=without_entries)
    else:
        expected = by_hand(other, spans, False)
    np.testing.assert_allclose(values.numpy(), expected, rtol=1e-4, atol=1e-6)


def of_vocabulary(spans, bridge):
    """The spans with tokens that a tiny model has."""
    ids = [token % bridge.cfg.d_vocab for token in spans._layout.ids]
    return Spans(list(spans), replace(spans._layout, ids=ids))


def without_entries(bridge, tokens, span):
    """The logits with a span's columns taken out of every pattern, which is normalised again."""

    def take_out(pattern, hook):
        pattern[:, :, span.end :, span.start : span.end] = 0
        return pattern / pattern.sum(-1, keepdim=True)

    hooks = [(f"blocks.{i}.attn.hook_pattern", take_out) for i in range(bridge.cfg.n_layers)]
    with torch.no_grad():
        return bridge.run_with_hooks(tokens, fwd_hooks=hooks)


@pytest.mark.parametrize(
    ("family", "task", "message"),
    [
        ("t5", "seq2seq", "no causal decoder"),
        ("bert", "masked", "no causal decoder"),
        ("mamba", "causal", "attention cannot be masked in every layer"),
        ("jamba", "causal", "attention cannot be masked in every layer"),
        ("falcon_h1", "causal", "carries tokens forward by more than attention"),
    ],
)
def test_models_that_carry_text_otherwise_are_refused(bridge, family, task, message):
    other = TransformerBridge(tiny_model(family, task), bridge.tokenizer)
    with pytest.raises(ValueError, match=message):
        suppression(other, of_vocabulary(bridge.spans(CHAT).sentences(), other))


def test_bad_input(bridge):
    spans = bridge.spans(CHAT).sentences()
    for wrong in (spans[:1], Spans([spans[1], spans[0]], spans._layout)):
        with pytest.raises(ValueError, match="give at least two sentences, each after the one"):
            suppression(bridge, wrong)
    with pytest.raises(ValueError, match="temperature is 0"):
        suppression(bridge, spans, temperature=0)
    with pytest.raises(ValueError, match="n is 0"):
        rollouts(bridge, spans, spans[1], 0)
    with pytest.raises(ValueError, match="there is no text before the sentence"):
        rollouts(bridge, spans, replace(spans[0], start=0), 1)
    hooks = [("blocks.1.hook_resid_post", Zero(positions=-1))]
    with (
        bridge.hooks(fwd_hooks=hooks),
        pytest.raises(ValueError, match=r"hooks are active, .*num_return_sequences=2"),
    ):
        rollouts(bridge, spans, spans[1], 2)
    other = TransformerBridge(tiny_model("openai-gpt"), bridge.tokenizer)
    with pytest.raises(ValueError, match="returns no past_key_values"):
        rollouts(other, of_vocabulary(spans, other), spans[1], 2)


def test_suppression_needs_little_more_memory_than_a_forward(bridge):
    """The pattern of one head would be 151 MB, and two copies of the logits 197 MB each."""
    n, names = 6144, ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = {"vocab_size": 8000, "hidden_size": 32, "intermediate_size": 64}
    config = LlamaConfig(**sizes, **dict.fromkeys(names, 1), max_position_embeddings=n)
    model = LlamaForCausalLM(config).eval()
    other = TransformerBridge(model)
    ids = torch.randint(8000, (n,), generator=torch.Generator().manual_seed(0)).tolist()
    cuts = [0, 2000, 4000, n]
    some = [Span(a, b, "user", 0, "content", i, "") for i, (a, b) in enumerate(pairwise(cuts))]
    spans = Spans(some, replace(bridge.spans(CHAT)._layout, ids=ids))
    with torch.no_grad():
        forward = peak_bytes(lambda: other(spans.tokens))
        assert peak_bytes(lambda: suppression(other, spans)) < 1.2 * forward
        statistics = PatternStatistics(groups=spans)
        names = "blocks.0.attn.hook_pattern"
        run = lambda: other.run_with_callback(spans.tokens, statistics, names, max_bytes=2**24)
        assert peak_bytes(run) < 1.2 * forward


@pytest.mark.parametrize("sentence", [1, 4])
def test_rollouts_are_generations_with_the_text_before_run_once(bridge, sentence):
    spans = bridge.spans(CHAT)
    start = spans.sentences()[sentence].start
    prompt = spans.tokens[:, :start]
    kept = bridge.generate(prompt, 6, do_sample=False, verbose=False, return_type="str")
    (expected,) = kept if isinstance(kept, list) else [kept]
    of_prompt = bridge.tokenizer.decode(prompt[0], skip_special_tokens=True)
    lengths = []
    handle = bridge.original_model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    try:
        texts = rollouts(bridge, spans, spans.sentences()[sentence], 3, 6, do_sample=False)
    finally:
        handle.remove()
    assert texts == [expected[len(of_prompt) :]] * 3
    assert lengths[0] == (1, start - 1) and set(lengths[1:]) == {(3, 1)}
    torch.manual_seed(0)
    sampled = rollouts(bridge, spans, spans.sentences()[sentence], 8, 6, temperature=2.0)
    assert len(set(sampled)) > 1


@pytest.mark.parametrize("name", ["llama_3", "qwen_3", "mistral"])
def test_rollouts_of_templates_with_special_tokens(name):
    tokenizer = tokenizer_of(TEMPLATES[name])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
    )
    other = TransformerBridge(LlamaForCausalLM(config).eval(), tokenizer)
    spans = other.spans([{"role": "user", "content": "The train is late. Is the bus here?"}])
    for sentence in spans.sentences():
        prompt = spans.tokens[:, : sentence.start]
        options = {"do_sample": False, "verbose": False, "return_type": "tokens"}
        new = other.generate(prompt, 6, **options)[0, sentence.start :]
        right = tokenizer.decode(new, skip_special_tokens=True)
        assert right and rollouts(other, spans, sentence, 2, 6, do_sample=False) == [right] * 2


def test_a_sentence_of_another_chat_is_refused(bridge):
    spans = bridge.spans(CHAT)
    other = bridge.spans([{"role": "user", "content": "Mary left the house. " + TEXT}])
    with pytest.raises(ValueError, match="does not belong to this chat, which has at"):
        rollouts(bridge, spans, other.sentences()[2], 1)


def test_a_position_that_is_listed_twice_counts_once(bridge):
    name = "blocks.2.attn.hook_pattern"
    between = []
    for group in ([1, 1, 2], [1, 2]):
        statistics = PatternStatistics(groups=[group, [3]])
        bridge.run_with_callback(TEXT, statistics, name)
        between.append(statistics.between[name])
    assert torch.equal(*between)


def reference_scores(matrix, nearest, ranks):
    """thought-anchors' `get_vertical_scores`, as it is written."""
    matrix = matrix.astype(np.float64).copy()
    matrix[np.triu_indices_from(matrix, k=1)] = np.nan
    matrix[np.triu_indices_from(matrix, k=-nearest + 1)] = np.nan
    if ranks:
        per_row = np.sum(~np.isnan(matrix), axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            matrix = stats.rankdata(matrix, axis=1, nan_policy="omit") / per_row[:, None]
    columns = [matrix[i + nearest :, i] for i in range(len(matrix))]
    return np.array([column.mean() if len(column) else np.nan for column in columns])


@pytest.mark.parametrize("ranks", [False, True])
@pytest.mark.parametrize("nearest", [1, 4, 12])
def test_vertical_scores_and_kurtosis(nearest, ranks):
    generator = np.random.default_rng(0)
    matrices = generator.random((2, 3, 12, 12)).astype(np.float32)
    matrices[0, 0] = matrices[0, 0].round(1)  # equal entries
    matrices *= np.tri(12, dtype=np.float32)
    expected = np.array([[reference_scores(m, nearest, ranks) for m in row] for row in matrices])
    scores = vertical_scores(torch.tensor(matrices), nearest, ranks=ranks)
    np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-6, atol=1e-6)
    if nearest == 12:
        assert bool(scores.isnan().all())
        return
    moments = stats.kurtosis(expected, axis=2, fisher=True, bias=True, nan_policy="omit")
    np.testing.assert_allclose(kurtosis(scores).numpy(), moments, rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match="between is a tensor"):
        vertical_scores(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="nearest is -1; it must be 0 or more"):
        vertical_scores(torch.zeros(3, 3), -1)


@pytest.mark.parametrize("max_bytes", [1, 3000, None])
@pytest.mark.parametrize("side", ["left", "right", None])
def test_attention_between_groups(bridge, side, max_bytes):
    texts = [TEXT, "John gave a drink to Mary. Then Mary went to the park."]
    texts = texts[:1] if side is None else texts
    groups = [[0, 1, 2], range(3, 7), [2, 9], Span(4, 10, "user", 0, "content", 0, "")]
    groups = [list(x) if isinstance(x, range) else x for x in groups]
    statistics = PatternStatistics(groups=groups)
    name = "blocks.2.attn.hook_pattern"
    batch = bridge.batch_of(texts, padding_side=side)
    more = {} if batch.mask is None else {"attention_mask": batch.mask}
    with torch.no_grad():
        bridge.run_with_callback(batch.tokens, statistics, name, max_bytes=max_bytes, **more)
    for row, text in enumerate(texts):
        with torch.no_grad():
            _, cache = bridge.run_with_cache(text, names_filter=name)
        pattern = cache[name][0].double()
        places = [getattr(group, "positions", group) for group in groups]
        expected = [[pattern[:, q][:, :, k].mean((1, 2)) for k in places] for q in places]
        expected = torch.stack([torch.stack(x, -1) for x in expected], -2)
        torch.testing.assert_close(
            statistics.between[name][row].double(), expected, rtol=1e-5, atol=1e-6
        )


def test_groups_that_are_not_there(bridge):
    name = "blocks.2.attn.hook_pattern"
    with pytest.raises(IndexError, match="groups go to position 400 of"):
        bridge.run_with_callback(TEXT, PatternStatistics(groups=[[1, 400]]), name)
    with pytest.raises(ValueError, match="positions from 0 on"):
        PatternStatistics(groups=[[-1]])
    other = TransformerBridge(tiny_model("t5", "seq2seq"), bridge.tokenizer)
    tokens = {
        "input_ids": torch.tensor([[5, 6, 7]]),
        "decoder_input_ids": torch.tensor([[5, 6, 7]]),
    }
    statistics = PatternStatistics(groups=[[0]])
    with pytest.raises(ValueError, match="attends from other tokens than it attends to"):
        other.run_with_callback(tokens, statistics, "decoder.1.cross_attn.hook_pattern")


def test_a_patch_of_a_sentence_is_that_of_all_its_positions(bridge):
    spans = bridge.spans(CHAT)
    corrupted = spans.tokens.clone()
    corrupted[:, 8] = corrupted[:, 4]
    metric = lambda logits: logits[0, -1, 7] - logits[0, -1, 9]
    with torch.no_grad():
        _, cache = bridge.run_with_cache(spans.tokens)
        values = generic_activation_patch(
            bridge,
            corrupted,
            cache,
            metric,
            layer_pos_patch_setter,
            "resid_pre",
            ("layer", "pos"),
            positions=spans.sentences(),
            verbose=False,
        )
        assert values.shape == (4, 6)
        for layer in range(4):
            for column, span in enumerate(spans.sentences()):
                name = f"blocks.{layer}.hook_resid_pre"

                def put(stream, hook, span=span):
                    stream[:, span.positions] = cache[hook.name][:, span.positions]
                    return stream

                logits = bridge.run_with_hooks(corrupted, fwd_hooks=[(name, put)])
                torch.testing.assert_close(
                    values[layer, column], metric(logits), rtol=1e-4, atol=1e-4
                )
    with pytest.raises(ValueError, match='positions are those of the axis "pos"'):
        generic_activation_patch(
            bridge,
            corrupted,
            cache,
            metric,
            layer_pos_patch_setter,
            "resid_pre",
            ("layer",),
            positions=spans.sentences(),
        )
