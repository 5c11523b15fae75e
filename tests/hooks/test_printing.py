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
        assert [sizes[axis] if axis in sizes else int(axis) for axis in shape] == list(
            cache[name].shape
        ), name
    assert "weights: " in text and "attn.W_Q" in text


def test_a_part_prints_what_is_in_it(bridge):
    text = repr(bridge.blocks[0].attn)
    assert (
        text.startswith("blocks.0.attn\n")
        and "hook_pattern" in text
        and "hook_resid_pre" not in text
    )


def test_a_bridge_prints_what_it_is_in_a_few_lines(bridge, hf):
    text = repr(bridge)
    assert len(text.splitlines()) == 5 and max(map(len, text.splitlines())) < 120
    n = sum(parameter.numel() for parameter in hf.parameters())
    assert type(hf).__name__ in text and f"{n:,} parameters" in text
    assert "3 layers of 4 heads, d_model 32" in text and "no tokenizer" in text
    assert f"{len(bridge.hook_dict)} hook points" in text


def test_cfg_prints_the_fields_that_say_something(bridge, hf):
    lines = repr(bridge.cfg).splitlines()
    told = dict(line.strip().split(" = ") for line in lines[1:-1])
    assert told["n_layers"] == "3" and told["d_model"] == "32" and told["d_head"] == "8"
    assert "extra" not in told and "seed" not in told  # as in every model that says nothing of them
    for name, value in told.items():
        assert repr(getattr(bridge.cfg, name)) == value
    bridge.cfg.seed = 3
    assert "seed = 3" in repr(bridge.cfg)
