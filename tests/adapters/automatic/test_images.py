"""Vision transformers and encoders of sound: values, edits, gradients and attributions, against
plain torch hooks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from adapters import verify
from adapters.architecture import mean_at, tables
from adapters.inputs import sample_inputs
from bridge import TransformerBridge
from tests.adapters.mutations import declared_as
from tests.tiny_models import config_for, tiny_of

#: Classes; the layer of patches, the first block, its attention, the module of the first stream and
#: the head, if any.
CLASSES = {
    "ViTForImageClassification": (
        "embeddings.patch_embeddings",
        "layers.0",
        "attention",
        "embeddings",
        "classifier",
    ),
    "DeiTForImageClassification": (
        "embeddings.patch_embeddings",
        "layers.0",
        "attention",
        "embeddings",
        "classifier",
    ),
    "Dinov2WithRegistersForImageClassification": (
        "embeddings.patch_embeddings",
        "encoder.layer.0",
        "layer_scale1",
        "embeddings",
        None,
    ),
    "DINOv3ViTModel": (
        "embeddings.patch_embeddings",
        "model.layer.0",
        "layer_scale1",
        "embeddings",
        None,
    ),
    "SiglipForImageClassification": (
        "embeddings.patch_embedding",
        "encoder.layers.0",
        "self_attn",
        "embeddings",
        "classifier",
    ),
    "CLIPVisionModel": (
        "embeddings.patch_embedding",
        "encoder.layers.0",
        "self_attn",
        "pre_layrnorm",
        None,
    ),
    "CLIPForImageClassification": (
        "embeddings.patch_embedding",
        "encoder.layers.0",
        "self_attn",
        "pre_layrnorm",
        "classifier",
    ),
    "BeitForImageClassification": (
        "embeddings.patch_embeddings",
        "layers.0",
        None,
        "embeddings",
        "classifier",
    ),
    "IJepaForImageClassification": (
        "embeddings.patch_embeddings",
        "layers.0",
        "attention",
        "embeddings",
        "classifier",
    ),
}


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "bridge")


def made(name: str) -> tuple[Any, TransformerBridge, Tensor]:
    cls = getattr(transformers, name)
    model = tiny_of(cls, config_for(cls))
    return model, TransformerBridge(model), next(iter(sample_inputs(model).values()))


def ending(model: nn.Module, path: str) -> nn.Module:
    """The module whose path ends so, the shortest."""
    found = [name for name, _ in model.named_modules() if f".{name}".endswith(f".{path}")]
    assert found, (path, [name for name, _ in model.named_modules()])
    return model.get_submodule(min(found, key=len))


def first(output: Any) -> Tensor:
    found: Tensor = (
        output
        if isinstance(output, Tensor)
        else next(iter(output.values() if hasattr(output, "values") else output))
    )
    return found


def seen(model: nn.Module, path: str, run: Callable[[], Any]) -> Tensor:
    """What a module puts out, by a plain torch hook."""
    kept: list[Tensor] = []
    handle = ending(model, path).register_forward_hook(
        lambda module, args, output: kept.append(first(output))
    )
    try:
        run()
    finally:
        handle.remove()
    return kept[0]


def as_patches(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2) if x.ndim == 4 else x


@pytest.mark.parametrize("name", CLASSES)
def test_activations_edits_and_gradients_are_those_of_plain_hooks(name: str) -> None:
    model, bridge, images = made(name)
    patches, block, attention, stream, head = CLASSES[name]
    assert not bridge.offered().not_offered
    run = lambda: model(pixel_values=images)
    own = first(run())
    logits, cache = bridge.run_with_cache(pixel_values=images)
    assert torch.equal(first(logits), own)
    assert torch.equal(cache["hook_embed"], as_patches(seen(model, patches, run)))
    assert torch.equal(cache["hook_full_embed"], seen(model, stream, run))
    assert torch.equal(cache["blocks.0.hook_resid_post"], seen(model, block, run))
    if attention is not None:
        assert torch.equal(
            cache["blocks.0.hook_attn_out"], seen(model, f"{block}.{attention}", run)
        )
    if head is not None:
        _, ends = bridge.run_with_cache(pixel_values=images, names_filter="unembed.hook_out")
        assert torch.equal(ends["unembed.hook_out"], own)

    def other(x: Tensor) -> Tensor:  # of the patches alone
        return torch.cat([x[:, :-2], x[:, -2:].flip(1) * 0.5], 1)

    for hook, path in (
        ("hook_embed", patches),
        ("blocks.0.hook_resid_post", block),
        ("hook_full_embed", stream),
    ):

        def edit(module: object, args: object, output: Any) -> Any:
            x = first(output)
            grid = x.ndim == 4
            y = other(as_patches(x))
            y = y.transpose(1, 2).reshape(x.shape) if grid else y
            return y if isinstance(output, Tensor) else (y, *output[1:])

        handle = ending(model, path).register_forward_hook(edit)
        expected = first(run())
        handle.remove()
        edited = bridge.run_with_hooks(images, fwd_hooks=[(hook, lambda x, hook: other(x))])
        torch.testing.assert_close(first(edited), expected, rtol=1e-5, atol=1e-6)
        assert not torch.equal(expected, own), hook

    grads: dict[str, Tensor] = {}
    with bridge.hooks(
        bwd_hooks=[("blocks.0.hook_resid_post", lambda x, hook: grads.update(hook=x.clone()))]
    ):
        first(bridge(images)).pow(2).sum().backward()
    kept: list[Tensor] = []

    def keep(module: object, args: object, output: Any) -> None:
        first(output).register_hook(lambda grad: kept.append(grad.clone()))

    handle = ending(model, block).register_forward_hook(keep)
    first(run()).pow(2).sum().backward()
    handle.remove()
    torch.testing.assert_close(grads["hook"], kept[0], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    "name",
    ["ViTForImageClassification", "SiglipForImageClassification", "IJepaForImageClassification"],
)
def test_the_classifiers_head_is_the_unembedding(name: str) -> None:
    """Attributions sum to a class's logit, and the lens ends in the logits: at the class token, or
    in the mean.
    """
    model, bridge, images = made(name)
    pooled = bridge.architecture.readout.pooled
    assert pooled in ((0, 1), (0, None))
    own = model(pixel_values=images).logits
    _, cache = bridge.run_with_cache(pixel_values=images)
    terms = cache.decompose_resid(layer=-1, mlp_input=False)
    torch.testing.assert_close(
        terms.sum(0), cache["blocks.1.hook_resid_post"], rtol=1e-4, atol=1e-5
    )
    label = torch.ones(len(images), dtype=torch.long)
    attributions = (
        cache.logit_attrs(terms, label, norm_weights=True)[:, :, slice(*pooled)].mean(-1).sum(0)
    )
    bias = (
        model.classifier.bias[1] + model.classifier.weight[1] @ ending(model, final_norm(name)).bias
    )
    torch.testing.assert_close(attributions + bias, own[:, 1], rtol=1e-3, atol=1e-4)
    reading = bridge.lens(images)
    torch.testing.assert_close(
        reading.logits(-1)[:, slice(*pooled)].mean(1), own, rtol=1e-4, atol=1e-5
    )


def final_norm(name: str) -> str:
    return "post_layernorm" if name.startswith("Siglip") else "layernorm"


def test_patches_can_be_patched() -> None:
    """Each position of another image's stream, in turn, against a plain torch hook."""
    model, bridge, images = made("ViTForImageClassification")
    clean, corrupted = images[:1], images[1:2]
    _, cache = bridge.run_with_cache(pixel_values=clean)
    kept = cache["blocks.1.hook_resid_pre"]
    for position in (0, 1, kept.shape[1] - 1):

        def patch(x: Tensor, hook: object, position: int = position) -> Tensor:
            x = x.clone()
            x[:, position] = kept[:, position]
            return x

        def patched(
            module: object, args: tuple[Tensor, ...], position: int = position
        ) -> tuple[Tensor, ...]:
            return (patch(args[0], None, position), *args[1:])

        handle = ending(model, "layers.1").register_forward_pre_hook(patched)
        expected = model(pixel_values=corrupted).logits
        handle.remove()
        found = bridge.run_with_hooks(corrupted, fwd_hooks=[("blocks.1.hook_resid_pre", patch)])
        torch.testing.assert_close(found, expected)


def test_a_norm_of_one_vector_is_no_sum() -> None:
    _, bridge, images = made("BeitForImageClassification")
    _, cache = bridge.run_with_cache(pixel_values=images)
    assert cache["ln_final.hook_normalized"].shape == (len(images), 32)
    with pytest.raises(ValueError, match="its final norm reads one vector of each"):
        cache.logit_attrs(cache.decompose_resid(layer=-1), 1)


@pytest.mark.parametrize(
    ("change", "claim"),
    [
        ("layer", "hook_embed"),
        ("pooled", "unembed"),
    ],
)
def test_a_wrong_beginning_or_end_is_refused(change: str, claim: str) -> None:
    model, bridge, _ = made("ViTForImageClassification")
    right = bridge.architecture
    if change == "layer":
        embedding = replace(right.embedding, added=tables(patches="layers.0.mlp.fc2"))
        wrong = replace(right, stacks=(replace(right.stack, embedding=embedding),))
    else:
        wrong = replace(right, readout=replace(right.readout, pooled=(1, None)))
    with declared_as(wrong):
        report = verify(TransformerBridge(model))
    assert not report.passed
    assert any(claim in check.detail for check in report.checks if not check.passed), str(report)


def test_what_is_for_text_is_refused() -> None:
    _, bridge, images = made("ViTForImageClassification")
    for call in (lambda: bridge.to_tokens("a"), lambda: bridge.to_str_tokens("a")):
        with pytest.raises(
            ValueError, match="ViTForImageClassification reads pixel_values, not text"
        ):
            call()
    with pytest.raises(
        TypeError, match="ViTForImageClassification reads no tokens: its input is pixel_values"
    ):
        bridge("a")
    with pytest.raises(TypeError, match="ViTForImageClassification does not generate text"):
        bridge.generate("a")
    with pytest.raises(ValueError, match="loss"):
        bridge(images, return_type="loss")


@pytest.mark.parametrize(
    "name",
    ["HubertModel", "Wav2Vec2ForCTC", "ASTForAudioClassification", "WhisperForAudioClassification"],
)
def test_encoders_of_sound(name: str) -> None:
    model, bridge, sound = made(name)
    report = verify(bridge)
    assert report.passed, str(report)
    own = first(model(sound))
    blocks = bridge.architecture.stack.path
    handle = ending(model, f"{blocks}.0").register_forward_hook(
        lambda module, args, output: (
            output * 0.5 if isinstance(output, Tensor) else (output[0] * 0.5, *output[1:])
        )
    )
    expected = first(model(sound))
    handle.remove()
    edited = bridge.run_with_hooks(
        sound, fwd_hooks=[("blocks.0.hook_out", lambda x, hook: x * 0.5)]
    )
    torch.testing.assert_close(first(edited), expected)
    assert not torch.allclose(expected, own)


def test_readouts_pool() -> None:
    x = torch.arange(12.0).view(1, 4, 3)
    assert torch.equal(mean_at((1, None), x), x[:, 1:].mean(1))
    assert mean_at(None, x) is x
