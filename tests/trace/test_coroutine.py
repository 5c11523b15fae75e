"""One greenlet serves a thread's traces one after the other: nothing of one is seen by the next."""

from __future__ import annotations

import contextvars
import gc
import sys
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from greenlet import getcurrent, greenlet
from transformers import DynamicCache

from bridge import TransformerBridge
from bridge.trace.coroutine import Coroutine
from tests.conftest import tiny

TOKENS = torch.tensor([[1, 2, 3, 4]])
NAME = "blocks.1.hook_resid_post"


@pytest.fixture(scope="module")
def bridge() -> TransformerBridge:
    return TransformerBridge(tiny("llama"))


def traced(bridge: TransformerBridge) -> torch.Tensor:
    with bridge.trace(TOKENS) as run:
        return run[NAME]


def worker_of(bridge: TransformerBridge) -> greenlet:
    """The greenlet that a trace runs the model in."""
    found: list[greenlet] = []
    handle = bridge.add_hook("blocks.0.hook_resid_pre", lambda x, hook: found.append(getcurrent()))
    traced(bridge)
    bridge.reset_hooks()
    assert handle is None or found
    return found[0]


def test_one_greenlet_serves_many(bridge):
    assert worker_of(bridge) is worker_of(bridge) is not getcurrent()


def test_each_thread_has_its_own(bridge):
    found = []
    thread = threading.Thread(target=lambda: found.extend([worker_of(bridge), worker_of(bridge)]))
    thread.start()
    thread.join()
    assert found[0] is found[1] is not worker_of(bridge)


def test_after_an_error_another_one_serves(bridge):
    wanted, before = traced(bridge), worker_of(bridge)

    def broken(*args: object) -> None:
        raise ZeroDivisionError

    handle = bridge.original_model.register_forward_hook(broken)
    with pytest.raises(ZeroDivisionError):
        traced(bridge)
    handle.remove()
    assert before.dead
    assert torch.equal(traced(bridge), wanted)


def test_one_that_was_left_serves_again(bridge):
    before = worker_of(bridge)
    with bridge.trace(TOKENS) as run:
        _ = run["blocks.0.hook_resid_pre"]
        run.stop()
    with pytest.raises(KeyError), bridge.trace(TOKENS) as run:
        _ = run["blocks.0.hook_resid_pre"]
        raise KeyError
    assert worker_of(bridge) is before


def test_traces_inside_each_other(bridge):
    wanted = traced(bridge)
    with bridge.trace(TOKENS) as one:
        _ = one["blocks.0.hook_resid_pre"]
        with bridge.trace(TOKENS) as other:
            inside = other[NAME]
        outside = one[NAME]
    assert torch.equal(inside, wanted) and torch.equal(outside, wanted)


@pytest.mark.parametrize("depths", [(0, 60), (60, 0), (5, 60, 1)])
def test_from_any_depth(bridge, depths):
    """A greenlet's stack lies where its first caller's did: those of later callers are put aside
    for it.
    """

    def deep(n: int) -> torch.Tensor:
        return (
            traced(bridge) if n == 0 else next(map(deep, [n - 1]))
        )  # through C, whose stack is meant

    wanted: list[torch.Tensor] = []
    thread = threading.Thread(
        target=lambda: wanted.extend(deep(n) for n in depths)
    )  # with a fresh greenlet
    thread.start()
    thread.join()
    assert len(wanted) == len(depths) and all(torch.equal(x, traced(bridge)) for x in wanted)


def test_one_that_began_deep_does_not_serve_later_traces(bridge):
    """What is called in a greenlet counts from where its first work began, as long as it lives."""

    def deep(n: int) -> torch.Tensor:
        return traced(bridge) if n == 0 else deep(n - 1)

    def room(n: int = 0) -> int:
        try:
            return room(n + 1)
        except RecursionError:
            return n

    def measure() -> None:
        bridge.add_hook("blocks.0.hook_resid_pre", lambda x, hook: found.append(room()))
        traced(bridge)
        bridge.reset_hooks()

    found: list[int] = []
    for calls in ([measure], [lambda: deep(sys.getrecursionlimit() // 2), measure]):
        thread = threading.Thread(target=lambda: [call() for call in calls])  # noqa: B023  # it ends here
        thread.start()
        thread.join()
    assert found[1] > found[0] - 100


VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE", default="nothing")


def test_context_variables_of_one_are_not_those_of_the_next(bridge):
    seen = []

    def note(module: torch.nn.Module, args: object, output: object) -> None:
        seen.append(VARIABLE.get())
        VARIABLE.set("set by the model")

    handle = bridge.original_model.register_forward_hook(note)
    traced(bridge)
    VARIABLE.set("set by the user")
    traced(bridge)
    VARIABLE.set("nothing")
    traced(bridge)
    handle.remove()
    assert seen == ["nothing", "set by the user", "nothing"]


def watched(
    watch: Callable[[Callable[..., object]], None], call: Callable[[], object]
) -> list[str]:
    """The functions of the model that a debugger's function is told of."""
    names: list[str] = []

    def told(frame: object, event: str, arg: object) -> Callable[..., object]:
        if event == "call":
            names.append(frame.f_code.co_qualname)
        return told

    before = sys.gettrace() if watch is sys.settrace else sys.getprofile()
    watch(told)
    try:
        call()
    finally:
        watch(before)
    return [name for name in names if name.endswith("MLP.forward")]


@pytest.mark.parametrize("watch", [sys.settrace, sys.setprofile])
def test_debuggers_and_profilers_see_the_model(bridge, watch):
    """Also in a greenlet that was made when nobody watched, and the reverse."""
    traced(bridge)
    seen = watched(watch, lambda: traced(bridge))
    assert len(seen) == bridge.cfg.n_layers
    assert watched(watch, lambda: traced(bridge)) == seen
    traced(bridge)


def test_in_a_greenlet_of_the_users_own(bridge):
    """One that another greenlet was the parent of does not wait: it would keep that one alive."""
    found: list[greenlet] = []
    other = greenlet(lambda: found.extend([worker_of(bridge), worker_of(bridge)]))
    other.switch()
    assert found[0] is not found[1] and torch.equal(traced(bridge), traced(bridge))


def test_what_leaves_is_not_begun():
    """Work that was left before it began is never done, and needs no greenlet."""
    done: list[int] = []
    coroutine = Coroutine(lambda: done.append(1))
    coroutine.abandon()
    coroutine.resume()
    assert coroutine.finished and not done


@pytest.mark.parametrize("stops", [True, False])
def test_a_trace_that_is_over_holds_no_arguments_of_the_run(bridge, stops):
    cache = DynamicCache()
    ref = weakref.ref(cache)
    with bridge.trace(TOKENS, past_key_values=cache, stop_at_layer=2) as run:
        _ = run["blocks.0.hook_resid_pre"]
        if stops:
            run.stop()
    del cache
    gc.collect()
    assert ref() is None
    assert torch.equal(run.tokens, TOKENS) and torch.equal(run.rows(0).tokens, TOKENS)
