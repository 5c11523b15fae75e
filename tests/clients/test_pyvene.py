"""pyvene: its interventions on the Hugging Face model of a bridge, against ours."""

import pytest
import pyvene
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from bridge import TransformerBridge

BASE, SOURCE = torch.tensor([[3, 5, 7, 9]]), torch.tensor([[3, 6, 2, 9]])
POINTS = {
    "block_output": "blocks.1.hook_resid_post",
    "mlp_output": "blocks.1.hook_mlp_out",
    "attention_output": "blocks.1.hook_attn_out",
    "mlp_activation": "blocks.1.mlp.hook_post",
}


@pytest.fixture(scope="module")
def bridge():
    torch.manual_seed(0)
    return TransformerBridge(
        GPT2LMHeadModel(GPT2Config(n_layer=3, n_head=2, n_embd=16, vocab_size=20)).eval()
    )


def intervenable(bridge, component, **more):
    config = pyvene.IntervenableConfig(
        {"layer": 1, "component": component, "unit": "pos"} | more, pyvene.VanillaIntervention
    )
    return pyvene.IntervenableModel(config, bridge.original_model)


@torch.no_grad()
@pytest.mark.parametrize("component", POINTS)
def test_an_interchange_is_the_same(bridge, component):
    name, at = POINTS[component], 2
    _, theirs = intervenable(bridge, component)(
        {"input_ids": BASE},
        [{"input_ids": SOURCE}],
        {"sources->base": at},
        output_original_output=False,
    )
    _, cache = bridge.run_with_cache(SOURCE, names_filter=name)

    def exchange(activation, hook):
        activation[:, at] = cache[name][:, at]

    ours = bridge.run_with_hooks(BASE, fwd_hooks=[(name, exchange)])
    assert torch.allclose(theirs.logits, ours, atol=1e-6)
    assert not torch.allclose(ours, bridge(BASE), atol=1e-3)


@torch.no_grad()
def test_what_is_opened_after_a_run_of_pyvenes_acts(bridge):
    """It takes every torch hook off the model, whoever put it there: added hooks of a bridge,
    too.
    """
    name, seen = POINTS["mlp_output"], []
    halved = bridge.run_with_hooks(BASE, fwd_hooks=[(name, lambda x, hook: x / 2)])
    intervenable(bridge, "mlp_output")(
        {"input_ids": BASE}, [{"input_ids": SOURCE}], {"sources->base": 2}
    )
    assert torch.equal(
        bridge.run_with_hooks(BASE, fwd_hooks=[(name, lambda x, hook: x / 2)]), halved
    )
    handle = bridge.get_hook_point(name).add_hook(lambda x, hook: seen.append(hook.name))
    bridge(BASE)
    handle.remove()
    assert seen == [name] and torch.equal(bridge(BASE), bridge.original_model(BASE).logits)
