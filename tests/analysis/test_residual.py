"""Decompositions sum to the residual stream in every family; what they do with slices, gaps and odd
models.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor, nn

from adapters.linear import weight_in_out
from bridge import ActivationCache, TransformerBridge
from bridge.analysis.analysis import MissingActivationsError
from bridge.analysis.decomposition import stream_at
from bridge.analysis.logit_lens import head_contributions
from bridge.legacy import HookedTransformer
from tests.analysis.models import CASES, EXPERTS, bridge_of

GEMMAS = ["gemma2", "gemma3"]
TOKENS = torch.randint(1, 61, (2, 7), generator=torch.Generator().manual_seed(3))


@cache
def run(case: str) -> ActivationCache:
    return bridge_of(case).run_with_cache(TOKENS)[1]


def close(ours: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(
        ours, right.to(ours.dtype), atol=2e-5 * max(1.0, float(right.abs().max())), rtol=1e-4
    )


def layers(c: ActivationCache) -> list[int]:
    return list(range(c.model.cfg.n_layers + 1))


@pytest.mark.parametrize("case", CASES)
def test_outputs_sum_to_the_stream(case: str) -> None:
    c = run(case)
    for layer in layers(c):
        close(c.decompose_resid(layer).sum(0), stream_at(c, layer))
    if not c.model.cfg.parallel_attn_mlp and not c.model.cfg.attn_only:
        close(c.decompose_resid(1, mlp_input=True).sum(0), c["resid_mid", 1])


@pytest.mark.parametrize("expand_neurons", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_heads_and_neurons_sum_to_the_stream(case: str, expand_neurons: bool) -> None:
    c = run(case)
    if expand_neurons and case in EXPERTS:
        with pytest.raises(ValueError, match=r"mixture of experts.*expand_neurons=False"):
            c.get_full_resid_decomposition()
        return
    for layer in layers(c):
        stack, labels = c.get_full_resid_decomposition(
            layer, expand_neurons=expand_neurons, post_norms=True, return_labels=True
        )
        assert len(stack) == len(set(labels)) == len(labels)
        close(stack.sum(0), stream_at(c, layer))
    if not c.model.cfg.parallel_attn_mlp and not c.model.cfg.attn_only:
        stack = c.get_full_resid_decomposition(1, True, expand_neurons, post_norms=True)
        close(stack.sum(0), c["resid_mid", 1])


@pytest.mark.parametrize("case", CASES)
def test_what_each_layer_reads(case: str) -> None:
    """Normed terms sum to what the model's own norm made of the stream, weight and bias taken
    off.
    """
    c = run(case)
    model = c.model
    for layer, mlp_input, name in (
        (1, False, "blocks.1.ln1"),
        (1, True, "blocks.1.ln2"),
        (-1, False, "ln_final"),
    ):
        if case == "bert":
            name = {"blocks.1.ln2": "blocks.1.ln1"}.get(name, "none")
        if f"{name}.hook_normalized" not in model.hook_dict:
            continue
        if mlp_input and model.cfg.parallel_attn_mlp:
            continue
        terms = c.decompose_resid(layer, mlp_input, apply_ln=True).sum(0)
        normalized = c[f"{name}.hook_normalized"]
        hook = model.hook_dict[f"{name}.hook_normalized"]
        weights = model.weights.getters
        if (
            f"{name}.b" in weights and hook is not None
        ):  # a layer norm's hook is after weight and bias
            normalized = (normalized - model.weights[f"{name}.b"]) / model.weights[f"{name}.w"]
        close(terms, normalized.detach())


@pytest.mark.parametrize("case", [case for case in CASES if case != "bert"])
def test_logits_are_sums(case: str) -> None:
    c = run(case)
    model = c.model
    with torch.no_grad():
        _, extra = model.run_with_cache(
            TOKENS, names_filter=["unembed.hook_out"]
        )  # before a soft cap
    right = extra["unembed.hook_out"]
    stack = c.get_full_resid_decomposition(expand_neurons=False, post_norms=True)
    ours = c.logit_attrs(stack, 5, 9, norm_weights=True).sum(0)
    constant = model.b_U if "unembed.b_U" in model.weights.getters else torch.zeros(61)
    if "ln_final.b" in model.weights.getters:
        constant = constant + model.weights["ln_final.b"] @ model.W_U
    constant = constant.detach()
    close(ours, right[..., 5] - right[..., 9] - constant[5] + constant[9])
    lens = c.accumulated_resid(apply_ln=True) @ model.W_U.detach() + (model.b_U.detach())
    close(lens[-1], right)
    assert not ours.requires_grad


@pytest.mark.parametrize("case", CASES)
def test_remainders_and_layers(case: str) -> None:
    c = run(case)
    for layer in layers(c):
        stack, labels = c.stack_head_results(layer, incl_remainder=True, return_labels=True)
        assert labels == [*c.model.all_head_labels[: layer * c.model.cfg.n_heads], "remainder"]
        close(stack.sum(0), stream_at(c, layer))
        if case in EXPERTS or c.model.cfg.attn_only:
            continue
        stack, labels = c.stack_neuron_results(layer, incl_remainder=True, return_labels=True)
        assert (
            labels == [*c.model.get_neuron_labels(layer), "remainder"]
            if layer
            else labels == ["remainder"]
        )
        close(stack.sum(0), stream_at(c, layer))
    assert c.stack_head_results(0).shape == (0, 2, 7, 32)


@pytest.mark.parametrize("case", CASES)
def test_heads_and_neurons_are_what_the_hooks_show(case: str) -> None:
    c = run(case)
    model = c.model
    part = "attn.hook_out"
    names = [f"blocks.1.{part}", "blocks.1.attn.hook_result"]
    with torch.no_grad():
        _, own = model.run_with_cache(TOKENS, names_filter=names)
    heads = c.stack_head_results().unflatten(0, (-1, 4))[1].movedim(0, -2)
    if case != "bert":  # whose later norm the heads have gone through
        close(heads, own[names[1]])
        bias = model.weights["blocks.1.attn.b_O"].detach()
        close(heads.sum(-2) + bias, own[names[0]])
    copy = ActivationCache(dict(c.cache_dict), model)
    copy.compute_head_results()
    close(copy["result", 1], own[names[1]])
    assert torch.equal(copy.stack_head_results(), c.stack_head_results())
    assert "blocks.1.attn.hook_result" not in c


@pytest.mark.parametrize("case", GEMMAS)
def test_norms_after_the_parts(case: str) -> None:
    """By hand: each head over the post-norm's scale, times its weight; HookedTransformer's numbers
    leave that out.
    """
    c = run(case)
    norm = c.model.original_model.get_submodule("model.layers.0.post_attention_layernorm")
    heads = c.stack_head_results(1)
    by_hand = heads / c["scale", 0, "ln1_post"] * (1 + norm.weight.detach())
    close(c.stack_head_results(1, post_norms=True), by_hand)
    raw = c.get_full_resid_decomposition(expand_neurons=False)
    assert (raw.sum(0) - c["resid_post", -1]).abs().max() > 0.1


def test_the_norms_of_bert_by_hand() -> None:
    c = run("bert")
    stack, labels = c.decompose_resid(1, return_labels=True)
    assert labels == [
        "embed",
        "pos_embed",
        "token_type_embed",
        "0_attn_out",
        "0_mlp_out",
        "norm_bias",
    ]

    def through(
        name: str, module: str, terms: list[Tensor], bias: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        norm = c.model.original_model.get_submodule(module)

        def linear(x: Tensor) -> Tensor:
            return (x - x.mean(-1, keepdim=True)) / c[f"{name}.hook_scale"] * norm.weight.detach()

        return [linear(x) for x in terms], linear(bias) + norm.bias.detach()

    names = ["hook_embed", "hook_pos_embed", "embed.hook_token_type_embed"]
    start = torch.zeros_like(c["resid_pre", 0])
    terms, bias = through(
        "embed.ln", "bert.embeddings.LayerNorm", [c[name] for name in names], start
    )
    terms.append(c["attn_out", 0])
    terms, bias = through(
        "blocks.0.ln1", "bert.encoder.layer.0.attention.output.LayerNorm", terms, bias
    )
    terms.append(c["mlp_out", 0])
    terms, bias = through("blocks.0.ln2", "bert.encoder.layer.0.output.LayerNorm", terms, bias)
    close(stack, torch.stack([*terms, bias]))
    with pytest.raises(ValueError, match="activation function come between"):
        c.logit_attrs(stack, 5)
    final = c.accumulated_resid(return_labels=True, apply_ln=True)
    assert final[1] == ["0_pre", "1_pre", "final_post"]
    assert torch.equal(final[0][-1], c["normalized_resid_post", 1])


def test_a_position_embedding_that_the_stream_never_sees() -> None:
    assert run("native-shortformer").has_pos_embed
    assert "pos_embed" not in run("native-shortformer").decompose_resid(return_labels=True)[1]
    assert "pos_embed" in run("gpt2").decompose_resid(return_labels=True)[1]


@pytest.mark.parametrize("case", ["gpt2", "gemma2", "bert", "gpt_neox"])
def test_slices_are_slices_of_the_whole(case: str) -> None:
    c = run(case)
    calls: list[Any] = [
        lambda pos: c.decompose_resid(apply_ln=True, pos_slice=pos),
        lambda pos: c.accumulated_resid(apply_ln=True, pos_slice=pos),
        lambda pos: c.stack_head_results(
            apply_ln=True, incl_remainder=True, pos_slice=pos, post_norms=True
        ),
        lambda pos: c.stack_neuron_results(-1, pos_slice=pos, neuron_slice=(0, 5), apply_ln=True),
        lambda pos: c.get_full_resid_decomposition(pos_slice=pos, apply_ln=True, post_norms=True),
    ]
    for call in calls:
        whole = call(None)
        for pos, right in (
            (-1, whole[..., -1, :]),
            ((1, 6, 2), whole[..., 1:6:2, :]),
            ([0, 3], whole[..., [0, 3], :]),
            (torch.tensor([2]), whole[..., [2], :]),
            (slice(2), whole[..., :2, :]),
        ):
            close(call(pos), right)
    results = c.get_neuron_results(1)
    assert results.shape == (2, 7, c.model.cfg.d_mlp, 32)
    close(c.get_neuron_results(1, neuron_slice=3, pos_slice=2), results[:, 2, 3])
    close(c.get_neuron_results(1, neuron_slice=[1, 4], pos_slice=(2, 4)), results[:, 2:4, [1, 4]])
    stack, labels = c.stack_neuron_results(2, neuron_slice=3, return_labels=True)
    assert (labels, stack.shape) == (["L0N3", "L1N3"], (2, 2, 7, 32))


def test_without_a_batch_axis() -> None:
    bridge = bridge_of("gpt2")
    _, c = bridge.run_with_cache(TOKENS[:1])
    _, flat = bridge.run_with_cache(TOKENS[:1], remove_batch_dim=True)
    for call in (
        lambda c: c.get_full_resid_decomposition(apply_ln=True),
        lambda c: c.accumulated_resid(apply_ln=True),
        lambda c: c.stack_activation("q"),
        lambda c: c.get_neuron_results(0).movedim(-2, 0),
    ):
        close(call(flat), call(c).squeeze(1))
    stack = c.decompose_resid(pos_slice=-1)
    one = c.logit_attrs(stack, 5, pos_slice=-1)
    close(flat.logit_attrs(stack[:, 0], 5, pos_slice=-1, has_batch_dim=False), one[:, 0])
    assert flat.remove_batch_dim() is flat


def test_rows_of_the_batch() -> None:
    c = run("gpt2")
    for rows, right in (
        (1, 1),
        ([1], [1]),
        ((0, 1), slice(0, 1)),
        (None, slice(None)),
        (torch.tensor(0), 0),
    ):
        part = c.apply_slice_to_batch_dim(rows)
        assert part.has_batch_dim is not isinstance(right, int)
        assert list(part) == list(c) == list(part.keys())
        assert all(torch.equal(value, c[name][right]) for name, value in part.items())
        close(
            part.get_full_resid_decomposition(apply_ln=True),
            c.get_full_resid_decomposition(apply_ln=True)[:, right],
        )
        attrs = c.logit_attrs(c.decompose_resid(), 5, batch_slice=rows)
        close(attrs, c.logit_attrs(c.decompose_resid(), 5)[:, right])
    with pytest.raises(ValueError, match="batch axis was removed"):
        c.apply_slice_to_batch_dim(0).apply_slice_to_batch_dim(0)


def test_rows_that_are_of_no_batch() -> None:
    names = ["hook_embed", "blocks.0.mlp.experts.1.hook_pre"]
    _, c = bridge_of("mixtral").run_with_cache(TOKENS[:1], names_filter=names)
    with pytest.raises(ValueError, match=r"experts.1.hook_pre has rows of the whole batch"):
        c.apply_slice_to_batch_dim(0)
    before = c[names[1]]
    assert c.remove_batch_dim()[names[1]] is before
    assert c["embed"].shape == (7, 32)


def test_tokens_for_rows_and_positions() -> None:
    c = run("llama")
    stack = c.decompose_resid()
    each = torch.stack(
        [c.logit_attrs(stack, token) for token in range(61)], -1
    )  # component batch pos token
    rows, places = torch.tensor([4, 8]), torch.randint(0, 61, (2, 7))
    close(c.logit_attrs(stack, rows), torch.stack([each[:, 0, :, 4], each[:, 1, :, 8]], 1))
    close(
        c.logit_attrs(stack, places),
        each.gather(-1, places.expand(len(stack), 2, 7)[..., None])[..., 0],
    )
    close(c.logit_attrs(stack[:, :, -1], rows, pos_slice=-1), c.logit_attrs(stack, rows)[..., -1])
    close(c.logit_attrs(stack, torch.tensor([4]), 8), each[..., 4] - each[..., 8])
    with pytest.raises(ValueError, match="different shapes"):
        c.logit_attrs(stack, rows, 8)
    with pytest.raises(ValueError, match="do not fit terms"):
        c.logit_attrs(stack, torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match="tokens go from 0 to 61"):
        c.model.tokens_to_residual_directions(torch.tensor([0, 61]))
    with pytest.raises(TypeError, match="whole numbers"):
        c.model.tokens_to_residual_directions(torch.tensor([0.0]))


def test_what_is_missing_is_named() -> None:
    bridge = bridge_of("gemma2")
    _, c = bridge.run_with_cache(TOKENS, names_filter="hook_embed")
    with pytest.raises(
        MissingActivationsError,
        match=r"blocks.0.hook_attn_out.*and 1 more.*endswith\(\('hook_attn_out",
    ):
        c.decompose_resid()
    with pytest.raises(MissingActivationsError, match=r"blocks.0.attn.hook_z.*ln1_post.hook_scale"):
        c.stack_head_results(1, post_norms=True)
    with pytest.raises(MissingActivationsError, match=r"blocks.1.ln1.hook_scale"):
        c.apply_ln_to_stack(c["embed"][None], 1)
    with pytest.raises(MissingActivationsError, match=r"mlp.hook_post"):
        c.get_neuron_results(1)
    with pytest.raises(MissingActivationsError, match=r"hook_resid_mid"):
        c.accumulated_resid(incl_mid=True)
    endings = ("hook_embed", "hook_attn_out", "hook_mlp_out")
    _, c = bridge.run_with_cache(TOKENS, names_filter=lambda name: name.endswith(endings))
    assert c.decompose_resid().shape == (5, 2, 7, 32)


def test_what_cannot_be() -> None:
    c = run("gpt_neox")
    with pytest.raises(ValueError, match="layer is 4; it must be from 0 to 3"):
        c.decompose_resid(4)
    with pytest.raises(ValueError, match="layer is -2"):
        c.stack_head_results(-2)
    with pytest.raises(ValueError, match="after the last layer"):
        c.decompose_resid(mlp_input=True)
    with pytest.raises((ValueError, TypeCheckError), match="mode"):  # the tests check types as well
        c.decompose_resid(mode="heads")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="read the same residual stream"):
        c.accumulated_resid(incl_mid=True)
    with pytest.raises(KeyError, match=r"no hook point 'blocks.0.hook_nothing'"):
        c.stack_activation("nothing")


def test_an_encoder_and_a_decoder() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=16,
        d_kv=4,
        d_ff=20,
        num_layers=2,
        num_heads=4,
        vocab_size=61,
        decoder_start_token_id=0,
    )
    bridge = TransformerBridge(T5ForConditionalGeneration(config).eval())
    with torch.no_grad():
        _, c = bridge.run_with_cache(TOKENS, decoder_input_ids=TOKENS[:, :3])
    with pytest.raises(ValueError, match="models with one residual stream"):
        c.decompose_resid()
    assert bridge.all_head_labels[7:9] == ["EL1H3", "DL0H0"]
    assert len(bridge.all_head_labels()) == 16


class Doubled(nn.Module):
    """A layer whose weight is no plain matrix, as LoRA's and quantised ones are."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


def test_projections_that_are_no_plain_layers() -> None:
    bridge = bridge_of("llama")
    for layer in bridge.original_model.model.layers:
        layer.self_attn.o_proj = Doubled(layer.self_attn.o_proj)
        layer.mlp.down_proj = Doubled(layer.mlp.down_proj)
    bridge = TransformerBridge(bridge.original_model)
    with torch.no_grad():
        _, c = bridge.run_with_cache(TOKENS)
    assert weight_in_out(bridge.original_model.model.layers[0].mlp.down_proj) is None
    stack = torch.cat([c.stack_head_results(), c.stack_neuron_results(-1), c.decompose_resid(0)])
    close(stack.sum(0), c["resid_post", -1])
    close(c.get_neuron_results(1, neuron_slice=5), c.get_neuron_results(1)[..., 5, :])


def test_nothing_runs_and_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    c = run("gemma2")
    before = dict(c.cache_dict)
    monkeypatch.setattr(type(c.model.core), "forward", None)
    c.get_full_resid_decomposition(apply_ln=True, post_norms=True)
    c.accumulated_resid(apply_ln=True)
    assert c.cache_dict.keys() == before.keys()
    assert all(c.cache_dict[name] is value for name, value in before.items())


def test_gradients_of_a_live_cache() -> None:
    """A cache of tensors with a graph keeps it; one of detached tensors does not hang on the
    weights.
    """
    c = run("gpt2")
    live = ActivationCache(
        {name: value.clone().requires_grad_() for name, value in c.cache_dict.items()}, c.model
    )
    live.get_full_resid_decomposition(apply_ln=True).sum().backward()
    assert live["z", 0].grad is not None
    for stack in (
        c.get_full_resid_decomposition(apply_ln=True),
        c.stack_neuron_results(1),
        c.get_neuron_results(0),
    ):
        assert not stack.requires_grad
    c.toggle_autodiff(False)
    try:
        assert not torch.is_grad_enabled()
    finally:
        c.toggle_autodiff(True)


def test_half_precision() -> None:
    bridge = TransformerBridge(bridge_of("gemma2").original_model.to(torch.bfloat16))
    with torch.no_grad():
        _, c = bridge.run_with_cache(TOKENS)
    stack = c.get_full_resid_decomposition(apply_ln=True, post_norms=True)
    assert (stack.sum(0) - c["normalized", None, "ln_final"]).abs().max() < 0.2
    assert c.accumulated_resid(apply_ln=True).dtype == torch.bfloat16
    assert torch.isfinite(bridge.all_composition_scores("Q")).all()


def test_the_cache_of_a_generation() -> None:
    bridge = bridge_of("llama")
    more = {"do_sample": False, "stop_at_eos": False, "return_cache": True, "verbose": False}
    _, c = bridge.generate(TOKENS, max_new_tokens=3, **more)
    stack = c.get_full_resid_decomposition(apply_ln=True)
    close(stack.sum(0), c["normalized", None, "ln_final"])


def test_one_answer_for_attribution_to_logits():
    """Our two ways agree on a model whose norms are not folded; HookedTransformer's says that it
    differs.
    """
    bridge = bridge_of("llama")
    tokens = torch.randint(0, 61, (2, 6))
    answers, wrong = torch.tensor([5, 8]), torch.tensor([9, 2])
    _, c = bridge.run_with_cache(tokens)
    heads = c.stack_head_results(pos_slice=-1)
    right = head_contributions(bridge, tokens, answers, wrong).flatten(1).T.detach()
    close(c.logit_attrs(heads, answers, wrong, pos_slice=-1), right)
    old = HookedTransformer(bridge.original_model)
    _, c = old.run_with_cache(tokens)
    with pytest.warns(
        UserWarning, match="leaves out the final norm's weight, as HookedTransformer does"
    ):
        left_out = c.logit_attrs(heads, answers, wrong, pos_slice=-1)
    assert (left_out - right).abs().max() > 0.01
    close(c.logit_attrs(heads, answers, wrong, pos_slice=-1, norm_weights=True), right)
    old.process_weights()
    _, c = old.run_with_cache(tokens)
    heads = c.stack_head_results(pos_slice=-1)
    counted = c.logit_attrs(heads, answers, wrong, pos_slice=-1, norm_weights=True)
    close(c.logit_attrs(heads, answers, wrong, pos_slice=-1), counted)
