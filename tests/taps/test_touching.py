"""Scores and patterns of the heads and queries that a hook touches are made, and no others: with
the same results.
"""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bridge import TransformerBridge
from bridge.cache import ActivationCache
from bridge.hooks.parts import rows_within
from bridge.interventions import Add, Clamp, Mean, Replace, Scale, Set, Touching, Zero
from bridge.taps.attention_call import AttentionCall
from bridge.trace.coroutine import OutOfStepError
from tests.conftest import tiny
from tests.taps.test_kernels import TOKENS, by_hand, windowed
from tests.tiny_models import checkpoint, tiny_model

FAMILIES = [
    ("gpt2", "causal"),
    ("llama", "causal"),
    ("mistral", "causal"),
    ("gemma2", "causal"),
    ("gemma3_text", "causal"),
    ("qwen3", "causal"),
    ("gpt_neox", "causal"),
    ("opt", "causal"),
    ("falcon", "causal"),
    ("gpt_oss", "causal"),
    ("bloom", "causal"),
    ("mpt", "causal"),
    ("starcoder2", "causal"),
    ("bert", "masked"),
    ("t5", "seq2seq"),
]
PATTERN, SCORES = "blocks.1.attn.hook_pattern", "blocks.1.attn.hook_attn_scores"


@pytest.fixture(autouse=True)
def however_few(monkeypatch):
    """Of few scores the whole is quicker: here it is the parts that are looked at."""
    monkeypatch.setattr("bridge.taps.attention_tap.FEW_SCORES", 0)


@pytest.fixture
def made(monkeypatch):
    """Of how many heads and queries scores were made, call by call."""
    sizes, own = [], AttentionCall.scores

    def scores(self):
        found = own(self)
        sizes.append(tuple(found.shape[1:3]))
        return found

    monkeypatch.setattr(AttentionCall, "scores", scores)
    return sizes


def on_the_whole(change, heads=slice(None), queries=slice(None)):
    """A plain hook function, which is given everything, and changes a part."""

    def fn(x, hook):
        x = x.clone()
        x[:, heads, queries] = change(x[:, heads, queries])
        return x

    return fn


def softened(x):
    """What scores and patterns can be multiplied with: what is forbidden stays so."""
    return x * 0.25


def inputs_of(task):
    """Two rows, one of them padded on the left."""
    tokens = torch.randint(5, 50, (2, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    return tokens, mask, {"decoder_input_ids": tokens} if task == "seq2seq" else {}


def peak_bytes(run):
    """The most that torch has allocated at one time while something runs, above what was there."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        run()
    events = [x for x in watched.profiler.kineto_results.events() if x.name() == "[memory]"]
    return max(accumulate(x.nbytes() for x in sorted(events, key=lambda x: x.start_ns())))


def names_of(task):
    """The hook points of scores and patterns of one layer."""
    if task != "seq2seq":
        return [PATTERN, SCORES]
    inside = ("hook_pattern", "hook_attn_scores")
    return [
        f"{part}.{name}"
        for part in ("encoder.1.attn", "decoder.1.attn", "decoder.1.cross_attn")
        for name in inside
    ]


CASES = [
    ((3, slice(None)), (slice(3, 4), slice(None))),
    (([0, -1], slice(4, 6)), (slice(0, 4, 3), slice(4, 6))),
    ((None, [-1]), (slice(None), slice(8, 9))),
]
BY_HAND = (
    "bloom",
    "mpt",
    "gpt_oss",
    "gemma2",
)  # these have no kernel: their scores are made by the model


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("family", "task"), FAMILIES)
def test_values_edits_and_gradients_are_those_of_the_whole(family, task, attention, made):
    hf = tiny_model(family, task)
    hf.set_attn_implementation("eager" if family in BY_HAND else attention)
    bridge = TransformerBridge(hf)
    tokens, mask, more = inputs_of(task)

    def run(name, fn, given):
        hf.zero_grad()
        logits = bridge.run_with_hooks(tokens, fwd_hooks=[(name, fn)], **given)
        logits.log_softmax(-1)[..., 7].sum().backward()
        return logits.detach(), {
            key: x.grad.clone() for key, x in hf.named_parameters() if x.grad is not None
        }

    for name in names_of(task):
        for given in (more, more | {"attention_mask": mask}):
            plain = bridge(tokens, **given).detach()
            _, cache = bridge.run_with_cache(tokens, names_filter=name, **given)
            for (heads, queries), (cols, rows) in CASES:
                # Asked of a cache that holds queries and keys, before the whole is there.
                _, asked = bridge.run_with_cache(tokens, names_filter=name, **given)
                part = asked.part(name, heads=[3] if heads == 3 else heads, queries=queries)
                torch.testing.assert_close(part, cache[name][:, cols, rows], atol=2e-6, rtol=0)
                expected, slopes = run(name, on_the_whole(softened, cols, rows), given)
                assert not torch.allclose(expected, plain, atol=1e-6)
                made.clear()
                shown = []

                def seen(x, hook, shown=shown):
                    shown.append(x.detach())
                    return softened(x)

                def written(x, hook):
                    x *= 0.25

                where = {"heads": heads, "queries": queries}
                functions = [
                    Touching(seen, **where),
                    Touching(written, **where),
                    Touching(seen, **where, max_bytes=999),
                ]
                if heads == 3:
                    functions.append(Scale(0.25, heads=3))
                for fn in functions:
                    logits, gradients = run(name, fn, given)
                    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)
                    assert gradients.keys() == slopes.keys()
                    for key, slope in slopes.items():
                        torch.testing.assert_close(gradients[key], slope, atol=2e-4, rtol=1e-3)
                    with torch.no_grad():
                        other = bridge.run_with_hooks(tokens, fwd_hooks=[(name, fn)], **given)
                    torch.testing.assert_close(other, expected, atol=2e-5, rtol=1e-4)
                torch.testing.assert_close(shown[0], part, atol=2e-6, rtol=1e-5)
                assert bool(made) is (hf.config._attn_implementation == "sdpa")
                assert all(h * q <= 18 for h, q in made)  # of 36


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("family", "task"), FAMILIES)
def test_caches_traces_and_added_hooks_of_some_heads(family, task, attention, made):
    hf = tiny_model(family, task)
    hf.set_attn_implementation("eager" if family in BY_HAND else attention)
    bridge, kernel = TransformerBridge(hf), hf.config._attn_implementation == "sdpa"
    tokens, mask, more = inputs_of(task)
    half = (slice(0, 4, 3), slice(4, 6))

    def gradients(logits):
        hf.zero_grad()
        logits.log_softmax(-1)[..., 7].sum().backward()
        return {key: x.grad.clone() for key, x in hf.named_parameters() if x.grad is not None}

    for name in names_of(task):
        for given in (more, more | {"attention_mask": mask}):
            whole = bridge.run_with_cache(tokens, names_filter=name, **given)[1][name]
            made.clear()
            _, cache = bridge.run_with_cache(tokens, names_filter={name: [-1, 0]}, **given)
            assert list(cache) == [f"{name}[0, 3]"] and name not in cache
            torch.testing.assert_close(
                cache.part(name, heads=[3, 0]), whole[:, [3, 0]], atol=2e-6, rtol=0
            )
            torch.testing.assert_close(
                cache.part(name, heads=-1, queries=2), whole[:, 3, 2], atol=2e-6, rtol=0
            )
            torch.testing.assert_close(cache[f"{name}[0, 3]"], whole[:, ::3], atol=2e-6, rtol=0)
            assert all(h <= 2 for h, _ in made) and bool(made) is kernel
            expected = bridge.run_with_hooks(
                tokens, fwd_hooks=[(name, on_the_whole(softened, *half))], **given
            )
            slopes = gradients(expected)
            made.clear()
            with bridge.trace(tokens, **given) as run:
                part = run.part(name, heads=[0, 3], queries=slice(4, 6))
                before = part.detach().clone()
                part *= 0.25
            (handle,) = bridge.add_hook(name, softened_hook, heads=[0, -1], queries=slice(4, 6))
            with handle:
                added = bridge(tokens, **given)
            assert bool(made) is kernel and all(sizes == (2, 2) for sizes in made)
            torch.testing.assert_close(before, whole[:, half[0], half[1]], atol=2e-6, rtol=0)
            for logits in (run.logits, added):
                torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)
                for key, slope in gradients(logits).items():
                    torch.testing.assert_close(slope, slopes[key], atol=2e-4, rtol=1e-3)
            assert run.grad(name).shape == before.shape


def softened_hook(x, hook):
    """`softened`, as a hook function."""
    return softened(x)


def test_a_cache_of_some_heads_says_so(tokens, made):
    bridge = TransformerBridge(tiny("llama"))
    chosen = {
        "blocks.0.hook_resid_pre": None,
        SCORES: 2,
        "blocks.2.attn.hook_q": [0, 3],
        "blocks.2.attn.hook_k": 1,
    }
    _, whole = bridge.run_with_cache(tokens)
    _, cache = bridge.run_with_cache(tokens, names_filter=chosen)
    assert list(cache) == [
        "blocks.0.hook_resid_pre",
        f"{SCORES}[2]",
        "blocks.2.attn.hook_q[0, 3]",
        "blocks.2.attn.hook_k[1]",
    ]
    assert torch.equal(cache["resid_pre", 0], whole["resid_pre", 0])
    assert torch.equal(cache.part("q", 2, heads=3), whole["q", 2][:, :, 3])
    assert torch.equal(cache.part("k", 2, heads=[1]), whole["k", 2][:, :, [1]])
    assert (
        cache["blocks.2.attn.hook_q[0, 3]"].untyped_storage().nbytes() == 2 * 9 * 2 * 8 * 4
    )  # and nothing else
    for ask, said in (
        (
            lambda: cache["q", 2],
            r"it holds the heads \[0, 3\] alone: cache.part\('blocks.2.attn.hook_q', heads=0\)",
        ),
        (lambda: cache.part("q", 2), r"keeps the heads \[0, 3\], not \[1, 2\]"),
        (lambda: cache.part("q", 2, heads=[0, 1]), r"keeps the heads \[0, 3\], not \[1\]"),
    ):
        with pytest.raises(KeyError, match=said):
            ask()
    with pytest.raises(IndexError):
        cache.part("q", 2, heads=4)
    copied = pickle.loads(pickle.dumps(cache))
    assert torch.equal(copied.part("blocks.2.attn.hook_q", heads=0), whole["q", 2][:, :, 0])
    row = bridge.run_with_cache(tokens[:1], names_filter=chosen, remove_batch_dim=True)[1]
    torch.testing.assert_close(
        row.part("attn_scores", 1, heads=2), whole["attn_scores", 1][0, 2], atol=2e-6, rtol=0
    )
    assert copied.apply_slice_to_batch_dim(1).part("blocks.2.attn.hook_q", heads=0).shape == (9, 8)
    some, _ = bridge.run_with_cache(tokens, names_filter=chosen, pos_slice=-1), made.clear()
    assert some[1].part("attn_scores", 1, heads=2).shape == (2, 1, 9)
    values = bridge.run_with_cache(tokens, names_filter=chosen, return_cache_object=False)[1]
    assert list(values) == list(cache)


@pytest.mark.parametrize(
    ("chosen", "options", "error", "said"),
    [
        ({PATTERN: 4}, {}, IndexError, "has 4 of them"),
        ({"blocks.1.hook_resid_pre": 1}, {}, ValueError, "no heads among them"),
        ({PATTERN: "3"}, {}, TypeError, "whole number"),
        ({PATTERN: []}, {}, ValueError, "chooses nothing"),
        ({}, {}, ValueError, "empty"),
        ({"blocks.9.attn.hook_pattern": 1}, {}, KeyError, "blocks.9"),
        ({PATTERN: 1}, {"incl_bwd": True, "return_type": "loss"}, ValueError, "no gradients"),
        ({PATTERN: 1}, {"reset_hooks_end": False}, ValueError, "no hooks that stay"),
    ],
)
@pytest.mark.unchecked
def test_heads_of_a_cache_that_are_refused_before_anything_runs(
    chosen, options, error, said, tokens
):
    bridge = TransformerBridge(tiny("llama"))
    bridge.original_model.forward = None
    with pytest.raises(error, match=said):
        bridge.run_with_cache(tokens, names_filter=chosen, **options)


@pytest.mark.parametrize("name", [PATTERN, SCORES])
@torch.no_grad()
def test_some_heads_of_what_cannot_wait(name, tokens, made):
    """Behind a past, under autocast, and beside one who needs all."""
    bridge = TransformerBridge(tiny("llama"))
    _, past = bridge(tokens[:, :5], return_type="logits_and_cache")
    given = {"past_key_values": copy.deepcopy(past)}
    whole = bridge.run_with_cache(tokens[:, 5:], names_filter=name, past_key_values=past)[1][name]
    made.clear()
    _, cache = bridge.run_with_cache(tokens[:, 5:], names_filter={name: 3}, **given)
    assert made == [(1, 4)] and torch.equal(cache.part(name, heads=[3]), whole[:, [3]])
    with torch.autocast("cpu", torch.bfloat16):
        whole = bridge.run_with_cache(tokens, names_filter=name)[1][name]
        made.clear()
        _, cache = bridge.run_with_cache(tokens, names_filter={name: [0, 2]})
    assert made == [(2, 9)] and torch.equal(cache.part(name, heads=[2]), whole[:, [2]])
    seen = []
    with bridge.hooks(fwd_hooks=[(name, lambda x, hook: seen.append(x.clone()) or x * 0.5)]):
        _, cache = bridge.run_with_cache(tokens, names_filter={name: 1})
    assert torch.equal(cache.part(name, heads=1), seen[0][:, 1] * 0.5)


def test_parts_of_a_trace_in_their_order(tokens, made):
    bridge = TransformerBridge(tiny("llama"))
    _, whole = bridge.run_with_cache(tokens)
    with torch.no_grad(), bridge.trace(tokens, capture=["blocks.1.hook_resid_post"]) as run:
        first = run["blocks.0.hook_resid_post"]
        head = run.part("blocks.1.attn.hook_pattern", heads=1)
        later = run["blocks.1.hook_mlp_out"]
        kept = head.clone()
    assert made == [(1, 9)]
    torch.testing.assert_close(head, whole["pattern", 1][:, [1]], atol=2e-6, rtol=0)
    assert torch.equal(first, whole["resid_post", 0]) and torch.equal(kept, head)
    torch.testing.assert_close(later, whole["mlp_out", 1], atol=1e-5, rtol=1e-5)
    made.clear()
    with (
        torch.no_grad(),
        bridge.trace(tokens) as run,
    ):  # inside of an attention that is open, all are made
        q = run["blocks.1.attn.hook_q"]
        head = run.part(SCORES, heads=1)
        both = run[PATTERN]
    assert torch.equal(q, whole["q", 1]) and made == [(4, 9)]
    torch.testing.assert_close(head, whole["attn_scores", 1][:, [1]], atol=2e-6, rtol=0)
    torch.testing.assert_close(both, whole["pattern", 1], atol=2e-6, rtol=0)


def test_parts_that_a_trace_refuses(tokens):
    bridge = TransformerBridge(tiny("llama"))

    def traced(*names, **chosen):
        with bridge.trace(tokens) as run:
            for name in names:
                run.part(name, **chosen)

    with pytest.raises(
        OutOfStepError, match="never came"
    ):  # who listens was settled when the attention began
        traced(SCORES, PATTERN, heads=1)
    with pytest.raises(OutOfStepError, match=r"has passed|the model is at"):
        traced("blocks.2.attn.hook_z", PATTERN, heads=1)
    with pytest.raises(IndexError):
        traced(PATTERN, heads=4)
    with pytest.raises(ValueError, match="neither heads"):
        traced(PATTERN)
    with pytest.raises(ValueError, match="no heads"):
        traced("blocks.0.hook_resid_pre", heads=1)


def test_parts_of_a_trace_elsewhere(tokens):
    bridge = TransformerBridge(tiny("llama"))
    _, whole = bridge.run_with_cache(tokens)
    z = whole["z", 1].clone()
    with torch.no_grad(), bridge.trace(tokens) as run:
        part = run.part("blocks.1.attn.hook_z", heads=2)
        part[:] = 0
        after = run["blocks.1.hook_attn_out"]
    z[:, :, 2] = 0
    expected = bridge.run_with_hooks(
        tokens, fwd_hooks=[("blocks.1.attn.hook_z", lambda x, hook: z)]
    )
    torch.testing.assert_close(run.logits, expected, atol=1e-5, rtol=1e-5)
    assert not torch.equal(after, whole["attn_out", 1])
    given = whole["resid_pre", 0].clone()
    with torch.no_grad(), bridge.trace(given) as run:  # which the model goes on with as it is
        run.part("blocks.0.hook_resid_pre", queries=2).zero_()
    assert torch.equal(given, whole["resid_pre", 0])
    given[:, 2] = 0
    torch.testing.assert_close(run.logits, bridge(given), atol=1e-5, rtol=1e-5)
    steps = []
    with bridge.trace_generate(tokens[:1], max_new_tokens=2, do_sample=False) as run:
        for step in run.steps:
            steps.append(step.part(PATTERN, heads=3).shape)
    assert steps == [(1, 1, 9, 9), (1, 1, 1, 10)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_in_other_precisions(dtype, tokens):
    bridge = TransformerBridge(tiny("llama", dtype=dtype))
    expected = bridge.run_with_hooks(
        tokens, fwd_hooks=[(PATTERN, on_the_whole(softened, slice(2, 3)))]
    )
    for fn in (Touching(lambda x, hook: softened(x), heads=2), Scale(0.25, heads=2)):
        made = bridge.run_with_hooks(tokens, fwd_hooks=[(PATTERN, fn)])
        assert made.dtype == dtype
        torch.testing.assert_close(
            made, expected, atol=1e-12 if dtype == torch.float64 else 0.05, rtol=0
        )


def test_under_autocast(tokens):
    bridge = TransformerBridge(tiny("llama"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = bridge.run_with_hooks(
            tokens, fwd_hooks=[(PATTERN, on_the_whole(softened, slice(2, 3)))]
        )
        made = bridge.run_with_hooks(tokens, fwd_hooks=[(PATTERN, Scale(0.25, heads=2))])
    torch.testing.assert_close(made, expected, atol=0.05, rtol=0)


NUMBERS = torch.linspace(0.5, 1.0, 4).reshape(4, 1, 1)
OPERATIONS = [
    Scale(NUMBERS, heads=[1, 3]),
    Scale(NUMBERS[None].repeat(2, 1, 1, 1), heads=[1, 3], rows=1),
    Set(0.125, heads=-1, positions=[2, -1]),
    Add(0.125, heads=slice(1, None), keys=[0, -1]),
    Clamp(max=0.25, heads=0, part="prompt"),
    Zero(positions=-1),
    Zero(heads=[0, 1, 2, 3]),
    Mean("rows", heads=2),
    Mean("heads", heads=2),
    Replace(torch.full((1, 4, 9, 9), 0.1) * NUMBERS, heads=[1, 2]),
    Replace(torch.full((1, 4, 9, 9), 0.1) * NUMBERS, heads=[1, 2], positions=4),
]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("operation", OPERATIONS, ids=repr)
@pytest.mark.parametrize("grad", [False, True])
def test_operations_are_those_of_the_whole(operation, padded, grad, tokens, monkeypatch, made):
    monkeypatch.setattr(
        "bridge.interventions.operations.MAX_BYTES", 2000
    )  # a few queries at a time
    bridge = TransformerBridge(tiny("llama"))
    mask = torch.ones_like(tokens)
    if padded:
        mask[0, :4] = 0
    if padded and isinstance(operation, Mean) and operation.over == "rows":
        with pytest.raises(ValueError, match="rows with padding"):
            bridge.run_with_hooks(tokens, attention_mask=mask, fwd_hooks=[(PATTERN, operation)])
        return
    with torch.set_grad_enabled(grad):
        # Of the same operation, a function that does not say what it touches.
        def plain(x, hook):
            return operation(x, hook)

        plain.in_run = True
        expected = bridge.run_with_hooks(tokens, attention_mask=mask, fwd_hooks=[(PATTERN, plain)])
        made.clear()
        found = bridge.run_with_hooks(tokens, attention_mask=mask, fwd_hooks=[(PATTERN, operation)])
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    if operation != Mean("heads", heads=2):
        assert (made and all(h * q < 36 for h, q in made)) or (
            grad and operation.heads == (0, 1, 2, 3)
        )


def test_several_functions_at_once(tokens, made):
    """Each is shown its own part, as the ones before it have left it; one that needs all
    makes all.
    """
    bridge = TransformerBridge(tiny("llama"))
    seen = []
    fns = [
        (PATTERN, Touching(lambda x, hook: seen.append(x.clone()), heads=[1, 2])),
        (SCORES, Touching(lambda x, hook: x * 0.5, heads=2, queries=slice(3, None))),
        (PATTERN, Scale(0.5, heads=2)),
        (
            PATTERN,
            Touching(lambda x, hook: seen.append(x.clone()), heads=[3, 2], queries=-1, keys=[0, 2]),
        ),
    ]
    logits = bridge.run_with_hooks(tokens, fwd_hooks=fns)
    assert made == [(3, 9)] and len(seen) == 2
    made.clear()
    whole = []

    def keep(x, hook):
        whole.append(x.clone())

    both = bridge.run_with_hooks(tokens, fwd_hooks=[*fns, (PATTERN, keep)])
    assert made == [(4, 9)]
    torch.testing.assert_close(logits, both, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(seen[0], seen[2])
    torch.testing.assert_close(seen[3], whole[0][:, 2:, -1:][..., [0, 2]])
    torch.testing.assert_close(seen[1], seen[3])
    torch.testing.assert_close(seen[0][:, 1, -1, [0, 2]] * 0.5, seen[1][:, 0, 0])
    # A cache beside an edit holds the whole, edited.
    with bridge.hooks(fwd_hooks=fns):
        again, cache = bridge.run_with_cache(tokens, names_filter=PATTERN)
    torch.testing.assert_close(again, both)
    torch.testing.assert_close(cache[PATTERN], whole[0])


def test_pieces_that_fit_into_a_bound(tokens, made):
    bridge = TransformerBridge(tiny("llama"))
    expected = bridge.run_with_hooks(
        tokens, fwd_hooks=[(PATTERN, on_the_whole(softened, slice(1, 2)))]
    )
    seen = []

    def fn(x, hook):
        seen.append(x.shape[2])
        return softened(x)

    with torch.no_grad():
        found = bridge.run_with_hooks(
            tokens, fwd_hooks=[(PATTERN, Touching(fn, heads=1, max_bytes=16 * 2 * 9 * 4))]
        )
        assert made[1:] == [(1, 4), (1, 4), (1, 1)] and seen == [4, 4, 1]
        every = bridge.run_with_hooks(tokens, fwd_hooks=[(PATTERN, Touching(fn, max_bytes=1))])
        assert made[4:] == [(4, 1)] * 9
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    whole = bridge.run_with_hooks(tokens, fwd_hooks=[(PATTERN, lambda x, hook: softened(x))])
    torch.testing.assert_close(every, whole, atol=2e-6, rtol=1e-5)


def test_the_other_heads_are_the_kernels(tokens):
    """What nobody touches is what the kernel makes: the very numbers."""
    bridge = TransformerBridge(tiny("llama"))
    _, plain = bridge.run_with_cache(tokens, names_filter="blocks.1.attn.hook_z")
    with bridge.hooks(fwd_hooks=[(PATTERN, Zero(heads=2, positions=[4, -1]))]):
        _, edited = bridge.run_with_cache(tokens, names_filter="blocks.1.attn.hook_z")
    one, other = plain["z", 1], edited["z", 1].clone()
    assert not bool(other[:, [4, 8], 2].any())
    other[:, [4, 8], 2] = one[:, [4, 8], 2]
    assert torch.equal(one, other)


def test_of_few_scores_the_whole_is_made(tokens, made, monkeypatch):
    bridge, edit = TransformerBridge(tiny("llama")), [(PATTERN, Zero(heads=1))]
    part = bridge.run_with_hooks(tokens, fwd_hooks=edit)
    for few, heads in ((2 * 4 * 9 * 9, 4), (2 * 4 * 9 * 9 - 1, 1)):
        monkeypatch.setattr("bridge.taps.attention_tap.FEW_SCORES", few)
        made.clear()
        torch.testing.assert_close(
            bridge.run_with_hooks(tokens, fwd_hooks=edit), part, atol=2e-6, rtol=1e-5
        )
        assert made == [(heads, 9)]


def test_functions_of_gradients(tokens):
    bridge, seen = TransformerBridge(tiny("llama")), []

    def fn(gradient, hook):
        seen.append(gradient.clone())
        return gradient * 0

    def whole(gradient, hook):
        gradient[:, 2] = 0

    slopes = []
    for function in (Touching(fn, heads=2), whole):
        bridge.original_model.zero_grad()
        bridge.run_with_hooks(
            tokens, return_type="loss", bwd_hooks=[(PATTERN, function)]
        ).backward()
        slopes.append([x.grad.clone() for x in bridge.parameters() if x.grad is not None])
    assert seen[0].shape == (2, 1, 9, 9) and seen[0].any()
    assert all(map(torch.equal, *slopes))


def test_a_hook_that_runs_the_model(tokens):
    bridge = TransformerBridge(tiny("llama"))
    inner = []

    def fn(x, hook):
        inner.append(bridge(tokens[:, :5]))  # the hook is added: it is seen there, too
        return softened(x)

    plain = bridge.run_with_hooks(tokens[:, :5], fwd_hooks=[(PATTERN, Scale(0.25, heads=1))])
    expected = bridge.run_with_hooks(tokens, fwd_hooks=[(PATTERN, Scale(0.25, heads=1))])
    depth = []

    def once(x, hook):
        if depth:
            return softened(x)
        depth.append(1)
        return fn(x, hook)

    with bridge.hooks(fwd_hooks=[(PATTERN, Touching(once, heads=1))]):
        found = bridge(tokens)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(inner[0], plain, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("change", ["fwd", "bwd", "gone"])
@pytest.mark.parametrize("grad", [False, True])
def test_who_listens_is_settled_when_a_call_of_the_attention_begins(change, grad, tokens):
    """A hook that comes or goes while parts are made changes none of what the others are shown."""
    bridge, handles, late = TransformerBridge(tiny("llama")), [], []
    point, before = bridge.hook_dict[PATTERN], bridge(tokens).detach()

    def at_first(x, hook):
        if change == "gone":
            handles[0].remove()
        elif not late:
            late.append(point.add_hook(lambda x, hook: None, dir=change))

    def cut(x, hook):
        at_first(x, hook)
        return x * 0

    with torch.set_grad_enabled(grad):
        expected = bridge.run_with_hooks(tokens, fwd_hooks=[(PATTERN, Zero(heads=1))])
        assert not torch.allclose(expected, before, atol=1e-4)
        if change == "gone":
            handles.append(point.add_hook(Touching(cut, heads=1, max_bytes=300)))
            assert torch.equal(
                bridge(tokens), bridge.run_with_hooks(tokens, fwd_hooks=[(PATTERN, Zero(heads=1))])
            )
            assert not bridge.wiring.listening
            return
        hooks = [
            (SCORES, Touching(at_first, heads=[1, 3], max_bytes=900)),
            (PATTERN, Zero(heads=1)),
        ]
        found = bridge.run_with_hooks(tokens, fwd_hooks=hooks)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    late[0].remove()
    assert not bridge.wiring.listening


WRONG = [
    Set(torch.rand(3, 1, 1), heads=[0, 2]),
    Scale(torch.rand(8, 1, 1), heads=1),
    Add(torch.rand(1, 2, 1, 1), heads=0),
    Clamp(max=torch.rand(5, 1, 1), heads=0),
    Replace(torch.rand(2, 2, 9, 9), heads=[0, 1]),
    Replace(torch.rand(1, 8, 9, 9), heads=3),
]


@pytest.mark.parametrize("operation", WRONG, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("few", [0, 2**17])
def test_numbers_for_another_count_of_heads_are_refused(operation, few, tokens, monkeypatch):
    monkeypatch.setattr("bridge.taps.attention_tap.FEW_SCORES", few)
    bridge = TransformerBridge(tiny("llama"))
    for name in (PATTERN, SCORES):
        with pytest.raises(ValueError, match=r"of \w+ has shape .*, for \d heads; .* has 4"):
            bridge.run_with_hooks(tokens, fwd_hooks=[(name, operation)])
    assert not bridge.wiring.listening


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("grad", [False, True])
def test_over_numbers_that_vmap_maps(grad, tokens):
    bridge, numbers = TransformerBridge(tiny("llama")), torch.tensor([0.0, 0.5, 1.0])
    functions = (
        lambda by: Scale(by, heads=[1, 3]),
        lambda by: Touching(lambda x, hook: x * by, heads=1, queries=[0, -1]),
        lambda by: Touching(lambda x, hook: x * by, keys=[0, 2], max_bytes=500),
    )
    for make in functions:

        def run(by, make=make):
            return bridge.run_with_hooks(tokens, fwd_hooks=[(PATTERN, make(by))])

        with torch.set_grad_enabled(grad):
            expected = torch.stack([run(by) for by in numbers])
            torch.testing.assert_close(torch.vmap(run)(numbers), expected, atol=2e-6, rtol=1e-5)


def test_a_bound_counts_what_numbers_take(tokens):
    for dtype, rows in ((torch.float64, 4), (torch.float32, 8), (torch.float16, 8)):
        assert rows_within(8 * 16 * 2 * 9, (2, 4, 9, 9), [1], dtype) == rows
        bridge, seen = TransformerBridge(tiny("llama", dtype=dtype)), []
        for fn in (
            Touching(lambda x, hook: seen.append(x.shape[2]), heads=1, max_bytes=8 * 16 * 2 * 9),  # noqa: B023
        ):
            with torch.no_grad():
                bridge.run_with_hooks(tokens, fwd_hooks=[(PATTERN, fn)])
        assert seen[0] == rows


def test_an_error_midway_leaves_nothing(tokens):
    bridge = TransformerBridge(tiny("llama"))
    before, calls = bridge(tokens), []

    def fails(x, hook):
        calls.append(x.shape)
        if len(calls) == 2:
            raise ValueError("midway")

    with pytest.raises(ValueError, match="midway"), torch.no_grad():
        bridge.run_with_hooks(
            tokens, fwd_hooks=[(PATTERN, Touching(fails, heads=0, max_bytes=2000))]
        )
    assert len(calls) == 2 and not bridge.wiring.listening
    assert torch.equal(bridge(tokens), before)
    assert not any("forward" in module.__dict__ for module in bridge.original_model.modules())


def test_threads_do_not_meet(tokens):
    bridge = TransformerBridge(tiny("llama"))
    expected = [
        bridge.run_with_hooks(tokens, fwd_hooks=[(PATTERN, Zero(heads=head))]) for head in range(4)
    ]

    def one(head):
        return bridge.run_with_hooks(tokens, fwd_hooks=[(PATTERN, Zero(heads=head))])

    with ThreadPoolExecutor(4) as pool:
        for index, found in enumerate(pool.map(one, [0, 1, 2, 3] * 8)):
            assert torch.equal(found, expected[index % 4])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_with_adapters_of_peft(tokens):
    import peft

    model = peft.get_peft_model(tiny("llama"), peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    bridge = TransformerBridge(model.eval())
    expected = bridge.run_with_hooks(
        tokens, fwd_hooks=[(PATTERN, on_the_whole(softened, slice(2, 3)))]
    )
    expected.sum().backward()
    slopes = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    found = bridge.run_with_hooks(
        tokens, fwd_hooks=[(PATTERN, Touching(lambda x, hook: softened(x), heads=2))]
    )
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    found.sum().backward()
    for name, x in model.named_parameters():
        if x.grad is not None:
            torch.testing.assert_close(x.grad, slopes[name], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "fn", [Scale(0.25, heads=2), Touching(lambda x, hook: softened(x), heads=2, max_bytes=1)]
)
def test_checkpointed_blocks_are_computed_again_with_it(fn, tokens):
    slopes = []
    for checkpoints in (False, True):
        hf = tiny("llama").train()
        if checkpoints:
            checkpoint(hf)
        bridge = TransformerBridge(hf)
        loss = bridge.run_with_hooks(tokens, return_type="loss", fwd_hooks=[(PATTERN, fn)])
        loss.backward()
        slopes.append([x.grad for x in hf.parameters() if x.grad is not None])
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("cache", [None, "static"])
def test_in_a_generation(cache, tokens, made):
    bridge = TransformerBridge(tiny("llama"))
    options = {
        "max_new_tokens": 4,
        "do_sample": False,
        "stop_at_eos": False,
        "verbose": False,
        "output_logits": True,
        **({"cache_implementation": cache} if cache else {}),
    }
    found = []
    for fn in (
        on_the_whole(softened, slice(2, 3)),
        Scale(0.25, heads=2),
        Touching(lambda x, hook: softened(x), heads=2),
    ):
        made.clear()
        with bridge.hooks(fwd_hooks=[(PATTERN, fn)]):
            found.append(torch.stack(bridge.generate(tokens, **options)["logits"]))
        # A static cache is compiled for one position, whose queries are packed.
        assert {heads for heads, queries in made if queries > 1} == (
            {4} if len(found) == 1 else {1}
        )
    torch.testing.assert_close(found[0], found[1], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(found[0], found[2], atol=2e-5, rtol=1e-5)
    some = Zero(heads=1, from_step=2)
    with bridge.hooks(fwd_hooks=[(PATTERN, some)]):
        generated = torch.stack(bridge.generate(tokens, **options)["logits"])
    plain = torch.stack(bridge.generate(tokens, **options)["logits"])
    torch.testing.assert_close(generated[:2], plain[:2], atol=2e-6, rtol=1e-5)
    assert not torch.allclose(generated[2], plain[2], atol=1e-4)


def test_requests_of_a_batch_and_programs_take_it_from_the_whole(tokens):
    bridge = TransformerBridge(tiny("llama"))
    fn = Touching(lambda x, hook: softened(x), heads=2)
    expected = bridge.run_with_hooks(tokens, fwd_hooks=[(PATTERN, fn)])
    for changes in ([(PATTERN, fn)], [(PATTERN, Scale(0.25, heads=2))]):
        program = bridge.program([PATTERN], changes)
        torch.testing.assert_close(program(tokens)["logits"], expected, atol=2e-6, rtol=1e-5)
    program = bridge.program(
        [],
        [(PATTERN, Touching(lambda x, hook, by: x * by, heads=2))],
        inputs={"by": torch.tensor(1.0)},
    )
    torch.testing.assert_close(
        program(tokens, by=torch.tensor(0.25))["logits"], expected, atol=2e-6, rtol=1e-5
    )


@pytest.mark.parametrize("kernel", ["flash_attention_2"])
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_kernels_that_are_no_torch_functions(kernel, side, tokens, made, monkeypatch):
    """The kernel runs on all heads, and what comes of the touched ones is put in: its own tensor
    stays as it is.
    """
    returned, copies = [], []

    def own(*args, **kwargs):
        with torch._C.DisableTorchFunctionSubclass(), torch._C.DisableTorchFunction():
            returned.append(by_hand(*args, **kwargs)[0])
            copies.append(returned[-1].clone())
        return returned[-1], None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, kernel, own)
    bridge = TransformerBridge(windowed("window", kernel))
    mask = torch.ones_like(tokens)
    if side:
        mask[0, slice(0, 4) if side == "left" else slice(5, 9)] = 0
    real = mask.bool()
    with torch.no_grad():
        whole = on_the_whole(softened, slice(1, 2))
        expected = bridge.run_with_hooks(tokens, attention_mask=mask, fwd_hooks=[(PATTERN, whole)])
        made.clear()
        for fn in (Scale(0.25, heads=1), Touching(lambda x, hook: softened(x), heads=1)):
            found = bridge.run_with_hooks(tokens, attention_mask=mask, fwd_hooks=[(PATTERN, fn)])
            torch.testing.assert_close(found[real], expected[real], atol=2e-5, rtol=1e-5)
    assert {heads for heads, _ in made} == {1}
    assert len(returned) > 2 and all(map(torch.equal, returned, copies))


def test_flex_attention_with_a_block_mask():
    mask = create_block_mask(lambda b, h, q, k: (k <= q) & (q - k < 3), 2, None, 9, 9, device="cpu")
    call = AttentionCall(
        torch.randn(2, 4, 9, 8),
        torch.randn(2, 2, 9, 8),
        torch.randn(2, 2, 9, 8),
        mask,
        4,
        kernel="flex_attention",
        options={"softcap": 2.0, "s_aux": torch.randn(4)},
    )
    whole = call.pattern(call.scores())
    for heads in (torch.tensor([1]), torch.tensor([0, 3]), torch.tensor([2, 3])):
        for queries in (slice(3, 5), torch.tensor([8, 0])):
            some = call.of_heads(heads).of_queries(queries)
            pattern = some.pattern(some.scores())
            torch.testing.assert_close(pattern, whole[:, heads][:, :, queries])
            expected = call.result(whole)[:, heads][:, :, queries]
            torch.testing.assert_close(some.result(pattern), expected)


@pytest.mark.parametrize(
    "mask", [(2, 4, 9, 9), (1, 4, 9, 9), (4, 9, 9), (2, 1, 9, 9), (9, 9), (2, 4, 1, 9)]
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_with_heads(mask, dtype):
    mask = torch.randn(mask) > 0 if dtype == torch.bool else torch.randn(mask)
    call = AttentionCall(
        torch.randn(2, 4, 9, 8), torch.randn(2, 1, 9, 8), torch.randn(2, 2, 9, 8), mask, 4
    )
    whole, heads = call.pattern(call.scores()), torch.tensor([1, 3])
    some = call.of_heads(heads).of_queries(slice(2, 6))
    torch.testing.assert_close(some.pattern(some.scores()), whole[:, heads, 2:6])
    torch.testing.assert_close(some.result(whole[:, heads, 2:6]), call.result(whole)[:, heads, 2:6])


def test_other_hook_points(tokens):
    """Anywhere with heads or positions it is a function of a part."""
    bridge = TransformerBridge(tiny("llama"))
    seen = []

    def fn(x, hook):
        seen.append(x.shape)
        return x * 0

    z = bridge.run_with_hooks(
        tokens, fwd_hooks=[("blocks.1.attn.hook_z", Touching(fn, heads=[0, 2], queries=-1))]
    )
    expected = bridge.run_with_hooks(
        tokens, fwd_hooks=[("blocks.1.attn.hook_z", Zero(heads=[0, 2], positions=-1))]
    )
    torch.testing.assert_close(z, expected)
    assert seen == [(2, 1, 2, 8)]
    bridge.run_with_hooks(
        tokens, fwd_hooks=[("blocks.1.hook_resid_pre", Touching(fn, queries=slice(2, 4)))]
    )
    assert seen[1] == (2, 2, 32)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: Touching(softened, heads=1), TypeError, "parameter named `hook`"),
        (lambda: Touching(on_the_whole(softened)), ValueError, "use the function itself"),
        (lambda: Touching(on_the_whole(softened), heads="1"), TypeError, "heads"),
        (lambda: Touching(on_the_whole(softened), heads=[]), ValueError, "chooses nothing"),
        (lambda: Touching(on_the_whole(softened), heads=1, max_bytes=0), ValueError, "max_bytes"),
        (lambda: Touching(3, heads=1), TypeError, "function"),
        (
            lambda: Touching(Zero(positions=-1), max_bytes=2**20),
            TypeError,
            "operations have heads=, positions=",
        ),
        (
            lambda: Touching(Touching(on_the_whole(softened), heads=1), heads=[1, 2]),
            TypeError,
            "within the part",
        ),
    ],
)
@pytest.mark.unchecked
def test_what_is_refused_when_it_is_made(make, error, said):
    with pytest.raises(error, match=said):
        make()


@pytest.mark.parametrize(
    ("name", "fn", "error", "said"),
    [
        (PATTERN, Touching(lambda x, hook: x, heads=4), IndexError, "heads is .* has 4"),
        (PATTERN, Touching(lambda x, hook: x, queries=[0, -10]), IndexError, "queries is .* has 9"),
        (PATTERN, Touching(lambda x, hook: x, queries=slice(9, 12)), IndexError, "none of the 9"),
        (
            PATTERN,
            Touching(lambda x, hook: x[..., :1], heads=1),
            ValueError,
            r"returned shape \[2, 1, 9, 1\]",
        ),
        (PATTERN, Touching(lambda x, hook: x > 0, heads=1), TypeError, "torch.bool"),
        (PATTERN, Touching(lambda x, hook: x, queries=slice(9, 12)), IndexError, "queries is"),
        (PATTERN, Zero(heads=7), IndexError, "heads"),
        ("blocks.1.hook_resid_pre", Touching(lambda x, hook: x, heads=1), ValueError, "no heads"),
        ("blocks.1.attn.hook_z", Touching(lambda x, hook: x, max_bytes=9), ValueError, "no keys"),
    ],
)
def test_what_is_refused_in_a_run(name, fn, error, said, tokens):
    bridge = TransformerBridge(tiny("llama"))
    with pytest.raises(error, match=said):
        bridge.run_with_hooks(tokens, fwd_hooks=[(name, fn)])
    assert not bridge.wiring.listening


def test_a_cache_computes_what_is_asked_of_it(tokens, made):
    bridge = TransformerBridge(tiny("llama"))
    _, cache = bridge.run_with_cache(tokens)
    part = cache.part("pattern", 1, heads=slice(1, 3), queries=-1, keys=[0, 2])
    assert made == [(2, 1)] and part.shape == (2, 2, 2)
    assert cache.part("pattern", 1, heads=3).shape == (2, 9, 9) and cache.part(
        PATTERN, queries=[3]
    ).shape == (
        2,
        4,
        1,
        9,
    )
    assert cache.part("pattern", -1, heads=[3, 0]).shape == (2, 2, 9, 9)
    whole = cache["pattern", 1]
    torch.testing.assert_close(part, whole[:, 1:3, -1][..., [0, 2]])
    made.clear()
    assert (
        torch.equal(cache.part("pattern", 1, heads=3), whole[:, 3]) and not made
    )  # it is there now
    assert torch.equal(cache.part("z", 1, heads=3), cache["z", 1][:, :, 3])
    torch.testing.assert_close(
        cache.part("pattern", 2, heads=[3, 0]), cache["pattern", 2][:, [3, 0]]
    )
    for index in ({"heads": 4}, {"queries": [9]}, {"heads": slice(4, 4)}):
        with pytest.raises(IndexError):
            bridge.run_with_cache(tokens)[1].part("pattern", 1, **index)
    with pytest.raises(ValueError, match="no heads"):
        cache.part("resid_pre", 1, heads=1)
    with pytest.raises(KeyError):
        bridge.run_with_cache(tokens, names_filter=SCORES)[1].part("pattern", 1, heads=1)
    _, single = bridge.run_with_cache(tokens[:1], remove_batch_dim=True)
    assert single.part("pattern", 1, heads=1, queries=2).shape == (9,)


@pytest.mark.parametrize(
    "index",
    [
        [3, 0, 0],
        -1,
        (2, 2),
        [],
        slice(None, None, 2),
        slice(None, None, -1),
        slice(-1, 1, -1),
        (1, None),
        4,
        [0, -5],
        np.array([1, 0]),
        np.int64(2),
        torch.tensor([1, 0]),
        torch.tensor(2),
        torch.tensor([[0, 1], [2, 3]]),
        [[0], [1]],
        torch.tensor([True, False, False, True]),
        [True, False, False, True],
        [True],
        True,
        [False] * 4,
        torch.tensor([0.5]),
    ],
    ids=repr,
)
@pytest.mark.unchecked
def test_a_part_of_a_cache_is_the_same_before_and_after_the_whole(index, tokens, made):
    bridge = TransformerBridge(tiny("llama"))
    for what, axis in (("heads", 1), ("queries", 2), ("keys", 3)):
        found = []
        for first in (False, True):
            _, cache = bridge.run_with_cache(tokens[:, :4], names_filter=PATTERN)
            whole = cache[PATTERN] if first else None
            try:
                found.append(cache.part("pattern", 1, **{what: index}))
            except (IndexError, TypeError) as error:
                found.append(f"{type(error).__name__}: {error}")
        if isinstance(found[0], str):
            assert found[0] == found[1] and f"Error: {what} is " in found[0]
            continue
        torch.testing.assert_close(*found, atol=2e-6, rtol=1e-5)
        given = slice(*index) if isinstance(index, tuple) else index
        expected = np.moveaxis(
            np.moveaxis(whole.numpy(), axis, 0)[given], 0, axis if found[1].ndim == 4 else 0
        )
        if found[1].ndim == 3:
            expected = np.take(whole.numpy(), int(index), axis)
        assert torch.equal(found[1], torch.from_numpy(expected.copy()))


def test_a_cache_without_a_model_does_not_know_where_heads_are(tokens):
    _, cache = TransformerBridge(tiny("llama")).run_with_cache(tokens)
    alone = ActivationCache(dict(cache.cache_dict), None)
    with pytest.raises(ValueError, match="assign the model"):
        alone.part(PATTERN, heads=1)


@pytest.mark.unchecked  # to check a mapping is to look at one of its values, which is computed then
def test_a_cache_says_when_what_it_holds_was_written_over(tokens):
    bridge = TransformerBridge(tiny("llama"))
    _, cache = bridge.run_with_cache(tokens, names_filter=PATTERN)
    held = cache._values[PATTERN]
    held.attention.query.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        cache.part("pattern", 1, heads=1)


@pytest.mark.unchecked
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["cache", "operation", "function"])
def test_the_peak_of_one_head_is_three_of_its_patterns(dtype, how):
    config = LlamaConfig(
        hidden_size=256,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=64,
        vocab_size=61,
        max_position_embeddings=2048,
    )
    bridge = TransformerBridge(
        LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=dtype).eval()
    )
    tokens, name = torch.randint(0, 61, (1, 2048)), "blocks.0.attn.hook_pattern"

    def fn(x, hook):
        x *= 0.5

    def run():
        if how == "cache":
            bridge.run_with_cache(tokens, names_filter=name)[1].part(name, heads=[3])
        else:
            edit = Scale(0.5, heads=3) if how == "operation" else Touching(fn, heads=3)
            bridge.run_with_hooks(tokens, fwd_hooks=[(name, edit)])

    with torch.no_grad():
        bridge(tokens[:, :8])
        peak = peak_bytes(run) - peak_bytes(lambda: bridge(tokens))
    assert peak <= 3 * 2048 * 2048 * dtype.itemsize


def test_what_chooses_means_one_thing():
    bridge = TransformerBridge(tiny_model("llama"))
    _, cache = bridge.run_with_cache(TOKENS, names_filter={PATTERN: np.int64(2)})
    _, whole = bridge.run_with_cache(TOKENS, names_filter=PATTERN)
    torch.testing.assert_close(cache.part(PATTERN, heads=2), whole[PATTERN][:, 2])
    for held in (cache, whole):
        with pytest.raises(
            TypeError, match=r"give \[1, 2\] for those, or slice\(1, 2\) for a range"
        ):
            held.part(PATTERN, heads=(1, 2))
    with pytest.raises(ValueError, match="are one hook point: name it once"):
        bridge.run_with_cache(
            TOKENS, names_filter={"blocks.0.attn.o.hook_in": [1], "blocks.0.attn.hook_z": None}
        )
    for add in (bridge.add_hook, bridge.add_perma_hook):
        with pytest.raises(IndexError, match="7"):
            add(PATTERN, lambda x, hook: None, heads=7)
        (handle,) = add(PATTERN, lambda x, hook: x * 0, heads=np.array([1, 3]))
        edited = bridge.run_with_cache(TOKENS, names_filter=PATTERN)[1][PATTERN]
        handle.remove()
        assert not edited[:, [1, 3]].any() and torch.equal(
            edited[:, [0, 2]], whole[PATTERN][:, [0, 2]]
        )
    with pytest.raises(ValueError, match="nothing is between them"):
        Clamp(torch.tensor([0.0, 2.0]), 1.0)


def test_a_trace_shows_a_point_once():
    bridge = TransformerBridge(tiny_model("llama"))
    for first, then in (({"heads": 1}, {"heads": 2}), ({"heads": 1}, None), (None, {"heads": 2})):

        def both(asked=(first, then)):
            with bridge.trace(TOKENS) as run:
                for some in asked:
                    _ = run[PATTERN] if some is None else run.part(PATTERN, **some)

        with pytest.raises(OutOfStepError, match="shows it once: ask there for all"):
            both()
    with pytest.raises(TypeError, match="shown whole activations"):
        bridge.run_with_hooks(
            TOKENS,
            fwd_hooks=bridge.trace_edit(lambda run: run.part(PATTERN, heads=1), points=[PATTERN]),
        )
