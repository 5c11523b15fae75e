"""The residual stream of hybrids: what a mixer writes is a component like what attention writes."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor

from bridge import TransformerBridge
from bridge.analysis.logit_lens import head_contributions, logit_lens
from bridge.cache import ActivationCache
from bridge.patching import get_act_patch_attn_out, get_act_patch_mixer_out
from tests.tiny_models import tiny_model

TOKENS = torch.randint(3, 99, (2, 9), generator=torch.Generator().manual_seed(0))
Run = tuple[TransformerBridge, Tensor, ActivationCache]
LAYERS = {
    "jamba": ["mixer+mlp", "attn+mlp"],
    "bamba": ["mixer+mlp", "attn+mlp"],
    "qwen3_next": ["mixer+mlp", "attn+mlp"],
    "falcon_h1": ["mixer+attn+mlp", "mixer+attn+mlp"],
    "mamba": ["mixer", "mixer"],
}


@pytest.fixture(scope="module", params=list(LAYERS))
def run(request: pytest.FixtureRequest) -> Run:
    """A hybrid in float64, a run of it, and what it left."""
    fields = (
        {"residual_in_fp32": False} if request.param == "mamba" else {}
    )  # its stream would be in float32
    model = tiny_model(request.param, **fields)
    model.set_experts_implementation("eager")  # the others know no float64
    bridge = TransformerBridge(model).to(torch.float64)
    with torch.no_grad():
        return bridge, *bridge.run_with_cache(TOKENS)


def kinds(bridge: TransformerBridge) -> list[str]:
    return LAYERS[bridge.original_model.config.model_type]


def test_the_kinds_of_layers(run: Run) -> None:
    bridge, _, _ = run
    assert bridge.layer_types == bridge.layer_types() == kinds(bridge)
    for part in ("attn", "mixer", "mlp", "cross_attn"):
        found = bridge.blocks_with(part)
        assert [index for index, _ in found] == [
            i for i, kind in enumerate(kinds(bridge)) if part in kind.split("+")
        ]
        assert all(block.name == f"blocks.{index}" for index, block in found)
        for index, _ in found:
            assert f"blocks.{index}.hook_{part}_out" in bridge.hook_dict


def test_a_part_that_no_block_has_is_refused(run: Run) -> None:
    bridge, _, _ = run
    with pytest.raises(ValueError, match="there are attn, cross_attn, mixer, mlp"):
        bridge.blocks_with("atn")
    with pytest.raises(ValueError, match="State spaces and linear attention are mixers"):
        bridge.blocks_with("ssm")


def test_the_parts_sum_to_the_stream(run: Run) -> None:
    """Against what enters the model's blocks, seen by plain torch hooks."""
    bridge, _, cache = run
    own: list[Tensor] = []
    handles = [
        bridge.original_model.get_submodule(path).register_forward_pre_hook(
            lambda module, args: own.append(args[0])
        )
        for path in bridge.block_paths
    ]
    with torch.no_grad():
        bridge.original_model(TOKENS)
    for handle in handles:
        handle.remove()
    for layer in range(bridge.cfg.n_layers):
        stack, labels = cache.decompose_resid(layer, return_labels=True)
        written = [f"{i}_{part}_out" for i in range(layer) for part in kinds(bridge)[i].split("+")]
        assert labels == ["embed", *written]
        torch.testing.assert_close(stack.sum(0), own[layer], rtol=0, atol=1e-12)
    end = cache[f"blocks.{bridge.cfg.n_layers - 1}.hook_resid_post"]
    torch.testing.assert_close(cache.decompose_resid().sum(0), end, rtol=0, atol=1e-12)


def test_heads_and_mixers_sum_to_the_stream(run: Run) -> None:
    bridge, _, cache = run
    stack, labels = cache.get_full_resid_decomposition(expand_neurons=False, return_labels=True)
    mixers = [f"{i}_mixer_out" for i, kind in enumerate(kinds(bridge)) if "mixer" in kind]
    heads = [f"L{i}H{head}" for i, _ in bridge.blocks_with("attn") for head in range(4)]
    assert labels[: len(heads) + len(mixers)] == heads + mixers
    end = cache[f"blocks.{bridge.cfg.n_layers - 1}.hook_resid_post"]
    torch.testing.assert_close(stack.sum(0), end, rtol=0, atol=1e-12)


def test_one_kind_of_component(run: Run) -> None:
    bridge, _, cache = run
    mixers = cache.decompose_resid(mode="mixer", incl_embeds=False)
    assert len(mixers) == len(bridge.blocks_with("mixer"))
    torch.testing.assert_close(mixers[0], cache["blocks.0.hook_mixer_out"], rtol=0, atol=0)


def test_the_attributions_sum_to_the_logits(run: Run) -> None:
    """Direct logit attribution, against the model's own logits."""
    bridge, logits, cache = run
    tokens = torch.tensor([5, 6])
    terms = cache.logit_attrs(cache.decompose_resid(pos_slice=-1), tokens, pos_slice=-1)
    torch.testing.assert_close(terms.sum(0), logits[[0, 1], -1, tokens].double(), rtol=0, atol=1e-6)
    assert len(terms) == 1 + sum(kind.count("+") + 1 for kind in kinds(bridge))


def test_the_logit_lens_ends_in_the_logits(run: Run) -> None:
    bridge, logits, _ = run
    with torch.no_grad():
        lens = logit_lens(bridge, TOKENS)
    torch.testing.assert_close(lens[-1], logits, rtol=0, atol=1e-6)
    assert not torch.allclose(lens[1], logits, atol=1e-3)


def test_a_run_from_a_layer_on(run: Run) -> None:
    bridge, logits, cache = run
    for layer in range(bridge.cfg.n_layers):
        with torch.no_grad():
            again = bridge(cache["resid_pre", layer], start_at_layer=layer)
        torch.testing.assert_close(again, logits, rtol=0, atol=1e-6)


def test_heads_contribute_where_there_is_attention(run: Run) -> None:
    bridge, _, _ = run
    if not bridge.blocks_with("attn"):
        return
    one, other = torch.tensor([5, 6]), torch.tensor([7, 8])
    with torch.no_grad():
        found = head_contributions(bridge, TOKENS, one, other)
    assert found.shape == (2, bridge.cfg.n_layers, 4)
    layers = [index for index, _ in bridge.blocks_with("attn")]
    assert found.abs().amax((0, 2)).nonzero().flatten().tolist() == layers


def metric(logits: Tensor) -> Tensor:
    return logits[:, -1, 5].sum() - logits[:, -1, 6].sum()


def patched_at_4(clean: Tensor, module: torch.nn.Module, args: object, output: Tensor) -> Tensor:
    return torch.cat([output[:, :4], clean[:, None], output[:, 5:]], 1)


def test_a_mixer_is_patched_as_attention_is(run: Run) -> None:
    """Against the same edit with a plain torch hook on the mixer's module."""
    bridge, _, cache = run
    corrupted = TOKENS.flip(0)
    with torch.no_grad():
        found = get_act_patch_mixer_out(bridge, corrupted, cache, metric, verbose=False)
    assert found.shape == (bridge.cfg.n_layers, TOKENS.shape[1])
    for layer, kind in enumerate(kinds(bridge)):
        if "mixer" not in kind:
            assert all(math.isnan(x) for x in found[layer].tolist())
            continue
        site = bridge.hook_dict[f"blocks.{layer}.hook_mixer_out"].point.site
        clean = (
            cache[f"blocks.{layer}.hook_mixer_out"][:, 4]
            / bridge.architecture.step_at(layer, "mixer").last_factor
        )
        patch = functools.partial(patched_at_4, clean)
        handle = bridge.original_model.get_submodule(site.path).register_forward_hook(patch)
        try:
            with torch.no_grad():
                expected = metric(bridge.original_model(corrupted).logits)
        finally:
            handle.remove()
        assert float(found[layer, 4]) == pytest.approx(float(expected), abs=1e-5)


def test_attention_is_patched_where_it_is(run: Run) -> None:
    bridge, _, cache = run
    if not bridge.blocks_with("attn"):
        with pytest.raises(KeyError, match="hook_attn_out"):
            get_act_patch_attn_out(bridge, TOKENS, cache, metric, verbose=False)
        return
    with torch.no_grad():
        found = get_act_patch_attn_out(bridge, TOKENS.flip(0), cache, metric, verbose=False)
    layers = [index for index, _ in bridge.blocks_with("attn")]
    assert (~found.isnan()).all(1).nonzero().flatten().tolist() == layers


def test_a_stack_of_weights_of_some_layers_is_refused(run: Run) -> None:
    bridge, _, _ = run
    layers = bridge.blocks_with("attn")
    if 0 < len(layers) < bridge.cfg.n_layers:
        with pytest.raises(
            AttributeError,
            match=r"layers 0 of .* have no attn, and so no W_Q: go through the other layers",
        ):
            _ = bridge.W_Q
        assert layers[0][1].attn.W_Q.shape == (4, 32, 8)


def test_a_stream_that_is_not_wholly_seen_is_not_taken_apart() -> None:
    """Llama 4's mixture is left out: what the others write would be passed off as the stream."""
    bridge = TransformerBridge(tiny_model("llama4_text"))
    if "blocks.0.hook_mlp_out" in bridge.hook_dict:
        pytest.skip("its mixture is offered now")
    with torch.no_grad():
        _, cache = bridge.run_with_cache(TOKENS)
    with pytest.raises(
        ValueError, match=r"has no blocks\.0\.hook_mlp_out: without its contribution"
    ):
        cache.decompose_resid()


def test_two_mlps_in_a_block() -> None:
    bridge = TransformerBridge(tiny_model("granitemoehybrid"))
    with torch.no_grad():
        _, cache = bridge.run_with_cache(TOKENS)
    stack, labels = cache.decompose_resid(return_labels=True)
    assert labels[1:4] == ["0_mixer_out", "0_mlp_out", "0_mlp_2_out"]
    torch.testing.assert_close(stack.sum(0), cache["blocks.1.hook_resid_post"])
    with pytest.raises(ValueError, match="mlp_2 as well as mlp in a block"):
        cache.get_full_resid_decomposition()
