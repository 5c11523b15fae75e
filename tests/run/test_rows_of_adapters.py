"""A batch whose rows have different LoRA adapters (``adapter_names=``): each row is what it is
alone.
"""

import pytest
import torch

from bridge import TransformerBridge
from bridge.interventions import Add, Scale, Zero
from bridge.patching import get_act_patch_resid_pre
from tests.tiny_models import tiny_model

peft = pytest.importorskip("peft")
#: A bias of an adapter where the layer has none; and what PEFT asks for.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
NAMES = ["first", "second", "__base__"]
VECTOR = torch.arange(32.0).sin()
HOOKS = [
    ("hook_q_input", Add(VECTOR, heads=1)),
    ("hook_v_input", Add(VECTOR)),
    ("hook_attn_in", Zero(heads=1)),
    ("attn.hook_result", Scale(0.3, heads=2)),
    ("attn.hook_z", Zero(heads=1)),
    ("mlp.hook_post", Scale(0.1)),
]


@pytest.fixture(scope="module")
def mixed():
    def lora():
        modules = ["q_proj", "v_proj", "o_proj", "down_proj"]
        return peft.LoraConfig(r=4, target_modules=modules, init_lora_weights=False, lora_bias=True)

    torch.manual_seed(0)
    model = peft.get_peft_model(tiny_model("llama"), lora(), adapter_name="first")
    model.add_adapter("second", lora())
    bridge = TransformerBridge(model.eval())
    return bridge, torch.randint(3, 60, (3, 6))


def alone(bridge, tokens, run):
    found = []
    for row, name in zip(tokens[:, None], NAMES, strict=True):
        if name == "__base__":
            with bridge.original_model.disable_adapter():
                found.append(run(row))
        else:
            bridge.original_model.set_adapter(name)
            found.append(run(row))
    bridge.original_model.set_adapter("first")
    return torch.cat(found)


@pytest.mark.parametrize(("point", "operation"), HOOKS)
@torch.no_grad()
def test_an_edit_is_of_each_rows_own_adapter(mixed, point, operation):
    bridge, tokens = mixed
    hooks = [(f"blocks.1.{point}", operation)]
    together = bridge.run_with_hooks(tokens, fwd_hooks=hooks, adapter_names=NAMES)
    expected = alone(bridge, tokens, lambda row: bridge.run_with_hooks(row, fwd_hooks=hooks))
    torch.testing.assert_close(together, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(together, bridge(tokens, adapter_names=NAMES), atol=2e-5)


@torch.no_grad()
def test_results_of_heads_are_of_each_rows_own_adapter(mixed):
    bridge, tokens = mixed
    names = "blocks.1.attn.hook_result"
    _, cache = bridge.run_with_cache(tokens, adapter_names=NAMES, names_filter=names)
    expected = alone(
        bridge, tokens, lambda row: bridge.run_with_cache(row, names_filter=names)[1]["result", 1]
    )
    torch.testing.assert_close(cache["result", 1], expected, rtol=1e-4, atol=1e-5)
    _, cache = bridge.run_with_cache(tokens, adapter_names=NAMES)
    with pytest.raises(ValueError, match="each row of this run had adapters of its own"):
        cache.stack_neuron_results(-1)


@pytest.mark.parametrize("way", [{}, {"num_beams": 2}, {"num_beams": 2, "num_return_sequences": 2}])
def test_each_row_is_continued_with_its_own_adapter(mixed, way):
    bridge, tokens = mixed
    given = {"max_new_tokens": 5, "do_sample": False, "verbose": False, "stop_at_eos": False, **way}
    with bridge.hooks(fwd_hooks=[("blocks.1.attn.hook_result", Scale(0.3, heads=2))]):
        together = bridge.generate(tokens, adapter_names=NAMES, **given)
        assert torch.equal(
            together, alone(bridge, tokens, lambda row: bridge.generate(row, **given))
        )


@torch.no_grad()
@pytest.mark.parametrize("together", ["auto", 3])
def test_studies_are_of_each_rows_own_adapter(mixed, together):
    bridge, tokens = mixed
    logits, cache = bridge.run_with_cache(tokens, adapter_names=NAMES)
    torch.testing.assert_close(bridge.lens(tokens, adapter_names=NAMES).stack()[-1], logits)
    corrupted = (tokens + 7) % 50 + 3

    def metric(logits):
        return (logits[:, -1, 7] - logits[:, -1, 9]).mean()

    options = {"verbose": False, "patches_per_run": together, "adapter_names": NAMES}
    found = get_act_patch_resid_pre(bridge, corrupted, cache, metric, **options)
    for layer, pos in ((0, 0), (0, 5), (1, 2), (1, 5)):

        def put(x, hook):
            x[:, pos] = cache[hook.name][:, pos]  # noqa: B023
            return x

        hooks = [(f"blocks.{layer}.hook_resid_pre", put)]
        expected = metric(bridge.run_with_hooks(corrupted, fwd_hooks=hooks, adapter_names=NAMES))
        torch.testing.assert_close(found[layer, pos], expected)
