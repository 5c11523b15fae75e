"""circuit-tracer: attribution graphs, against those that it makes on TransformerLens 2.18, and
against interventions.

`python tests/clients/test_circuit_tracer.py`, where TransformerLens 2.18 is installed, writes the
reference.
"""

from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file

huggingface_hub.constants.HF_HUB_ENABLE_HF_TRANSFER = (
    False  # which it imports, and newer versions have not
)

from circuit_tracer import attribute
from circuit_tracer.frontend import graph_models
from circuit_tracer.replacement_model.replacement_model_transformerlens import (
    TransformerLensReplacementModel,
)
from circuit_tracer.transcoder import TranscoderSet
from circuit_tracer.transcoder.cross_layer_transcoder import load_clt
from circuit_tracer.transcoder.single_layer_transcoder import (
    SingleLayerTranscoder,
    load_transcoder_set,
)
from circuit_tracer.utils.create_graph_files import (
    build_model,
    create_nodes,
    create_used_nodes_and_edges,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformer_lens import HookedTransformerConfig
from transformers import PreTrainedTokenizerFast

from bridge import TransformerBridge
from bridge.bases.folders import read_folder
from bridge.features import AttributionGraph, attribution_graph
from tests.bases.test_folders import FORMATS

REFERENCE = Path(__file__).with_name("circuit_tracer.safetensors")
TOKENS = torch.tensor([0, 3, 14, 7])
MODELS = {
    "gpt2": {"act_fn": "gelu_new", "normalization_type": "LN"},
    "llama": {
        "act_fn": "silu",
        "normalization_type": "RMS",
        "gated_mlp": True,
        "positional_embedding_type": "rotary",
        "rotary_dim": 8,
        "final_rms": True,
    },
}


def made(kind):
    cpu = torch.device("cpu")
    config = HookedTransformerConfig(
        n_layers=2,
        d_model=16,
        n_ctx=16,
        d_head=8,
        n_heads=2,
        d_mlp=32,
        d_vocab=40,
        seed=0,
        device="cpu",
        **MODELS[kind],
    )
    torch.manual_seed(7)
    coders = {
        i: SingleLayerTranscoder(16, 8, torch.relu, i, device=cpu, dtype=torch.float32)
        for i in range(2)
    }
    with torch.no_grad():
        for coder in coders.values():
            for parameter in coder.parameters():
                parameter.copy_(torch.randn(parameter.shape) / 4)
    model = TransformerLensReplacementModel.from_config(
        config,
        TranscoderSet(coders, feature_input_hook="mlp.hook_in", feature_output_hook="mlp.hook_out"),
    )
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0"))
    model.tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="w0", eos_token="w0", pad_token="w0"
    )
    return model


@pytest.fixture(params=MODELS)
def graph(request):
    model = made(request.param)
    return request.param, model, attribute(TOKENS, model, max_n_logits=4, batch_size=8)


def test_the_adjacency_is_that_of_transformer_lens(graph):
    kind, model, found = graph
    right = load_file(REFERENCE)
    assert (
        torch.equal(found.active_features, right[f"{kind}.active"])
        and len(found.active_features) > 10
    )
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
            TOKENS,
            [(layer, pos, feature, twice)],
            constrained_layers=range(2),
            apply_activation_function=False,
        )
        changed = changed.squeeze(0)[-1]
        effects = (after - before)[tuple(features.T)]
        elsewhere = torch.arange(n) != node
        assert torch.allclose(effects[elsewhere], edges[:n, node][elsewhere], atol=1e-5)
        moved = (changed - changed.mean() - logits + logits.mean())[targets]
        assert torch.allclose(moved, edges[-len(targets) :, node], atol=1e-5)


def test_its_file_is_read(graph, tmp_path):
    """Its interface's JSON, of all nodes and edges: the same nodes, and the same edges between
    them.
    """
    _, model, found = graph
    everything = torch.ones(len(found.adjacency_matrix), dtype=torch.bool)
    nodes = create_nodes(found, everything, model.tokenizer, torch.zeros(len(everything)))
    used, edges = create_used_nodes_and_edges(found, nodes, found.adjacency_matrix != 0)
    for node, vocabulary in zip(
        used[-len(found.logit_targets) :], found.logit_targets, strict=True
    ):
        assert node.feature_type == "logit" and node.feature == vocabulary.vocab_idx
    # Its name of an error is that of another node, a feature of layer 0: here each has one of its
    # own.
    at = {id(node): name for name, node in nodes.items()}
    for node in used:
        node.node_id = (
            f"{node.node_id}_of_{at[id(node)]}"
            if node.feature_type.endswith("error")
            else node.node_id
        )
    dsts, srcs = (found.adjacency_matrix != 0).nonzero().unbind(1)
    edges = [
        {
            "source": nodes[int(j)].node_id,
            "target": nodes[int(i)].node_id,
            "weight": float(found.adjacency_matrix[i, j]),
        }
        for i, j in zip(dsts, srcs, strict=True)
    ]
    (tmp_path / "theirs.json").write_text(
        build_model(found, used, edges, "one", "made", 0.8, model.tokenizer).model_dump_json()
    )
    again = AttributionGraph.load(tmp_path / "theirs.json")
    where = [next(i for i, node in nodes.items() if node is one) for one in used]
    assert torch.equal(again.adjacency, found.adjacency_matrix[where][:, where].float())
    features = [
        (node.point, node.pos, node.index) for node in again.nodes if node.kind == "feature"
    ]
    right = [
        (f"blocks.{a}.hook_mlp_out.transcoder", b, c) for a, b, c in found.active_features.tolist()
    ]
    assert features == [one for one in right if one in features] and len(features) > 5


def test_it_reads_ours(tmp_path):
    bridge = TransformerBridge.boot_embedded()
    tokens, W = bridge.to_tokens("Mary and John"), torch.eye(128)[:, :6]
    points = [
        bridge.add_basis(
            f"blocks.{i}.hook_mlp_out",
            "tc",
            encode=lambda x: (x @ W).relu(),
            decode=lambda f: f @ W.T,
        )
        for i in range(2)
    ]
    ours = attribution_graph(bridge, tokens, [point.name for point in points], limit=12)
    ours.save(tmp_path / "ours.json", bridge, tokens, scan="made")
    read = graph_models.Model.model_validate_json((tmp_path / "ours.json").read_text())
    assert read.metadata.prompt_tokens == [
        bridge.to_single_str_token(token) for token in tokens[0].tolist()
    ]
    at = {node.node_id: node for node in read.nodes}
    assert len(at) == len(read.nodes) == 12 + 3 and len(read.links) > 10
    for link in read.links:
        assert link["source"] in at and link["target"] in at
    for node in read.nodes:
        if node.feature_type == "cross layer transcoder":
            layer, index = int(node.layer), int(node.node_id.split("_")[1])
            assert (
                node.feature == graph_models.Node.feature_node(layer, node.ctx_idx, index).feature
            )
            assert (
                node.node_id == graph_models.Node.feature_node(layer, node.ctx_idx, index).node_id
            )


def loaded_by_them(kind, folder):
    """The transcoders in a folder, by circuit-tracer's own loaders."""
    options = {"lazy_encoder": False, "lazy_decoder": False, "dtype": torch.float32}
    options |= {"device": torch.device("cpu")}
    if kind == "across layers":
        return load_clt(str(folder), **options)
    special = {"Gemma Scope": "gemma-scope", "Gemma Scope 2": "gemma-scope-2"}.get(kind)
    files = sorted(folder.glob("layer_*.safetensors")) or sorted(folder.glob("layer_*/params.*"))
    names = {"feature_input_hook": "", "feature_output_hook": "", "scan": ""}
    paths = dict(enumerate(map(str, files)))
    return load_transcoder_set(paths, special_load_fn=special, **names, **options)


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if "2, across" not in kind])
@torch.no_grad()
def test_folders_as_they_load_them(tmp_path, kind):
    """Features and reconstructions. (Their loader of Gemma Scope 2's cross-layer transcoders leaves
    the last layer out.)
    """
    FORMATS[kind](tmp_path)
    theirs, ours = loaded_by_them(kind, tmp_path), read_folder(tmp_path)
    x = torch.randn(len(ours.layers), 5, 32, generator=torch.Generator().manual_seed(0))
    features = theirs.encode(x)
    total = [torch.zeros(5, 32) for _ in ours.layers]
    for i, layer in enumerate(ours.layers):
        torch.testing.assert_close(layer.basis.encode(x[i]), features[i], atol=1e-6, rtol=1e-6)
        total[i] = total[i] + layer.basis.decode(features[i])
        if layer.skip is not None:
            total[i] = total[i] + layer.skip(x[i])
        for ahead in range(1, layer.basis.n_later + 1):
            total[i + ahead] = total[i + ahead] + layer.basis.decode_later(features[i], ahead)
    right = theirs.decode(features) if kind == "across layers" else theirs.decode(features, x)
    torch.testing.assert_close(torch.stack(total), right, atol=1e-5, rtol=1e-5)


if __name__ == "__main__":
    reference = {}
    for kind in MODELS:
        model = made(kind)
        graph = attribute(TOKENS, model, max_n_logits=4, batch_size=8)
        reference[f"{kind}.adjacency"] = graph.adjacency_matrix
        reference[f"{kind}.active"] = graph.active_features
        reference[f"{kind}.logits"] = model(TOKENS[None])[0, -1].detach()
    save_file({name: tensor.contiguous() for name, tensor in reference.items()}, REFERENCE)
