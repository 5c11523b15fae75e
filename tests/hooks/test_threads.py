"""Several threads may call one bridge; a thread's hooks are never seen by another's run."""

import threading

import torch


def test_concurrent_runs_do_not_see_each_other(bridge, tokens):
    plain = bridge(tokens)
    halved = bridge.run_with_hooks(tokens, fwd_hooks=[("blocks.1.hook_resid_pre", lambda x, hook: x * 0.5)])
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
            bridge.run_with_hooks(tokens, fwd_hooks=[("blocks.1.hook_resid_pre", lambda x, hook: x * 0.5)]),
            halved,
        )
        yield lambda: expect("start", bridge(residual, start_at_layer=2), plain)
        yield lambda: expect("stop", bridge(tokens, stop_at_layer=2), residual)
        yield lambda: expect("cache", bridge.run_with_cache(tokens)[1]["pattern", 2], whole["pattern", 2], exact=False)

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
        m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__ for m in bridge.original_model.modules()
    )


def test_added_hooks_belong_to_their_thread(bridge, tokens):
    plain = bridge(tokens)
    bridge.add_hook("hook_embed", lambda x, hook: x * 0)
    results = []
    thread = threading.Thread(target=lambda: results.append(bridge(tokens)))
    thread.start()
    thread.join()
    assert torch.equal(results[0], plain)
    assert not torch.equal(bridge(tokens), plain)
    bridge.reset_hooks()
