"""Attentions inside of parts that are not known in full: their scores and patterns, read and
edited.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.diffllama import modeling_diffllama

from adapters import verify
from bridge import TransformerBridge
from tests.tiny_models import tiny_model

TOKENS = torch.tensor([[5, 9, 2, 7, 11, 3], [1, 3, 8, 4, 6, 2]])
#: Short enough that no token is sent to another expert of the last layer.
STEP = 1e-2


def wrapped(kind: str, implementation: str = "sdpa") -> tuple[PreTrainedModel, TransformerBridge]:
    model = tiny_model(kind).eval()
    model.set_attn_implementation(implementation)
    return model, TransformerBridge(model)


def eager_with(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """DiffLlama's eager attention, written down again, with another pattern."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Any:
        keys, values = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
        scores = query @ keys.transpose(-1, -2) * options["scaling"]
        scores = scores + torch.full(scores.shape[-2:], -torch.inf).triu(1)
        pattern = change(scores.softmax(-1))
        return (pattern @ values).transpose(1, 2), pattern

    return attend


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_differential_pattern_is_edited_for_both_halves_of_the_values(
    layer: int, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, bridge = wrapped("diffllama", implementation)
    name = f"blocks.{layer}.attn.hook_pattern"

    def change(pattern: Tensor) -> Tensor:
        pattern = pattern.clone()
        pattern[:, 1, 3:] *= torch.arange(6) / 5
        return pattern

    with torch.no_grad():
        plain = model(TOKENS).logits
        edited = bridge.run_with_hooks(TOKENS, fwd_hooks=[(name, lambda x, hook: change(x))])
        module = model.model.layers[layer].self_attn
        own = modeling_diffllama.eager_attention_forward
        other = eager_with(change)
        model.set_attn_implementation("eager")
        monkeypatch.setattr(
            modeling_diffllama,
            "eager_attention_forward",
            lambda self, *args, **options: (other if self is module else own)(
                self, *args, **options
            ),
        )
        expected = model(TOKENS).logits
    torch.testing.assert_close(edited, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(edited, plain, atol=1e-3)


@pytest.mark.parametrize("point", ["hook_pattern", "hook_attn_scores", "hook_rot_q", "hook_rot_k"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "kind", ["diffllama", "jetmoe", "zaya", "inkling_text", "gpt_neox_japanese"]
)
def test_gradients_are_slopes_of_edits(kind: str, implementation: str, point: str) -> None:
    _, bridge = wrapped(kind, implementation)
    name = [name for name in bridge.hook_dict if name.endswith(f"attn.{point}")][-1]
    seen: dict[str, Tensor] = {}
    direction = torch.empty(0)

    def loss(step: float) -> Tensor:
        def move(x: Tensor, hook: Any) -> Tensor:
            nonlocal direction
            seen["value"] = x.detach()
            direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).to(x)
            return torch.where(x.isfinite(), x + step * direction, x)

        return (
            bridge.run_with_hooks(TOKENS, fwd_hooks=[(name, move)])
            .log_softmax(-1)[..., 7]
            .double()
            .sum()
        )

    def keep(grad: Tensor, hook: Any) -> None:
        seen["grad"] = grad

    with bridge.hooks(bwd_hooks=[(name, keep)]):
        bridge(TOKENS).log_softmax(-1)[..., 7].double().sum().backward()
    with torch.no_grad():
        slope = (loss(STEP) - loss(-STEP)) / (2 * STEP)
    along = (seen["grad"].double() * direction.double())[seen["value"].isfinite()].sum()
    torch.testing.assert_close(along, slope, rtol=3e-2, atol=5e-5)
    assert float(along.abs()) > 3e-4


@pytest.mark.parametrize(
    "kind", ["diffllama", "jetmoe", "zaya", "inkling_text", "zamba", "zamba2", "deepseek_v4"]
)
def test_patterns_are_those_that_the_model_returns(kind: str) -> None:
    model, bridge = wrapped(kind, "eager")
    with torch.no_grad():
        _, cache = bridge.run_with_cache(TOKENS)
        returned = [x for x in model(TOKENS, output_attentions=True).attentions if x is not None]
    names = [name for name in bridge.hook_dict if name.endswith("attn.hook_pattern")]
    assert len(names) == len(returned)
    for name, expected in zip(names, returned, strict=True):
        torch.testing.assert_close(cache[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["zamba", "zamba2"])
def test_an_attention_before_a_mixer_is_known_in_full(kind: str) -> None:
    model, bridge = wrapped(kind)
    layer = next(name.split(".")[1] for name in bridge.hook_dict if name.endswith("attn.hook_z"))
    start = f"blocks.{layer}.attn."
    with torch.no_grad():
        _, cache = bridge.run_with_cache(TOKENS)
        mixed = cache[f"{start}hook_pattern"] @ cache[f"{start}hook_v"].transpose(1, 2)
        torch.testing.assert_close(
            cache[f"{start}hook_z"], mixed.transpose(1, 2), rtol=1e-5, atol=1e-6
        )
        z = bridge.run_with_hooks(TOKENS, fwd_hooks=[(f"{start}hook_z", lambda x, hook: x * 0)])
        pattern = bridge.run_with_hooks(
            TOKENS, fwd_hooks=[(f"{start}hook_pattern", lambda x, hook: x * 0)]
        )
        torch.testing.assert_close(z, pattern, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(z, model(TOKENS).logits, atol=1e-3)
    assert f"blocks.{layer}.hook_attn_out" in bridge.offered().not_offered and verify(bridge).passed


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("letter", ["q", "k"])
@torch.no_grad()
def test_rotated_queries_and_keys_are_edited_for_both_halves_whoever_watches(
    implementation: str, letter: str
) -> None:
    _, bridge = wrapped("diffllama", implementation)
    for layer in (0, 1):
        place = f"blocks.{layer}.attn.hook_"
        double: Callable[[Tensor, Any], Tensor] = lambda x, hook: x * 2
        right = bridge.run_with_hooks(
            TOKENS, fwd_hooks=[(f"{place}{letter}", double)]
        )  # a rotation is linear
        rotated = (f"{place}rot_{letter}", double)
        watched = [rotated, (f"{place}pattern", lambda pattern, hook: None)]
        for hooks in ([rotated], watched):
            torch.testing.assert_close(
                bridge.run_with_hooks(TOKENS, fwd_hooks=hooks), right, atol=2e-6, rtol=0
            )
