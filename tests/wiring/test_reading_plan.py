"""A cache of many points is read by a way of its own, where nobody changes anything: it has to be
the same cache.
"""

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from bridge import TransformerBridge
from tests.conftest import torch_hooks


def read_one_by_one(
    bridge: TransformerBridge, tokens: Tensor, names: list[str]
) -> dict[str, Tensor]:
    """The same by hook functions of a user."""
    seen: dict[str, Tensor] = {}

    def keep(activation: Tensor, hook: object) -> None:
        seen[hook.name] = activation.detach().clone()

    bridge.run_with_hooks(tokens, fwd_hooks=[(names, keep)])
    return seen


@pytest.mark.parametrize("surroundings", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_it_is_what_hooks_see(
    bridge: TransformerBridge, tokens: Tensor, surroundings: type
) -> None:
    with surroundings():
        logits, cache = bridge.run_with_cache(tokens)
        seen = read_one_by_one(bridge, tokens, list(cache))
    assert torch.equal(logits, bridge(tokens))
    assert set(seen) == set(cache)
    for name in cache:
        assert not cache[name].requires_grad
        torch.testing.assert_close(cache[name], seen[name], rtol=1e-5, atol=1e-5)
    assert torch_hooks(bridge.original_model) == 0


def test_a_few_names_hold_what_they_show_and_no_graph(
    bridge: TransformerBridge, tokens: Tensor
) -> None:
    names = ["blocks.1.ln1.hook_scale", "blocks.1.attn.hook_q", "blocks.2.hook_resid_pre"]
    _, cache = bridge.run_with_cache(tokens, names_filter=names)
    _, everything = bridge.run_with_cache(tokens)
    for name in names:
        assert torch.equal(cache[name], everything[name])
    assert all(cache[name].grad_fn is None for name in names)


class InGraph(torch.autograd.Function):
    """The identity, with an object that lives as long as the graph does."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, graphs: "weakref.WeakSet[nn.Module]") -> Tensor:
        graphs.add(mark := nn.Identity())
        ctx.mark = mark
        return x.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def test_nothing_of_the_graph_is_kept(bridge: TransformerBridge, tokens: Tensor) -> None:
    """What waits to be computed holds tensors without a graph: else the whole pass would stay in
    memory.
    """
    graphs: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    first = bridge.original_model.get_submodule(bridge.block_paths[0])
    first.register_forward_pre_hook(
        lambda module, args: (InGraph.apply(args[0], graphs), *args[1:])
    )
    with torch.enable_grad():
        logits, cache = bridge.run_with_cache(tokens)
    assert logits.requires_grad and len(graphs) == 1
    del logits
    gc.collect()
    assert not graphs
    assert cache["pattern", 1].grad_fn is None


def test_a_module_that_was_replaced_is_found_anew(
    bridge: TransformerBridge, tokens: Tensor
) -> None:
    _, before = bridge.run_with_cache(tokens)
    point = bridge.hook_dict["blocks.1.mlp.hook_post"].point
    parent_path, _, name = point.site.path.rpartition(".")
    parent = bridge.original_model.get_submodule(parent_path)
    replaced = copy.deepcopy(getattr(parent, name))
    with torch.no_grad():
        replaced.weight.mul_(2)
    setattr(parent, name, replaced)
    logits, after = bridge.run_with_cache(tokens)
    assert torch.equal(logits, bridge(tokens))
    assert torch.equal(after["blocks.1.mlp.hook_post"], before["blocks.1.mlp.hook_post"])
    assert not torch.equal(after["blocks.2.hook_resid_pre"], before["blocks.2.hook_resid_pre"])
    assert torch.equal(after["blocks.1.hook_resid_post"], after["blocks.2.hook_resid_pre"])
    assert torch_hooks(bridge.original_model) == 0


def test_it_sees_what_hooks_made_of_an_activation(
    bridge: TransformerBridge, tokens: Tensor
) -> None:
    for name in ("blocks.1.hook_resid_post", "blocks.1.attn.hook_q", "blocks.1.ln2.hook_scale"):
        _, plain = bridge.run_with_cache(tokens)
        with bridge.hooks(fwd_hooks=[(name, lambda activation, hook: activation * 0.5)]):
            _, cache = bridge.run_with_cache(tokens)
        torch.testing.assert_close(cache[name], plain[name] * 0.5)


def test_another_threads_run_is_not_read(bridge: TransformerBridge, tokens: Tensor) -> None:
    other = (tokens + 1) % bridge.cfg.d_vocab
    _, right = bridge.run_with_cache(tokens)
    entered, done = threading.Event(), threading.Event()

    def wait(module: nn.Module, args: object) -> None:
        if threading.current_thread() is threading.main_thread():
            entered.set()
            done.wait(20)

    def run_meanwhile() -> None:
        entered.wait(20)
        bridge(other)
        bridge.original_model(other)
        done.set()

    handle = bridge.original_model.get_submodule(bridge.block_paths[1]).register_forward_pre_hook(
        wait
    )
    thread = threading.Thread(target=run_meanwhile)
    thread.start()
    _, cache = bridge.run_with_cache(tokens)
    thread.join()
    handle.remove()
    assert all(torch.equal(cache[name], right[name]) for name in right)


def test_two_threads_read_one_model_at_once(bridge: TransformerBridge, tokens: Tensor) -> None:
    inputs = [(tokens + i) % bridge.cfg.d_vocab for i in range(4)]
    right = [bridge.run_with_cache(given)[1] for given in inputs]
    wrong: list[str] = []

    def read(index: int) -> None:
        for _ in range(15):
            _, cache = bridge.run_with_cache(inputs[index])
            wrong.extend(
                name for name in right[index] if not torch.equal(cache[name], right[index][name])
            )

    threads = [threading.Thread(target=read, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert torch_hooks(bridge.original_model) == 0


def test_a_change_in_place_is_refused(bridge: TransformerBridge, tokens: Tensor) -> None:
    def spoil(module: nn.Module, args: tuple[Tensor, ...], output: object) -> None:
        with torch.no_grad():
            args[0].mul_(2)

    handle = bridge.original_model.get_submodule(bridge.block_paths[1]).register_forward_hook(spoil)
    with (
        pytest.raises(RuntimeError, match="changed in place after it was recorded"),
        torch.no_grad(),
    ):
        bridge.run_with_cache(tokens)
    handle.remove()


def test_an_exception_leaves_nothing(bridge: TransformerBridge, tokens: Tensor) -> None:
    def fail(module: nn.Module, args: object) -> None:
        raise ArithmeticError("midway")

    handle = bridge.original_model.get_submodule(bridge.block_paths[1]).register_forward_pre_hook(
        fail
    )
    with pytest.raises(ArithmeticError, match="midway"):
        bridge.run_with_cache(tokens)
    handle.remove()
    assert torch_hooks(bridge.original_model) == 0
    assert not bridge.wiring.listening


def test_a_copy_made_meanwhile_reads_nothing(bridge: TransformerBridge, tokens: Tensor) -> None:
    copies: list[nn.Module] = []

    def take(module: nn.Module, args: object) -> None:
        copies.append(copy.deepcopy(bridge.original_model))

    handle = bridge.original_model.get_submodule(bridge.block_paths[1]).register_forward_pre_hook(
        take
    )
    _, cache = bridge.run_with_cache(tokens)
    handle.remove()
    kept = {name: cache[name].clone() for name in cache}
    copied = copies[0]
    for module in copied.modules():
        module._forward_pre_hooks.pop(handle.id, None)
    copied((tokens + 1) % bridge.cfg.d_vocab)
    assert all(torch.equal(cache[name], kept[name]) for name in cache)


def test_a_run_in_a_hook_of_another_reads_by_hooks_of_its_own(
    bridge: TransformerBridge, tokens: Tensor
) -> None:
    """The hooks of a plan are used again, never by two runs at once: the outer one goes on after
    the inner one.
    """
    other = (tokens + 1) % bridge.cfg.d_vocab
    right, of_other = bridge.run_with_cache(tokens)[1], bridge.run_with_cache(other)[1]
    inner: list[dict[str, Tensor]] = []

    def run_inside(module: nn.Module, args: object) -> None:
        handle.remove()
        inner.append(bridge.run_with_cache(other)[1])

    handle = bridge.original_model.get_submodule(bridge.block_paths[1]).register_forward_pre_hook(
        run_inside
    )
    _, outer = bridge.run_with_cache(tokens)
    assert all(torch.equal(outer[name], right[name]) for name in right)
    assert all(torch.equal(inner[0][name], of_other[name]) for name in of_other)
    assert torch_hooks(bridge.original_model) == 0


def test_hooks_that_wait_for_the_next_run_hold_nothing_of_the_last(
    bridge: TransformerBridge, tokens: Tensor
) -> None:
    block, seen = bridge.original_model.get_submodule(bridge.block_paths[1]), []

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(weakref.ref(args[0]))

    def fail(module: nn.Module, args: object) -> None:
        raise KeyError("as a user's hook may")

    noting = block.register_forward_pre_hook(note)
    with torch.no_grad():  # so that what is kept is the model's own tensor
        _, cache = bridge.run_with_cache(tokens)
        assert seen[0]() is not None and cache["resid_pre", 1] is seen[0]()
        handle = block.register_forward_pre_hook(fail)
        with pytest.raises(KeyError, match="as a user's hook may"):
            bridge.run_with_cache(tokens)
    handle.remove()
    noting.remove()
    gc.collect()
    assert len(seen) == 2 and seen[1]() is None
    assert torch_hooks(bridge.original_model) == 0


def other(module: nn.Module) -> nn.Module:
    """A copy that computes something else."""
    copied = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(1.01)
    return copied


def shows_what_runs(bridge: TransformerBridge, tokens: Tensor) -> None:
    """A cache holds all that hooks see, and the logits are the model's."""
    logits, cache = bridge.run_with_cache(tokens)
    seen = read_one_by_one(bridge, tokens, list(bridge.run_with_cache(tokens)[1]))
    assert torch.equal(logits, bridge.original_model(tokens).logits) and set(seen) == set(cache)
    for name, x in seen.items():
        torch.testing.assert_close(cache[name], x, rtol=1e-5, atol=1e-5)


def test_a_plan_falls_with_any_module_that_was_replaced(
    bridge: TransformerBridge, tokens: Tensor
) -> None:
    """Also where the new module has the place in memory that the old one had, and where the old one
    lives on.
    """
    kept: list[nn.Module] = []
    bridge.run_with_cache(tokens)
    for point in ("blocks.1.attn.hook_q", "blocks.1.hook_resid_pre", "blocks.1.hook_mlp_out"):
        parent_path, _, name = bridge.hook_dict[point].point.site.path.rpartition(".")
        parent = bridge.original_model.get_submodule(parent_path)
        for _ in range(20):
            setattr(parent, name, other(getattr(parent, name)))
        shows_what_runs(bridge, tokens)
        kept.append(getattr(parent, name))
        setattr(parent, name, other(kept[-1]))
        shows_what_runs(bridge, tokens)
