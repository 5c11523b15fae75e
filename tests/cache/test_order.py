"""A cache lists activations in the order of the hook points, which the model may come to in another
one.
"""

import pytest

#: Each is a hook of its own projection's input, and the model computes one projection after the
#: other.
WANTED = [f"blocks.1.{name}" for name in ("hook_q_input", "hook_k_input", "hook_v_input")]
WANTED += [f"blocks.1.attn.{name}" for name in ("hook_q", "hook_k", "hook_v")]


@pytest.fixture
def split(bridge):
    bridge.set_use_split_qkv_input(True)
    return bridge


def test_a_run_s_cache(split, tokens):
    _, cache = split.run_with_cache(tokens)
    assert [name for name in cache if name in WANTED] == WANTED
    assert list(cache) == [name for name in split.hook_dict if name in cache]


def test_a_dictionary_that_hooks_fill(split, tokens):
    cache = split.add_caching_hooks()
    split(tokens)
    split.reset_hooks()
    assert list(cache) == [name for name in split.hook_dict if name in cache]
    assert set(WANTED) <= set(cache)
