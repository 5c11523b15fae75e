"""A weight as a sum of components: masked components beside the model with the masked weight."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from adapters.linear import weight_in_out
from bridge import TransformerBridge
from bridge.features import attribution_graph, feature_attribution
from bridge.hooks.hooks import HookPoint
from tests.tiny_models import tiny_model

TOKENS = torch.randint(3, 50, (3, 7), generator=torch.Generator().manual_seed(0))
DOWN = "model.layers.0.mlp.down_proj"


def factors(module: nn.Module, n: int = 5) -> tuple[Tensor, Tensor]:
    """Random components of a layer's size."""
    generator = torch.Generator().manual_seed(1)
    weight = weight_in_out(module)
    V = torch.randn(weight.shape[0], n, generator=generator, dtype=torch.float64)
    U = torch.randn(n, weight.shape[1], generator=generator, dtype=torch.float64)
    return (V / weight.shape[0] ** 0.5).to(weight), (U / 3).to(weight)


def masking(point: HookPoint, mask: Tensor) -> list[tuple[HookPoint, Callable[..., Tensor]]]:
    return [(point, lambda x, hook: x * mask)]


@contextmanager
def masked(module: nn.Module, V: Tensor, U: Tensor, mask: Tensor):
    """The layer with ``V diag(mask) U`` in place of ``V U``."""
    plain = module.weight.data
    change = V @ torch.diag(mask - 1) @ U
    module.weight.data = plain + (change if isinstance(module, Conv1D) else change.T)
    try:
        yield
    finally:
        module.weight.data = plain


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "phi3", "gemma2", "gpt_neox"])
@torch.no_grad()
def test_a_mask_of_components_is_a_masked_weight(model_type):
    """Each row its own mask, at every linear layer; all ones change no bit."""
    model = tiny_model(model_type).to(torch.float64)
    bridge = TransformerBridge(model)
    plain = model(TOKENS).logits
    layers = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and path not in ("lm_head", "embed_out")
    ]
    assert len(layers) > 6
    for path, module in layers:
        V, U = factors(module)
        point = bridge.add_components(path, V, U)
        mask = torch.rand(3, 1, 5, generator=torch.Generator().manual_seed(2)).double()
        edited = bridge.run_with_hooks(TOKENS, fwd_hooks=masking(point, mask))
        rows = []
        for row in range(3):
            with masked(module, V, U, mask[row, 0]):
                rows.append(model(TOKENS[row : row + 1]).logits)
        # RMS norms compute in float32 whatever they are given.
        torch.testing.assert_close(edited, torch.cat(rows), atol=1e-5, rtol=1e-5)
        assert (edited - plain).abs().max() > 1e-3
        ones = bridge.run_with_hooks(TOKENS, fwd_hooks=masking(point, torch.ones(())))
        assert torch.equal(ones, plain)
        bridge.remove_basis(point)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
@torch.no_grad()
def test_without_the_rest_the_weight_is_the_components(model_type):
    model = tiny_model(model_type)
    bridge = TransformerBridge(model)
    weight = "blocks.0.mlp.W_out"
    module = model.get_submodule(DOWN if model_type == "llama" else "transformer.h.0.mlp.c_proj")
    if module.__dict__.get("bias") is None and getattr(module, "bias", None) is not None:
        module.bias.data.normal_()
    V, U = factors(module)
    point = bridge.add_components(weight, V, U, rest="drop")
    logits = bridge(TOKENS)
    bridge.remove_basis(point)
    module.weight.data = (V @ U).contiguous() if isinstance(module, Conv1D) else (V @ U).T
    torch.testing.assert_close(logits, bridge(TOKENS), atol=1e-5, rtol=1e-5)


def llama_with_components() -> tuple[
    TransformerBridge, HookPoint, tuple[nn.Module, Tensor, Tensor]
]:
    bridge = TransformerBridge(tiny_model("llama"))
    module = bridge.original_model.get_submodule(DOWN)
    V, U = factors(module)
    return bridge, bridge.add_components("blocks.0.mlp.W_out", V, U), (module, V, U)


MASK = torch.tensor([0.0, 0.3, 1.0, 2.0, 0.7])


@torch.no_grad()
def test_padding_and_an_edit_before():
    """Components read what the layer reads, with the edits of its input."""
    bridge, point, layer = llama_with_components()
    mask = torch.ones_like(TOKENS)
    mask[0, :3] = 0
    doubled = [("blocks.0.mlp.hook_post", lambda x, hook: x * 2)]
    edited = bridge.run_with_hooks(
        TOKENS, attention_mask=mask, fwd_hooks=[*masking(point, MASK), *doubled]
    )
    with masked(*layer, MASK):
        right = bridge.run_with_hooks(TOKENS, attention_mask=mask, fwd_hooks=doubled)
    torch.testing.assert_close(edited[mask.bool()], right[mask.bool()], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_generation(num_beams):
    bridge, point, layer = llama_with_components()
    settings = {"max_new_tokens": 6, "do_sample": False, "num_beams": num_beams}
    with bridge.hooks(fwd_hooks=masking(point, MASK)):
        tokens = bridge.generate(TOKENS, **settings)
    with masked(*layer, MASK):
        right = bridge.original_model.generate(
            TOKENS, attention_mask=torch.ones_like(TOKENS), **settings
        )
    assert torch.equal(tokens, right)


def test_attribution_is_the_gradient_of_the_mask():
    bridge, point, (module, V, U) = llama_with_components()
    scores = feature_attribution(bridge, TOKENS[:1], lambda logits: logits[0, -1, 3], point)
    mask = torch.ones(5, requires_grad=True)
    weight = module.weight.detach() + (V @ torch.diag(mask - 1) @ U).T
    logits = torch.func.functional_call(
        bridge.original_model, {f"{DOWN}.weight": weight}, (TOKENS[:1],)
    ).logits
    logits[0, -1, 3].backward()
    torch.testing.assert_close(scores[0].sum(0), mask.grad, atol=1e-6, rtol=1e-4)
    with pytest.raises(ValueError, match="is inside a part"):
        attribution_graph(bridge, TOKENS[:1], [point.name], logits=2)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("merged", [False, True])
@torch.no_grad()
def test_with_lora(merged):
    config = LoraConfig(target_modules=["down_proj"], init_lora_weights=False)
    model = get_peft_model(tiny_model("llama"), config)
    if merged:
        model.merge_adapter()
    bridge = TransformerBridge(model)
    module = model.get_submodule(f"base_model.model.{DOWN}.base_layer")
    V, U = factors(module)
    point = bridge.add_components("blocks.0.mlp.W_out", V, U)
    plain = bridge(TOKENS)
    ones = bridge.run_with_hooks(TOKENS, fwd_hooks=masking(point, torch.ones(())))
    assert torch.equal(ones, plain)
    edited = bridge.run_with_hooks(TOKENS, fwd_hooks=masking(point, MASK))
    with masked(module, V, U, MASK):
        torch.testing.assert_close(edited, bridge(TOKENS), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="what it adds besides its weight is not known"):
        bridge.add_components("blocks.0.mlp.W_out", V, U, "others", rest="drop")


@pytest.mark.parametrize(
    ("model_type", "weight", "message"),
    [
        ("gpt2", "blocks.0.attn.W_Q", "is one part of the weight of transformer.h.0.attn.c_attn"),
        ("phi3", "blocks.0.mlp.W_in", "is one part of the weight of .*gate_up_proj"),
        ("gpt2", "blocks.0.mlp.W_gate", "no linear layer with the weight"),
        ("mixtral", "blocks.0.mlp.W_out", "no linear layer with the weight"),
        ("llama", "blocks.9.mlp.W_out", "no linear layer with the weight"),
        ("llama", "blocks.0.mlp.W_ot", "the model has no module"),
        ("llama", "model.norm", "LlamaRMSNorm, which is no linear layer"),
        ("llama", "model.layers.0.mlp", "LlamaMLP, which is no linear layer"),
        ("llama", "lm_head", "the components go from 48 to 32 numbers, and lm_head from 32"),
    ],
)
def test_what_is_refused(model_type, weight, message):
    bridge = TransformerBridge(tiny_model(model_type))
    before = list(bridge.hook_dict)
    with pytest.raises(ValueError, match=message):
        bridge.add_components(weight, torch.zeros(48, 3), torch.zeros(3, 32))
    assert list(bridge.hook_dict) == before


def test_factors_that_do_not_fit():
    bridge = TransformerBridge(tiny_model("llama"))
    with pytest.raises(ValueError, match=r"V has the shape \[48, 3\] and U \[4, 32\]"):
        bridge.add_components(DOWN, torch.zeros(48, 3), torch.zeros(4, 32))
    with pytest.raises(ValueError, match=r"the basis holds torch\.float64"):
        bridge.add_components(DOWN, torch.zeros(48, 3).double(), torch.zeros(3, 32).double())


@torch.no_grad()
def test_half_precision_and_a_mask_of_ones():
    bridge = TransformerBridge(tiny_model("llama").to(torch.bfloat16))
    V, U = factors(bridge.original_model.get_submodule(DOWN))
    point = bridge.add_components(DOWN, V, U)
    ones = bridge.run_with_hooks(TOKENS, fwd_hooks=masking(point, torch.ones(())))
    assert torch.equal(ones, bridge(TOKENS))


@torch.no_grad()
def test_a_layer_that_runs_several_times():
    """In ALBERT the components are those of one call."""
    model = tiny_model("albert", "masked")
    bridge = TransformerBridge(model)
    path = "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn"
    layer = model.get_submodule(path)
    V, U = factors(layer)
    with pytest.raises(ValueError, match="runs 2 times in a run"):
        bridge.add_components(path, V, U)
    point = bridge.add_components(f"{path}@1", V, U)
    edited = bridge.run_with_hooks(TOKENS, fwd_hooks=masking(point, MASK))
    calls = []

    def second_alone(module, args, output):
        calls.append(args)
        return output + (args[0] @ V * (MASK - 1)) @ U if len(calls) == 2 else None

    handle = layer.register_forward_hook(second_alone)
    torch.testing.assert_close(edited, model(TOKENS).logits, atol=1e-5, rtol=1e-5)
    handle.remove()
    assert (edited - bridge(TOKENS)).abs().max() > 1e-3
