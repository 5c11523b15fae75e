"""Activation patching equals a plain loop of `run_with_hooks`, for every ready-made function,
however it is run.
"""

import sys
import types

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from bridge import TransformerBridge, UnknownHookError, act_name
from bridge import patching as ready
from bridge.embedded import MODEL_DIR
from bridge.legacy import HookedTransformer
from bridge.patching.patching import generic_activation_patch, make_df_from_ranges
from bridge.patching.runs import CorruptedRun, Patch, PatchedRuns, may_start_later
from bridge.patching.setters import (
    layer_head_vector_patch_setter,
    layer_pos_feature_patch_setter,
    layer_pos_patch_setter,
)
from tests.conftest import tiny, torch_hooks
from tests.reference import DATA, FAMILIES, reference

# What is patched, and which indices of the activation are taken from the clean run.
READY = {
    "resid_pre": ("resid_pre", ("pos",), lambda i: (slice(None), i[0])),
    "resid_mid": ("resid_mid", ("pos",), lambda i: (slice(None), i[0])),
    "attn_out": ("attn_out", ("pos",), lambda i: (slice(None), i[0])),
    "mlp_out": ("mlp_out", ("pos",), lambda i: (slice(None), i[0])),
    **{
        f"attn_head_{name}_by_pos": (short, ("pos", "head"), lambda i: (slice(None), i[0], i[1]))
        for name, short in (("out", "z"), ("q", "q"), ("k", "k"), ("v", "v"))
    },
    **{
        f"attn_head_{name}_all_pos": (short, ("head",), lambda i: (slice(None), slice(None), i[0]))
        for name, short in (("out", "z"), ("q", "q"), ("k", "k"), ("v", "v"))
    },
    "attn_head_pattern_all_pos": ("pattern", ("head",), lambda i: (slice(None), i[0])),
    "attn_head_pattern_by_pos": ("pattern", ("head", "pos"), lambda i: (slice(None), i[0], i[1])),
    "attn_head_pattern_dest_src_pos": (
        "pattern",
        ("head", "pos", "pos"),
        lambda i: (slice(None), i[0], i[1], i[2]),
    ),
}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def pair(tokens):
    """Clean and corrupted tokens, ``[2, 5]`` each."""
    clean = tokens[:, :5]
    return clean, torch.cat([clean[:, :1], (clean[:, 1:3] + 7) % 61, clean[:, 3:]], dim=1)


def metric(logits):
    return (logits[:, -1, 5] - logits[:, -1, 9]).mean()


def by_hand(bridge, corrupted, cache, name, axes, where):
    """The plain way: one whole run for each patch."""
    cfg, length = bridge.cfg, corrupted.shape[1]
    heads = cfg.n_kv_heads if name in ("k", "v") else cfg.n_heads
    sizes = [cfg.n_layers, *({"pos": length, "head": heads}[axis] for axis in axes)]
    found = torch.zeros(sizes)
    for index in torch.cartesian_prod(*map(torch.arange, sizes)).tolist():
        full = act_name(name, index[0])

        def patch(x, hook, full=full, index=index):
            x[where(index[1:])] = cache[full][where(index[1:])]

        found[tuple(index)] = metric(bridge.run_with_hooks(corrupted, fwd_hooks=[(full, patch)]))
    return found


@pytest.mark.parametrize("kind", READY)
def test_ready_made_functions_equal_the_plain_way(bridge, pair, kind):
    name, axes, where = READY[kind]
    clean, corrupted = (tokens[:, : 3 if len(axes) == 3 else 5] for tokens in pair)
    if bridge.cfg.parallel_attn_mlp and name == "resid_mid":
        with pytest.raises(UnknownHookError, match="resid_mid"):
            ready.get_act_patch_resid_mid(
                bridge, corrupted, bridge.run_with_cache(clean)[1], metric, verbose=False
            )
        return
    _, cache = bridge.run_with_cache(clean)
    function = getattr(ready, f"get_act_patch_{kind}")
    ours = function(bridge, corrupted, cache, metric, verbose=False)
    right = by_hand(bridge, corrupted, cache, name, axes, where)
    torch.testing.assert_close(ours, right)
    assert right.std() > 0
    in_batches = function(bridge, corrupted, cache, metric, verbose=False, patches_per_run=4)
    torch.testing.assert_close(in_batches, right, atol=1e-5, rtol=1e-4)
    assert torch_hooks(bridge.original_model) == 0


def test_runs_that_start_later_give_what_whole_runs_give(bridge, pair, monkeypatch):
    clean, corrupted = pair
    _, cache = bridge.run_with_cache(clean)
    for name in ("resid_pre", "mlp_out", "z"):
        arguments = (
            bridge,
            corrupted,
            cache,
            metric,
            layer_pos_patch_setter,
            name,
            ("layer", "pos"),
        )
        later = generic_activation_patch(*arguments, verbose=False)
        with monkeypatch.context() as patch:
            patch.setattr("bridge.patching.runs.may_start_later", lambda model: False)
            torch.testing.assert_close(
                generic_activation_patch(*arguments, verbose=False), later, atol=1e-5, rtol=1e-4
            )


@pytest.mark.parametrize("max_bytes", [1, 10**5])
def test_a_bound_on_memory_says_how_many_patches_are_one_run(bridge, pair, monkeypatch, max_bytes):
    clean, corrupted = pair
    _, cache = bridge.run_with_cache(clean)
    sizes, own = [], PatchedRuns._most

    def most(self, run, length):
        sizes.append(own(self, run, length))
        return sizes[-1]

    monkeypatch.setattr(PatchedRuns, "_most", most)
    arguments = (
        bridge,
        corrupted,
        cache,
        metric,
        layer_pos_patch_setter,
        "resid_pre",
        ("layer", "pos"),
    )
    found = generic_activation_patch(*arguments, verbose=False, max_bytes=max_bytes)
    monkeypatch.setattr("bridge.patching.runs.may_start_later", lambda model: False)
    torch.testing.assert_close(
        generic_activation_patch(*arguments, verbose=False), found, atol=1e-5, rtol=1e-4
    )
    cfg = bridge.cfg
    one = (
        (16 * cfg.d_model + 6 * cfg.d_mlp + 3 * cfg.n_heads * 5) * 4 * 2
    )  # bytes of a position of two prompts
    assert (
        set(sizes) == {1}
        if max_bytes == 1
        else all(n * one <= max_bytes for n in sizes) and max(sizes) > 1
    )
    for wrong in ({"max_bytes": 0}, {"max_bytes": 9, "patches_per_run": 2}):
        with pytest.raises(ValueError, match="max_bytes"):
            generic_activation_patch(*arguments, verbose=False, **wrong)


def test_every_standard_activation_can_be_patched_from_its_layer_on(bridge, pair):
    clean, corrupted = pair
    _, cache = bridge.run_with_cache(clean)
    runs = PatchedRuns(
        bridge, {"input_ids": corrupted}, [bridge.hook_dict["blocks.1.hook_mlp_out"]] * 5
    )
    assert runs.corrupted.steps
    for name, value in cache.items():
        hook = bridge.hook_dict[name]
        if hook.point.depth == 1:
            whole = bridge.run_with_hooks(
                corrupted, fwd_hooks=[(name, lambda x, hook, value=value: value)]
            )
            ((_, later),) = runs.logits(
                [Patch(0, hook, 0, lambda start, value=value: lambda x: value)], joined=False
            )
            assert torch.equal(later, whole), name


def test_with_gradients_on(bridge, pair):
    clean, corrupted = pair
    _, cache = bridge.run_with_cache(clean)
    right = ready.get_act_patch_mlp_out(bridge, corrupted, cache, metric, verbose=False)
    with torch.enable_grad():
        assert CorruptedRun(bridge, {"input_ids": corrupted}, [1]).steps
        ours = ready.get_act_patch_mlp_out(bridge, corrupted, cache, metric, verbose=False)
        assert not ours.requires_grad
        torch.testing.assert_close(ours, right)
    assert all(parameter.grad is None for parameter in bridge.parameters())


def test_layers_below_a_patch_do_not_run(pair):
    bridge = TransformerBridge(tiny("llama"))
    clean, corrupted = pair
    _, cache = bridge.run_with_cache(clean)
    counts = {"self_attn": [0] * 3, "mlp": [0] * 3}  # tokens

    def count(module, kind, number):
        forward = module.forward

        def counting(hidden_states, *args, **kwargs):
            counts[kind][number] += hidden_states.shape[0] * hidden_states.shape[1]
            return forward(hidden_states, *args, **kwargs)

        module.forward = counting

    for number, block in enumerate(bridge.original_model.model.layers):
        for kind in counts:
            count(getattr(block, kind), kind, number)
    ready.get_act_patch_resid_pre(bridge, corrupted, cache, metric, verbose=False)
    # Two prompts of 5 tokens. Positions 1 and 2 differ at first, later also those behind; at
    # position 0 nothing does. One run takes the stream, and one tries to go on from it with the
    # last three; no run has all positions.
    overhead = 2 * (5 + 3)
    # Another tries the last block at the last position, where the metric looks, with keys and
    # values of the others.
    tried = {"self_attn": 2 * 5, "mlp": 2}
    patched = [
        2 * 4 * 2,
        2 * 4 * (2 + 4),
        2 * 4 * (2 + 4 + 4),
    ]  # prompts, positions that run, patches so far
    assert counts["self_attn"] == [
        overhead + tokens for tokens in (*patched[:2], patched[2] + tried["self_attn"])
    ]
    assert counts["mlp"] == [
        overhead + tokens for tokens in (*patched[:2], 2 * (2 + 4) + 2 * 4 * 4 + tried["mlp"])
    ]
    for kind in counts:
        counts[kind][:] = [0] * 3
    ready.get_act_patch_attn_head_out_all_pos(bridge, corrupted, cache, metric, verbose=False)
    heads = (4, 8, 12)
    assert counts["self_attn"] == [
        overhead + 2 * 4 * n + more for n, more in zip(heads, (0, 0, 10), strict=True)
    ]
    assert counts["mlp"] == [
        overhead + tokens for tokens in (2 * 4 * 4, 2 * 4 * 8, 2 * 8 + 2 * 4 * 4 + 2)
    ]


def test_whole_runs_where_something_listens_or_is_random(bridge, pair):
    clean, corrupted = pair
    _, cache = bridge.run_with_cache(clean)
    assert may_start_later(bridge)
    seen = []
    with bridge.hooks(
        fwd_hooks=[("blocks.0.hook_mlp_out", lambda x, hook: seen.append(hook.name))]
    ):
        assert not may_start_later(bridge)
        ready.get_act_patch_resid_pre(bridge, corrupted, cache, metric, verbose=False)
    assert len(seen) == 15
    module = next(bridge.original_model.children())
    handle = module.register_forward_hook(lambda *args: None)
    assert not may_start_later(bridge)
    handle.remove()
    assert may_start_later(bridge)
    bridge.train()
    assert not may_start_later(bridge)


def test_hooks_that_are_there_stay_in_force(pair):
    bridge = TransformerBridge(tiny("gpt2"))
    clean, corrupted = pair
    _, cache = bridge.run_with_cache(clean)
    with bridge.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", lambda x, hook: x * 0.5)]):
        ours = ready.get_act_patch_resid_pre(bridge, corrupted, cache, metric, verbose=False)
        right = by_hand(bridge, corrupted, cache, *READY["resid_pre"])
    torch.testing.assert_close(ours, right)


def test_several_patches_in_a_whole_run_return_a_new_tensor_or_none(pair):
    bridge = TransformerBridge(tiny("gpt2"))
    clean, corrupted = pair
    _, cache = bridge.run_with_cache(clean)

    def setter(activation, index, clean_activation):
        new = activation.clone() if index[1] % 2 else activation
        new[:, index[1]] = clean_activation[:, index[1]]
        return new if index[1] % 2 else None

    arguments = (bridge, corrupted, cache, metric, setter, "resid_pre", ("layer", "pos"))
    with bridge.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", lambda x, hook: x * 0.5)]):
        ours = generic_activation_patch(*arguments, patches_per_run=3, verbose=False)
        right = by_hand(bridge, corrupted, cache, *READY["resid_pre"])
    torch.testing.assert_close(ours, right)


def test_a_model_that_feeds_its_blocks_something_else_is_run_whole(pair, monkeypatch):
    bridge = TransformerBridge(tiny("llama"))
    inner = bridge.original_model.model
    first, forward = inner.layers[0], inner.layers[2].forward
    original, memory = first.forward, {}

    def remember(x, *args, **kwargs):
        memory["x"] = x
        return original(x, *args, **kwargs)

    first.forward = remember
    inner.layers[2].forward = lambda x, *args, **kwargs: forward(
        x + memory.pop("x", 0), *args, **kwargs
    )
    clean, corrupted = pair
    _, cache = bridge.run_with_cache(clean)
    assert may_start_later(bridge) and not CorruptedRun(bridge, {"input_ids": corrupted}, [0]).steps
    ours = ready.get_act_patch_resid_pre(bridge, corrupted, cache, metric, verbose=False)
    torch.testing.assert_close(ours, by_hand(bridge, corrupted, cache, *READY["resid_pre"]))


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name, monkeypatch):
    bridge = TransformerBridge.boot_transformers(str(DATA / name)).eval()
    clean = reference(name)["tokens"]
    corrupted = torch.cat([clean[:, :3], (clean[:, 3:5] + 5) % 60, clean[:, 5:]], dim=1)
    _, cache = bridge.run_with_cache(clean)
    assert CorruptedRun(bridge, {"input_ids": corrupted}, [1]).steps
    for kind in (
        "resid_pre",
        "attn_out",
        "attn_head_out_all_pos",
        "attn_head_k_all_pos",
        "attn_head_pattern_all_pos",
    ):
        function = getattr(ready, f"get_act_patch_{kind}")
        later = function(bridge, corrupted, cache, metric, verbose=False)
        with monkeypatch.context() as patch:
            patch.setattr("bridge.patching.runs.may_start_later", lambda model: False)
            plain = function(bridge, corrupted, cache, metric, verbose=False)
        torch.testing.assert_close(later, plain, atol=1e-4, rtol=0, msg=kind)
        assert later.std() > 0


def test_padding_in_front_that_a_model_masks_by_itself():
    """There a run from a layer would lack the mask: the trial finds out."""
    model = HookedTransformer.from_pretrained(
        str(MODEL_DIR), device="cpu", default_padding_side="left"
    )
    clean = model.to_tokens(["Mary and John went", "When Tom and James went"])
    corrupted = clean.flip(0)
    _, cache = model.run_with_cache(clean)
    assert may_start_later(model) and not CorruptedRun(model, {"input_ids": corrupted}, [2]).steps
    ours = ready.get_act_patch_attn_head_out_all_pos(model, corrupted, cache, metric, verbose=False)
    torch.testing.assert_close(
        ours, by_hand(model, corrupted, cache, *READY["attn_head_out_all_pos"])
    )


def test_every(pair):
    bridge = TransformerBridge(tiny("llama"))  # two key heads for four query heads
    clean, corrupted = pair
    _, cache = bridge.run_with_cache(clean)
    arguments, length = (bridge, corrupted, cache, metric), clean.shape[1]
    heads = ready.get_act_patch_attn_head_all_pos_every(*arguments, verbose=False)
    assert heads.shape == (5, 3, 4)
    assert (heads[2:4, :, 2:] == 0).all() and (heads[2:4, :, :2] != 0).all()
    torch.testing.assert_close(
        heads[4], ready.get_act_patch_attn_head_pattern_all_pos(*arguments, verbose=False)
    )
    by_pos = ready.get_act_patch_attn_head_by_pos_every(
        *arguments, verbose=False, patches_per_run=8
    )
    assert by_pos.shape == (5, 3, length, 4)
    pattern = ready.get_act_patch_attn_head_pattern_by_pos(*arguments, verbose=False)
    torch.testing.assert_close(by_pos[4], pattern.transpose(1, 2), atol=1e-5, rtol=1e-4)
    blocks = ready.get_act_patch_block_every(*arguments, verbose=False)
    assert blocks.shape == (3, 3, length)
    torch.testing.assert_close(blocks[1], ready.get_act_patch_attn_out(*arguments, verbose=False))


def test_patching_everything_gives_the_clean_answer(bridge, pair):
    clean, corrupted = pair
    logits, cache = bridge.run_with_cache(clean)
    whole = lambda corrupted_activation, index, clean_activation: clean_activation
    found = generic_activation_patch(
        bridge, corrupted, cache, metric, whole, "resid_post", ["layer"], verbose=False
    )
    torch.testing.assert_close(found, metric(logits).expand(3))


def test_padded_prompts(bridge, pair):
    clean, corrupted = pair
    mask = torch.ones_like(clean)
    mask[0, :2] = 0
    _, cache = bridge.run_with_cache(clean, attention_mask=mask)
    arguments = (
        bridge,
        corrupted,
        cache,
        metric,
        layer_head_vector_patch_setter,
        "z",
        ("layer", "head"),
    )
    for more in (1, 5):
        ours = generic_activation_patch(
            *arguments, attention_mask=mask, patches_per_run=more, verbose=False
        )
        for layer, head in ((0, 1), (2, 3)):
            name = act_name("z", layer)

            def patch(z, hook, name=name, head=head):
                z[:, :, head] = cache[name][:, :, head]

            logits = bridge.run_with_hooks(
                corrupted, fwd_hooks=[(name, patch)], attention_mask=mask
            )
            torch.testing.assert_close(ours[layer, head], metric(logits), atol=1e-5, rtol=1e-4)


def test_one_clean_row_serves_a_batch_and_tokens_may_be_one_row(bridge, pair):
    clean, corrupted = pair
    _, cache = bridge.run_with_cache(clean[:1])
    assert ready.get_act_patch_mlp_out(bridge, corrupted, cache, metric, verbose=False).shape == (
        3,
        5,
    )
    one = ready.get_act_patch_mlp_out(bridge, corrupted[0], cache, metric, verbose=False)
    torch.testing.assert_close(
        one, ready.get_act_patch_mlp_out(bridge, corrupted[:1], cache, metric, verbose=False)
    )


class Frame:
    """As much of a pandas data frame as patching needs."""

    def __init__(self, rows, columns):
        self.rows, self.columns = [tuple(row) for row in rows], columns

    def itertuples(self, index, name):
        assert index is False and name is None
        return iter(self.rows)


def test_data_frames_of_indices(bridge, pair, monkeypatch):
    clean, corrupted = pair
    _, cache = bridge.run_with_cache(clean)
    arguments = (bridge, corrupted, cache, metric)
    right = ready.get_act_patch_attn_head_out_all_pos(*arguments, verbose=False)
    monkeypatch.setitem(sys.modules, "pandas", types.SimpleNamespace(DataFrame=Frame))
    frame = make_df_from_ranges([2, 3], ["layer", "head"])
    assert frame.rows == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    found, same = ready.get_act_patch_attn_head_out_all_pos(
        *arguments,
        index_df=Frame([(2, 1), (0, 3), (2, 0)], frame.columns),
        return_index_df=True,
        verbose=False,
    )
    assert same.rows == [(2, 1), (0, 3), (2, 0)]
    torch.testing.assert_close(found, torch.stack([right[2, 1], right[0, 3], right[2, 0]]))
    found, frame = ready.get_act_patch_attn_head_out_all_pos(
        *arguments, return_index_df=True, verbose=False
    )
    assert torch.equal(found, right) and len(frame.rows) == right.numel()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="need pandas"):
        ready.get_act_patch_mlp_out(*arguments, return_index_df=True, verbose=False)


def test_progress_bar(bridge, pair, capsys):
    clean, corrupted = pair
    _, cache = bridge.run_with_cache(clean)
    ready.get_act_patch_mlp_out(bridge, corrupted, cache, metric)
    assert "15/15" in capsys.readouterr().err
    ready.get_act_patch_mlp_out(bridge, corrupted, cache, metric, verbose=False)
    assert not capsys.readouterr().err


def test_errors(bridge, pair):
    clean, corrupted = pair
    _, cache = bridge.run_with_cache(clean)
    setter = layer_pos_patch_setter

    def patch(
        cache=cache, metric=metric, setter=setter, name="mlp_out", axes=("layer", "pos"), **options
    ):
        return generic_activation_patch(
            bridge, corrupted, cache, metric, setter, name, axes, verbose=False, **options
        )

    with pytest.raises(
        UnknownHookError, match=r"no hook point 'blocks.0.hook_mlp_outt'.*Did you mean"
    ):
        patch(name="mlp_outt")
    with pytest.raises(ValueError, match=r"no index axis 'posn'.*Did you mean pos"):
        patch(axes=("layer", "posn"))
    with pytest.raises(ValueError, match="give index_axis_names, or"):
        patch(axes=None)
    with pytest.raises(ValueError, match="give either"):
        patch(index_df=Frame([(0, 0)], ["layer", "pos"]))
    with pytest.raises(
        ValueError, match=r"the index is \[0, 0\]; this patch setter needs \[layer, pos, head\]"
    ):
        patch(setter=ready.layer_pos_head_vector_patch_setter, name="z")
    with pytest.raises(
        ValueError, match=r"a tensor of shape \[2, 61\]; it must be a single number"
    ):
        patch(metric=lambda logits: logits[:, -1])
    with pytest.raises(ValueError, match="patches_per_run is 0"):
        patch(patches_per_run=0)
    _, some = bridge.run_with_cache(clean, names_filter="blocks.0.hook_mlp_out")
    with pytest.raises(KeyError, match=r"does not hold blocks.1.hook_mlp_out"):
        patch(cache=some)
    with pytest.raises(KeyError, match=r"does not hold blocks.1.hook_mlp_out"):
        patch(cache=some.cache_dict)
    with pytest.raises(
        ValueError, match=r"corrupted activation has shape \[2, 5, 32\], the clean one \[5, 32\]"
    ):
        patch(cache={name: value[0] for name, value in cache.items()})
    _, shorter = bridge.run_with_cache(clean[:, :3])
    with pytest.raises(ValueError, match=r"cannot patch \[0, 0\].*prompts of the same length"):
        patch(cache=shorter)
    _, longer = bridge.run_with_cache(torch.cat([clean, clean], 1))
    for name, setter, axes in (
        ("mlp_out", ready.layer_pos_patch_setter, ("layer", "pos")),
        ("z", ready.layer_head_vector_patch_setter, ("layer", "head")),
        ("pattern", ready.layer_head_pos_pattern_patch_setter, ("layer", "head", "dest_pos")),
    ):
        with pytest.raises(ValueError, match=r"cannot patch.*prompts of the same length"):
            patch(cache=longer, name=name, setter=setter, axes=axes)
    with pytest.raises(UnknownHookError, match=r"no hook point 'blocks\.7"):
        patch(axes=None, index_df=Frame([(7, 0)], ["layer", "pos"]))
    assert torch_hooks(bridge.original_model) == 0


def test_legacy_names_are_these():
    from bridge.legacy import patching

    assert patching.get_act_patch_resid_pre is ready.get_act_patch_resid_pre
    assert patching.generic_activation_patch is generic_activation_patch
    assert {f"get_act_patch_{kind}" for kind in READY} < set(patching.__all__)
    assert all(getattr(patching, name).__doc__ for name in patching.__all__ if name[0].islower())


@torch.no_grad()
@pytest.mark.parametrize("point", ["resid_post", "resid_pre"])
def test_features_that_depend_on_other_positions(point):
    """A basis that adds up positions: a run that left out the first ones would see other
    features.
    """
    bridge = TransformerBridge.boot_embedded()
    clean, corrupted = torch.tensor([[1, 20, 31, 42, 53, 64], [1, 20, 31, 42, 99, 64]])[:, None]
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(128, 8, generator=generator) / 11

    def encode(x):
        return x.cumsum(1) @ W

    def decode(features):
        return (features + features.cumsum(1)) @ W.T

    hook = bridge.add_basis(f"blocks.1.hook_{point}", "own", encode=encode, decode=decode)
    _, cache = bridge.run_with_cache(clean, names_filter=hook.name)
    metric = lambda logits: logits[0, -1, 7]
    options = {"index_axis_names": ("layer", "pos", "feature"), "verbose": False}
    found = generic_activation_patch(
        bridge, corrupted, cache, metric, layer_pos_feature_patch_setter, f"{point}.own", **options
    )
    for pos in range(found.shape[1]):

        def patch(features, hook, pos=pos):
            features[:, pos, 3] = cache[hook.name][:, pos, 3]
            return features

        right = metric(bridge.run_with_hooks(corrupted, fwd_hooks=[(hook.name, patch)]))
        assert float(found[1, pos, 3]) == pytest.approx(float(right), abs=1e-4)
    assert found[1].std() > 1e-2


MIXES = {
    "encode": (lambda x: (x - 0.5 * x.mean(0, keepdim=True)).relu(), lambda f: f),
    "decode": (lambda x: x, lambda f: f - 0.5 * f.mean(0, keepdim=True)),
    "top k of the batch": (lambda x: x * (x >= x.flatten().topk(40).values[-1]), lambda f: f),
}


@torch.no_grad()
@pytest.mark.parametrize("together", ["auto", 3])
@pytest.mark.parametrize("kind", MIXES)
def test_a_basis_that_mixes_rows_is_run_patch_by_patch(kind, together):
    """In a batch of patches it would give each the others' numbers."""
    bridge = TransformerBridge.boot_embedded()
    clean, corrupted = torch.tensor([[1, 20, 31, 42, 53, 64], [1, 20, 31, 42, 99, 64]])[:, None]
    W = torch.randn(128, 8, generator=torch.Generator().manual_seed(0)) / 11
    encode, decode = MIXES[kind]
    hook = bridge.add_basis(
        "blocks.1.hook_resid_post",
        "own",
        encode=lambda x: encode(x @ W),
        decode=lambda f: decode(f) @ W.T,
    )
    _, cache = bridge.run_with_cache(clean, names_filter=hook.name)
    metric = lambda logits: logits[0, -1, 7]
    setter, axes = ready.layer_feature_patch_setter, ("layer", "feature")
    arguments = (bridge, corrupted, cache, metric, setter, "resid_post.own", axes)
    found = generic_activation_patch(*arguments, patches_per_run=together, verbose=False)
    for feature in range(8):

        def patch(features, hook, feature=feature):
            features[..., feature] = cache[hook.name][..., feature]
            return features

        right = metric(bridge.run_with_hooks(corrupted, fwd_hooks=[(hook.name, patch)]))
        assert float(found[1, feature]) == pytest.approx(float(right), abs=1e-4)
    assert found[1].std() > 1e-3


@pytest.mark.parametrize(("labels", "length"), [(1, 5), (3, 3), (5, 5), (2, 6)])
def test_scores_of_a_classifier_have_no_positions(labels, length):
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(**sizes, vocab_size=61, num_labels=labels, pad_token_id=0)
    model = LlamaForSequenceClassification(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    bridge = TransformerBridge(model)
    clean = torch.randint(3, 61, (2, length), generator=generator)
    corrupted = clean.clone()
    corrupted[:, 1] = 30
    with torch.no_grad():
        _, cache = bridge.run_with_cache(clean)
        right = torch.zeros(3, length)
        for layer in range(3):
            for pos in range(length):

                def put(x, hook, pos=pos):
                    x[:, pos] = cache[hook.name][:, pos]

                hooks = [(f"blocks.{layer}.hook_resid_pre", put)]
                right[layer, pos] = bridge.run_with_hooks(corrupted, fwd_hooks=hooks)[:, 0].sum()
        found = ready.get_act_patch_resid_pre(
            bridge, corrupted, cache, lambda scores: scores[:, 0].sum(), verbose=False
        )
    torch.testing.assert_close(found, right)
