"""Tries each kind of tuner of the installed PEFT on a tiny Llama, and prints the table that
docs/properties.md sums up.

    PYTHONPATH=. python benchmarks/tuners.py [KIND ...]

Each result is compared with PEFT's own model: its logits, a plain torch hook on it, its `generate`.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import peft
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from bridge import TransformerBridge

TOKENS = torch.tensor([[1, 10, 11, 12, 5, 6, 20, 21, 22], [1, 7, 8, 9, 5, 6, 30, 31, 32]])
#: What a kind needs besides its defaults.
NEEDS: dict[str, dict[str, Any]] = {
    "LORA": {"target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"]},
    "IA3": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm", "post_attention_layernorm", "norm"]},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 2},
    "PROMPT_TUNING": {"num_virtual_tokens": 3},
    "MULTITASK_PROMPT_TUNING": {"num_virtual_tokens": 3, "num_tasks": 2, "num_ranks": 2},
    "P_TUNING": {"num_virtual_tokens": 3, "encoder_hidden_size": 16},
    "PREFIX_TUNING": {"num_virtual_tokens": 3},
    "POLY": {"target_modules": ["q_proj", "o_proj"], "n_tasks": 2},
    "OFT": {"target_modules": ["q_proj", "o_proj"], "oft_block_size": 8},
    "BOFT": {"target_modules": ["q_proj", "o_proj"], "boft_block_size": 8},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [5, 6]},
    "FOURIERFT": {"target_modules": ["q_proj", "o_proj"], "n_frequency": 20},
    "VBLORA": {"target_modules": ["q_proj", "o_proj"], "num_vectors": 8, "vector_length": 16},
    "C3A": {"target_modules": ["q_proj", "o_proj"], "block_size": 8},
    "ADALORA": {"target_modules": ["q_proj", "o_proj"], "total_step": 10},
}
#: Two ways of LoRA that are no kinds of their own.
VARIANTS: dict[str, dict[str, Any]] = {
    "LORA, activated": {"alora_invocation_tokens": [5, 6]},
    "LORA, DoRA": {"use_dora": True},
    "LORA, of embeddings": {"target_modules": ["embed_tokens"]},
}
Z = "blocks.0.attn.hook_z"
_MODULES = {"target_modules": ["q_proj", "o_proj"]}


def tuned(kind: str) -> nn.Module:
    """Return a tiny model with a tuner of a kind, whose parameters have been changed."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 4, "intermediate_size": 48, "vocab_size": 97}
    model = LlamaForCausalLM(LlamaConfig(initializer_range=0.3, **sizes)).eval()
    base, _, _ = kind.partition(",")
    config_class = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType[base]]
    options = {"task_type": "CAUSAL_LM", **NEEDS.get(base, _MODULES), **VARIANTS.get(kind, {})}
    adapted = peft.get_peft_model(model, config_class(**options)).eval()
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            generator = torch.Generator().manual_seed(len(name))
            parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return adapted


def close(found: Tensor, right: Tensor) -> bool:
    """Tell whether two results are equal up to rounding."""
    return found.shape == right.shape and torch.allclose(found, right, atol=1e-3, rtol=1e-3)


class Trial:
    """The comparisons of one tuned model with what the bridge says of it."""

    def __init__(self, kind: str) -> None:
        self.model: Any = tuned(kind)
        self.more: dict[str, Any] = {}
        if kind in ("POLY", "MULTITASK_PROMPT_TUNING"):
            self.more["task_ids"] = torch.tensor([0, 1])
        with torch.no_grad():
            self.logits: Tensor = self.model(input_ids=TOKENS, **self.more).logits
        self.bridge = TransformerBridge(self.model)

    def run(self) -> bool:
        """Compare the logits, also beside a cache."""
        cached, _ = self.bridge.run_with_cache(TOKENS, **self.more)
        found = self.bridge(TOKENS, **self.more)
        return torch.equal(found, self.logits) and close(cached, self.logits)

    def edit(self) -> bool:
        """Compare an edit of the stream with a plain torch hook."""
        name = "blocks.0.hook_resid_post"
        block = self.model.get_submodule(self.bridge.block_paths[0])

        def half(module: nn.Module, args: Any, output: Any) -> Any:
            if isinstance(output, Tensor):
                return output * 0.5
            return (output[0] * 0.5, *output[1:])

        handle = block.register_forward_hook(half)
        right = self.model(input_ids=TOKENS, **self.more).logits
        handle.remove()
        hooks = [(name, lambda x, hook: x * 0.5)]
        return close(self.bridge.run_with_hooks(TOKENS, fwd_hooks=hooks, **self.more), right)

    def heads(self) -> bool:
        """Compare the sum of the heads' results with what attention writes."""
        _, cache = self.bridge.run_with_cache(TOKENS, **self.more)
        total = cache.stack_head_results(layer=1).sum(0)
        output = self.model.get_submodule(self.bridge.hook_dict[Z].point.site.path)
        z = cache["z", 0]
        bias = output(torch.zeros_like(z[:, :, 0].flatten(2)).repeat(1, 1, z.shape[2]))
        return close(total + bias, cache["attn_out", 0])

    def neurons(self) -> bool:
        """Compare the sum of the neurons' results with what the MLP writes."""
        _, cache = self.bridge.run_with_cache(TOKENS, **self.more)
        return close(cache.stack_neuron_results(layer=1).sum(0), cache["mlp_out", 0])

    def embeddings(self) -> bool:
        """Compare rows of `W_E` with what the model's own layer gives."""
        return close(self.bridge.W_E[TOKENS], self.model.get_input_embeddings()(TOKENS))

    def generation(self) -> bool:
        """Compare generated tokens."""
        options = {"max_new_tokens": 4, "do_sample": False}
        right = self.model.generate(input_ids=TOKENS, **options, **self.more)
        found = self.bridge.generate(
            TOKENS, stop_at_eos=True, return_type="tokens", verbose=False, **options, **self.more
        )
        return torch.equal(found[:, TOKENS.shape[1] :], right[:, -found.shape[1] :][:, -4:])

    def processing(self) -> bool:
        """Compare the logits of processed weights."""
        self.bridge.process_weights()
        found = self.bridge(TOKENS, **self.more).log_softmax(-1)
        return close(found, self.logits.log_softmax(-1))


CHECKS: dict[str, Callable[[Trial], bool]] = {
    "run": Trial.run,
    "edit": Trial.edit,
    "heads": Trial.heads,
    "neurons": Trial.neurons,
    "W_E": Trial.embeddings,
    "generate": Trial.generation,
    "processing": Trial.processing,
}


def tried(kind: str) -> tuple[dict[str, str], list[str]]:
    """Return the verdict of each check for a kind of tuner, and the reasons of refusals."""
    reasons: list[str] = []
    try:
        trial = Trial(kind)
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError, ImportError) as error:
        return {"run": "r"}, [f"{type(error).__name__}: {' '.join(str(error).split())}"]
    verdicts = {}
    for name, check in CHECKS.items():
        try:
            with torch.no_grad():
                verdicts[name] = "yes" if check(trial) else "WRONG"
        except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
            verdicts[name] = "r"
            reasons.append(f"{name}: {' '.join(str(error).split())}")
    return verdicts, reasons


def main(kinds: list[str]) -> None:
    """Print the table of some kinds, or all."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    known = [kind.name for kind in PEFT_TYPE_TO_CONFIG_MAPPING]
    print(f"| tuner of peft {peft.__version__} | " + " | ".join(CHECKS) + " |")
    print("|---" * (len(CHECKS) + 1) + "|")
    notes = []
    for kind in kinds or sorted([*known, *VARIANTS]):
        verdicts, reasons = tried(kind)
        cells = [verdicts.get(name, "–") for name in CHECKS]
        print(f"| {kind} | " + " | ".join(cells) + " |", flush=True)
        notes += [f"- {kind}, {reason[:160]}" for reason in reasons]
    print()
    print("\n".join(notes))


if __name__ == "__main__":
    main(sys.argv[1:])
