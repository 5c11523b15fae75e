"""Promise 3: an intervention means what it says."""

import pytest
import torch

from bridge import TransformerBridge
from tests.conftest import tiny, torch_hooks
from tests.tiny_models import tiny_model


def standard(bridge):
    return [name for name, hook in bridge.hook_dict.items() if name != "embed.hook_in"]


def test_editing_in_place_and_returning_are_the_same(bridge, tokens):
    def returned(x, hook):
        return x * 0.5

    def in_place(x, hook):
        x *= 0.5

    for name in standard(bridge):
        with torch.no_grad():
            one = bridge.run_with_hooks(tokens, fwd_hooks=[(name, returned)])
            other = bridge.run_with_hooks(tokens, fwd_hooks=[(name, in_place)])
        assert torch.equal(one, other), name
        with torch.inference_mode():
            assert torch.equal(bridge.run_with_hooks(tokens, fwd_hooks=[(name, in_place)]), one), (
                name
            )


def test_edits_in_one_run_follow_each_other(bridge, tokens):
    double = lambda x, hook: x * 2
    name = "blocks.1.attn.hook_q"
    twice = bridge.run_with_hooks(tokens, fwd_hooks=[(name, double), (name, double)])
    torch.testing.assert_close(
        twice, bridge.run_with_hooks(tokens, fwd_hooks=[(name, lambda x, hook: x * 4)])
    )
    seen = {}
    with bridge.hooks(fwd_hooks=[(name, double)]):
        _, cache = bridge.run_with_cache(tokens, names_filter=name)
    _, before = bridge.run_with_cache(tokens, names_filter=name)
    torch.testing.assert_close(cache[name], before[name] * 2)
    assert not seen


def test_resid_mid_edits_the_stream(tokens):
    for name in ("gpt2", "llama"):
        bridge = TransformerBridge(tiny(name))
        with bridge.hooks(
            fwd_hooks=[("blocks.1.hook_resid_mid", lambda x, hook: torch.zeros_like(x))]
        ):
            _, cache = bridge.run_with_cache(tokens)
        assert (cache["resid_mid", 1] == 0).all()
        assert torch.equal(cache["resid_post", 1], cache["mlp_out", 1])


def test_mlp_in_and_ln_inputs_edit_one_reader(tokens):
    bridge = TransformerBridge(tiny("llama"))
    _, plain = bridge.run_with_cache(tokens)
    with bridge.hooks(fwd_hooks=[("blocks.1.hook_mlp_in", lambda x, hook: x * 0.5 + 1)]):
        _, cache = bridge.run_with_cache(tokens)
    assert torch.equal(cache["resid_mid", 1], plain["resid_mid", 1])
    assert not torch.equal(cache["mlp_out", 1], plain["mlp_out", 1])
    torch.testing.assert_close(cache["resid_post", 1], plain["resid_mid", 1] + cache["mlp_out", 1])
    with bridge.hooks(fwd_hooks=[("blocks.1.attn.v.hook_in", lambda x, hook: x * 0)]):
        _, cache = bridge.run_with_cache(tokens)
    assert torch.equal(cache["q", 1], plain["q", 1])
    assert (cache["v", 1] == 0).all()


def test_forbidding_all_attention_gives_none(bridge, tokens):
    name = "blocks.1.attn.hook_attn_scores"

    def forbid(scores, hook):
        scores[:, 0] = float("-inf")
        return scores

    with bridge.hooks(fwd_hooks=[(name, forbid)]):
        logits, cache = bridge.run_with_cache(tokens)
    assert (cache["pattern", 1][:, 0] == 0).all()
    torch.testing.assert_close(cache["pattern", 1][:, 1:].sum(-1), torch.ones(2, 3, 9))
    assert logits.isfinite().all()
    zeroed = bridge.run_with_hooks(
        tokens,
        fwd_hooks=[
            ("blocks.1.attn.hook_z", lambda z, hook: torch.cat([z[:, :, :1] * 0, z[:, :, 1:]], 2))
        ],
    )
    torch.testing.assert_close(logits, zeroed, atol=1e-5, rtol=1e-5)
    loss = bridge.run_with_hooks(tokens, fwd_hooks=[(name, forbid)], return_type="loss")
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in bridge.parameters())


def test_scores_show_what_is_masked(bridge, tokens):
    _, cache = bridge.run_with_cache(tokens)
    future = torch.ones(9, 9, dtype=torch.bool).triu(1)
    for layer in range(3):
        assert (cache["attn_scores", layer][..., future] == float("-inf")).all()
        assert cache["attn_scores", layer][..., ~future].isfinite().all()
        torch.testing.assert_close(cache["attn_scores", layer].softmax(-1), cache["pattern", layer])


def test_pattern_equals_output_attentions(family, tokens):
    eager = tiny(family, "eager")
    for implementation in ("sdpa", "eager"):
        _, cache = TransformerBridge(tiny(family, implementation)).run_with_cache(tokens)
        for layer, attention in enumerate(eager(tokens, output_attentions=True).attentions):
            if implementation == "eager":
                assert torch.equal(cache["pattern", layer], attention)
            torch.testing.assert_close(cache["pattern", layer], attention, atol=1e-6, rtol=1e-5)


def test_attn_in_edits_all_three(tokens):
    for name in ("gpt2", "llama", "gpt_neox"):
        bridge = TransformerBridge(tiny(name))
        half = lambda x, hook: x * 0.5 + 0.1
        by_three = bridge.run_with_hooks(
            tokens, fwd_hooks=[(f"blocks.1.hook_{x}_input", half) for x in "qkv"]
        )
        by_one = bridge.run_with_hooks(tokens, fwd_hooks=[("blocks.1.hook_attn_in", half)])
        torch.testing.assert_close(by_one, by_three, atol=1e-6, rtol=1e-5)
        gradients = {}
        loss = bridge.run_with_hooks(
            tokens,
            return_type="loss",
            bwd_hooks=[
                (
                    "blocks.1.hook_attn_in",
                    lambda g, hook, gradients=gradients: gradients.update(x=g),
                )
            ],
        )
        loss.backward()
        assert gradients["x"].shape == (2, 9, 4, 32)
        assert gradients["x"].abs().sum() > 0


def test_wrong_results_of_hooks(bridge, tokens):
    def crop(x, hook):
        return x[:, :-1]

    with pytest.raises(
        ValueError,
        match=(
            r"crop at blocks.1.attn.hook_z returned shape \[2, 8, 4, 8\].* \(batch pos n_heads"
            r" d_head\)"
        ),
    ):
        bridge.run_with_hooks(tokens, fwd_hooks=[("blocks.1.attn.hook_z", crop)])
    with pytest.raises(TypeError, match="returned list; it must return a tensor or None"):
        bridge.run_with_hooks(tokens, fwd_hooks=[("hook_embed", lambda x, hook: [x])])
    with pytest.raises(ValueError, match="returned a tensor on meta"):
        bridge.run_with_hooks(tokens, fwd_hooks=[("hook_embed", lambda x, hook: x.to("meta"))])
    loss = bridge.run_with_hooks(tokens, return_type="loss", bwd_hooks=[("hook_embed", crop)])
    with pytest.raises(ValueError, match="backward hook crop at hook_embed returned shape"):
        loss.backward()


def test_backward_hooks_can_change_gradients(bridge, tokens):
    embed = bridge.original_model.get_input_embeddings().weight
    plain = torch.autograd.grad(bridge(tokens, return_type="loss"), embed)[0]
    for result in (lambda g, hook: g * 0, lambda g, hook: (g * 0,)):
        loss = bridge.run_with_hooks(
            tokens, return_type="loss", bwd_hooks=[("blocks.0.hook_resid_pre", result)]
        )
        changed = torch.autograd.grad(loss, embed, allow_unused=True)[0]
        assert not torch.allclose(changed, plain)


def test_hooks_can_keep_gradients_of_what_they_are_given(bridge, tokens):
    kept = {}

    def keep(x, hook):
        x.retain_grad()
        kept[hook.name] = x

    names = [
        "blocks.1.hook_resid_pre",
        "blocks.1.attn.hook_q",
        "blocks.1.attn.hook_pattern",
        "blocks.1.hook_mlp_out",
    ]
    bridge.run_with_hooks(tokens, return_type="loss", fwd_hooks=[(names, keep)]).backward()
    _, cache = bridge.run_with_cache(tokens, names_filter=names, return_type="loss", incl_bwd=True)
    for name in names:
        torch.testing.assert_close(kept[name].grad, cache[name + "_grad"])


def test_half_precision_results_keep_the_models_type(tokens):
    bridge = TransformerBridge(tiny("llama", dtype=torch.bfloat16))
    logits = bridge.run_with_hooks(
        tokens, fwd_hooks=[("blocks.0.hook_resid_pre", lambda x, hook: x.float() * 2)]
    )
    assert logits.dtype == torch.bfloat16


def test_a_module_put_in_place_after_wrapping_is_found(tokens):
    hf = tiny("llama")
    bridge = TransformerBridge(hf)
    inner = hf.model.layers[1].mlp

    class Wrapped(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            for name, child in inner.named_children():
                setattr(self, name, child)

        def forward(self, x):
            return self.inner(x) * 0

    hf.model.layers[1].mlp = Wrapped(inner)
    _, cache = bridge.run_with_cache(tokens)
    assert (cache["mlp_out", 1] == 0).all()


def test_edits_behind_a_norm_whose_gradient_is_asked_for_are_kept(bridge, tokens):
    gradients = []
    watch = ("blocks.1.ln1.hook_normalized", lambda g, hook: gradients.append(g.clone()))
    for name in (
        "blocks.1.attn.hook_q",
        "blocks.1.attn.q.hook_in",
        "blocks.1.ln1.hook_in",
        "blocks.1.ln1.hook_out",
    ):
        if name not in bridge.hook_dict:
            continue
        edit = (name, lambda x, hook: x * 0.5)
        plain = bridge.run_with_hooks(tokens, fwd_hooks=[edit])
        watched = bridge.run_with_hooks(tokens, fwd_hooks=[edit], bwd_hooks=[watch])
        torch.testing.assert_close(watched, plain, atol=1e-6, rtol=1e-5, msg=name)
        gradients.clear()
        watched.sum().backward()
        assert len(gradients) == 3


def test_gradients_of_separate_readers_add_up(bridge, tokens):
    each, total = [], []
    norm, entry = "blocks.1.ln1.hook_out", "blocks.1.ln1.hook_in"
    bridge.run_with_hooks(
        tokens, return_type="loss", bwd_hooks=[(norm, lambda g, hook: each.append(g.clone()))]
    ).backward()
    out = {}
    module = bridge.original_model.get_submodule(bridge.hook_dict[norm].point.site.path)

    def keep(module, args, output):
        output.retain_grad()
        out["x"] = output

    handle = module.register_forward_hook(keep)
    bridge(tokens, return_type="loss").backward()
    handle.remove()
    torch.testing.assert_close(sum(each), out["x"].grad)
    assert len(each) == 3
    bridge.run_with_hooks(
        tokens, return_type="loss", bwd_hooks=[(entry, lambda g, hook: total.append(g))]
    ).backward()
    assert len(total) == 1


def test_own_inputs_and_gradients_of_the_shared_norm_exclude_each_other(bridge, tokens):
    look, watch = lambda x, hook: None, lambda g, hook: None
    for own in ("hook_q_input", "hook_attn_in"):
        with pytest.raises(ValueError, match="cannot be used together"):
            bridge.run_with_hooks(
                tokens,
                fwd_hooks=[(f"blocks.1.{own}", look)],
                bwd_hooks=[("blocks.1.ln1.hook_scale", watch)],
            )
        with pytest.raises(ValueError, match="cannot be used together"):
            bridge.run_with_cache(
                tokens,
                return_type="loss",
                incl_bwd=True,
                names_filter=[f"blocks.1.{own}", "blocks.1.ln1.hook_scale"],
            )
        assert not any(
            m._forward_hooks or m._forward_pre_hooks for m in bridge.original_model.modules()
        )
        bridge.run_with_hooks(
            tokens,
            fwd_hooks=[(f"blocks.1.{own}", look)],
            bwd_hooks=[("blocks.2.ln1.hook_scale", watch)],
        )


@pytest.mark.parametrize("fn", [lambda z: z, lambda z, other: z, lambda z, h=None: z])
def test_a_function_without_a_hook_parameter_is_an_error_that_names_the_point(bridge, tokens, fn):
    before = torch_hooks(bridge.original_model)
    with pytest.raises(
        TypeError, match=r"at blocks\.1\.attn\.hook_z takes \(.*parameter named `hook`"
    ):
        bridge.run_with_hooks(tokens, fwd_hooks=[("blocks.1.attn.hook_z", fn)])
    assert torch_hooks(bridge.original_model) == before
    with pytest.raises(TypeError, match="parameter named `hook`"):
        bridge.run_with_hooks(
            tokens, return_type="loss", bwd_hooks=[("blocks.1.attn.hook_z", lambda gradient: None)]
        ).backward()


def test_a_type_error_inside_a_hook_is_its_own(bridge, tokens):
    def broken(z, hook):
        return z + "one"

    with pytest.raises(TypeError) as caught:
        bridge.run_with_hooks(tokens, fwd_hooks=[("blocks.1.attn.hook_z", broken)])
    assert "parameter named" not in str(caught.value)


@pytest.mark.parametrize("name", ["ln1.hook_scale", "ln1.hook_normalized", "ln1.hook_out"])
@pytest.mark.parametrize("own", ["hook_attn_in", "hook_q_input"])
def test_an_edited_norm_and_inputs_of_heads_are_refused_together(name: str, own: str) -> None:
    """What heads are given of their own is normed again, and the edit of the norm would be lost."""
    bridge = TransformerBridge(tiny_model("llama"))
    tokens = torch.tensor([[3, 4, 5]])
    before = bridge(tokens)
    edits = [
        (f"blocks.0.{name}", lambda x, hook: x * 0.5),
        (f"blocks.0.{own}", lambda x, hook: x + 0.3),
    ]
    with pytest.raises(RuntimeError, match="normed again without that change"):
        bridge.run_with_hooks(tokens, fwd_hooks=edits)
    with pytest.raises(ValueError, match="cannot be changed in one program"):
        bridge.program(interventions=edits)
    looks = [(f"blocks.0.{name}", lambda x, hook: None), edits[1]]
    assert not torch.equal(bridge.run_with_hooks(tokens, fwd_hooks=looks), before)
    assert torch.equal(bridge(tokens), before)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_written_back_is_no_edit(family: str, dtype: torch.dtype) -> None:
    """What is returned as it was read differs by rounding alone; an edit of some digits is told
    from it.
    """
    bridge = TransformerBridge(tiny_model(family).to(dtype))
    tokens = torch.tensor([[3, 4, 5, 6]])
    own = ("blocks.1.hook_attn_in", lambda x, hook: x + 0.3)
    expected = bridge.run_with_hooks(tokens, fwd_hooks=[own])
    inside = [f"blocks.1.ln1.{name}" for name in ("hook_scale", "hook_normalized", "hook_out")]
    found = bridge.run_with_hooks(tokens, fwd_hooks=[(inside, lambda x, hook: x), own])
    assert torch.equal(found, expected)
    little = 1 + 16 * torch.finfo(dtype).eps
    with pytest.raises(RuntimeError, match="normed again without that change"):
        bridge.run_with_hooks(tokens, fwd_hooks=[(inside[1], lambda x, hook: x * little), own])


@torch.no_grad()
def test_what_a_hook_puts_in_stays_as_it_is_where_the_model_writes_over_it() -> None:
    """Falcon adds what attention returns to what its MLP returned, in place: a patch is the same in
    the next run.
    """
    bridge = TransformerBridge(tiny_model("falcon"))
    clean, corrupted = torch.randint(3, 90, (2, 1, 6), generator=torch.Generator().manual_seed(0))
    name = "blocks.0.hook_mlp_out"
    _, cache = bridge.run_with_cache(clean, names_filter=name)
    kept = cache[name].clone()
    first, second = (
        bridge.run_with_hooks(corrupted, fwd_hooks=[(name, lambda x, hook: cache[name])])
        for _ in "12"
    )
    assert torch.equal(cache[name], kept) and torch.equal(first, second)
    with bridge.linearised(clean, freeze=("mlp_out",)):
        first, second = bridge(clean), bridge(clean)
    assert torch.equal(first, second)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "name"),
    [("bloom", "blocks.1.attn.hook_pattern"), ("mamba2", "blocks.0.mixer.hook_ssm_state")],
)
def test_what_a_hook_puts_in_may_lie_in_memory_in_any_way(family: str, name: str) -> None:
    """These models take a view of it, which of an expanded or transposed tensor there is none."""
    bridge = TransformerBridge(tiny_model(family))
    tokens = torch.randint(3, 90, (2, 6), generator=torch.Generator().manual_seed(0))
    _, cache = bridge.run_with_cache(tokens, names_filter=name)
    mean = cache[name].mean(0, keepdim=True).expand_as(cache[name])
    turned = cache[name].mT.contiguous().mT
    for value in (mean, turned):
        expected = bridge.run_with_hooks(
            tokens, fwd_hooks=[(name, lambda x, hook, value=value: value.contiguous())]
        )
        assert torch.equal(
            bridge.run_with_hooks(tokens, fwd_hooks=[(name, lambda x, hook, value=value: value)]),
            expected,
        )
        with bridge.trace(tokens) as run:
            run[name] = value
        assert torch.equal(run.logits, expected)
