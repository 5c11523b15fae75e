"""Promise 4: one name everywhere, and nothing silently skipped."""

import pytest
import torch

from bridge import HookPoint, TransformerBridge, UnknownHookError, act_name


def test_every_alias_means_the_same_everywhere(bridge, tokens):
    for alias, name in bridge.names.aliases.items():
        assert bridge.names.find(alias) is bridge.hook_dict[name]
        found = bridge
        for part in alias.split("."):
            found = found[int(part)] if part.isdigit() else getattr(found, part)
        assert found is bridge.hook_dict[name], alias
    alias, name = "blocks.1.attn.q.hook_out", "blocks.1.attn.hook_q"
    _, by_alias = bridge.run_with_cache(tokens, names_filter=alias)
    _, by_name = bridge.run_with_cache(tokens, names_filter=[name])
    assert list(by_alias) == list(by_name) == [name]
    assert torch.equal(by_alias[alias], by_name["q", 1])
    zero = lambda x, hook: x * 0
    assert torch.equal(
        bridge.run_with_hooks(tokens, fwd_hooks=[(alias, zero)]),
        bridge.run_with_hooks(tokens, fwd_hooks=[(name, zero)]),
    )
    assert alias in by_alias


def test_attribute_access(bridge):
    point = bridge.blocks[2].attn.hook_z
    assert isinstance(point, HookPoint)
    assert point is bridge.hook_dict["blocks.2.attn.hook_z"]
    assert point is bridge.blocks[-1].attn.hook_z
    assert point.layer() == 2
    assert len(bridge.blocks) == 3
    assert [b.name for b in bridge.blocks] == ["blocks.0", "blocks.1", "blocks.2"]
    assert "hook_z" in dir(bridge.blocks[0].attn)
    with pytest.raises(IndexError, match="3 members; 3 is out of range"):
        bridge.blocks[3]
    with pytest.raises(AttributeError, match=r"blocks\.0\.attn has no 'hook_zz'.*hook_z"):
        _ = bridge.blocks[0].attn.hook_zz
    with pytest.raises(AttributeError, match=r"has no 'blcks'.*blocks"):
        _ = bridge.blcks
    with pytest.raises(ValueError, match="belongs to no layer"):
        bridge.hook_embed.layer()


@pytest.mark.parametrize(
    "use",
    [
        lambda b, t, n: b.run_with_cache(t, names_filter=n),
        lambda b, t, n: b.run_with_cache(t, names_filter=["hook_embed", n]),
        lambda b, t, n: b.run_with_hooks(t, fwd_hooks=[(n, lambda x, hook: x)]),
        lambda b, t, n: b.run_with_hooks(t, bwd_hooks=[(n, lambda x, hook: None)]),
        lambda b, t, n: b.add_hook(n, lambda x, hook: x),
        lambda b, t, n: b.get_caching_hooks(n),
    ],
)
def test_misspelt_names_are_errors_with_suggestions(bridge, tokens, use):
    with pytest.raises(UnknownHookError, match=r"'blocks.1.attn.hook_zed'.*blocks.1.attn.hook_z"):
        use(bridge, tokens, "blocks.1.attn.hook_zed")
    assert not any(
        m._forward_hooks or m._forward_pre_hooks for m in bridge.original_model.modules()
    )


@pytest.mark.unchecked
def test_filters_that_match_nothing_are_errors(bridge, tokens):
    with pytest.raises(ValueError, match="matches none of the"):
        bridge.run_with_cache(tokens, names_filter=lambda name: False)
    with pytest.raises(ValueError, match="list of names is empty"):
        bridge.run_with_cache(tokens, names_filter=[])
    with pytest.raises(TypeError, match="names_filter is int"):
        bridge.names.select(3, lambda flag: False)
    with pytest.raises(TypeError, match="holds 3"):
        bridge.names.select(["hook_embed", 3], lambda flag: False)
    with pytest.raises(UnknownHookError):
        bridge.run_with_cache(tokens, names_filter="blocks.9.hook_resid_pre")


def test_cache_keys(bridge, tokens):
    _, cache = bridge.run_with_cache(
        tokens, names_filter=["blocks.2.hook_resid_post", "blocks.0.attn.hook_pattern"]
    )
    assert torch.equal(cache["resid_post", -1], cache["blocks.2.hook_resid_post"])
    assert torch.equal(cache["attn", 0], cache["pattern", 0])
    assert len(cache) == 2
    with pytest.raises(KeyError, match="was not asked for"):
        cache["blocks.1.hook_resid_post"]
    with pytest.raises(KeyError, match="no hook point has this name"):
        cache["blocks.1.hook_resid_pst"]


@pytest.mark.parametrize(
    ("short", "full"),
    [
        (("q", 3), "blocks.3.attn.hook_q"),
        (("pattern", 0), "blocks.0.attn.hook_pattern"),
        (("attn", 0), "blocks.0.attn.hook_pattern"),
        (("attn_scores", 1), "blocks.1.attn.hook_attn_scores"),
        (("resid_pre", 2), "blocks.2.hook_resid_pre"),
        (("mlp_out", 2), "blocks.2.hook_mlp_out"),
        (("post", 2), "blocks.2.mlp.hook_post"),
        (("pre", 2, "mlp"), "blocks.2.mlp.hook_pre"),
        (("k", 6, "a"), "blocks.6.attn.hook_k"),
        (("scale", 4, "ln1"), "blocks.4.ln1.hook_scale"),
        (("normalized", None, "ln_final"), "ln_final.hook_normalized"),
        (("normalized",), "ln_final.hook_normalized"),
        (("embed",), "hook_embed"),
        (("pos_embed",), "hook_pos_embed"),
        (("blocks.0.hook_resid_pre",), "blocks.0.hook_resid_pre"),
        (("q_input", 1), "blocks.1.hook_q_input"),
        (("k6",), "blocks.6.attn.hook_k"),
        (("scale4ln1",), "blocks.4.ln1.hook_scale"),
        (("pre5",), "blocks.5.mlp.hook_pre"),
        (("attn12",), "blocks.12.attn.hook_pattern"),
        (("query", 1), "blocks.1.attn.hook_q"),
        (("mlp_post", 1), "blocks.1.mlp.hook_post"),
        (("attn_logits", 1), "blocks.1.attn.hook_attn_scores"),
    ],
)
def test_act_name(short, full):
    assert act_name(*short) == full


def test_unknown_arguments(bridge, tokens):
    with pytest.raises(TypeError, match=r"'return_typ' is an argument of neither.*return_type"):
        bridge(tokens, return_typ="loss")
    with pytest.raises(TypeError, match=r"'name_filter'.*names_filter"):
        bridge.run_with_cache(tokens, name_filter="hook_embed")
    with pytest.raises(ValueError, match="return_type is 'logit'"):
        bridge(tokens, return_type="logit")


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("hook_z", ".attn.hook_z"),
        ("pattern", ".attn.hook_pattern"),
        ("attn.hook_q", ".attn.hook_q"),
        ("z", ".attn.hook_z"),
        ("resid_post", ".hook_resid_post"),
        ("q.hook_out", ".attn.q.hook_out"),
    ],
)
def test_a_name_without_the_layer_is_told_how_to_choose_all_layers(bridge, tokens, name, ending):
    with pytest.raises(UnknownHookError) as caught:
        bridge.run_with_cache(tokens, names_filter=name)
    said = str(caught.value)
    assert repr(name) in said and f"blocks.0{ending}, " in said
    assert f"lambda name: name.endswith({ending!r})" in said and "all 3 layers" in said
    _, cache = bridge.run_with_cache(tokens, names_filter=lambda name: name.endswith(ending))
    assert len(cache) == 3  # the advice works
    with pytest.raises(UnknownHookError, match="A name says the layer"):
        bridge.run_with_hooks(tokens, fwd_hooks=[(name, lambda x, hook: x)])


def test_lists_of_names_hold_hook_points_too() -> None:
    bridge, other = TransformerBridge.boot_embedded(), TransformerBridge.boot_embedded()
    point = bridge.blocks[1].hook_resid_post
    names = ["blocks.0.hook_resid_pre", point]
    _, cache = bridge.run_with_cache("Mary and", names_filter=names)
    assert list(cache) == ["blocks.0.hook_resid_pre", point.name]
    assert point in cache
    assert torch.equal(cache[point], cache[point.name])
    with pytest.raises(ValueError, match="belongs to another bridge"):
        other.run_with_cache("Mary and", names_filter=names)
