"""Tiny models whose blocks hold a mixer, declared by hand."""

from collections.abc import Callable

import torch
import transformers
from torch import nn

from adapters import (
    MLP,
    Architecture,
    Block,
    Embedding,
    Norm,
    Projection,
    Readout,
    Stack,
    Step,
    register,
)
from adapters.mixers import Mixer
from adapters.norms import GEMMA_NORM, RMS_NORM
from bridge import TransformerBridge


def noised(model: nn.Module) -> nn.Module:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def only_mixers(mixer: str) -> Callable[[object], Architecture]:
    """Of Mamba and its like: blocks of a mixer alone."""

    def declare(config: object) -> Architecture:
        block = Block((Step(mixers[mixer], pre=Norm("norm", RMS_NORM)),))
        return Architecture(
            (Stack("layers", block, {}, Norm("norm_f", RMS_NORM), Embedding("embeddings")),),
            Readout("lm_head"),
            config_values=FACTS,
        )

    return declare


FACTS = {"n_heads": 1, "d_head": 8, "n_ctx": 64, "attention_dir": "causal"}
mixers: dict[str, Mixer] = {}


def build(name: str) -> TransformerBridge:
    """A bridge around the tiny model of a name."""
    model = noised(MODELS[name]())
    return TransformerBridge(model)


def mamba() -> nn.Module:
    config = transformers.MambaConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=8,
        conv_kernel=3,
        time_step_rank=4,
    )
    return declared("mamba", transformers.MambaForCausalLM(config), "MambaPreTrainedModel")


def falcon_mamba() -> nn.Module:
    config = transformers.FalconMambaConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=8,
        conv_kernel=3,
        time_step_rank=4,
    )
    model = transformers.FalconMambaForCausalLM(config)
    return declared("falcon_mamba", model, "FalconMambaPreTrainedModel")


def mamba2() -> nn.Module:
    config = transformers.Mamba2Config(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=8,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        chunk_size=4,
        conv_kernel=3,
    )
    model = transformers.Mamba2ForCausalLM(config)
    return declared("mamba2", model, "Mamba2PreTrainedModel")


def declared(name: str, model: nn.Module, base: str) -> nn.Module:
    mixers[name] = Mixer("mixer", modules=(("in_proj", "batch pos d_in_proj"),))
    register(base)(only_mixers(name))
    return model


def qwen3_next() -> nn.Module:
    config = transformers.Qwen3NextConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        intermediate_size=48,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
        mlp_only_layers=[0, 1],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    model = transformers.Qwen3NextForCausalLM(config)
    return delta(model, "Qwen3NextPreTrainedModel")


def kimi_linear() -> nn.Module:
    config = transformers.KimiLinearConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=4,
        linear_attn_config={"head_dim": 8, "num_heads": 4},
        mlp_layer_types=["dense", "dense"],
        pad_token_id=0,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    model = transformers.KimiLinearForCausalLM(config)
    return delta(model, "KimiLinearPreTrainedModel")


def delta(model: nn.Module, base: str) -> nn.Module:
    path = "linear_attn" if hasattr(model.model.layers[0], "linear_attn") else "self_attn"
    kind = GEMMA_NORM if base.startswith("Qwen") else RMS_NORM

    def declare(config: object) -> Architecture:
        mlp = MLP("mlp", up=Projection("up_proj"), gate=Projection("gate_proj"), down="down_proj")
        behind = Step(mlp, pre=Norm("post_attention_layernorm", kind))
        first, last = (
            Block((Step(mixer, pre=Norm("input_layernorm", kind)), behind))
            for mixer in (Mixer(path), Mixer("self_attn"))
        )
        stack = Stack("layers", first, {1: last}, Norm("norm", kind), Embedding("embed_tokens"))
        return Architecture((stack,), Readout("lm_head"))

    register(base)(declare)
    return model


MODELS = {
    "mamba": mamba,
    "falcon_mamba": falcon_mamba,
    "mamba2": mamba2,
    "qwen3_next": qwen3_next,
    "kimi_linear": kimi_linear,
}
