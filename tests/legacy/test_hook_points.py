"""Hook points in modules of the user's own."""

import functools

import pytest
import torch
from torch import nn

from bridge.hooks.names import UnknownHookError
from bridge.legacy import HookedTransformer
from bridge.legacy.hook_points import HookedRootModule, HookPoint, LensHandle
from tests.reference import DATA, reference


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.hook_q = HookPoint()

    def forward(self, x):
        return self.hook_q(self.linear(x))


class Toy(HookedRootModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.hook_in = HookPoint()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.hook_out = HookPoint()
        self.setup()

    def forward(self, x, scale=1.0):
        x = self.hook_in(x)
        for block in self.blocks:
            x = block(x)
        return self.hook_out(x * scale).sum()


@pytest.fixture
def toy():
    return Toy()


@pytest.fixture
def x():
    return torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(3))


def double(tensor, hook):
    return tensor * 2


def counts(module):
    return {
        n: (len(p.fwd_hooks), len(p.bwd_hooks))
        for n, p in module.hook_dict.items()
        if p.fwd_hooks or p.bwd_hooks
    }


def test_the_level_of_a_model_counts_what_is_open(model):
    hooks = [("hook_embed", lambda x, hook: None)]
    assert model.context_level == 0
    with model.hooks(fwd_hooks=hooks):
        with model.hooks(fwd_hooks=hooks):
            assert model.context_level == 2
        assert model.context_level == 1
    with pytest.raises(ZeroDivisionError):
        model.run_with_hooks([[1, 2]], fwd_hooks=[("hook_embed", lambda x, hook: 1 / 0)])
    assert model.context_level == 0


def test_a_hook_that_is_added_with_a_level_goes_with_the_hooks_of_that_level(model):
    tokens, plain = [[1, 2]], model([[1, 2]])

    def doubled():
        return any(handle.user_hook is double for handle in model.hook_dict["hook_embed"].fwd_hooks)

    for run in (model.run_with_hooks, lambda x, **end: model.run_with_cache(x, **end)[0]):
        model.add_hook("hook_embed", double, level=1)
        assert not torch.equal(model(tokens), plain)
        assert not torch.equal(run(tokens, reset_hooks_end=False), plain)
        model.add_hook("hook_pos_embed", double)
        with model.hooks([("hook_embed", lambda x, hook: None)]):
            run(tokens)  # its own hooks are of level 2
            assert doubled()
        assert not doubled()
        model.add_hook("hook_embed", double, level=1)
        run(tokens)
        assert not doubled()
        assert model.hook_dict["hook_pos_embed"].fwd_hooks
        model.reset_hooks()
    assert torch.equal(model(tokens), plain)


def test_hooks_that_outlast_their_run_go_with_the_next_run_of_their_level(model):
    tokens, plain, hooks = [[1, 2]], model([[1, 2]]), [("hook_embed", double)]
    with model.hooks():
        assert model.context_level == 1
    for run in (model.run_with_hooks, lambda x: model.run_with_cache(x)[0]):
        model.run_with_hooks(tokens, fwd_hooks=hooks, reset_hooks_end=False)
        assert not torch.equal(model(tokens), plain)
        assert [each.context_level for each in model.hook_dict["hook_embed"].fwd_hooks] == [1]
        assert not torch.equal(run(tokens), plain)
        assert torch.equal(model(tokens), plain)
    with model.hooks(hooks, reset_hooks_end=False):
        assert model.context_level == 1
        model.run_with_cache(tokens)  # of level 2
    assert not torch.equal(model(tokens), plain)
    with model.hooks():
        pass
    assert torch.equal(model(tokens), plain)


def test_setup_names_modules_and_hook_points(toy):
    assert list(toy.hook_dict) == ["hook_in", "blocks.0.hook_q", "blocks.1.hook_q", "hook_out"]
    assert toy.mod_dict["blocks.1.linear"] is toy.blocks[1].linear
    assert toy.blocks[1].hook_q.name == "blocks.1.hook_q"
    assert toy.blocks[1].hook_q.layer() == 1
    assert list(toy.hook_points()) == list(toy.hook_dict.values())
    with pytest.raises(ValueError, match="belongs to no layer"):
        toy.hook_out.layer()


def test_hook_points_of_bridges_are_instances(model):
    assert isinstance(model.hook_dict["hook_embed"], HookPoint)
    assert list(model.hook_points()) == list(model.hook_dict.values())
    assert isinstance(HookPoint(), HookPoint)
    assert not isinstance(nn.Identity(), HookPoint)
    assert not isinstance(model.hook_dict["hook_embed"], type("Mine", (HookPoint,), {}))


def test_hooks_change_what_follows(toy, x):
    assert torch.allclose(toy.run_with_hooks(x, fwd_hooks=[("hook_out", double)]), 2 * toy(x))
    assert torch.allclose(
        toy.run_with_hooks(x, scale=3.0, fwd_hooks=[(lambda name: "out" in name, double)]),
        6 * toy(x),
    )
    assert counts(toy) == {}


def test_order_and_prepend(toy, x):
    order = []
    for name, prepend in (("a", False), ("b", False), ("c", True)):
        toy.hook_in.add_hook(lambda t, hook, name=name: order.append(name), prepend=prepend)
    toy(x)
    assert order == ["c", "a", "b"]
    assert all(isinstance(handle, LensHandle) for handle in toy.hook_in.fwd_hooks)


def test_levels(toy):
    toy.add_hook("hook_in", double)
    with toy.hooks(fwd_hooks=[("hook_in", double)]):
        assert toy.context_level == 1
        assert [h.context_level for h in toy.hook_in.fwd_hooks] == [None, 1]
        with toy.hooks(fwd_hooks=[("hook_in", double)], bwd_hooks=[("hook_out", double)]):
            assert counts(toy) == {"hook_in": (3, 0), "hook_out": (0, 1)}
        assert counts(toy) == {"hook_in": (2, 0)}
    assert counts(toy) == {"hook_in": (1, 0)}
    assert toy.context_level == 0
    toy.reset_hooks()
    assert counts(toy) == {}


def test_a_context_that_keeps_its_hooks(toy):
    with toy.hooks(fwd_hooks=[("hook_in", double)], reset_hooks_end=False):
        pass
    assert counts(toy) == {"hook_in": (1, 0)}
    toy.remove_all_hook_fns("bwd")
    assert counts(toy) == {"hook_in": (1, 0)}


def test_hooks_go_after_an_error(toy, x):
    def fail(tensor, hook):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        toy.run_with_hooks(x, fwd_hooks=[("blocks.0.hook_q", fail)])
    assert counts(toy) == {}
    assert toy.context_level == 0


def test_permanent_hooks_stay(toy, x):
    toy.add_perma_hook("hook_out", double)
    toy.add_hook("hook_in", double)
    toy.reset_hooks()
    assert counts(toy) == {"hook_out": (1, 0)}
    toy.run_with_hooks(x, fwd_hooks=[("hook_out", double)])
    assert counts(toy) == {"hook_out": (1, 0)}
    toy.reset_hooks(including_permanent=True)
    assert counts(toy) == {}


def test_contexts(toy):
    toy.hook_in.ctx["seen"] = 1
    toy.reset_hooks(clear_contexts=False)
    assert toy.hook_in.ctx == {"seen": 1}
    toy.reset_hooks()
    assert toy.hook_in.ctx == {}


def test_backward_hooks_see_and_change_gradients(toy, x):
    _, cache = toy.run_with_cache(x, incl_bwd=True)
    assert torch.equal(cache["hook_out_grad"], torch.ones(2, 3, 4))
    expected = torch.ones(2, 3, 4) @ toy.blocks[1].linear.weight
    assert torch.allclose(cache["blocks.0.hook_q_grad"], expected)
    toy.zero_grad()
    with toy.hooks(bwd_hooks=[("hook_out", lambda grad, hook: grad * 2)]):
        toy(x).backward()
    doubled = toy.blocks[0].linear.weight.grad.clone()
    toy.zero_grad()
    toy(x).backward()
    assert torch.allclose(doubled, 2 * toy.blocks[0].linear.weight.grad)


def test_caches(toy, x):
    output, cache = toy.run_with_cache(x)
    assert list(cache) == list(toy.hook_dict)
    assert torch.equal(cache["hook_in"], x)
    assert torch.equal(cache["hook_out"].sum(), output)
    assert not cache["hook_out"].requires_grad
    _, one = toy.run_with_cache(x[:1], names_filter="hook_in", remove_batch_dim=True)
    assert {name: list(value.shape) for name, value in one.items()} == {"hook_in": [3, 4]}
    with pytest.raises(ValueError, match="hook_in"):
        toy.run_with_cache(x, names_filter="hook_in", remove_batch_dim=True)
    with pytest.raises(TypeError, match="pos_slice"):
        toy.run_with_cache(x, pos_slice=-1)
    with pytest.raises(ValueError, match="matches none of the 4 hook points"):
        toy.run_with_cache(x, names_filter=lambda name: False)
    assert counts(toy) == {}


def test_caching_hooks_stay_until_reset(toy, x):
    cache = toy.add_caching_hooks(names_filter=lambda name: name.startswith("blocks"))
    toy(x)
    first = cache["blocks.1.hook_q"]
    toy(x + 1)
    assert list(cache) == ["blocks.0.hook_q", "blocks.1.hook_q"]
    assert not torch.equal(first, cache["blocks.1.hook_q"])
    toy.reset_hooks()
    assert counts(toy) == {}
    mine = {}
    toy.cache_some(mine, lambda name: name == "hook_in")
    toy(x)
    assert list(mine) == ["hook_in"]


@pytest.mark.unchecked
def test_unknown_names_are_errors(toy, x):
    for call in (
        lambda: toy.add_hook("hook_inn", double),
        lambda: toy.run_with_cache(x, names_filter=["hook_inn"]),
        lambda: toy.run_with_hooks(x, fwd_hooks=[("hook_inn", double)]),
    ):
        with pytest.raises(UnknownHookError, match="Did you mean hook_in"):
            call()
    with pytest.raises(ValueError, match="dir is 'sideways'"):
        toy.hook_in.add_hook(double, dir="sideways")
    with pytest.raises(ValueError, match="dir is 'sideways'"):
        toy.hook_in.remove_hooks("sideways")
    assert counts(toy) == {}


def test_positions_of_hook_points_whose_axes_nobody_knows_are_refused(toy):
    """As in `run_with_cache`: they would be kept whole."""
    for caching in (toy.get_caching_hooks, toy.add_caching_hooks):
        with pytest.raises(ValueError, match=r"which axis of hook_in, blocks\.0\.hook_q"):
            caching(pos_slice=-1)
    assert counts(toy) == {}


def test_a_hook_point_of_another_module_is_refused(toy):
    with pytest.raises(ValueError, match="another module"):
        toy.add_hook(Toy().hook_in, double)
    toy.add_hook(toy.hook_in, double)
    assert counts(toy) == {"hook_in": (1, 0)}


def test_torch_hooks_of_every_kind_act_on_a_models_hook_point():
    model = HookedTransformer.from_pretrained_no_processing(str(DATA / "gpt2"), device="cpu")
    tokens, point, seen = reference("gpt2")["tokens"], model.blocks[0].hook_resid_mid, []
    right = model.run_with_hooks(tokens, fwd_hooks=[(point.name, lambda x, hook: x / 2)])
    handle = point.register_forward_pre_hook(lambda module, given: (given[0] / 2,))
    assert torch.equal(model(tokens), right)
    handle.remove()
    point.register_full_backward_pre_hook(lambda module, gradient: seen.append(gradient[0]))
    point.register_full_backward_hook(lambda module, inner, outer: (inner[0] * 0,))
    model(tokens, return_type="loss").backward()
    assert seen[0].abs().sum() > 0
    assert (
        model.blocks[0].attn.W_O.grad.abs().max() == 0 < model.blocks[0].mlp.W_out.grad.abs().max()
    )


def test_a_model_inside_of_a_module_with_hook_points():
    class Root(HookedRootModule):
        def __init__(self, model):
            super().__init__()
            self.model, self.hook_logits = model, HookPoint()
            self.setup()

        def forward(self, tokens):
            return self.hook_logits(self.model(tokens))

    model = HookedTransformer.from_pretrained_no_processing(str(DATA / "gpt2"), device="cpu")
    tokens = reference("gpt2")["tokens"]
    _, right = model.run_with_cache(tokens)
    edited = model.run_with_hooks(
        tokens, fwd_hooks=[("blocks.0.attn.hook_pattern", lambda x, hook: x / 2)]
    )
    root = Root(model)
    _, cache = root.run_with_cache(tokens)
    assert torch.allclose(cache["model.blocks.1.attn.hook_pattern"], right["pattern", 1], atol=1e-6)
    halving = [("model.blocks.0.attn.hook_pattern", lambda x, hook: x / 2)]
    assert torch.equal(root.run_with_hooks(tokens, fwd_hooks=halving), edited)
    assert (
        model.blocks[0].attn.name == "blocks.0.attn"
        and model.blocks[0].attn(right["resid_pre", 0]).ndim == 3
    )


def test_a_class_of_the_users_may_call_its_input_otherwise():
    class Halved(HookedTransformer):
        def forward(self, tokens):
            return super().forward(tokens) / 2

    cfg = {
        "n_layers": 1,
        "d_model": 8,
        "n_ctx": 5,
        "d_head": 4,
        "d_vocab": 10,
        "act_fn": "relu",
        "device": "cpu",
    }
    model, tokens = Halved(cfg), torch.tensor([[1, 2, 3]])
    assert torch.equal(model.run_with_cache(tokens)[0], model(tokens))
    assert torch.equal(model.run_with_hooks(tokens, fwd_hooks=[]), model(tokens))


def test_handles_are_torchs():
    """The original ACDC asks a hook point's handles which functions are there."""
    cfg = {
        "n_layers": 1,
        "d_model": 8,
        "n_ctx": 5,
        "d_head": 4,
        "d_vocab": 10,
        "act_fn": "relu",
        "device": "cpu",
    }
    model = HookedTransformer(cfg)
    point, seen = model.hook_dict["blocks.0.hook_resid_pre"], []

    def sender_hook(x, hook, more=1):
        seen.append((hook.name, more))

    point.add_hook(functools.partial(sender_hook, more=2))
    point.add_hook(sender_hook)
    first, second = point.fwd_hooks
    assert isinstance(first.hook, torch.utils.hooks.RemovableHandle) and isinstance(
        first.hook.next_id, int
    )
    there = first.hook.hooks_dict_ref()
    assert there == second.hook.hooks_dict_ref() and list(there) == [first.hook.id, second.hook.id]
    assert [type(hook) is functools.partial for hook in there.values()] == [False, False]
    assert all("sender_hook" in hook.__name__ for hook in there.values())
    assert there[first.hook.id].__name__.startswith("partial(")
    there[first.hook.id](point, (), torch.ones(1))
    assert seen == [(point.name, 2)]
    with pytest.raises(TypeError):
        del there[first.hook.id]
    with first.hook:
        pass
    assert [handle.user_hook for handle in point.fwd_hooks] == [sender_hook]
    assert first.hook.id not in second.hook.hooks_dict_ref()
    alone = HookPoint()
    alone.add_hook(sender_hook, dir="bwd")
    (handle,) = alone.bwd_hooks
    assert handle.hook.id in handle.hook.hooks_dict_ref() and not alone.fwd_hooks
    handle.hook.hooks_dict_ref()[handle.hook.id](alone, (), (torch.ones(1),))
    handle.hook.remove()
    assert not alone.bwd_hooks
