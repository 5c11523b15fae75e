"""circuit-tracer: attribution graphs, against those that it makes on TransformerLens 2.18, and against interventions.

`python tests/clients/test_circuit_tracer.py`, where TransformerLens 2.18 is installed, writes the reference.
"""

from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file

huggingface_hub.constants.HF_HUB_ENABLE_HF_TRANSFER = False  # which it imports, and newer versions have not

from circuit_tracer import attribute
from circuit_tracer.replacement_model.replacement_model_transformerlens import TransformerLensReplacementModel
from circuit_tracer.transcoder import TranscoderSet
from circuit_tracer.transcoder.single_layer_transcoder import SingleLayerTranscoder
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformer_lens import HookedTransformerConfig
from transformers import PreTrainedTokenizerFast

REFERENCE = Path(__file__).with_name("circuit_tracer.safetensors")
TOKENS = torch.tensor([0, 3, 14, 7])
MODELS = {
    "gpt2": {"act_fn": "gelu_new", "normalization_type": "LN"},
    "llama": {
        "act_fn": "silu", "normalization_type": "RMS", "gated_mlp": True, "positional_embedding_type": "rotary",
        "rotary_dim": 8, "final_rms": True,
    },
}  # fmt: skip


def made(kind):
    cpu = torch.device("cpu")
    config = HookedTransformerConfig(
        n_layers=2, d_model=16, n_ctx=16, d_head=8, n_heads=2, d_mlp=32, d_vocab=40, seed=0, device="cpu",
        **MODELS[kind],
    )  # fmt: skip
    torch.manual_seed(7)
    coders = {i: SingleLayerTranscoder(16, 8, torch.relu, i, device=cpu, dtype=torch.float32) for i in range(2)}
    with torch.no_grad():
        for coder in coders.values():
            for parameter in coder.parameters():
                parameter.copy_(torch.randn(parameter.shape) / 4)
    model = TransformerLensReplacementModel.from_config(
        config, TranscoderSet(coders, feature_input_hook="mlp.hook_in", feature_output_hook="mlp.hook_out")
    )
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0"))
    model.tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w0", eos_token="w0", pad_token="w0")
    return model


@pytest.fixture(params=MODELS)
def graph(request):
    model = made(request.param)
    return request.param, model, attribute(TOKENS, model, max_n_logits=4, batch_size=8)


def test_the_adjacency_is_that_of_transformer_lens(graph):
    kind, model, found = graph
    right = load_file(REFERENCE)
    assert torch.equal(found.active_features, right[f"{kind}.active"]) and len(found.active_features) > 10
    assert torch.allclose(model(TOKENS[None])[0, -1], right[f"{kind}.logits"], atol=1e-5)
    edges = right[f"{kind}.adjacency"]
    assert (found.adjacency_matrix - edges).abs().max() < 1e-5 and edges.abs().max() > 0.1


def test_edges_are_what_interventions_do(graph):
    _, model, found = graph
    features, edges = found.active_features, found.adjacency_matrix
    logits, before = model.get_activations(TOKENS, apply_activation_function=False)
    logits, n = logits[0, -1], len(features)
    targets = torch.tensor([target.vocab_idx for target in found.logit_targets])
    for node, (layer, pos, feature) in enumerate(features.tolist()):
        twice = 2 * before[layer, pos, feature]
        changed, after = model.feature_intervention(
            TOKENS, [(layer, pos, feature, twice)], constrained_layers=range(2), apply_activation_function=False
        )
        changed = changed.squeeze(0)[-1]
        effects = (after - before)[tuple(features.T)]
        elsewhere = torch.arange(n) != node
        assert torch.allclose(effects[elsewhere], edges[:n, node][elsewhere], atol=1e-5)
        moved = (changed - changed.mean() - logits + logits.mean())[targets]
        assert torch.allclose(moved, edges[-len(targets) :, node], atol=1e-5)


if __name__ == "__main__":
    reference = {}
    for kind in MODELS:
        model = made(kind)
        graph = attribute(TOKENS, model, max_n_logits=4, batch_size=8)
        reference[f"{kind}.adjacency"] = graph.adjacency_matrix
        reference[f"{kind}.active"] = graph.active_features
        reference[f"{kind}.logits"] = model(TOKENS[None])[0, -1].detach()
    save_file({name: tensor.contiguous() for name, tensor in reference.items()}, REFERENCE)
