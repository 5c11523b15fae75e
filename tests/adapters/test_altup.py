"""Gemma 3n: several streams of which a block works on the first (AltUp), Laurel, sparse neurons,
shared keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma3nConfig, Gemma3nForConditionalGeneration, Gemma3nTextConfig
from transformers.models.gemma3n import modeling_gemma3n

from adapters import verify
from adapters.registry import UndeclaredOptionError, declaration_for
from bridge import TransformerBridge
from tests.adapters.mutations import mutations, tried
from tests.tiny_models import add_noise, tiny_config, tiny_model

TOKENS = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
#: As the E2B and E4B models are released: sparse layers first, keys and values of the last layers
#: shared, and, in the former, MLPs of two widths. Windows are shorter than the text.
RELEASED: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.8, 0.8, 0.0, 0.0, 0.0, 0.0],
    "sliding_window": 4,
}
WIDTHS = {"intermediate_size": [48, 48, 48, 64, 64, 64]}


def made(**options: Any) -> tuple[Any, TransformerBridge]:
    model = tiny_model("gemma3n_text", **options)
    return model, TransformerBridge(model)


@pytest.mark.parametrize("options", [{}, RELEASED, RELEASED | WIDTHS], ids=["usual", "E4B", "E2B"])
def test_it_is_declared_and_proved(options: dict[str, Any]) -> None:
    model, bridge = made(**options)
    report = verify(bridge)
    assert report.passed and not bridge.offered().inferred and not bridge.offered().not_offered, (
        str(report)
    )
    with torch.no_grad():
        own = model(TOKENS, output_hidden_states=True, output_attentions=True)
        logits, cache = bridge.run_with_cache(TOKENS)
    assert torch.equal(logits, own.logits)
    for layer in range(bridge.cfg.n_layers):
        assert torch.equal(cache["resid_pre", layer], own.hidden_states[layer].movedim(0, 2))
    assert "E2B" not in options or cache["blocks.3.mlp.hook_post"].shape[-1] == 64


def test_with_images_and_sound_it_is_the_same_in_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The towers of images and sound need other packages, and do not run with text alone."""
    text = tiny_config("gemma3n_text", **RELEASED)
    real = modeling_gemma3n.AutoModel.from_config

    def made_of_text(config: Any, **more: Any) -> nn.Module:
        return real(config, **more) if isinstance(config, Gemma3nTextConfig) else nn.Identity()

    monkeypatch.setattr(modeling_gemma3n.AutoModel, "from_config", made_of_text)
    torch.manual_seed(0)
    model = Gemma3nForConditionalGeneration(Gemma3nConfig(text_config=text.to_dict())).eval()
    add_noise(model.model.language_model)
    bridge = TransformerBridge(model)
    report = verify(bridge)
    assert report.passed and not bridge.offered().not_offered, str(report)


def changed(module: Any, name: str, other: Callable[..., Tensor]) -> Callable[[], None]:
    """Puts a function in the place of a method, which is given what the method returns."""
    own = getattr(module, name)
    setattr(module, name, lambda *args: other(own, *args))
    return lambda: delattr(module, name)


@torch.no_grad()
def test_streams_are_what_altup_makes_of_them() -> None:
    """By the model's own functions: what is shown is what enters and leaves them."""
    model, bridge = made(**RELEASED)
    shown = (
        "hook_resid_pre",
        "hook_resid_post",
        "hook_attn_keep",
        "hook_resid_mid_2",
        "hook_mlp_2_out",
    )
    _, cache = bridge.run_with_cache(TOKENS, names_filter=lambda name: name.endswith(shown))
    for layer in range(6):
        altup = model.model.layers[layer].altup
        streams = cache["resid_pre", layer].movedim(2, 0)
        predicted = altup.predict(streams)
        kept = torch.einsum(
            "bpjd,bpji->ibpd", cache["resid_pre", layer], cache[f"blocks.{layer}.hook_attn_keep"]
        )
        torch.testing.assert_close(kept, predicted)
        behind = altup.correct(predicted, cache[f"blocks.{layer}.hook_resid_mid_2"])
        behind[1:] += cache[f"blocks.{layer}.hook_mlp_2_out"]
        torch.testing.assert_close(cache["resid_post", layer], behind.movedim(0, 2))


@torch.no_grad()
def test_edits_are_those_of_the_model_s_own_code() -> None:
    model, bridge = made(**RELEASED)
    plain, layer = model(TOKENS).logits, model.model.layers[1]

    def half(x: Tensor, hook: object) -> Tensor:
        return x * 0.5

    def third_stream_alone(x: Tensor, hook: object) -> Tensor:
        x[:, :, 2] *= 0.3
        return x

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        streams = args[0].clone()
        streams[2] *= 0.3
        return (streams, *args[1:])

    def compare(name: str, edit: Callable[..., Tensor], undo: Callable[[], None]) -> None:
        expected = model(TOKENS).logits
        undo()
        torch.testing.assert_close(
            bridge.run_with_hooks(TOKENS, fwd_hooks=[(name, edit)]), expected
        )
        assert not torch.allclose(expected, plain, atol=1e-3)

    compare(
        "blocks.1.hook_resid_pre",
        third_stream_alone,
        layer.register_forward_pre_hook(before).remove,
    )
    # How much of each stream goes to each, and of what the block makes.
    undo = changed(layer.altup.prediction_coefs, "forward", lambda own, x: own(x) * 2)
    compare("blocks.1.hook_attn_keep", lambda x, hook: 2 * x - torch.eye(4), undo)
    undo = changed(layer.altup.correction_coefs, "forward", lambda own, x: own(x) * 2)
    compare("blocks.1.hook_mlp_2_write", lambda x, hook: 2 * x - 1, undo)
    # What AltUp corrects its predictions by: the first stream behind attention, Laurel and MLP.
    undo = changed(
        layer.altup,
        "correct",
        lambda own, predictions, activated: own(predictions, activated * 0.5),
    )
    compare("blocks.1.hook_resid_mid_2", half, undo)
    undo = changed(layer.laurel, "forward", lambda own, x: own(x) * 0.5)
    compare("blocks.1.hook_mlp_3_out", half, undo)
    undo = changed(layer.mlp, "_gaussian_topk", lambda own, x: own(x * 0.5))
    compare("blocks.1.mlp.hook_pre", half, undo)
    undo = changed(layer.per_layer_projection, "forward", lambda own, x: own(x * 0.5))
    compare("blocks.1.mlp_2.hook_post", half, undo)


@torch.no_grad()
def test_an_edit_of_shared_keys_is_seen_by_all_readers() -> None:
    _, bridge = made(**RELEASED)
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(6)]
    _, cache = bridge.run_with_cache(TOKENS)
    assert torch.equal(cache["blocks.4.attn.hook_k"], cache["blocks.3.attn.hook_k"])
    assert torch.equal(cache["blocks.5.attn.hook_v"], cache["blocks.2.attn.hook_v"])
    with bridge.hooks(fwd_hooks=[("blocks.2.attn.hook_k", lambda x, hook: x.roll(1, 1))]):
        _, edited = bridge.run_with_cache(TOKENS, names_filter=names)
    assert [torch.equal(edited[name], cache[name]) for name in names[:3]] == [True, True, False]
    assert not torch.equal(edited[names[5]], cache[names[5]])


def test_generation_is_the_model_s_own() -> None:
    model, bridge = made(**RELEASED)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    expected = model.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), **options)
    assert torch.equal(bridge.generate(TOKENS, verbose=False, **options), expected)


#: Words of the changes that are tried.
WRONG = (
    "residual_transform",
    "keys of the block before",
    "makes its own keys",
    "stream_view",
    "v_norm left",
    "factor",
    "pre norm left out",
)


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_claim_is_refused(words: str) -> None:
    model = tiny_model("gemma3n_text", **RELEASED)
    found = [each for each in mutations(model) if words in each.name]
    assert found
    for mutation in found[:3]:
        report = tried(model, mutation)
        assert isinstance(report, Exception) or not report.passed, mutation.name


def test_what_there_is_not_is_refused_by_name() -> None:
    _, bridge = made()
    _, cache = bridge.run_with_cache(TOKENS)
    for refused in (cache.decompose_resid, cache.accumulated_resid):
        with pytest.raises(
            ValueError,
            match=r"has 4 residual streams, hook_resid_pre of shape \[batch, pos, n_streams",
        ):
            refused()
    with pytest.raises(
        ValueError, match="cannot start or stop at a layer: its blocks carry 4 streams"
    ):
        bridge(TOKENS, stop_at_layer=1)
    with pytest.raises(ValueError, match="does not do with embeddings what it does with tokens"):
        bridge(cache["hook_embed"])
    with pytest.raises(
        UndeclaredOptionError, match=r"is for altup_active_idx=0, and this one has 1"
    ):
        declaration_for(tiny_model("gemma3n_text", altup_active_idx=1))
