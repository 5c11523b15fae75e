"""What tells models, tokenizers and functions from one another."""

import copy
import functools
import subprocess
import sys

import numpy as np
import pytest
import torch
from einops import rearrange, reduce

from bridge import TransformerBridge
from bridge.harvest import HarvestError
from bridge.harvest.fingerprint import of_model, of_tokenizer, of_value
from tests.conftest import tiny


def scaled(factor):
    return lambda x, hook: x * factor


class Scale:
    """A function with a state."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x, hook):
        return x * self.factor


def test_functions():
    same = [
        (scaled(2), scaled(2)),
        (scaled(torch.ones(2)), scaled(torch.ones(2))),
        (Scale(2), Scale(2)),
        (functools.partial(max, 2), functools.partial(max, 2)),
        (scaled(torch.nn.Linear(2, 2).requires_grad_(False)),) * 2,
    ]
    for one, other in same:
        assert of_value(one) == of_value(other)
    kinds = [
        scaled(2),
        scaled(3),
        scaled(2.0),
        scaled("2"),
        scaled(None),
        scaled(torch.ones(2)),
        scaled(torch.ones(3)),
        scaled([1, 2]),
        scaled([1, [2]]),
        scaled({"a": 1}),
        Scale(2),
        Scale(3),
        functools.partial(max, 2),
        functools.partial(min, 2),
        scaled(torch.zeros(2)),
        scaled(torch.nn.Linear(2, 2)),
        lambda x, hook: x + 2,
        lambda x, hook, extra=1: x + 2,
        scaled(scaled(2)),
        scaled(scaled(3)),
        torch.relu,
        len,
    ]
    assert len({of_value(kind) for kind in kinds}) == len(kinds)


class Choice(Scale):
    """Functions with a state that only their names tell apart."""

    def first(self, x, hook):
        return x[:, 0] * self.factor

    def last(self, x, hook):
        return x[:, -1] * self.factor


def calling_itself(step):
    def count(n):
        return count(n - step) if n > 0 else n

    return count


def test_arrays_methods_and_what_holds_itself():
    array = np.arange(6.0).reshape(2, 3)
    kinds = [
        array,
        array + 1,
        array.T,
        array.astype(np.float32),
        Choice(2).first,
        Choice(2).last,
        Choice(3).first,
        Choice(array).first,
        calling_itself(1),
        calling_itself(2),
        {1, 2},
        {1, 3},
        frozenset({1, 2}),
        lambda x, hook: rearrange(x, "b p d -> p b d"),
        lambda x, hook: reduce(x, "b p d -> p b d", "sum"),
    ]
    assert len({of_value(kind) for kind in kinds}) == len(kinds)
    assert of_value(array.T) == of_value(np.ascontiguousarray(array.T))
    assert of_value(Choice(2).first) == of_value(Choice(2).first)
    assert of_value(calling_itself(1)) == of_value(calling_itself(1))
    assert of_value({"a", "b", "c"}) == of_value({"c", "b", "a"})


def test_what_cannot_be_told():
    with pytest.raises(HarvestError, match="harvest_id"):
        of_value(scaled(iter([1])))

    def named(version):
        function = scaled(iter([1]))
        function.harvest_id = version
        return function

    assert of_value(named("one")) == of_value(named("one")) != of_value(named("two"))


def test_models():
    model = tiny("gpt2")
    first = of_model(TransformerBridge(model))
    assert of_model(TransformerBridge(copy.deepcopy(model))) == first
    with torch.no_grad():
        model.transformer.wpe.weight[3, 3] += 1e-3
    second = of_model(TransformerBridge(model))
    assert {name for name in first if first[name] != second[name]} == {"weights"}
    model.config.layer_norm_epsilon *= 2
    assert of_model(TransformerBridge(model))["config"] != first["config"]


def test_a_tokenizer_that_was_used_is_the_same(embedded):
    tokenizer = copy.deepcopy(embedded.tokenizer)
    before = of_tokenizer(tokenizer)
    tokenizer(["Mary", "Mary and John"], padding=True, truncation=True, max_length=3)
    assert of_tokenizer(tokenizer) == before
    tokenizer.add_tokens(["Zanzibar"])
    assert of_tokenizer(tokenizer) != before


def test_what_is_not_installed():
    hidden = (
        "import sys; sys.modules['xxhash'] = None; import importlib.util as u; f = u.find_spec; "
    )
    hidden += (
        "u.find_spec = lambda name, *a: None if name == 'xxhash' else f(name, *a); import"
        " bridge.harvest"
    )
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True)
    assert (
        'ImportError: bridge.harvest needs xxhash: pip install "transformer-bridge[harvest]"'
        in done.stderr
    )


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # PEFT asks for it
def test_other_adapters_at_work_are_another_model():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny("llama"), LoraConfig(r=2, target_modules=["o_proj"]))
    model.add_adapter("other", LoraConfig(r=2, target_modules=["o_proj"]))
    bridge = TransformerBridge(model.eval())
    found = [of_model(bridge)]
    assert of_model(bridge) == found[0]
    with model.disable_adapter():
        found.append(of_model(bridge))
    model.set_adapter("other")
    found.append(of_model(bridge))
    for module in model.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(2.0)
    found.append(of_model(bridge))
    assert len({each["adapters at work"] for each in found}) == len(found)
    assert "adapters at work" not in of_model(TransformerBridge(tiny("llama")))


def test_a_model_is_told_by_its_numbers_and_the_users_torch_hooks():
    def twice(module, args, output):
        return output * 2

    bridge = TransformerBridge(tiny("llama"))
    model = bridge.original_model
    before = of_model(bridge)
    model.model.norm.variance_epsilon = 0.5
    assert of_model(bridge)["weights"] != before["weights"]
    model.model.norm.variance_epsilon = model.config.rms_norm_eps
    assert of_model(bridge) == before
    handle = model.model.layers[0].register_forward_hook(twice)
    assert set(of_model(bridge)) - set(before) == {"torch hooks"}
    handle.remove()
    bridge.add_hook("blocks.0.hook_resid_post", lambda x, hook: x)
    assert of_model(bridge) == before
