"""Attribution graphs of circuit-tracer on the tiny reference models: what `graphs.safetensors`
holds.

Run with circuit-tracer 0.5.0 and TransformerLens 2.18.0, on CPU: ``python
tests/data/circuit_tracer/make.py``.
"""

from pathlib import Path

import huggingface_hub.constants
import torch

huggingface_hub.constants.HF_HUB_ENABLE_HF_TRANSFER = (
    False  # asked for, and gone from newer versions
)

from circuit_tracer.attribution.attribute import attribute
from circuit_tracer.replacement_model.replacement_model_transformerlens import (
    TransformerLensReplacementModel,
)
from circuit_tracer.transcoder.cross_layer_transcoder import CrossLayerTranscoder
from circuit_tracer.transcoder.single_layer_transcoder import SingleLayerTranscoder, TranscoderSet
from safetensors.torch import load_file, save_file
from transformer_lens import HookedTransformerConfig

HERE = Path(__file__).parent
REFERENCE = HERE.parent / "reference"
CONFIGS = {
    "gpt2": {
        "act_fn": "gelu_new",
        "normalization_type": "LN",
        "positional_embedding_type": "standard",
    },
    "llama": {
        "act_fn": "silu",
        "normalization_type": "RMS",
        "positional_embedding_type": "rotary",
        "gated_mlp": True,
        "final_rms": True,
        "rotary_dim": 8,
        "rotary_adjacent_pairs": False,
    },
}
READS = {"gpt2": "ln2.hook_normalized", "llama": "hook_resid_mid"}
N = 16


class Words:
    """In place of a tokenizer."""

    padding_side, all_special_ids, vocab_size = "right", range(61), 61

    def decode(self, tokens):
        return str(tokens)


def transcoders(reads: str, skip: bool) -> TranscoderSet:
    torch.manual_seed(0)
    layers = {}
    for layer in range(2):
        one = SingleLayerTranscoder(
            32, N, torch.nn.ReLU(), layer, skip_connection=skip, dtype=torch.float32
        )
        for parameter in one.parameters():
            parameter.data.copy_(torch.randn_like(parameter) / 6)
        one.b_enc.data.sub_(0.5)
        layers[layer] = one
    return TranscoderSet(layers, reads, "hook_mlp_out")


def cross_layer(reads: str, activation: str) -> CrossLayerTranscoder:
    torch.manual_seed(1)
    clt = CrossLayerTranscoder(
        2,
        N,
        32,
        activation,
        lazy_decoder=False,
        feature_input_hook=reads,
        device="cpu",
        dtype=torch.float32,
    )
    for parameter in clt.parameters():
        parameter.data.copy_(torch.randn_like(parameter) / 6)
    clt.b_enc.data.sub_(0.5)
    if activation == "jump_relu":
        clt.activation_function.threshold.data.abs_()
    return clt


def main() -> None:
    kept = {}
    for family, options in CONFIGS.items():
        found = load_file(REFERENCE / family / "reference.safetensors")
        weights = {
            name.removeprefix("raw/param/"): value
            for name, value in found.items()
            if name.startswith("raw/param/")
        }
        config = HookedTransformerConfig(
            n_layers=2,
            d_model=32,
            n_heads=4,
            d_head=8,
            n_ctx=40,
            d_vocab=weights["embed.W_E"].shape[0],
            d_mlp=weights["blocks.0.mlp.W_in"].shape[1],
            seed=0,
            device="cpu",
            eps=OWN[family]["eps"],
            **({"n_key_value_heads": OWN[family]["kv"]} if OWN[family]["kv"] else {}),
            **options,
        )
        kinds = {
            "plain": transcoders(READS[family], False),
            "skip": transcoders(READS[family], True),
        }
        kinds["clt"] = cross_layer(READS[family], "jump_relu" if family == "llama" else "relu")
        for kind, ours in kinds.items():
            model = TransformerLensReplacementModel.from_config(config, ours)
            named = {}
            for name in model.state_dict():
                plain = name.replace(".old_mlp", "").replace(".old_unembed", "")
                if plain in weights:
                    named[name] = weights[plain]
            missing = model.load_state_dict(named, strict=False).missing_keys
            fixed = ("transcoders", "mask", "IGNORE", "rotary", "unembed.b", "_b_")
            assert not [name for name in missing if not any(part in name for part in fixed)], (
                missing
            )
            model.tokenizer = Words()
            tokens = found["tokens"][0, :7]
            with torch.no_grad():
                far = (model(tokens[None])[0] - found["raw/logits"][0, :7]).abs().max()
            assert far < 1e-4, far
            graph = attribute(
                tokens, model, attribution_targets=torch.tensor([7, 9, 11]), batch_size=16
            )
            key = f"{family}/{kind}"
            kept |= {
                f"{key}/tokens": tokens,
                f"{key}/features": graph.active_features.int(),
                f"{key}/values": graph.activation_values,
                f"{key}/adjacency": graph.adjacency_matrix,
            }
            if kind == "clt":
                kept |= {f"{key}/{name}": value.data for name, value in ours.named_parameters()}
                continue
            for layer, one in enumerate(ours):
                kept |= {
                    f"{key}/{layer}/{name}": value.data for name, value in one.named_parameters()
                }
            print(key, graph.adjacency_matrix.shape, graph.active_features.shape)
    save_file(
        {name: value.contiguous().clone() for name, value in kept.items()},
        HERE / "graphs.safetensors",
    )


OWN = {"gpt2": {"eps": 1e-5, "kv": None}, "llama": {"eps": 1e-6, "kv": 2}}

if __name__ == "__main__":
    main()
