"""What a bridge and its parts print can be read, and is true."""

import re


def test_a_block_prints_its_hook_points_with_the_shapes_that_they_have(bridge, tokens):
    text = repr(bridge.blocks[2])
    assert text.startswith("blocks.2\n")
    rows = dict(re.findall(r"^  ([\w.]+) +\[(.*)\]$", text, flags=re.MULTILINE))
    assert {"hook_resid_pre", "attn.hook_z", "mlp.hook_post", "ln1.hook_scale"} <= set(rows)
    _, cache = bridge.run_with_cache(tokens)
    sizes = {"batch": 2, "pos": 9, "query": 9, "key": 9, "query_pos": 9, "key_pos": 9}
    cached = [name for name in cache if name.startswith("blocks.2.")]
    assert len(cached) > 10
    for name in cached:
        shape = rows[name.removeprefix("blocks.2.")].split(", ")
        assert [sizes[axis] if axis in sizes else int(axis) for axis in shape] == list(cache[name].shape), name
    assert "weights: " in text and "attn.W_Q" in text


def test_a_part_prints_what_is_in_it(bridge):
    text = repr(bridge.blocks[0].attn)
    assert text.startswith("blocks.0.attn\n") and "hook_pattern" in text and "hook_resid_pre" not in text
