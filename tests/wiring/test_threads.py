"""What is worked out once for all threads is the same for two that ask for it first."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from bridge import TransformerBridge
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
