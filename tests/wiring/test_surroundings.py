"""Models that something else has changed: offloaded, quantised, with learned prompts, with weights
of other classes.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import accelerate
import peft
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from adapters import verify
from adapters.registry import UnsupportedModelError
from bridge import TransformerBridge
from tests.adapters.test_verify_all import tiny
from tests.conftest import torch_hooks

TOKENS = torch.randint(1, 61, (2, 7), generator=torch.Generator().manual_seed(0))
#: What is computed beside the model, from its weights.
COMPUTED = (
    "blocks.1.attn.hook_result",
    "blocks.1.hook_q_input",
    "blocks.1.hook_attn_in",
    "blocks.1.hook_mlp_in",
    "blocks.1.ln1.hook_scale",
    "blocks.1.ln1.hook_normalized",
    "blocks.1.ln2.hook_scale",
    "blocks.1.attn.hook_pattern",
    "ln_final.hook_scale",
    "ln_final.hook_normalized",
)


def halve(x, hook):
    return x * 0.5


def reads_and_edits_agree(
    ours: TransformerBridge, plain: TransformerBridge, atol: float = 1e-5
) -> None:
    torch.testing.assert_close(ours(TOKENS), plain(TOKENS), atol=atol, rtol=0)
    for name in COMPUTED:
        if name not in plain.hook_dict:
            continue
        expected = plain.run_with_cache(TOKENS, names_filter=name)[1][name]
        torch.testing.assert_close(
            ours.run_with_cache(TOKENS, names_filter=name)[1][name],
            expected,
            atol=atol,
            rtol=0,
            msg=name,
        )
        spec = [(name, halve)]
        expected = plain.run_with_hooks(TOKENS, fwd_hooks=spec)
        torch.testing.assert_close(
            ours.run_with_hooks(TOKENS, fwd_hooks=spec), expected, atol=atol, rtol=0, msg=name
        )


@pytest.mark.parametrize("case", ["gpt2", "gpt_neo", "opt", "bloom", "llama-gqa", "bert"])
def test_embeddings_for_tokens(case):
    """A run on the embeddings of tokens is the run on the tokens."""
    bridge = TransformerBridge(tiny(case))
    given = bridge.original_model.get_input_embeddings()(TOKENS).detach()
    logits, cache = bridge.run_with_cache(given)
    expected, full = bridge.run_with_cache(TOKENS)
    assert torch.equal(logits, expected)
    missing = set(full) - set(cache)
    assert missing <= {name for name in full if name.split(".")[-1] == "hook_embed"}
    for name, value in cache.items():
        assert torch.equal(value, full[name]), name
    positions = [name for name in cache if name.endswith("hook_pos_embed")]
    for name in positions:
        assert cache[name].shape == full[name].shape
        spec = [(name, halve)]
        assert torch.equal(
            bridge.run_with_hooks(given, fwd_hooks=spec),
            bridge.run_with_hooks(TOKENS, fwd_hooks=spec),
        )
        with bridge.hooks(spec):  # and when the Hugging Face model is called itself
            direct = bridge.original_model(inputs_embeds=given).logits
        assert torch.equal(direct, bridge.run_with_hooks(TOKENS, fwd_hooks=spec))
    if bridge.core.can_generate():
        new: dict[str, Any] = {
            "max_new_tokens": 3,
            "do_sample": False,
            "verbose": False,
            "return_cache": True,
        }
        made, steps = bridge.generate(
            given, **new, names_filter=lambda name: not name.endswith("hook_embed")
        )
        assert torch.equal(made, bridge.generate(TOKENS, **new)[0][:, 7:])
        assert all(name in steps for name in positions)
        assert not missing & set(steps)
        if missing:
            with pytest.raises(RuntimeError, match="did not run on this prompt"):
                bridge.generate(given, **new, names_filter=sorted(missing))


@pytest.mark.parametrize(
    "case", ["gpt2", "llama-gqa", "gemma2-gqa", "gpt_neox", "phi", "mixtral-gqa", "gpt_oss-gqa"]
)
def test_offloaded_weights(case):
    plain = TransformerBridge(tiny(case))
    model = accelerate.cpu_offload(copy.deepcopy(plain.original_model), execution_device="cpu")
    bridge = TransformerBridge(model)
    reads_and_edits_agree(bridge, plain)
    for name in plain.weights.getters:
        assert torch.equal(bridge.weights[name], plain.weights[name]), name
    assert bridge.cfg.device.type == "cpu"
    assert all(p.is_meta for p in model.parameters())  # nothing of it stays


@pytest.mark.parametrize("where", ["cpu", "disk", "partly on disk"])
@pytest.mark.parametrize("case", ["llama-gqa", "gpt2", "qwen2_moe-gqa"])
def test_what_plays_which_part_is_found_from_offloaded_weights(case, where, tmp_path):
    plain = TransformerBridge(tiny(case), automatic="always")
    model = tiny(case)
    if where == "cpu":
        accelerate.cpu_offload(model, execution_device="cpu")
    elif where == "disk":
        accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    else:
        blocks = plain.block_paths
        leaves = [
            name
            for name, module in model.named_modules()
            if not any(True for _ in module.children())
        ]
        others = [
            name for name in leaves if not any(name.startswith(f"{block}.") for block in blocks)
        ]
        places = dict.fromkeys((*others, *blocks), "cpu") | dict.fromkeys(blocks[1:], "disk")
        accelerate.dispatch_model(
            model, places, main_device="cpu", offload_dir=tmp_path, force_hooks=True
        )
    moved = TransformerBridge(model, automatic="always")
    assert any(p.is_meta for p in model.parameters())
    assert moved.architecture == plain.architecture and list(moved.hook_dict) == list(
        plain.hook_dict
    )
    assert moved.offered().not_offered == plain.offered().not_offered
    assert verify(moved).passed
    assert any(p.is_meta for p in model.parameters())  # nothing of it stays


def test_a_model_without_weights_is_refused():
    bridge = TransformerBridge(accelerate.cpu_offload(tiny("llama-gqa"), execution_device="cpu"))
    assert verify(bridge).passed
    with torch.device("meta"):
        empty = type(bridge.original_model)(bridge.original_model.config)
    with pytest.raises(UnsupportedModelError, match="it has no weights"):
        TransformerBridge(empty, automatic="always")


class RoundsRows(nn.Linear):
    """As layers of int8 activations do: each row of the input is rounded by its own largest."""

    def forward(self, x):
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 127
        return super().forward((x / scale).round() * scale)


def test_heads_of_a_layer_that_rounds_its_input_are_refused():
    model = tiny("llama-gqa")
    model.model.layers[1].self_attn.o_proj.__class__ = RoundsRows
    bridge = TransformerBridge(model)
    with pytest.raises(
        TypeError, match=r"does not sum to its output \(off by .* or rounds it as it comes"
    ):
        bridge.run_with_cache(TOKENS, names_filter="blocks.1.attn.hook_result")
    bridge.run_with_cache(
        TOKENS, names_filter=["blocks.0.attn.hook_result", "blocks.1.attn.hook_z"]
    )


def test_an_edit_of_an_offloaded_weight_is_an_edit_of_the_model():
    model = accelerate.cpu_offload(tiny("llama-gqa"), execution_device="cpu")
    bridge = TransformerBridge(model)
    with torch.no_grad():
        bridge.weights["blocks.1.attn.W_O"].zero_()
    out = bridge.run_with_cache(TOKENS, names_filter="blocks.1.hook_attn_out")[1][
        "blocks.1.hook_attn_out"
    ]
    assert not out.any()


class OnlyLinear(torch.Tensor):
    """A weight that can do what a quantised one can: be multiplied with, and nothing else."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        allowed = (
            "linear",
            "addmm",
            "addmm_",
            "detach",
            "numel",
            "data_ptr",
            "__get__",
            "size",
            "dim",
            "requires_grad_",
            "__set__",
        )
        name = getattr(func, "__name__", str(func))
        shape = "T.__get__" in str(func) or "mT.__get__" in str(func)
        if name not in allowed or shape or (name == "__get__" and "_T" in str(func)):
            raise NotImplementedError(f"a quantised weight has no {func}")
        made = super().__torch_function__(func, types, args, kwargs or {})
        return made.as_subclass(torch.Tensor) if name in ("linear", "addmm") else made


@pytest.mark.parametrize("case", ["gpt2", "llama-gqa", "gpt_neox", "phi3-gqa"])
def test_weights_of_a_class_of_their_own(case):
    plain = TransformerBridge(tiny(case))
    model = tiny(case)
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D) and module is not model.get_output_embeddings():
            module.weight = nn.Parameter(
                module.weight.data.as_subclass(OnlyLinear), requires_grad=False
            )
    bridge = TransformerBridge(model)
    reads_and_edits_agree(bridge, plain)
    with pytest.raises(TypeError, match=r"whose weight .*is not a plain matrix; dequantise"):
        _ = bridge.W_Q
    with pytest.raises(Exception, match="plain matrix"):
        bridge.process_weights(fold_ln=True)
    assert torch.equal(bridge.b_Q, plain.b_Q)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")  # its own business
@pytest.mark.parametrize("case", ["llama-gqa", "gpt_neox", "opt"])
def test_dynamically_quantised_models(case):
    plain = tiny(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch is about to move it
        model = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear}, dtype=torch.qint8)
    bridge, exact = TransformerBridge(model), TransformerBridge(plain)
    logits, cache = bridge.run_with_cache(TOKENS)
    assert torch.equal(logits, model(TOKENS).logits)
    expected = exact.run_with_cache(TOKENS)[1]
    for name, value in cache.items():
        if not name.endswith("attn_scores"):
            assert (value - expected[name]).abs().max() < 0.5, name
    for name in ("blocks.1.attn.hook_result", "blocks.1.hook_q_input"):
        torch.testing.assert_close(
            bridge.run_with_cache(TOKENS, names_filter=name)[1][name],
            exact.run_with_cache(TOKENS, names_filter=name)[1][name],
            atol=0.1,
            rtol=0,
        )
    for name in ("W_Q", "W_U", "b_Q", "b_U", "W_in"):
        with pytest.raises(TypeError, match=r"plain (matrix|bias); dequantise"):
            getattr(bridge, name)
    before = model(TOKENS).logits
    bridge.process_weights()
    assert torch.equal(model(TOKENS).logits, before)
    assert all(state.startswith("left out: ") for state in bridge.cfg.processed.values())


LEARNED = {"prompt": peft.PromptTuningConfig, "prefix": peft.PrefixTuningConfig}


def with_learned_prompt(model: nn.Module, kind: str) -> nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning
        )  # PEFT's business
        return peft.get_peft_model(
            model, LEARNED[kind](task_type="CAUSAL_LM", num_virtual_tokens=3)
        ).eval()


@pytest.mark.filterwarnings(
    "ignore:Position ids are not supported:UserWarning"
)  # from PEFT's own `generate`
@pytest.mark.parametrize("kind", LEARNED)
@pytest.mark.parametrize("case", ["gpt2", "llama-gqa", "gpt_neox"])
def test_learned_prompts(case, kind):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = with_learned_prompt(tiny(case), kind)
    bridge = TransformerBridge(model)
    expected = model(TOKENS).logits
    assert torch.equal(bridge(TOKENS), expected)
    assert type(bridge.core) is type(tiny(case))
    seen: list[torch.Tensor] = []
    block = bridge.core.get_submodule(bridge.block_paths[1].split("base_model.", 1)[1])
    handle = block.register_forward_hook(
        lambda module, args, out: seen.append(out if torch.is_tensor(out) else out[0])
    )
    logits, cache = bridge.run_with_cache(TOKENS)
    handle.remove()
    assert torch.equal(logits, expected)
    assert torch.equal(cache["resid_post", 1], seen[0])
    before = 3 if kind == "prompt" else 0
    assert cache["resid_post", 1].shape[1] == 7 + before
    losses = nn.functional.cross_entropy(
        expected[:, before:-1].transpose(1, 2), TOKENS[:, 1:], reduction="none"
    )
    assert torch.equal(bridge(TOKENS, return_type="loss", loss_per_token=True), losses)
    mask = torch.ones_like(TOKENS)
    mask[1, 5:] = 0
    masked = bridge(TOKENS, attention_mask=mask, return_type="loss", loss_per_token=True)
    torch.testing.assert_close(masked[0], losses[0])
    assert not masked[1, 4:].any()
    halved = bridge.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.hook_mlp_out", halve)])
    assert not torch.allclose(halved, expected)
    made = bridge.generate(TOKENS, max_new_tokens=3, do_sample=False, verbose=False)
    assert torch.equal(made, model.generate(input_ids=TOKENS, max_new_tokens=3, do_sample=False))
    with pytest.raises(ValueError, match=r"learned prompt.* use padding_side=.right"):
        bridge(TOKENS, attention_mask=mask.flip(-1))
    with pytest.raises(ValueError, match="start_at_layer is not available with a learned prompt"):
        bridge(cache["resid_pre", 1], start_at_layer=1)
    assert torch_hooks(model) == 0


def test_an_expert_that_adds_by_name(monkeypatch: pytest.MonkeyPatch):
    """A mixture whose own code writes ``torch.add(x, other=y)`` and ``linear(input, weight=W)``."""
    model = tiny("gpt_oss-gqa")
    experts = type(model.model.layers[0].mlp.experts)
    names = [
        name
        for name in TransformerBridge(model).hook_dict
        if ".experts." in name and name.startswith("blocks.0")
    ]
    expected = TransformerBridge(model).run_with_cache(TOKENS, names_filter=names)[1]

    def forward(self, hidden_states, router_indices=None, routing_weights=None):
        shape = hidden_states.shape
        hidden_states = hidden_states.reshape(-1, shape[-1])
        out = torch.zeros_like(hidden_states)
        chosen = nn.functional.one_hot(router_indices, self.num_experts).permute(2, 1, 0)
        for e in (chosen.sum((-1, -2)) > 0).nonzero().flatten().tolist():
            rank, token = torch.where(chosen[e])
            both = torch.add(
                torch.matmul(hidden_states[token], other=self.gate_up_proj[e]),
                other=self.gate_up_proj_bias[e],
            )
            made = torch.matmul(input=self._apply_gate(both), other=self.down_proj[e])
            made = torch.add(input=made, other=self.down_proj_bias[e])
            out.index_add_(0, token, made * routing_weights[token, rank, None])
        return out.view(shape)

    plain = model(TOKENS).logits
    monkeypatch.setattr(experts, "forward", forward)
    bridge = TransformerBridge(model)
    torch.testing.assert_close(bridge(TOKENS), plain)
    found = bridge.run_with_cache(TOKENS, names_filter=names)[1]
    for name in names:
        torch.testing.assert_close(found[name], expected[name], msg=name)
    post = next(name for name in names if name.endswith("hook_post") and len(found[name]))
    assert not torch.allclose(
        bridge.run_with_hooks(TOKENS, fwd_hooks=[(post, lambda x, hook: x * 0)]), plain
    )
