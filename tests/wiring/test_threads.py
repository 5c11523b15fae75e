"""What is worked out once for all threads is the same for two that ask for it first."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from bridge import TransformerBridge
from bridge.interventions import Add
from tests.conftest import tiny


@pytest.fixture
def changing_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_sites_that_traces_watch(changing_often):
    model = tiny("llama")
    for _ in range(15):
        wiring = TransformerBridge(model).wiring
        site = wiring.points["ln_final.hook_normalized"].point.site
        found, ready = [], threading.Barrier(3)

        def ask(wiring=wiring, site=site, found=found, ready=ready) -> None:
            ready.wait()
            found.append((wiring.sources_in("blocks", 1), wiring.elements_of(site)))

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        again = wiring.sources_in("blocks", 1), wiring.elements_of(site)
        assert found == [again] * 3 and again[0]


def test_a_forward_that_was_taken_while_hooks_were_on_works_afterwards():
    """As in another thread, which has looked it up and calls it when they are gone."""
    bridge = TransformerBridge(tiny("llama"))
    tokens = torch.tensor([[5, 6, 7]])
    plain = bridge(tokens)
    with bridge.hooks(fwd_hooks=[("blocks.0.hook_resid_post", lambda x, hook: x * 2)]):
        forward = bridge.core.forward
    assert "forward" not in bridge.core.__dict__
    assert torch.equal(forward(tokens).logits, plain)


def test_what_another_thread_compiles_is_no_matter_of_this_one():
    """torch says in every thread that it compiles, while one of them does: a run here is what it is
    otherwise.
    """
    bridge = TransformerBridge(tiny("llama"))
    tokens = torch.tensor([[5, 6, 7, 8], [0, 0, 9, 4]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    steer = Add(
        torch.ones(bridge.cfg.d_model), positions=[-1]
    )  # of generation: of what this pass makes
    hooks = [
        ("blocks.1.hook_resid_pre", steer),
        ("blocks.0.attn.hook_z", lambda z, hook: z.mul_(2)),
    ]
    begun, go_on = threading.Event(), threading.Event()

    def runs() -> list[torch.Tensor]:
        with bridge.hooks(fwd_hooks=hooks):
            new = bridge.generate(tokens, 3, attention_mask=mask, do_sample=False, verbose=False)
            return [new, bridge.core(tokens, attention_mask=mask).logits]

    def compiler(graph: torch.fx.GraphModule, inputs: object) -> object:
        begun.set()
        assert go_on.wait(60)
        return graph.forward

    compiled = torch.compile(torch.nn.Linear(3, 3), backend=compiler)
    other = threading.Thread(target=compiled, args=(torch.ones(1, 3),))
    wanted = runs()
    other.start()
    try:
        assert begun.wait(60)
        found = runs()
    finally:
        go_on.set()
        other.join()
    assert all(map(torch.equal, wanted, found))
