"""Folders of transcoders in each format, beside their formulas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from bridge import TransformerBridge
from bridge.features import attribution_graph
from tests.tiny_models import tiny_model

N_LAYERS, D, N = 2, 32, 9
TOKENS = torch.randint(3, 50, (2, 6), generator=torch.Generator().manual_seed(0))
Layer = dict[str, Tensor]


def layers(across: bool = False) -> list[Layer]:
    """Random transcoders: what each is mathematically."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda *size: torch.randn(size, generator=generator) / 4
    return [
        {
            "enc": draw(D, N),
            "b_enc": draw(N),
            "dec": draw(N_LAYERS - layer if across else 1, N, D),  # [point, feature, d]
            "b_dec": draw(D),
            "threshold": draw(N).abs(),
            "affine": draw(D, D) / 4,
        }
        for layer in range(N_LAYERS)
    ]


def config(folder: Path, kind: str = "transcoder_set", more: str = "") -> None:
    text = (
        f"model_kind: {kind}\nfeature_input_hook: hook_resid_mid\n"
        f"feature_output_hook: hook_mlp_out\nscan: none\n{more}"
    )
    (folder / "config.yaml").write_text(text, encoding="utf-8")


def save(file: Path, tensors: dict[str, Tensor]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: x.contiguous() for name, x in tensors.items()}, file)


def relu_set(folder: Path, skip: bool = False, threshold: bool = False) -> list[Layer]:
    config(folder)
    for i, layer in enumerate(found := layers()):
        tensors = {"W_enc": layer["enc"].T, "b_enc": layer["b_enc"], "W_dec": layer["dec"][0]}
        tensors["b_dec"] = layer["b_dec"]
        if skip:
            tensors["W_skip"] = layer["affine"].T
        else:
            del layer["affine"]
        if threshold:
            tensors["activation_function.threshold"] = layer["threshold"][None]
        else:
            del layer["threshold"]
        save(folder / f"layer_{i}.safetensors", tensors)
    return found


def skip_set(folder: Path) -> list[Layer]:
    return relu_set(folder, skip=True, threshold=True)


def gemma_scope(folder: Path) -> list[Layer]:
    names = [f"layer_{i}/params.npz" for i in range(N_LAYERS)]
    config(folder, more=f"transcoders: {names}")
    for name, layer in zip(names, found := layers(), strict=True):
        del layer["affine"]
        tensors = {"W_enc": layer["enc"], "W_dec": layer["dec"][0]}
        tensors |= {key: layer[key] for key in ("b_enc", "b_dec", "threshold")}
        (folder / name).parent.mkdir()
        np.savez(folder / name, **{key: x.numpy() for key, x in tensors.items()})
    return found


def in_gemma_names(layer: Layer, W_dec: Tensor) -> dict[str, Tensor]:
    tensors = {"w_enc": layer["enc"], "w_dec": W_dec, "affine_skip_connection": layer["affine"]}
    return tensors | {key: layer[key] for key in ("b_enc", "b_dec", "threshold")}


def gemma_scope_2(folder: Path) -> list[Layer]:
    found = layers()
    for i, layer in enumerate(found):
        file = folder / f"layer_{i}_width_16k_l0_small_affine" / "params.safetensors"
        save(file, in_gemma_names(layer, layer["dec"][0]))
    return found


def across(folder: Path) -> list[Layer]:
    config(folder, "cross_layer_transcoder")
    for i, layer in enumerate(found := layers(across=True)):
        del layer["affine"]
        save(
            folder / f"W_enc_{i}.safetensors",
            {
                f"W_enc_{i}": layer["enc"].T,
                f"b_enc_{i}": layer["b_enc"],
                f"b_dec_{i}": layer["b_dec"],
                f"threshold_{i}": layer["threshold"],
            },
        )
        save(folder / f"W_dec_{i}.safetensors", {f"W_dec_{i}": layer["dec"].transpose(0, 1)})
    return found


def gemma_scope_2_across(folder: Path) -> list[Layer]:
    found = layers(across=True)
    for i, layer in enumerate(found):
        W_dec = torch.full((N, N_LAYERS, D), 7.0)  # what is before the own layer is not used
        W_dec[:, i:] = layer["dec"].transpose(0, 1)
        save(folder / f"params_layer_{i}.safetensors", in_gemma_names(layer, W_dec))
    return found


FORMATS: dict[str, Callable[[Path], list[Layer]]] = {
    "ReLU": relu_set,
    "skip paths and thresholds": skip_set,
    "Gemma Scope": gemma_scope,
    "Gemma Scope 2": gemma_scope_2,
    "across layers": across,
    "Gemma Scope 2, across layers": gemma_scope_2_across,
}


def by_hand(
    model: torch.nn.Module, found: list[Layer], of_norm: bool
) -> tuple[Tensor, list[Tensor]]:
    """The logits with each MLP replaced by its transcoders, and the features, by torch hooks."""
    features: list[Tensor] = []
    handles = []
    for i, layer in enumerate(found):
        block = model.model.layers[i]
        norm = block.post_attention_layernorm

        def on_norm(module, args, output, layer=layer):
            x = output if of_norm else args[0]
            before = x @ layer["enc"] + layer["b_enc"]
            threshold = layer.get("threshold", torch.zeros(N))
            features.append(torch.where(before > threshold, before, 0.0))
            layer["read"] = x

        def on_mlp(module, args, output, layer=layer, i=i):
            total = layer["b_dec"].clone()
            if "affine" in layer:
                total = total + layer["read"] @ layer["affine"]
            for before in range(i + 1):
                if i - before < len(found[before]["dec"]):
                    total = total + features[before] @ found[before]["dec"][i - before]
            return total

        handles += [norm.register_forward_hook(on_norm), block.mlp.register_forward_hook(on_mlp)]
    try:
        return model(TOKENS).logits, features
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("kind", list(FORMATS))
@torch.no_grad()
def test_each_format_is_its_formula(tmp_path, kind):
    found = FORMATS[kind](tmp_path)
    bridge = TransformerBridge(tiny_model("llama"))
    logits, features = by_hand(bridge.original_model, found, "Scope 2" in kind)
    plain = bridge(TOKENS)
    points = bridge.add_transcoders(tmp_path, error="drop")
    replaced, cache = bridge.run_with_cache(TOKENS, names_filter=points)
    torch.testing.assert_close(replaced, logits, atol=1e-5, rtol=1e-5)
    for point, right in zip(points, features, strict=True):
        torch.testing.assert_close(cache[point], right, atol=1e-5, rtol=1e-5)
    assert (replaced - plain).abs().max() > 1e-2


@pytest.mark.parametrize("kind", list(FORMATS))
def test_with_the_error_kept_the_model_is_the_same(tmp_path, kind):
    FORMATS[kind](tmp_path)
    bridge = TransformerBridge(tiny_model("llama"))
    plain = bridge(TOKENS)
    points = bridge.add_transcoders(tmp_path, "tc")
    assert [point.name for point in points] == [
        f"blocks.{i}.hook_mlp_out.tc" for i in range(N_LAYERS)
    ]
    assert torch.equal(bridge(TOKENS), plain)
    graph = attribution_graph(bridge, TOKENS[:1], [point.name for point in points], logits=2)
    assert len(graph.nodes) > 10


def test_files_on_the_hub(tmp_path, monkeypatch):
    """They are downloaded by repository, path and revision."""
    relu_set(tmp_path)
    asked = []

    def download(repository, path, revision=None):
        asked.append((repository, path, revision))
        return str(tmp_path / Path(path).name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    first, second = "hf://who/what/some/layer_0.safetensors?revision=v1", "layer_1.safetensors"
    config(tmp_path, more=f"transcoders: ['{first}', '{second}']")
    assert len(TransformerBridge(tiny_model("llama")).add_transcoders(tmp_path)) == N_LAYERS
    assert asked == [("who/what", "some/layer_0.safetensors", "v1")]


def test_the_dtype_of_the_model(tmp_path):
    relu_set(tmp_path)
    bridge = TransformerBridge(tiny_model("llama").to(torch.bfloat16))
    points = bridge.add_transcoders(tmp_path)
    _, cache = bridge.run_with_cache(TOKENS, names_filter=points)
    assert cache[points[0]].dtype == torch.bfloat16


def no_config(folder: Path) -> None:
    (folder / "config.yaml").unlink()


def other_kind(folder: Path) -> None:
    config(folder, "lorsa")


def no_hooks(folder: Path) -> None:
    (folder / "config.yaml").write_text("model_kind: transcoder_set", encoding="utf-8")


def other_tensors(folder: Path) -> None:
    save(folder / "layer_1.safetensors", {"W_enc": torch.zeros(N, D), "log_k": torch.zeros(1)})


def one_too_many(folder: Path) -> None:
    (folder / "layer_2.safetensors").write_bytes((folder / "layer_1.safetensors").read_bytes())


def a_gap(folder: Path) -> None:
    (folder / "layer_0.safetensors").rename(folder / "layer_2.safetensors")


def no_number(folder: Path) -> None:
    (folder / "layer_0.safetensors").rename(folder / "layer_first.safetensors")


def another_width(folder: Path) -> None:
    save(
        folder / "layer_1.safetensors",
        {
            "W_enc": torch.zeros(N, 8),
            "b_enc": torch.zeros(N),
            "W_dec": torch.zeros(N, 8),
            "b_dec": torch.zeros(8),
        },
    )


def another_point(folder: Path) -> None:
    text = (folder / "config.yaml").read_text(encoding="utf-8")
    (folder / "config.yaml").write_text(text.replace("resid_mid", "nonsense"), encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (no_config, "has no config.yaml"),
        (other_kind, "is 'lorsa'; it is one of transcoder_set"),
        (no_hooks, "lacks feature_input_hook, feature_output_hook"),
        (other_tensors, "has the tensors W_enc, log_k; a transcoder has"),
        (one_too_many, "transcoders of 3 layers, and the model 2"),
        (a_gap, "needs one file of layer 0, and has none"),
        (no_number, "layer_first.safetensors does not say the number of its layer"),
        (another_width, "layer 1 .* 8 numbers"),
        (another_point, "hook_nonsense"),
    ],
)
def test_what_is_refused_leaves_everything_as_it_was(tmp_path, change, message):
    relu_set(tmp_path)
    change(tmp_path)
    bridge = TransformerBridge(tiny_model("llama"))
    before = list(bridge.hook_dict)
    with pytest.raises((ValueError, KeyError), match=message):
        bridge.add_transcoders(tmp_path)
    assert list(bridge.hook_dict) == before


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="is no folder"):
        TransformerBridge(tiny_model("llama")).add_transcoders(tmp_path / "nothing")
