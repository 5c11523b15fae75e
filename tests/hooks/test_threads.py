"""Several threads may call one bridge; added hooks are seen by all, scoped ones where they were
opened.
"""

import asyncio
import contextvars
import sys
import threading

import pytest
import torch

from bridge import TransformerBridge
from bridge.taps.taps import LOCK
from tests.conftest import tiny, torch_hooks


def test_concurrent_runs_do_not_see_each_other(bridge, tokens):
    plain = bridge(tokens)
    halved = bridge.run_with_hooks(
        tokens, fwd_hooks=[("blocks.1.hook_resid_pre", lambda x, hook: x * 0.5)]
    )
    residual = bridge(tokens, stop_at_layer=2)
    _, whole = bridge.run_with_cache(tokens)
    wrong, barrier = [], threading.Barrier(5)

    def expect(what, got, want, exact=True):
        same = torch.equal(got, want) if exact else torch.allclose(got, want, atol=1e-5)
        if not same:
            wrong.append(what)

    def jobs():
        yield lambda: expect("plain", bridge(tokens), plain)
        yield lambda: expect(
            "halved",
            bridge.run_with_hooks(
                tokens, fwd_hooks=[("blocks.1.hook_resid_pre", lambda x, hook: x * 0.5)]
            ),
            halved,
        )
        yield lambda: expect("start", bridge(residual, start_at_layer=2), plain)
        yield lambda: expect("stop", bridge(tokens, stop_at_layer=2), residual)
        yield lambda: expect(
            "cache",
            bridge.run_with_cache(tokens)[1]["pattern", 2],
            whole["pattern", 2],
            exact=False,
        )

    errors = []

    def work(job):
        barrier.wait()
        try:
            with torch.no_grad():
                for _ in range(40):
                    job()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(job,)) for job in jobs()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert not wrong
    assert not any(
        m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__
        for m in bridge.original_model.modules()
    )


EDITED = (
    "blocks.1.hook_resid_pre",
    "blocks.1.attn.hook_q",
    "blocks.1.attn.hook_pattern",
    "blocks.2.mlp.hook_post",
)


def half(x, hook):
    return x * 0.5


def with_hooks(model, tokens):
    hooks = [(name, half) for name in EDITED]
    model.run_with_hooks(
        tokens, fwd_hooks=hooks, bwd_hooks=[(name, lambda grad, hook: None) for name in EDITED]
    )


def with_a_trace(model, tokens):
    with model.trace(tokens) as run:
        for name in EDITED:
            run[name] = run[name] * 0.5


def with_hooks_that_stay(model, tokens):
    for name in EDITED:
        model.hook_dict[name].add_hook(lambda x, hook: None)
    model.reset_hooks()


#: What another thread may be doing with a model, at the places where a run has its hooks.
MEANWHILE = {
    "hooks": with_hooks,
    "a cache": lambda model, tokens: model.run_with_cache(tokens),
    "a trace": with_a_trace,
    "hooks that stay": with_hooks_that_stay,
    "another bridge": (
        lambda model, tokens: TransformerBridge(model.original_model).run_with_cache(tokens)
    ),
}


@pytest.mark.unchecked  # the type checker's own lines are not ours
@pytest.mark.parametrize("what", MEANWHILE)
def test_a_run_keeps_its_hooks_at_every_moment_of_what_others_do(bridge, tokens, what):
    """Between any two lines with which a thread attaches or detaches something, another one's run
    may come by.
    """
    rooms = ("bridge.hooks", "bridge.wiring", "bridge.taps")
    seen, moments, locks = {}, set(), (bridge.wiring.lock, LOCK)
    hooks = [(name, half) for name in EDITED]

    def comes_by(frame, event, arg):
        moment = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and any(lock._is_owned() for lock in locks) and moment not in moments:
            moments.add(moment)
            with torch.no_grad():
                found = another.run(bridge, tokens)
            if not torch.equal(found, right):
                seen[moment] = float((found - right).abs().max())
        return comes_by

    def traced(frame, event, arg):
        return comes_by if frame.f_globals["__name__"].startswith(rooms) else None

    outside = contextvars.copy_context()
    with bridge.hooks(hooks):
        with torch.no_grad():
            right = bridge(tokens)
        another = contextvars.copy_context()
        sys.settrace(traced)
        try:
            outside.run(MEANWHILE[what], bridge, tokens)
        finally:
            sys.settrace(None)
    assert len(moments) > 20
    assert not seen


ZERO = [("hook_embed", lambda x, hook: x * 0)]


def in_thread(fn):
    """What a function returns in a thread of its own."""
    results = []
    thread = threading.Thread(target=lambda: results.append(fn()))
    thread.start()
    thread.join()
    return results[0]


def test_added_hooks_are_the_hook_points(bridge, tokens):
    plain = bridge(tokens)
    bridge.add_hook(*ZERO[0])
    zeroed = bridge(tokens)
    assert not torch.equal(zeroed, plain)
    assert torch.equal(in_thread(lambda: bridge(tokens)), zeroed)
    in_thread(bridge.reset_hooks)
    assert torch.equal(bridge(tokens), plain)
    in_thread(lambda: bridge.add_hook(*ZERO[0]))
    assert torch.equal(bridge(tokens), zeroed)
    bridge.reset_hooks()
    assert torch_hooks(bridge.original_model) == 0


def test_scoped_hooks_are_their_contexts(bridge, tokens):
    plain, zeroed = bridge(tokens), bridge.run_with_hooks(tokens, fwd_hooks=ZERO)
    with bridge.hooks(fwd_hooks=ZERO):
        assert torch.equal(bridge(tokens), zeroed)
        assert torch.equal(in_thread(lambda: bridge(tokens)), plain)
        context = contextvars.copy_context()
        assert torch.equal(in_thread(lambda: context.run(bridge, tokens)), zeroed)
        assert torch.equal(asyncio.run(asyncio.to_thread(bridge, tokens)), zeroed)
    assert torch_hooks(bridge.original_model) == 0
    # A context that outlives the statement it was copied in sees hooks that are gone.
    assert torch.equal(in_thread(lambda: context.run(bridge, tokens)), plain)


def test_two_tasks_of_one_thread_never_see_each_others_hooks(bridge, tokens):
    plain = bridge(tokens)
    halved = bridge.run_with_hooks(tokens, fwd_hooks=[("hook_embed", lambda x, hook: x * 0.5)])
    zeroed = bridge.run_with_hooks(tokens, fwd_hooks=ZERO)

    async def task(hooks, expected):
        for _ in range(5):
            with bridge.hooks(fwd_hooks=hooks):
                await asyncio.sleep(0)
                assert torch.equal(bridge(tokens), expected)
                await asyncio.sleep(0)
            assert torch.equal(bridge(tokens), plain)

    async def both():
        half = [("hook_embed", lambda x, hook: x * 0.5)]
        await asyncio.gather(task(ZERO, zeroed), task(half, halved), task([], plain))

    asyncio.run(both())
    assert torch_hooks(bridge.original_model) == 0


def test_statements_may_end_in_any_order(bridge, tokens):
    plain, zeroed = bridge(tokens), bridge.run_with_hooks(tokens, fwd_hooks=ZERO)
    first = bridge.hooks(fwd_hooks=ZERO)
    second = bridge.hooks(fwd_hooks=[("hook_embed", lambda x, hook: x * 2)])
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    doubled = bridge(tokens)
    assert not torch.equal(doubled, plain)
    assert not torch.equal(doubled, zeroed)
    second.__exit__(None, None, None)
    assert torch.equal(bridge(tokens), plain)
    assert torch_hooks(bridge.original_model) == 0


def test_a_streamers_worker_sees_the_hooks_of_its_caller(tokens):
    bridge = TransformerBridge(tiny("llama"))
    asked = {"max_new_tokens": 4, "do_sample": False, "return_type": "tokens", "verbose": False}
    with bridge.hooks(fwd_hooks=ZERO):
        made = bridge.generate(tokens, **asked)
        streamed = torch.cat(list(bridge.generate_stream(tokens, **asked)), dim=1)
    assert torch.equal(streamed, made)
    assert not torch.equal(made, bridge.generate(tokens, **asked))
