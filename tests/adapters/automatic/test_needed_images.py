"""Models that do not run on text alone: their language part is found, and proved, with images that
are made up.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adapters import verify
from adapters.inputs import sample_inputs, split, text_places
from bridge import TransformerBridge
from tests.tiny_models import tiny_model

#: Model types, the block that is edited, and the name of what leaves it.
TYPES = {
    "blip": ("text_decoder.bert.encoder.layer.0", "blocks.0.hook_out"),
    "blip-2": ("language_model.model.decoder.layers.0", "blocks.0.hook_out"),
    "instructblip": ("language_model.model.decoder.layers.0", "blocks.0.hook_out"),
    "instructblipvideo": ("language_model.model.decoder.layers.0", "blocks.0.hook_out"),
    "pix2struct": ("decoder.layer.0", "decoder.0.hook_out"),
    "pp_formulanet": ("model.decoder.layers.0", "blocks.0.hook_out"),
    "udop": ("decoder.block.0", "decoder.0.hook_out"),
    "vision-encoder-decoder": ("decoder.bert.encoder.layer.0", "decoder.0.hook_out"),
}
#: With an image among the tokens, behind an encoder, and without places for it in the text.
QUICK = ("blip", "blip-2", "pp_formulanet", "udop")


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "bridge")


def is_whole(model_type: str) -> None:
    """Offered in full and proved; runs are the model's own, and an edit is that by a plain torch
    hook.
    """
    model: Any = tiny_model(model_type, "image_text")
    bridge, arguments = TransformerBridge(model), sample_inputs(model)
    given, more = split(model, arguments)
    assert not bridge.offered().not_offered
    report = verify(bridge)
    assert report.passed, str(report)
    path, name = TYPES[model_type]

    def halved(module: object, args: object, output: Any) -> Any:
        return output * 0.5 if isinstance(output, Tensor) else (output[0] * 0.5, *output[1:])

    with torch.no_grad():
        own = model(**arguments).logits
        assert torch.equal(bridge(given, **more), own)
        _, cache = bridge.run_with_cache(
            given, names_filter=lambda name: name.endswith("hook_pattern"), **more
        )
        edited = bridge.run_with_hooks(given, fwd_hooks=[(name, lambda x, hook: x * 0.5)], **more)
        handle = model.get_submodule(path).register_forward_hook(halved)
        try:
            expected = model(**arguments).logits
        finally:
            handle.remove()
    torch.testing.assert_close(edited, expected)
    assert not torch.allclose(edited, own)
    assert all(x.isfinite().all() for x in cache.values()) and len(cache) > 1


@pytest.mark.parametrize("model_type", QUICK)
def test_a_model_that_needs_an_image(model_type: str) -> None:
    is_whole(model_type)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted({*TYPES} - {*QUICK}))
def test_every_model_that_needs_an_image(model_type: str) -> None:
    is_whole(model_type)


def test_what_a_model_needs_is_asked_for_by_name() -> None:
    bridge = TransformerBridge(tiny_model("instructblip", "image_text"))
    tokens = torch.full((1, 4), 7)
    with pytest.raises(
        ValueError,
        match=r"InstructBlipForConditionalGeneration needs pixel_values in addition to its tokens",
    ):
        bridge(tokens)
    with pytest.raises(
        ValueError,
        match=r"needs qformer_input_ids in addition to its tokens: bridge\(tokens, qformer_input_",
    ):
        bridge(tokens, pixel_values=torch.zeros(1, 3, 28, 28))


def test_generation_from_an_image_is_the_models_own() -> None:
    model: Any = tiny_model("blip-2", "image_text")
    bridge, given = TransformerBridge(model), sample_inputs(model)
    options = {"max_new_tokens": 4, "do_sample": False, "pixel_values": given["pixel_values"]}
    own = model.generate(input_ids=given["input_ids"], **options)
    assert torch.equal(bridge.generate(given["input_ids"], **options, verbose=False), own)
    with bridge.hooks(fwd_hooks=[("blocks.1.hook_resid_pre", lambda x, hook: x.flip(-1) * 2)]):
        edited = bridge.generate(given["input_ids"], **options, verbose=False)
    assert not torch.equal(edited, own)
    with pytest.raises(
        ValueError, match="return_cache is not available for Blip2ForConditionalGeneration"
    ):
        bridge.generate(given["input_ids"], **options, verbose=False, return_cache=True)


def test_positions_are_those_of_the_text() -> None:
    """Where images stand is seen from a run with other images, not from the tokens."""
    model = tiny_model("blip-2", "image_text")
    given = sample_inputs(model)
    first = model.get_submodule("language_model.model.decoder.layers.0")
    _, cache = TransformerBridge(model).run_with_cache(
        given["input_ids"],
        names_filter="blocks.0.hook_resid_pre",
        pixel_values=given["pixel_values"],
    )
    places = text_places(model, given, first, cache["blocks.0.hook_resid_pre"])
    assert places is not None and torch.equal(places, given["input_ids"] != 5)


def test_padding_before_an_image_is_left_to_the_model() -> None:
    model = tiny_model("instructblip", "image_text")
    bridge, given = TransformerBridge(model), sample_inputs(model)
    tokens = torch.cat([torch.zeros(3, 2, dtype=torch.long), given.pop("input_ids")], 1)
    mask = torch.ones_like(tokens)
    mask[:, :2] = 0
    with torch.no_grad():
        own = model(input_ids=tokens, attention_mask=mask, **given).logits
        assert torch.equal(bridge(tokens, attention_mask=mask, **given), own)


class ByName(nn.Module):
    """A model that gives its first block the stream by name, behind a mask."""

    class Block(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x * mask[..., None]

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(9, 4), ByName.Block()

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
        stream = torch.cat(
            [self.embed(input_ids[:, :1]), pixel_values, self.embed(input_ids[:, 1:])], 1
        )
        made: Tensor = self.block(mask=torch.ones(stream.shape[:2]), x=stream)
        return made


@torch.no_grad()
def test_where_images_are_in_a_stream_that_is_given_by_name() -> None:
    model, given = (
        ByName(),
        {"input_ids": torch.tensor([[1, 2, 3]]), "pixel_values": torch.randn(1, 2, 4)},
    )
    places = text_places(model, given, model.block, model(**given))
    assert places is not None and places.tolist() == [[True, False, False, True, True]]


def test_positions_without_parameters_that_the_model_writes_over_are_copied() -> None:
    """Kosmos-2.5 adds its segments to what its sinusoidal positions returned, in place."""
    model: Any = tiny_model("kosmos-2.5", "image_text")
    bridge = TransformerBridge(model)
    tokens, more = split(model, sample_inputs(model))
    returned: list[Tensor] = []

    def keep(module: object, args: object, output: Tensor) -> None:
        returned.append(output.clone())

    with torch.no_grad():
        _, cache = bridge.run_with_cache(tokens, **more)
        handle = model.text_model.model.embed_positions.register_forward_hook(keep)
        model(tokens, **more)
        handle.remove()
    assert torch.equal(cache["hook_pos_embed"], returned[0])
