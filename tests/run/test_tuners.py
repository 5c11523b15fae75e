"""Models that PEFT or others changed: right, or refused with the reason before anything runs."""

from contextlib import nullcontext
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from bridge import TransformerBridge
from bridge.interventions import Add, Scale

#: Of PEFT and transformers, while a model is adapted.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]

TOKENS = torch.tensor([[1, 10, 11, 12, 5, 6, 20, 21, 22], [1, 7, 8, 9, 5, 6, 30, 31, 32]])
Z = "blocks.1.attn.hook_z"


def llama(**more: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 4, "intermediate_size": 48, "vocab_size": 97}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "initializer_range": 0.3, **more})).eval()


def tuned(config: peft.PeftConfig, model: nn.Module | None = None) -> Any:
    adapted = peft.get_peft_model(model or llama(), config).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return adapted


def half(x, hook):
    return x * 0.5


def test_tuned_norms_are_norms():
    names = ["input_layernorm", "post_attention_layernorm", "norm"]
    model = tuned(peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=names))
    bridge = TransformerBridge(model)
    with torch.no_grad():
        logits, cache = bridge.run_with_cache(TOKENS)
        assert torch.equal(logits, model(input_ids=TOKENS).logits)
        end = cache["ln_final.hook_normalized"]
        weight = model.base_model.model.model.norm.ln_tuning_layers["default"].weight
        torch.testing.assert_close((end * weight) @ bridge.W_U, logits, atol=1e-4, rtol=1e-4)
        same = bridge.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.ln1.hook_scale", half)])
        norm = model.base_model.model.model.layers[1].input_layernorm
        handle = norm.register_forward_hook(lambda module, args, output: output * 2)
        right = model(input_ids=TOKENS).logits
        handle.remove()
        torch.testing.assert_close(same, right, atol=1e-4, rtol=1e-4)
        with model.disable_adapter():
            _, off = bridge.run_with_cache(TOKENS)
            assert torch.equal(bridge(TOKENS), model(input_ids=TOKENS).logits)
        assert not torch.allclose(off["ln_final.hook_scale"], cache["ln_final.hook_scale"])


def test_activated_lora_is_right_or_refused():
    places = ["q_proj", "v_proj", "o_proj", "down_proj"]
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=places, alora_invocation_tokens=[5, 6]
    )
    model = tuned(config)
    bridge = TransformerBridge(model)
    with torch.no_grad():
        right = model(input_ids=TOKENS).logits
        logits, cache = bridge.run_with_cache(TOKENS)
        torch.testing.assert_close(logits, right)
        acts = "activated LoRA acts from its invocation tokens"
        with pytest.raises(ValueError, match=acts):
            cache.stack_head_results()
        with pytest.raises(ValueError, match=acts):
            cache.stack_neuron_results(layer=1)
        with pytest.raises(ValueError, match="start_at_layer is not available with activated LoRA"):
            bridge(cache["resid_pre", 1], start_at_layer=1)
        named = ["blocks.1.attn.hook_result", "blocks.1.hook_attn_out"]
        kept = bridge.run_with_cache(TOKENS, names_filter=named)[1]
        torch.testing.assert_close(
            kept["result", 1].sum(-2), kept["attn_out", 1], atol=1e-4, rtol=1e-4
        )
        same = bridge.run_with_hooks(
            TOKENS[:1], fwd_hooks=[("blocks.0.hook_q_input", lambda x, hook: x + 0)]
        )
        torch.testing.assert_close(same, right[:1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["poly", "multitask"])
def test_tasks_are_passed_on(kind):
    if kind == "poly":
        config: Any = peft.PolyConfig(
            task_type="CAUSAL_LM", r=4, n_tasks=2, target_modules=["q_proj", "o_proj"]
        )
    else:
        config = peft.MultitaskPromptTuningConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=3, num_tasks=2, num_ranks=2
        )
    model = tuned(config)
    bridge = TransformerBridge(model)
    with torch.no_grad():
        for task in (0, 1):
            tasks = torch.tensor([task, 1 - task])
            right = model(input_ids=TOKENS, task_ids=tasks).logits
            torch.testing.assert_close(bridge(TOKENS, task_ids=tasks), right)
        _, cache = bridge.run_with_cache(TOKENS, task_ids=tasks)
    if kind == "poly":
        with pytest.raises(ValueError, match="Poly chooses by task_ids"):
            cache.stack_head_results()
    with pytest.raises(TypeError, match="task_ids"):
        TransformerBridge(llama())(TOKENS, task_ids=tasks)


def test_a_router_that_looks_at_the_whole_call_has_no_heads():
    model = tuned(peft.LilyConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "o_proj"]))
    bridge = TransformerBridge(model)
    with torch.no_grad():
        logits, cache = bridge.run_with_cache(TOKENS)
        assert torch.equal(logits, model(input_ids=TOKENS).logits)
        with pytest.raises(TypeError, match="results of heads are not available"):
            cache.stack_head_results()


def test_rows_of_adapted_embeddings():
    config = peft.LoraConfig(r=4, target_modules=["embed_tokens"], init_lora_weights=False)
    model = tuned(config)
    bridge = TransformerBridge(model)
    rows = model.get_input_embeddings()(TOKENS)
    torch.testing.assert_close(bridge.W_E[TOKENS], rows)
    assert not torch.allclose(rows, TransformerBridge(llama()).W_E[TOKENS])


def test_a_module_inside_of_another_is_found():
    """LLaMA-Adapter puts the attention inside of a module of its own."""
    config = peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=4, adapter_layers=2)
    model = tuned(config)
    bridge = TransformerBridge(model)
    with torch.no_grad():
        right = model(input_ids=TOKENS).logits
        logits, cache = bridge.run_with_cache(TOKENS)
        assert torch.equal(logits, right)
        names = ["blocks.0.hook_mlp_in", "blocks.0.hook_attn_out"]
        same = bridge.run_with_hooks(TOKENS, fwd_hooks=[(n, lambda x, hook: x + 0) for n in names])
        torch.testing.assert_close(same, right)
    assert set(cache) <= set(bridge.hook_dict)
    with pytest.raises(TypeError, match="has no module"):
        TransformerBridge(model, automatic=False)


def pruned(layers: list[int]) -> LlamaForCausalLM:
    model = llama()
    kept = torch.cat([torch.arange(0, 8), torch.arange(16, 24)])
    for index in layers:
        attention = model.model.layers[index].self_attn
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weight = getattr(attention, name).weight.data
            weight = weight[:, kept] if name == "o_proj" else weight[kept]
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            layer.weight.data = weight.clone()
            setattr(attention, name, layer)
    return model


@pytest.mark.parametrize("layers", [[1], [0, 1]])
def test_pruned_heads_are_those_that_are_there(layers):
    model = pruned(layers)
    bridge = TransformerBridge(model)
    output = model.model.layers[1].self_attn.o_proj

    def without_head_1(module, args):
        x = args[0].clone()
        x[..., 8:16] = 0
        return (x,)

    def off(z, hook):
        z[:, :, 1] = 0

    with torch.no_grad():
        handle = output.register_forward_pre_hook(without_head_1)
        right = model(input_ids=TOKENS).logits
        handle.remove()
        _, cache = bridge.run_with_cache(TOKENS)
        assert cache["z", 1].shape == (2, 9, 2, 8)
        assert cache["pattern", 1].shape == (2, 2, 9, 9)
        found = bridge.run_with_hooks(TOKENS, fwd_hooks=[(Z, off)])
        torch.testing.assert_close(found, right)


class WithValues(nn.Module):
    """Logits, and a value of each token from the last hidden states, as trl's value heads."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.values = inner, nn.Linear(32, 1)

    def forward(self, input_ids, **more):
        out = self.inner(input_ids=input_ids, output_hidden_states=True, **more)
        return out.logits, self.values(out.hidden_states[-1]).squeeze(-1)


@pytest.mark.parametrize("run_before", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_head_on_hidden_states(kind, run_before):
    if kind == "llama":
        inner: Any = llama()
        block = inner.model.layers[0]
    else:
        inner = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=97))
        block = inner.transformer.h[0]
    model = WithValues(inner).eval()
    with torch.no_grad():
        if run_before:  # transformers then has attached its own hooks
            model(TOKENS)
        bridge = TransformerBridge(model)
        handle = block.register_forward_hook(
            lambda module, args, out: (
                out * 0.5 if torch.is_tensor(out) else (out[0] * 0.5, *out[1:])
            )
        )
        right = model(TOKENS)[0]
        handle.remove()
        found = bridge.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.hook_resid_post", half)])
    torch.testing.assert_close(found, right)


def test_a_forward_on_the_instance_is_not_the_weights():
    model = llama()
    layer = model.model.layers[0].self_attn.o_proj

    def rounded(x):
        step = x.abs().amax(-1, keepdim=True) / 7
        return nn.functional.linear((x / step).round() * step, layer.weight)

    layer.forward = rounded
    bridge = TransformerBridge(model)
    with torch.no_grad():
        logits, cache = bridge.run_with_cache(TOKENS)
        assert torch.equal(logits, model(input_ids=TOKENS).logits)
        with pytest.raises(TypeError, match="results of heads are not available"):
            cache.stack_head_results()
        with pytest.raises(TypeError, match="not a plain matrix"):
            _ = bridge.blocks[0].attn.W_O
        assert bridge.blocks[1].attn.W_O.shape == (4, 8, 32)


@pytest.mark.parametrize("size", [1, 3, 20])
@pytest.mark.parametrize(
    "operation", ["generated", "prompt", "position 3", "last", "keys", "from step 2"]
)
def test_a_prompt_that_is_read_in_chunks(embedded, operation, size):
    vector = 3 * torch.randn(embedded.cfg.d_model, generator=torch.Generator().manual_seed(0))
    name, operations = (
        "blocks.1.hook_resid_post",
        {
            "generated": Add(vector, part="generated"),
            "prompt": Add(vector, part="prompt"),
            "position 3": Add(vector, positions=3),
            "last": Add(vector, positions=-1),
            "from step 2": Add(vector, from_step=2),
            "keys": Scale(0.0, keys=2),
        },
    )
    if operation == "keys":
        name = "blocks.1.attn.hook_pattern"
    hooks = [(name, operations[operation])]
    prompts = ["When Mary and John went to the store, John", "Mary and John"]
    options = {"max_new_tokens": 6, "do_sample": False, "verbose": False}
    with embedded.hooks(fwd_hooks=hooks):
        right = embedded.generate(prompts, **options)
        assert embedded.generate(prompts, prefill_chunk_size=size, **options) == right
    assert embedded.generate(prompts, **options) != right or operation == "keys"


def lora(**more: Any) -> peft.LoraConfig:
    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, **more)


def twice_adapted() -> Any:
    names = ["q_proj", "o_proj", "down_proj"]
    model = peft.get_peft_model(llama(), lora(target_modules=names))
    model.add_adapter("second", lora(target_modules=names))
    return model.eval()


def fails(x, hook):
    raise ZeroDivisionError


@pytest.mark.parametrize("how", ["stop", "hook", "generate"])
def test_adapters_of_rows_end_with_a_run_that_does_not_end(how):
    model = twice_adapted()
    bridge = TransformerBridge(model)
    names = ["second", "__base__"]
    with torch.no_grad():
        right = model(input_ids=TOKENS).logits
    if how == "stop":
        bridge(TOKENS, stop_at_layer=1, adapter_names=names)
    else:
        run = bridge if how == "hook" else bridge.generate
        with bridge.hooks(fwd_hooks=[("blocks.0.hook_resid_post", fails)]):  # noqa: SIM117
            with pytest.raises(ZeroDivisionError):
                run(TOKENS, adapter_names=names)
    assert not any(module._forward_pre_hooks for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(input_ids=TOKENS).logits, right)


def test_activated_adapters_leave_nothing_where_a_run_stops():
    model = peft.get_peft_model(
        llama(), lora(target_modules=["q_proj"], alora_invocation_tokens=[5, 6])
    ).eval()
    TransformerBridge(model)(TOKENS, stop_at_layer=1)
    assert not any(module._forward_pre_hooks for module in model.modules())


def mixture() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 48, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**sizes, initializer_range=0.3)).eval()


@pytest.mark.parametrize("disabled", [False, True])
def test_trained_copies_of_experts_are_seen_and_edited(disabled):
    model = tuned(lora(target_modules=["q_proj"], modules_to_save=["experts"]), mixture())
    bridge = TransformerBridge(model)
    wrapper = model.base_model.model.model.layers[0].mlp.experts
    experts = wrapper.original_module if disabled else wrapper.modules_to_save["default"]
    names = [f"blocks.0.mlp.experts.{e}.hook_post" for e in range(4)]
    inputs = [name.replace("post", "in") for name in names]
    with torch.no_grad(), model.disable_adapter() if disabled else nullcontext():
        right, cache = bridge.run_with_cache(TOKENS, names_filter=[*names, *inputs])
        for e, (name, x) in enumerate(zip(names, map(cache.__getitem__, inputs), strict=True)):
            gate, up = (x @ experts.gate_up_proj[e].T).chunk(2, -1)
            post = torch.nn.functional.silu(gate) * up
            torch.testing.assert_close(cache[name], post, atol=1e-5, rtol=1e-5)
        assert sum(len(cache[name]) for name in names) == 2 * TOKENS.numel()
        edited = bridge.run_with_hooks(TOKENS, fwd_hooks=[(name, Scale(0.0)) for name in names])
        handle = wrapper.register_forward_hook(lambda module, args, output: output * 0)
        expected = model(input_ids=TOKENS).logits
        handle.remove()
    torch.testing.assert_close(edited, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(edited, right, atol=1e-3)


def test_weights_beside_adapted_experts():
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = tuned(lora(target_modules=[], target_parameters=names), mixture())
    bridge = TransformerBridge(model)
    plain = model.base_model.model
    assert torch.equal(bridge.W_U, plain.lm_head.weight.T)
    assert torch.equal(bridge.W_E, plain.model.embed_tokens.weight)
    with pytest.raises(TypeError, match="merge adapters first"):
        bridge.weights["blocks.0.mlp.experts.0.W_in.weight"]


def test_biases_of_tuned_norms():
    names = ["ln_1", "ln_2", "ln_f"]
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97, "n_positions": 32}
    model = tuned(
        peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=names),
        GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)),
    )
    bridge = TransformerBridge(model)
    norm = model.base_model.model.transformer.ln_f
    assert torch.equal(bridge.weights["ln_final.b"], norm.ln_tuning_layers["default"].bias)
    with model.disable_adapter():
        assert torch.equal(bridge.weights["ln_final.b"], norm.base_layer.bias)


@pytest.mark.parametrize(
    "more", [{"trainable_token_indices": [5, 6]}, {"modules_to_save": ["embed_tokens"]}]
)
def test_scaled_embeddings_inside_of_wrappers(more):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 97}
    model = tuned(lora(target_modules=["q_proj"], **more), GemmaForCausalLM(GemmaConfig(**sizes)))
    bridge = TransformerBridge(model)
    with torch.no_grad():
        torch.testing.assert_close(bridge.W_E[TOKENS], model.get_input_embeddings()(TOKENS))


def test_neurons_of_a_layer_whose_router_sees_the_call():
    names = ["down_proj"]
    model = tuned(peft.LilyConfig(task_type="CAUSAL_LM", target_modules=names))
    _, cache = TransformerBridge(model).run_with_cache(TOKENS)
    with pytest.raises(TypeError, match="the results of neurons are not available"):
        cache.stack_neuron_results(layer=1)
