"""What holds for any input: hypothesis chooses the tokens, their padding, the positions and the
hook points.
"""

from __future__ import annotations

import functools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge import TransformerBridge
from tests.adapters.test_verify_all import tiny

CASES = ("gpt2", "llama-gqa", "gpt_neox", "bloom", "gemma2-gqa", "mixtral-gqa")


@functools.cache
def bridge_of(case: str) -> TransformerBridge:
    return TransformerBridge(tiny(case))


rows = st.lists(st.lists(st.integers(3, 60), min_size=1, max_size=7), min_size=1, max_size=3)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    case=st.sampled_from(CASES), texts=rows, side=st.sampled_from(["left", "right"]), data=st.data()
)
def test_padded_rows_are_as_alone(case, texts, side, data):
    """Each row of a padded batch, its activations and an edit of them, is what it is alone."""
    bridge = bridge_of(case)
    longest = max(map(len, texts))
    padded, mask = [], []
    for row in texts:
        gap = [0] * (longest - len(row))
        padded.append([*gap, *row] if side == "left" else [*row, *gap])
        mask.append([*gap, *([1] * len(row))] if side == "left" else [*([1] * len(row)), *gap])
    standard = [
        name for name, hook in bridge.hook_dict.items() if hook.point.axes.startswith("batch pos")
    ]
    name = data.draw(
        st.sampled_from([n for n in standard if bridge.hook_dict[n].point.group == "standard"])
    )
    factor = data.draw(st.sampled_from([0.0, 0.5, -1.0, 2.0]))
    spec = [] if name.endswith("hook_scale") else [(name, lambda x, hook: x * factor)]
    with torch.no_grad(), bridge.hooks(spec):
        arguments = {"attention_mask": torch.tensor(mask), "names_filter": name}
        logits, cache = bridge.run_with_cache(torch.tensor(padded), **arguments)
        for index, row in enumerate(texts):
            at = slice(longest - len(row), None) if side == "left" else slice(0, len(row))
            alone, own = bridge.run_with_cache(torch.tensor([row]), names_filter=name)
            torch.testing.assert_close(logits[index, at], alone[0], atol=2e-4, rtol=2e-4)
            torch.testing.assert_close(cache[name][index, at], own[name][0], atol=2e-4, rtol=2e-4)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(case=st.sampled_from(CASES), data=st.data())
def test_positions_are_those_of_the_whole(case, data):
    """What `pos_slice` keeps is what Python's own indexing takes of the whole, or an error."""
    bridge = bridge_of(case)
    tokens = torch.tensor([[5, 9, 17, 33, 4]])
    name = data.draw(
        st.sampled_from(["blocks.1.hook_resid_pre", "blocks.0.attn.hook_z", "blocks.1.attn.hook_q"])
    )
    bounds = st.none() | st.integers(-6, 6)
    pos = data.draw(
        st.integers(-7, 7)
        | st.builds(slice, bounds, bounds)
        | st.lists(st.integers(-5, 4), min_size=1, max_size=4)
    )
    whole = bridge.run_with_cache(tokens, names_filter=name)[1][name]
    if isinstance(pos, int):
        expected = whole[:, [pos]] if -5 <= pos < 5 else None
    else:
        expected = whole[:, pos]
    try:
        kept = bridge.run_with_cache(tokens, names_filter=name, pos_slice=pos)[1][name]
    except IndexError:
        assert expected is None or not expected.numel()
    else:
        assert expected is not None and torch.equal(kept, expected)
