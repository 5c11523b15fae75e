"""Classes of other people that hold a model and forward what they lack (`__getattr__`): they are
models, too.
"""

import pytest
import torch
from torch import nn

from bridge import TransformerBridge, patching
from bridge.analysis.svd import SVDInterpreter as BridgesInterpreter
from bridge.circuits import edge_attribution
from bridge.legacy import (
    ActivationCache,
    HookedRootModule,
    HookedTransformer,
    HookedTransformerConfig,
    HookPoint,
    SVDInterpreter,
)
from bridge.legacy.head_detector import detect_head

pytestmark = pytest.mark.unchecked  # the tests' checks of our own functions look at classes


class Wrapper:
    """As `iit` and InterpBench write it."""

    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, *args, **kwargs):
        return self.model(*args, **kwargs)


class WrappingModule(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.model, name)

    def forward(self, *args, **kwargs):
        return self.model(*args, **kwargs)


@pytest.fixture(scope="module")
def model():
    cfg = {
        "n_layers": 2,
        "d_model": 16,
        "n_ctx": 16,
        "d_head": 4,
        "d_vocab": 20,
        "act_fn": "gelu",
        "device": "cpu",
    }
    return HookedTransformer(HookedTransformerConfig(**cfg, seed=0))


@pytest.fixture(params=[Wrapper, WrappingModule])
def wrapped(request, model):
    return request.param(model)


TOKENS, OTHERS = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 5, 3, 4]])


def metric(logits):
    return logits[0, -1, 3]


def test_a_cache(wrapped, model):
    _, cache = model.run_with_cache(TOKENS)
    again = ActivationCache(dict(cache.cache_dict), wrapped)
    assert torch.equal(again.accumulated_resid(), cache.accumulated_resid())
    assert torch.equal(again.stack_head_results(), cache.stack_head_results())
    assert torch.equal(
        again.logit_attrs(again.decompose_resid(), 3), cache.logit_attrs(cache.decompose_resid(), 3)
    )


def test_patching(wrapped, model):
    _, cache = model.run_with_cache(TOKENS)
    for function in (
        patching.get_act_patch_resid_pre,
        patching.get_act_patch_attn_head_pattern_all_pos,
        patching.get_act_patch_attn_head_all_pos_every,
        patching.get_act_patch_block_every,
    ):
        ours, theirs = (
            function(each, OTHERS, cache, metric, verbose=False) for each in (model, wrapped)
        )
        assert torch.equal(ours, theirs)


def test_studies(wrapped, model):
    for vectors in (SVDInterpreter, BridgesInterpreter):
        ours, theirs = (
            vectors(each).get_singular_vectors("OV", 0, 2, 1) for each in (model, wrapped)
        )
        assert torch.equal(ours, theirs)
    wrapped.eval()
    ours, theirs = (edge_attribution(each, TOKENS, OTHERS, metric) for each in (model, wrapped))
    assert torch.equal(ours.values, theirs.values)


def test_heads_are_detected(wrapped):
    bridge = TransformerBridge.boot_embedded()
    ours, theirs = (
        detect_head(each, "When Mary and John went", "previous_token_head")
        for each in (bridge, type(wrapped)(bridge))
    )
    assert torch.equal(ours, theirs)


def test_what_forwards_nothing_is_refused(model):
    _, cache = model.run_with_cache(TOKENS)
    for no_model in (model.original_model, "gpt2", nn.Linear(2, 2), object()):
        with pytest.raises(TypeError, match=r"(?s)model is .*takes TransformerBridge there"):
            patching.get_act_patch_resid_pre(no_model, OTHERS, cache, metric)
        with pytest.raises(TypeError, match=r"(?s)model is .*; ActivationCache.* takes"):
            ActivationCache({}, no_model)


def test_what_is_missing_is_named_when_it_is_missing(model):
    class Toy(HookedRootModule):
        def __init__(self):
            super().__init__()
            self.hook_square = HookPoint()
            self.setup()

        def forward(self, x):
            return self.hook_square(x * x)

    toy = Toy()
    _, made = toy.run_with_cache(torch.ones(2))
    cache = ActivationCache(made, toy)
    assert torch.equal(cache["hook_square"], torch.ones(2))
    with pytest.raises(AttributeError, match=r"no attribute 'cfg'"):
        cache.accumulated_resid()


def test_a_cache_without_a_model(model):
    _, made = model.run_with_cache(TOKENS)
    cache = ActivationCache(dict(made.cache_dict), None)
    assert torch.equal(cache["pattern", 0], made["pattern", 0])
    assert torch.equal(cache["blocks.1.hook_resid_post"], made["resid_post", 1])
    assert cache.remove_batch_dim()["q", 1].shape == (4, 4, 4)
    for ask in (lambda: cache["resid_post", -1], cache.accumulated_resid, lambda: cache.model):
        with pytest.raises(ValueError, match="has no model"):
            ask()
    with pytest.raises(KeyError, match="is not in the cache"):
        cache["blocks.0.nothing"]
    cache.model = model
    assert torch.equal(cache["resid_post", -1], made["resid_post", -1][0])
