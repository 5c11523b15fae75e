"""Fitted probes beside scikit-learn, and their aggregations beside the formulas of Kramár et al."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from bridge import TransformerBridge
from bridge.interventions import Add, FittedProbe, Interventions, Probe, Scale
from bridge.interventions.probes import AGGREGATIONS

POINT = "blocks.2.hook_resid_post"
TEXTS = ["Mary and John went to the store", "Mary", "The capital of France is", "Mary and"]


@pytest.fixture(scope="module")
def bridge() -> TransformerBridge:
    return TransformerBridge.boot_embedded()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def probe_over(over: str, width: int = 128, name: str = "probe") -> FittedProbe:
    heads = 3 if over in ("multimax", "attention") else 1
    queries = drawn(heads, width, seed=2) / 8 if over == "attention" else None
    return FittedProbe(
        point=POINT,
        values=drawn(heads, width, seed=1),
        queries=queries,
        over=over,
        name=name,
        bias=0.25,
        alpha=0.3,
    )


def by_hand(probe: FittedProbe, x: np.ndarray) -> float:
    """The formulas of the paper, sum by sum, in float64."""
    v = probe.values.double().numpy()
    n, heads = len(x), range(len(v))
    dot = lambda a, b: sum(a[i] * b[i] for i in range(len(a)))
    if probe.over == "last":
        total = dot(v[0], x[n - 1])
    elif probe.over == "mean":
        total = sum(dot(v[0], x[j]) for j in range(n)) / n
    elif probe.over in ("max", "multimax"):
        total = sum(max(dot(v[h], x[j]) for j in range(n)) for h in heads)
    elif probe.over == "ema":
        e = [0.0]
        for j in range(n):
            e.append(probe.alpha * dot(v[0], x[j]) + (1 - probe.alpha) * e[-1])
        total = max(e[1:])
    else:
        q = probe.queries.double().numpy()
        total = 0.0
        for h in heads:
            weights = [np.exp(dot(q[h], x[j])) for j in range(n)]
            total += sum(w * dot(v[h], x[j]) for j, w in enumerate(weights)) / sum(weights)
    return float(total + probe.bias)


@pytest.mark.parametrize("over", AGGREGATIONS)
def test_aggregations_are_the_formulas_of_the_paper(over: str) -> None:
    probe = probe_over(over, width=7)
    for seed, tokens in enumerate((1, 2, 9)):
        x = drawn(tokens, 7, seed=10 + seed).double()
        products = (
            x
            @ torch.cat([probe.values, *([probe.queries] if over == "attention" else [])])
            .double()
            .T
        )
        assert abs(probe.aggregate(products) - by_hand(probe, x.numpy())) < 1e-6


@pytest.mark.parametrize("side", ["left", "right"])
def test_readings_are_the_activation_times_the_direction(
    bridge: TransformerBridge, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded texts, in batches, beside each text alone; and in tokens with a mask."""
    monkeypatch.setattr(bridge.tokenizer, "padding_side", side)
    probes = [probe_over(over, name=over) for over in AGGREGATIONS]
    batch = bridge.batch_of(TEXTS)
    assert batch.mask is not None
    rows = [row[mask.bool()].tolist() for row, mask in zip(batch.tokens, batch.mask, strict=True)]
    ways = (
        bridge.readings(TEXTS, probes, batch_size=3),
        bridge.readings(rows, probes),
    )
    for number, text in enumerate(TEXTS):
        _, cache = bridge.run_with_cache(text, names_filter=POINT)
        x = cache[POINT][0].double()
        for way in ways:
            for probe in probes:
                read = way[number][probe.name]
                expected = x @ probe.weights.double().T
                scale = max(1.0, float(expected.abs().max()))
                if expected.shape[1] == 1:
                    expected = expected[:, 0] + probe.bias
                assert read.tokens.shape == expected.shape
                assert (read.tokens - expected).abs().max() < 1e-5 * scale
                assert abs(read.value - by_hand(probe, x.numpy())) < 1e-5 * scale


def test_readings_see_hooks(bridge: TransformerBridge) -> None:
    probe = probe_over("mean")
    with bridge.hooks(fwd_hooks=[(POINT, Scale(0.0))]):
        assert bridge.readings("Mary and", [probe])[0]["probe"].value == probe.bias


def test_a_generation_reads_every_processed_token(bridge: TransformerBridge) -> None:
    probes = [probe_over(over, name=over) for over in AGGREGATIONS]
    each = [[], [(POINT, Scale(0.5, part="generated"))], [], []]
    options = {"each": each, "do_sample": False, "stop_at_eos": False, "verbose": False}
    for answer in bridge.generate_batch(TEXTS, 4, readings=probes, **options):
        with bridge.hooks(fwd_hooks=each[answer.index]):
            _, cache = bridge.generate(
                TEXTS[answer.index],
                4,
                do_sample=False,
                stop_at_eos=False,
                verbose=False,
                return_cache=True,
                names_filter=POINT,
            )
        alone = cache[POINT][0]
        for probe in probes:
            expected = probe.reading(probe.products(alone))
            read = answer.readings[probe.name]
            assert torch.allclose(read.tokens, expected.tokens, rtol=1e-5, atol=1e-4)
            assert abs(read.value - expected.value) < 1e-3


def separable(count: int = 200, width: int = 12) -> tuple[list[Tensor], np.ndarray]:
    """Rows of unequal lengths, whose positives are shifted along one direction; features of very
    unequal sizes, and one that is constant.
    """
    generator = torch.Generator().manual_seed(4)
    labels = np.arange(count) % 2
    sizes = torch.logspace(-1, 2, width)
    rows = []
    for label in labels:
        x = torch.randn(
            int(torch.randint(2, 9, (1,), generator=generator)), width, generator=generator
        )
        x[:, 3] += 1.2 * float(label)
        x[:, 5] = 1.0
        rows.append(x * sizes)
    return rows, labels


@pytest.mark.parametrize("over", ["last", "mean", "max", "ema"])
def test_coefficients_are_scikit_learns(over: str) -> None:
    """Another solver of the same objective, on the training rows, pooled here."""
    rows, labels = separable()
    strength = 0.5
    probe = Probe.fit(rows, labels, POINT, over, strength=strength, held_out=0.25, seed=1)
    train = training_rows(labels, 0.25, 1)
    pooled = np.stack([(x[-1] if over == "last" else x.double().mean(0)).numpy() for x in rows])
    pipeline = make_pipeline(
        StandardScaler(), LogisticRegression(C=strength, solver="newton-cholesky", tol=1e-10)
    )
    pipeline.fit(pooled[train].astype(float), labels[train])
    scaler, regression = pipeline[0], pipeline[1]
    coefficients = regression.coef_[0] / scaler.scale_
    intercept = regression.intercept_[0] - coefficients @ scaler.mean_
    assert np.abs(probe.values[0].numpy() - coefficients).max() < 1e-4
    assert abs(probe.bias - intercept) < 1e-4


def training_rows(labels: np.ndarray, held_out: float, seed: int) -> np.ndarray:
    """The rows that a fit does not hold out: the same share of both classes."""
    rows = np.arange(len(labels))
    chosen, _ = train_test_split(rows, test_size=held_out, stratify=labels, random_state=seed)
    return np.isin(rows, chosen)


def test_a_report_is_of_the_rows_that_were_held_out() -> None:
    rows, labels = separable()
    probe = Probe.fit(rows, labels, POINT, "max", seed=2)
    report = probe.report()
    test = ~training_rows(labels, 0.2, 2)
    readings = np.array([by_hand(probe, x.double().numpy()) for x in rows])
    above = readings > probe.threshold
    assert report.rows == test.sum() == 40
    assert abs(report.auroc - roc_auc_score(labels[test], readings[test])) < 1e-9
    assert report.false_positives == above[test & (labels == 0)].mean()
    assert report.true_positives == above[test & (labels == 1)].mean()
    train = ~test  # no threshold separates the training rows better
    gain = lambda level: (
        (readings[train & (labels == 1)] > level).mean()
        - (readings[train & (labels == 0)] > level).mean()
    )
    assert all(gain(probe.threshold) >= gain(level) - 1e-9 for level in readings[train])
    lengths = np.array([len(x) for x in rows])
    sign = 1 if roc_auc_score(labels[train], lengths[train]) >= 0.5 else -1
    assert report.length == roc_auc_score(labels[test], sign * lengths[test])
    assert abs(report.shuffled - 0.5) < 0.2


def test_the_controls_show_what_labels_follow() -> None:
    """Labels that are the length of the text: the control says so. Labels at random: a probe is no
    better than its controls.
    """
    rows, _ = separable()
    long = np.array([len(x) > 4 for x in rows])
    assert Probe.fit(rows, long, POINT, "mean").report().length == 1.0
    noise = torch.randint(0, 2, (len(rows),), generator=torch.Generator().manual_seed(0))
    report = Probe.fit(rows, noise, POINT, "mean").report()
    assert abs(report.auroc - 0.5) < 0.25 and abs(report.random - 0.5) < 0.2


def test_multimax_has_a_head_for_each_kind_of_positive() -> None:
    """Positives of two kinds, along two directions: two heads find both, one direction cannot."""
    generator = torch.Generator().manual_seed(0)
    acts = torch.randn(300, 6, 10, generator=generator)
    labels = torch.arange(300) % 3  # 0: negative, 1 and 2: two kinds of positives
    acts[labels == 1, 2:4, 0] += 9.0
    acts[labels == 2, 2:4, 0] -= 9.0
    fits = {over: Probe.fit(acts, labels > 0, POINT, over, heads=2) for over in ("multimax", "max")}
    assert fits["multimax"].values.shape == (2, 10)
    assert fits["multimax"].report().auroc > 0.95 > 0.8 > fits["max"].report().auroc


def test_padding_is_not_read(bridge: TransformerBridge) -> None:
    rows, labels = separable()
    padded = torch.full((len(rows), 9, 12), 1e4)
    mask = torch.zeros(len(rows), 9, dtype=torch.long)
    for number, x in enumerate(rows):
        padded[number, : len(x)] = x
        mask[number, : len(x)] = 1
    for over in ("last", "mean"):
        ours = Probe.fit(padded, labels, POINT, over, mask=mask)
        expected = Probe.fit(rows, labels, POINT, over)
        assert torch.equal(ours.values, expected.values) and ours.report() == expected.report()


def test_a_condition_tests_each_token(bridge: TransformerBridge) -> None:
    """As a `Probe` written by hand; in a run, the tokens whose reading is above are changed."""
    probe = probe_over("ema")
    later = "blocks.3.hook_mlp_out"
    level = float(bridge.readings(TEXTS[0], [probe])[0]["probe"].tokens.median())
    pairs = Interventions(
        [(probe.point, probe.operation), (later, Add(100.0, where=probe > level))], bridge
    )
    _, before = bridge.run_with_cache(TEXTS[0], names_filter=[POINT, later])
    with bridge.hooks(fwd_hooks=list(pairs)):
        _, after = bridge.run_with_cache(TEXTS[0], names_filter=[later])
    changed = (after[later] - before[later]).abs().amax(-1)[0] > 50
    reading = before[POINT][0] @ probe.values[0] + probe.bias
    assert torch.equal(changed, reading > level) and 0 < changed.sum() < len(changed)
    assert (probe < 2.0) == (probe.operation < 2.0)
    with pytest.raises(ValueError, match="has several heads or queries"):
        _ = probe_over("attention") > 2.0


def test_comparing_asks_both(bridge: TransformerBridge) -> None:
    """A stand-in for an engine, whose readings are off in one token."""

    class Answer:
        def __init__(self, readings: dict[str, object]) -> None:
            self.readings = readings

    class Engine:
        def generate(self, texts: list[str], new: int, readings: list[FittedProbe]) -> list[Answer]:
            assert new == 1
            answers = [Answer(reading) for reading in bridge.readings(texts, readings)]
            answers[0].readings["probe"].tokens[2] += 1e4
            return answers

    tokens = sum(len(bridge.to_tokens(text)[0]) for text in TEXTS)
    for over, decisions, different in (("mean", tokens, 1), ("attention", len(TEXTS), 0)):
        agreement = probe_over(over).compare(bridge, Engine(), TEXTS)
        assert (agreement.decisions, agreement.different) == (decisions, different)
        assert (agreement.largest > 9e3) == (over == "mean")
    with pytest.raises(ValueError, match="there are no held-out rows"):
        probe_over("mean").report()


ROWS, LABELS = separable(12)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: Probe.fit(ROWS, LABELS, POINT, "median"), ValueError, "over is 'median'"),
        (lambda: Probe.fit(ROWS, LABELS, POINT, "attention"), ValueError, "no convex fit"),
        (lambda: Probe.fit(ROWS, LABELS[:3], POINT), ValueError, "for each of the 12 rows"),
        (lambda: Probe.fit(ROWS, LABELS * 2, POINT), ValueError, "a 0 or 1 for each"),
        (lambda: Probe.fit(ROWS, LABELS * 0, POINT), ValueError, "each class needs 3"),
        (lambda: Probe.fit(drawn(12, 4), LABELS, POINT), ValueError, r"acts\[:, None\]"),
        (
            lambda: Probe.fit(drawn(12, 3, 4), LABELS, POINT, mask=torch.ones(2, 3)),
            ValueError,
            "shorter",
        ),
        (
            lambda: Probe.fit(drawn(12, 3, 4), LABELS, POINT, mask=torch.zeros(12, 3)),
            ValueError,
            r"acts\[0\] is a tensor \[0, 4\]",
        ),
        (
            lambda: Probe.fit([*ROWS[1:], ROWS[0] * torch.nan], LABELS, POINT, held_out=0.3),
            ValueError,
            "NaN",
        ),
        (lambda: Probe.fit(torch.ones(12, 3, 4), LABELS, POINT), ValueError, "nothing to fit"),
        (lambda: Probe.fit(ROWS, LABELS, POINT, strength=0), ValueError, "'C' parameter"),
        (lambda: Probe.fit(ROWS, LABELS, POINT, held_out=1.0), ValueError, "test_size"),
        (lambda: Probe.fit(ROWS, LABELS, POINT, "multimax", heads=9), ValueError, "n_clusters=9"),
        (
            lambda: FittedProbe(point=POINT, values=drawn(2, 4), over="max"),
            ValueError,
            "one head",
        ),
        (
            lambda: FittedProbe(point=POINT, values=drawn(2, 4), over="attention"),
            ValueError,
            "queries is None",
        ),
        (
            lambda: FittedProbe(point=POINT, values=drawn(4), over="max"),
            ValueError,
            r"\[head feature\]",
        ),
        (
            lambda: FittedProbe(point=POINT, values=drawn(1, 4), over="ema", alpha=0.0),
            ValueError,
            "alpha is 0.0",
        ),
    ],
)
def test_bad_input_is_refused(
    call: Callable[[], object], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        call()


def test_what_cannot_be_read_is_refused(bridge: TransformerBridge) -> None:
    heads = FittedProbe(point="blocks.0.attn.hook_z", values=drawn(1, 32), over="max")
    narrow = FittedProbe(point=POINT, values=drawn(1, 4), over="max")
    good = probe_over("mean")
    for probes, match in (
        ([heads], "a probe reads"),
        ([narrow], "has 4 features"),
        ([good, good], "give each its own name"),
    ):
        with pytest.raises(ValueError, match=match):
            bridge.readings(TEXTS, probes)
        with pytest.raises(ValueError, match=match):
            bridge.generate_batch(TEXTS, 1, readings=probes)


def test_a_reading_for_each_text(bridge: TransformerBridge) -> None:
    probe = probe_over("mean")
    with pytest.raises(ValueError, match=r"texts\[1\] is of 2 texts"):
        bridge.readings([torch.tensor([5, 6]), torch.tensor([[5, 6], [7, 8]])], [probe])
    with pytest.raises(ValueError, match="batch_size is -1"):
        bridge.readings(TEXTS, [probe], batch_size=-1)
    bridge.tokenizer.chat_template = "{{ messages[0].content }}"
    chats = [[{"role": "user", "content": text}] for text in TEXTS[:2]]
    values = [x["probe"].value for x in bridge.readings(chats, [probe])]
    values += [x["probe"].value for x in bridge.readings(chats[0], [probe])]
    tokens = [bridge.to_tokens(chat)[0] for chat in (*chats, chats[0])]
    expected = [x["probe"].value for x in bridge.readings(tokens, [probe])]
    bridge.tokenizer.chat_template = None
    assert values == pytest.approx(expected, abs=1e-4)


@pytest.mark.unchecked
def test_padded_tokens_are_refused(bridge: TransformerBridge) -> None:
    with pytest.raises(TypeError, match="a list of tokens for each"):
        bridge.readings(bridge.batch_of(TEXTS).tokens, [probe_over("mean")])


def test_without_scikit_learn_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.model_selection", None)
    with pytest.raises(ImportError, match=r"pip install 'transformer-bridge\[probes\]'"):
        Probe.fit(ROWS, LABELS, POINT)
