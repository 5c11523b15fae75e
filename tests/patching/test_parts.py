"""What sweeps are made of: logits where they are looked at, the cut into runs, ablations, what a
model refuses.
"""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from bridge import TransformerBridge
from bridge import patching as ready
from bridge.patching import ablated, runs
from bridge.patching.lazy_logits import lazy
from bridge.patching.patching import generic_activation_patch
from bridge.patching.runs import CorruptedRun
from bridge.patching.setters import layer_head_vector_patch_setter
from tests.analysis.models import HUGGING_FACE, NATIVE, bridge_of
from tests.conftest import tiny

KINDS = ("resid_pre", "attn_head_out_all_pos", "attn_head_k_by_pos", "attn_head_pattern_by_pos")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def metric(logits):
    return (logits[:, -1, 5] - logits[:, -1, 9]).mean()


def plainly(monkeypatch, function, *arguments, **options):
    """One whole run for each patch."""
    with monkeypatch.context() as patch:
        patch.setattr("bridge.patching.runs.may_start_later", lambda model: False)
        return function(*arguments, verbose=False, **options)


WHOLE = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
LOOKS = {
    "last": (lambda x: x[:, -1], 1),
    "one token": (lambda x: x[0, -1, 3], 1),
    "ellipsis": (lambda x: x[..., -2, :], 1),
    "slice": (lambda x: x[:, 1:4:2, 2], 2),
    "places": (lambda x: x[torch.arange(2), torch.tensor([4, -2]), torch.tensor([1, 2])], 2),
    "repeated places": (lambda x: x[:, [3, 3, 0]], 2),
    "places of two axes": (lambda x: x[:, torch.tensor([[1, 2], [2, -1]])], 3),
    "rows in another order": (lambda x: x[[1, 0], -1], 1),
    "everything": (lambda x: x[:, :], 5),
    "one row": (lambda x: x[0][-1], 5),
    "a mask": (lambda x: x[:, torch.tensor([True, False, False, True, False])], 5),
    "softmax": (lambda x: x.log_softmax(-1)[:, -1], 5),
    "a function": (
        lambda x: torch.nn.functional.cross_entropy(
            x.flatten(0, 1), torch.arange(7).repeat(2)[:10]
        ),
        5,
    ),
    "a new axis": (lambda x: x[None, :, -1], 5),
    "written to": (lambda x: x.masked_fill_(x > 0, 0)[:, -1] + x[:, -1], 5),
    "numpy": (lambda x: torch.from_numpy(x.numpy())[0, -1], 5),
    "a list of it": (lambda x: torch.stack([x, x])[:, 0, -1], 5),
}


@pytest.mark.parametrize("look", LOOKS)
def test_lazy_logits_are_logits(look):
    function, needed = LOOKS[look]
    asked = set()

    def at(positions):
        asked.update(positions)
        return WHOLE[:, positions].clone()

    found = function(lazy(at, WHOLE.shape, WHOLE))
    assert type(found) is torch.Tensor
    assert torch.equal(found, function(WHOLE.clone()))
    assert len(asked) == needed


def test_lazy_logits_say_what_they_are_without_being_computed():
    def at(positions):
        raise AssertionError("nobody looked")

    logits = lazy(at, WHOLE.shape, WHOLE)
    assert (
        logits.shape == (2, 5, 7) and logits.size(1) == 5 and logits.ndim == 3 and len(logits) == 2
    )
    assert (
        logits.dtype == torch.float32
        and logits.device == WHOLE.device
        and isinstance(logits, torch.Tensor)
    )
    with pytest.raises(AssertionError, match="nobody looked"):
        logits.sum()


def test_lazy_logits_refuse_what_plain_ones_do():
    logits = lazy(lambda positions: WHOLE[:, positions], WHOLE.shape, WHOLE)
    with pytest.raises(IndexError):
        logits[:, 5]


def test_a_metric_that_reads_past_torchs_functions_gets_all_logits(bridge, tokens):
    def sneaky(logits):
        with torch._C.DisableTorchFunctionSubclass():
            return float(torch.Tensor.__getitem__(logits, (0, -1, 5)))

    clean, corrupted = tokens[:, :5], tokens[:, :5].flip(0)
    _, cache = bridge.run_with_cache(clean)
    arguments = (bridge, corrupted, cache)
    ours = ready.get_act_patch_resid_pre(*arguments, sneaky, verbose=False)
    right = ready.get_act_patch_resid_pre(
        *arguments, lambda logits: logits[0, -1, 5], verbose=False
    )
    torch.testing.assert_close(ours, right)


@pytest.mark.parametrize("look", ["all", "middle", "argmax"])
def test_metrics_of_any_positions(bridge, tokens, look, monkeypatch):
    functions = {
        "all": lambda logits: logits.log_softmax(-1)[..., 3].mean(),
        "middle": lambda logits: logits[:, 2, 3].mean() + logits[:, -1, 4].mean(),
        "argmax": lambda logits: logits[0, int(logits[0, :, 3].argmax()), 5],
    }
    clean, corrupted = tokens[:, :6], tokens[:, :6].clone()
    corrupted[:, 3] = (corrupted[:, 3] + 9) % 61
    _, cache = bridge.run_with_cache(clean)
    for kind in KINDS:
        function = getattr(ready, f"get_act_patch_{kind}")
        arguments = (bridge, corrupted, cache, functions[look])
        right = plainly(monkeypatch, function, *arguments)
        torch.testing.assert_close(function(*arguments, verbose=False), right, atol=1e-5, rtol=1e-4)
        assert right.std() > 0 or look == "argmax"


@pytest.mark.parametrize("case", [*HUGGING_FACE, *NATIVE])
@pytest.mark.parametrize("direction", ["clean into corrupted", "corrupted into clean"])
def test_every_family(case, direction, monkeypatch):
    bridge = bridge_of(case)
    one = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(0))
    other = one.clone()
    other[:, 3] = (other[:, 3] + 5) % 50 + 3
    if direction == "corrupted into clean":
        one, other = other, one
    _, cache = bridge.run_with_cache(one)
    for kind in KINDS:
        function = getattr(ready, f"get_act_patch_{kind}")
        ours = function(bridge, other, cache, metric, verbose=False)
        right = plainly(monkeypatch, function, bridge, other, cache, metric)
        torch.testing.assert_close(
            ours, right, atol=1e-4, rtol=0, msg=lambda text, kind=kind: f"{kind}: {text}"
        )
        assert right.std() > 0


@pytest.mark.parametrize("kind", ["zero", "mean", "resample"])
def test_ablations(bridge, tokens, kind, monkeypatch):
    tokens = tokens[:, :6]
    _, cache = bridge.run_with_cache(tokens)
    source = ablated(cache, kind)
    z = cache["blocks.1.attn.hook_z"]
    right = {"zero": torch.zeros_like(z), "mean": z.mean(0).expand_as(z), "resample": z.flip(0)}[
        kind
    ]
    assert torch.equal(source["blocks.1.attn.hook_z"].expand_as(z), right)
    for patched in KINDS:
        function = getattr(ready, f"get_act_patch_{patched}")
        ours = function(bridge, tokens, source, metric, verbose=False)
        plain = plainly(monkeypatch, function, bridge, tokens, source, metric)
        torch.testing.assert_close(ours, plain, atol=1e-4, rtol=0)
        assert plain.std() > 0


def test_ablations_refuse():
    with pytest.raises(ValueError, match="ablation is 'median'; it must be 'zero', 'mean'"):
        ablated({}, "median")
    with pytest.raises(ValueError, match="only one"):
        ablated({"x": torch.ones(2, 2), "y": torch.ones(1, 2)}, "resample")["y"]


def test_padded_prompts_start_later_too(bridge, tokens, monkeypatch):
    clean, corrupted = tokens[:, :6], tokens[:, :6].clone()
    corrupted[:, 4] = (corrupted[:, 4] + 9) % 61
    mask = torch.ones_like(clean)
    mask[0, :2] = 0
    _, cache = bridge.run_with_cache(clean, attention_mask=mask)
    for kind in KINDS:
        function = getattr(ready, f"get_act_patch_{kind}")
        arguments = (bridge, corrupted, cache, metric)
        right = plainly(monkeypatch, function, *arguments, attention_mask=mask)
        ours = function(*arguments, attention_mask=mask, verbose=False)
        torch.testing.assert_close(ours, right, atol=1e-5, rtol=1e-4)
        assert right.std() > 0


def test_a_window_shorter_than_the_prompt(monkeypatch):
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 28,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    torch.manual_seed(0)
    config = MistralConfig(vocab_size=61, num_key_value_heads=2, sliding_window=3, **sizes)
    bridge = TransformerBridge(MistralForCausalLM(config).eval())
    clean = torch.randint(0, 61, (1, 8))
    corrupted = clean.clone()
    corrupted[0, 2] = (corrupted[0, 2] + 5) % 61
    assert not CorruptedRun(bridge, {"input_ids": corrupted}, [1]).positions
    _, cache = bridge.run_with_cache(clean)
    for kind in KINDS:
        function = getattr(ready, f"get_act_patch_{kind}")
        ours = function(bridge, corrupted, cache, metric, verbose=False)
        torch.testing.assert_close(
            ours,
            plainly(monkeypatch, function, bridge, corrupted, cache, metric),
            atol=1e-5,
            rtol=1e-4,
        )


def test_setters_of_ones_own_see_all_positions(bridge, tokens, monkeypatch):
    clean, corrupted = tokens[:, :6], tokens[:, :6].clone()
    corrupted[:, 4] = (corrupted[:, 4] + 9) % 61
    _, cache = bridge.run_with_cache(clean)
    shapes = set()

    def setter(corrupted_activation, index, clean_activation):
        shapes.add(tuple(corrupted_activation.shape))
        return corrupted_activation + 0.1 * clean_activation * (index[1] + 1)

    arguments = (bridge, corrupted, cache, metric, setter, "z", ("layer", "head"))
    ours = generic_activation_patch(*arguments, verbose=False)
    assert shapes == {(2, 6, 4, 8)}
    torch.testing.assert_close(
        ours, plainly(monkeypatch, generic_activation_patch, *arguments), atol=1e-5, rtol=1e-4
    )


def test_patches_that_change_nothing_are_not_run(bridge, tokens, monkeypatch):
    clean, corrupted = tokens[:, :6], tokens[:, :6].clone()
    corrupted[:, 4] = (corrupted[:, 4] + 9) % 61
    _, cache = bridge.run_with_cache(clean)
    jobs = []
    logits = runs.PatchedRuns.logits
    monkeypatch.setattr(
        runs.PatchedRuns, "logits", lambda self, some: jobs.extend(some) or logits(self, some)
    )
    found = ready.get_act_patch_resid_pre(bridge, corrupted, cache, metric, verbose=False)
    # Before the first layer only position 4 differs.
    assert sorted((job.layer, job.start) for job in jobs) == [
        (0, 4),
        (1, 4),
        (1, 5),
        (2, 4),
        (2, 5),
    ]
    assert torch.equal(found[:, :4], metric(bridge(corrupted)).expand(3, 4))


@pytest.mark.parametrize("kept", [0, 1, 4])
def test_logits_are_computed_for_patches_together_within_a_bound(bridge, tokens, monkeypatch, kept):
    clean, corrupted = tokens[:, :5], tokens[:, :5].flip(0)
    _, cache = bridge.run_with_cache(clean)
    looks = lambda logits: logits[:, -1, 3].mean() + logits[:, 2, 4].mean()
    arguments = (bridge, corrupted, cache, looks)
    right = plainly(monkeypatch, ready.get_act_patch_attn_head_out_all_pos, *arguments)
    sizes, of_stream = [], CorruptedRun.logits_of
    monkeypatch.setattr(
        CorruptedRun, "logits_of", lambda self, x: sizes.append(len(x)) or of_stream(self, x)
    )
    monkeypatch.setattr(runs, "MOST_LOGITS", 2 * 61 * 5)  # five patches of two prompts
    monkeypatch.setattr(runs, "MOST_KEPT", kept)
    found = ready.get_act_patch_attn_head_out_all_pos(*arguments, verbose=False)
    torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-4)
    assert max(sizes) == (8 if kept else 2)  # three parts of four
    assert len(sizes) - 3 == {0: 24, 1: 3 + 12, 4: 6}[kept]  # 12 heads; three are of the trial runs


def test_runs_of_all_positions_are_tried_only_where_they_are_made(bridge, tokens, monkeypatch):
    clean = tokens[:, :5]
    later, first = ((clean + 7 * (torch.arange(5) == place)) % 61 for place in (2, 0))
    _, cache = bridge.run_with_cache(clean)
    patch = ready.get_act_patch_attn_head_out_all_pos
    right = [
        plainly(monkeypatch, patch, bridge, corrupted, cache, metric)
        for corrupted in (later, first)
    ]
    tried = []
    monkeypatch.setattr(CorruptedRun, "steps", property(lambda self: tried.append(1) or False))
    found = patch(bridge, later, cache, metric, verbose=False)
    torch.testing.assert_close(found, right[0], atol=1e-5, rtol=1e-4)
    assert not tried
    found = patch(
        bridge, first, cache, metric, verbose=False
    )  # what was tried went wrong: whole runs
    torch.testing.assert_close(found, right[1], atol=1e-5, rtol=1e-4)
    assert tried


def test_the_cut_into_runs_costs_least():
    config = GPT2Config(
        n_embd=8,
        n_layer=12,
        n_head=2,
        vocab_size=10,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    bridge = TransformerBridge(GPT2LMHeadModel(config))
    hooks = [bridge.hook_dict[f"blocks.{layer}.hook_mlp_out"] for layer in range(12)]
    jobs = [
        runs.Patch(0, hook, start, lambda start: torch.clone)
        for hook in hooks
        for start in range(15)
    ]

    def cost(cut):
        fixed = runs.RUN_COST * 12 * len(cut)
        return fixed + sum((12 - job.layer) * (15 - start) for start, some in cut for job in some)

    found = runs.groups(jobs, 15, 1, 12)
    assert sorted((job.layer, job.start) for _, some in found for job in some) == sorted(
        (job.layer, job.start) for job in jobs
    )
    assert all(job.start >= start for start, some in found for job in some)
    every = []
    for bits in range(2**14):
        starts = [0] + [i + 1 for i in range(14) if bits >> i & 1]
        ends = [*starts[1:], 15]
        works = [
            (s, e, sum((12 - layer) for layer in range(12)) * (e - s))
            for s, e in zip(starts, ends, strict=True)
        ]
        every.append(sum(runs.RUN_COST * 12 + work * (15 - s) for s, e, work in works))
    assert cost(found) == min(every)


def test_a_metric_that_asks_for_gradients(tokens):
    bridge = TransformerBridge(tiny("gpt2"))
    clean, corrupted = tokens[:, :5], tokens[:, :5].flip(0)
    _, cache = bridge.run_with_cache(clean)

    def steep(logits):
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(logits[0, -1, 5] ** 2, logits)
        return gradient.abs().sum()

    with torch.enable_grad():
        found = ready.get_act_patch_resid_pre(bridge, corrupted, cache, steep, verbose=False)
    right = ready.get_act_patch_resid_pre(
        bridge, corrupted, cache, lambda x: 2 * x[0, -1, 5].abs(), verbose=False
    )
    torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-4)


def test_the_memory_budget_bounds_the_batch(bridge, tokens, monkeypatch):
    clean, corrupted = tokens[:, :6], tokens[:, :6].flip(0)
    _, cache = bridge.run_with_cache(clean)
    rows = []
    run = TransformerBridge.run_with_hooks
    monkeypatch.setattr(
        TransformerBridge,
        "run_with_hooks",
        lambda self, x, **more: rows.append(len(x)) or run(self, x, **more),
    )
    monkeypatch.setattr(
        "bridge.patching.runs.free_memory",
        lambda device: 4 * 4 * (16 * 32 + 6 * 128 + 3 * 4 * 6) * 30,
    )
    arguments = (
        bridge,
        corrupted,
        cache,
        metric,
        layer_head_vector_patch_setter,
        "z",
        ("layer", "head"),
    )
    generic_activation_patch(*arguments, verbose=False)
    few, most = list(rows), max(rows)
    assert most <= 30 // 6 + 1
    monkeypatch.undo()
    monkeypatch.setattr(
        TransformerBridge,
        "run_with_hooks",
        lambda self, x, **more: rows.append(len(x)) or run(self, x, **more),
    )
    rows.clear()
    generic_activation_patch(*arguments, verbose=False)
    assert len(rows) < len(few) and max(rows) == 16  # the last layer goes apart


@pytest.mark.parametrize("case", [*HUGGING_FACE, *NATIVE])
def test_the_last_block_runs_where_the_metric_looks(case, monkeypatch):
    """And a metric that looks farther to the front afterwards gets those positions too."""
    bridge = bridge_of(case)
    clean = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(0))
    corrupted = clean.clone()
    corrupted[:, 2] = (corrupted[:, 2] + 5) % 50 + 3
    _, cache = bridge.run_with_cache(clean)
    columns = []
    last_block = CorruptedRun.last_block

    def watched(self, rows, start, begin):
        columns.append(start + begin)
        return last_block(self, rows, start, begin)

    monkeypatch.setattr(CorruptedRun, "last_block", watched)
    looks = lambda logits: logits[:, -1, 5].mean() + logits[0, 4, 3] - logits[1, 3, 9]
    found = ready.get_act_patch_resid_pre(bridge, corrupted, cache, looks, verbose=False)
    right = plainly(monkeypatch, ready.get_act_patch_resid_pre, bridge, corrupted, cache, looks)
    torch.testing.assert_close(found, right, atol=1e-4, rtol=0)
    if columns and CorruptedRun(bridge, {"input_ids": corrupted}, [0]).ends_early:
        assert columns[:2] == [6, 6] and columns[2] <= 2  # a trial, the last position, all that ran
