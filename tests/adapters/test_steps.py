"""Blocks of every form: a hybrid model against its own mathematics written out, and real families
of new forms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from adapters import (
    MLP,
    Architecture,
    Attention,
    Block,
    Embedding,
    Mixer,
    Norm,
    Projection,
    Readout,
    Stack,
    Step,
    map_model,
    register,
    verify,
)
from adapters.config import rotary_values
from adapters.families.llama import ATTENTION, FEED_FORWARD, llama_like
from adapters.families.shapes.llama import normed
from adapters.norms import LAYER_NORM, RMS_NORM
from adapters.proofs.stream import ENDS
from adapters.views import Affine, times
from bridge import TransformerBridge
from tests.adapters.hybrid import FACTOR, HALF, HEADS, WIDTH, hybrid, tiny_hybrid
from tests.adapters.test_verify_all import GQA, SIZES
from weight_processing.check import ProcessingError

TOKENS = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(5))
Edits = dict[str, Callable[[Tensor], Tensor]]


class ByHand:
    """The hybrid model's forward pass written out, with every activation by its canonical name."""

    def __init__(self, model: nn.Module, edits: Edits | None = None) -> None:
        self.model, self.edits = model, edits or {}
        self.values: dict[str, Tensor] = {}

    def at(self, name: str, x: Tensor) -> Tensor:
        x = self.edits[name](x) if name in self.edits else x * 1.0
        if x.requires_grad:
            x.retain_grad()
        self.values[name] = x
        return x

    def attend(self, name: str, part: Any, x: Tensor, factor: float = 1.0) -> Tensor:
        """What attention adds to the stream, head by head."""
        q, k, v = (
            self.at(f"{name}.hook_{letter}", linear(x).unflatten(-1, (HEADS, -1)))
            for letter, linear in (("q", part.q), ("k", part.k), ("v", part.v))
        )
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / (WIDTH // HEADS) ** 0.5
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        pattern = self.at(
            f"{name}.hook_pattern", scores.masked_fill(later, float("-inf")).softmax(-1)
        )
        z = self.at(f"{name}.hook_z", torch.einsum("bhqk,bkhd->bqhd", pattern, v))
        heads = torch.einsum("bqhd,mhd->bqhm", z, part.o.weight.unflatten(-1, (HEADS, -1))) * factor
        return self.at(f"{name}.hook_result", heads).sum(-2) + part.o.bias * factor

    def feed(self, name: str, part: Any, x: Tensor) -> Tensor:
        pre = self.at(f"{name}.hook_pre", part.gate(x))
        return part.down(
            self.at(
                f"{name}.hook_post", pre.relu() * self.at(f"{name}.hook_pre_linear", part.up(x))
            )
        )

    def run(self, tokens: Tensor) -> Tensor:
        mixes, all_at_once, after, on_stream = self.model.layers
        x = self.at("hook_embed", self.model.embed(tokens))

        x = self.at("blocks.0.hook_resid_pre", x)
        mixed = mixes.mix(mixes.norm(self.at("blocks.0.hook_mixer_in", x)))[0]
        x = self.at(
            "blocks.0.hook_resid_mid", x + self.at("blocks.0.hook_mixer_out", FACTOR * mixed)
        )
        fed = self.feed("blocks.0.mlp", mixes.mlp, mixes.before(self.at("blocks.0.hook_mlp_in", x)))
        fed = mixes.after(self.at("blocks.0.mlp.hook_out", fed))
        x = self.at("blocks.0.hook_resid_post", x + self.at("blocks.0.hook_mlp_out", HALF * fed))

        x = self.at("blocks.1.hook_resid_pre", x)
        a = self.attend("blocks.1.attn", all_at_once.attn, all_at_once.norm(x), FACTOR)
        m = all_at_once.mix(all_at_once.norm(self.at("blocks.1.hook_mixer_in", x)))[0]
        f = self.feed(
            "blocks.1.mlp", all_at_once.mlp, all_at_once.other(self.at("blocks.1.hook_mlp_in", x))
        )
        outs = [
            self.at(f"blocks.1.hook_{n}_out", value)
            for n, value in (("attn", a), ("mixer", m), ("mlp", f))
        ]
        x = self.at("blocks.1.hook_resid_post", x + sum(outs))

        x = self.at("blocks.2.hook_resid_pre", x)
        a = after.after_attn(
            self.at("blocks.2.attn.hook_out", self.attend("blocks.2.attn", after.attn, x))
        )
        x = self.at("blocks.2.hook_resid_mid", x + self.at("blocks.2.hook_attn_out", a))
        f = self.feed("blocks.2.mlp", after.mlp, self.at("blocks.2.hook_mlp_in", x))
        f = after.after_mlp(self.at("blocks.2.mlp.hook_out", f))
        x = self.at("blocks.2.hook_resid_post", x + self.at("blocks.2.hook_mlp_out", f))

        x = self.at("blocks.3.hook_resid_pre", x)
        a = self.at("blocks.3.hook_attn_out", self.attend("blocks.3.attn", on_stream.attn, x))
        x = self.at(
            "blocks.3.ln1.hook_out", on_stream.first(self.at("blocks.3.hook_resid_mid", x + a))
        )
        a = self.at(
            "blocks.3.hook_attn_2_out", self.attend("blocks.3.attn_2", on_stream.again, x, HALF)
        )
        x = on_stream.second(self.at("blocks.3.hook_resid_mid_2", x + a))
        post = self.at(
            "blocks.3.mlp.hook_post", self.at("blocks.3.mlp.hook_pre", on_stream.up(x)).relu()
        )
        x = self.at(
            "blocks.3.hook_resid_post", x + self.at("blocks.3.hook_mlp_out", on_stream.down(post))
        )
        x = self.at("blocks.3.hook_normalized_resid_post", on_stream.third(x))
        return self.model.head(self.model.norm(x))


@pytest.fixture
def mixed() -> TransformerBridge:
    register("HybridModel")(hybrid)
    return TransformerBridge(tiny_hybrid().double())


def names() -> list[str]:
    by_hand = ByHand(tiny_hybrid().double())
    by_hand.run(TOKENS)
    return list(by_hand.values)


def test_values_of_every_form(mixed: TransformerBridge) -> None:
    by_hand = ByHand(mixed.original_model)
    with torch.no_grad():
        logits = by_hand.run(TOKENS)
        ours, cache = mixed.run_with_cache(TOKENS, names_filter=list(by_hand.values))
    torch.testing.assert_close(ours, logits)
    for name, value in by_hand.values.items():
        torch.testing.assert_close(
            cache[name], value, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("name", names())
def test_effects_of_every_form(mixed: TransformerBridge, name: str) -> None:
    change: Callable[[Tensor], Tensor] = lambda x: 0.3 * x + 0.1
    with torch.no_grad():
        right = ByHand(mixed.original_model, {name: change}).run(TOKENS)
        ours = mixed.run_with_hooks(TOKENS, fwd_hooks=[(name, lambda x, hook: change(x))])
        assert not torch.allclose(right, mixed(TOKENS), atol=1e-6)
    torch.testing.assert_close(ours, right)


def test_gradients_of_every_form(mixed: TransformerBridge) -> None:
    by_hand = ByHand(mixed.original_model)
    by_hand.run(TOKENS)[:, -1, 5].sum().backward()
    for name, value in by_hand.values.items():
        found: list[Tensor] = []
        logits = mixed.run_with_hooks(
            TOKENS, bwd_hooks=[(name, lambda g, hook, found=found: found.append(g.clone()))]
        )
        logits[:, -1, 5].sum().backward()
        assert value.grad is not None
        torch.testing.assert_close(
            found[-1], value.grad, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_the_hybrid_is_verified(mixed: TransformerBridge) -> None:
    report = verify(mixed)
    assert report.passed, str(report)
    sums = [check.name for check in report.checks if "resid" in check.name and "+" in check.name]
    assert "resid_pre + attn_out + mixer_out + mlp_out = resid_post" in sums
    assert "ln1.hook_out + attn_2_out = resid_mid_2" in sums


def test_a_factor_is_in_the_last_matrix(mixed: TransformerBridge) -> None:
    weights = mixed.weights
    layer = mixed.original_model.layers[1]
    torch.testing.assert_close(
        weights["blocks.1.attn.W_O"].flatten(0, 1), FACTOR * layer.attn.o.weight.T
    )
    torch.testing.assert_close(weights["blocks.1.attn.b_O"], FACTOR * layer.attn.o.bias)
    # Behind the MLP of the first layer stands a norm, and the factor behind that.
    assert torch.equal(
        weights["blocks.0.mlp.W_out"], mixed.original_model.layers[0].mlp.down.weight.T
    )
    with torch.no_grad():
        _, cache = mixed.run_with_cache(TOKENS)
    out = (
        torch.einsum("bphd,hdm->bpm", cache["z", 1], weights["blocks.1.attn.W_O"])
        + weights["blocks.1.attn.b_O"]
    )
    torch.testing.assert_close(cache["attn_out", 1], out)
    assert torch.equal(
        weights["blocks.3.ln1_attn_2.w"], mixed.original_model.layers[3].second.weight
    )


def test_what_cannot_be_done_with_a_hybrid_is_refused(mixed: TransformerBridge) -> None:
    with pytest.raises(ProcessingError, match="not one stack of blocks"):
        mixed.process_weights(fold_ln=True)
    with torch.no_grad():
        _, cache = mixed.run_with_cache(TOKENS)
    with pytest.raises(ValueError, match="HybridModel has attn_2 as well as attn in a block"):
        cache.get_full_resid_decomposition(expand_neurons=False)


def test_a_hybrids_stream_is_the_sum_of_its_terms(mixed: TransformerBridge) -> None:
    """Mixers, parallel parts, norms behind parts and on the stream, three steps in a block,
    factors.
    """
    with torch.no_grad():
        _, cache = mixed.run_with_cache(TOKENS)
    for layer in range(4):
        terms, labels = cache.decompose_resid(layer, return_labels=True)
        torch.testing.assert_close(terms.sum(0), cache["resid_pre", layer], rtol=1e-4, atol=1e-4)
    assert labels[-2:] != ["norm_bias"] and "0_mixer_out" in labels
    terms, labels = cache.decompose_resid(return_labels=True)
    assert labels[-4:] == ["3_attn_out", "3_attn_2_out", "3_mlp_out", "norm_bias"]
    torch.testing.assert_close(
        terms.sum(0), cache["blocks.3.hook_normalized_resid_post"], rtol=1e-4, atol=1e-4
    )


def changed(architecture: Architecture, layer: int, step: int, **fields: Any) -> Architecture:
    blocks = dict(architecture.stack.layers)
    steps = list(blocks[layer].steps)
    steps[step] = replace(steps[step], **fields)
    return replace(
        architecture,
        stacks=(replace(architecture.stack, layers=blocks | {layer: Block(tuple(steps))}),),
    )


@pytest.mark.parametrize(
    ("layer", "step", "fields", "failing"),
    [
        (0, 0, {"result_chain": ()}, "resid_pre + mixer_out = resid_mid"),
        (
            0,
            1,
            {"result_chain": (Norm("after", RMS_NORM), *times(-HALF))},
            "resid_mid + mlp_out = resid_post",
        ),
        (1, 1, {"parallel_to": None}, "resid_pre + attn_out = resid_mid"),
        (2, 1, {"result_chain": ()}, "resid_mid + mlp_out = resid_post"),
        (3, 1, {"result_chain": ()}, "ln1.hook_out + attn_2_out = resid_mid_2"),
        (3, 1, {"stream_norm": None}, "ln1.hook_out + attn_2_out = resid_mid_2"),
    ],
)
def test_a_wrong_step_is_refused(
    layer: int, step: int, fields: dict[str, Any], failing: str
) -> None:
    register("HybridModel")(lambda config: changed(hybrid(config), layer, step, **fields))
    report = verify(TransformerBridge(tiny_hybrid()))
    assert failing in [check.name for check in report.checks if not check.passed], str(report)


# Families of transformers, declared here for what they have and the shipped ones have not.


def noisy(
    cls: str, config: transformers.PreTrainedConfig, **more: Any
) -> transformers.PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = getattr(transformers, cls)._from_config(config, **more)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def granite(config: transformers.PreTrainedConfig) -> Architecture:
    scale = {"attn_scale": 1 / config.attention_multiplier}
    embed, factor = config.embedding_multiplier, config.residual_multiplier
    return llama_like(config, factor=factor, embed_factor=embed, config_values=scale)


def olmo2(config: transformers.PreTrainedConfig) -> Architecture:
    post = ("post_attention_layernorm", "post_feedforward_layernorm")
    attn = replace(normed(ATTENTION, "q_norm", "k_norm"), norms_over="width")
    return llama_like(config, attn=attn, pre=(None, None), post=post)


def cohere(config: transformers.PreTrainedConfig) -> Architecture:
    norm = Norm("input_layernorm", LAYER_NORM)
    block = Block((Step(ATTENTION, pre=norm), Step(FEED_FORWARD, pre=norm, parallel_to=0)))
    stack = Stack("layers", block, {}, Norm("norm", LAYER_NORM), Embedding("embed_tokens"))
    values = rotary_values(config) | {"rotary_adjacent_pairs": True}
    return Architecture(
        (stack,),
        Readout("lm_head", output_transform=Affine(config.logit_scale)),
        config_values=values,
    )


def bart(config: transformers.PreTrainedConfig) -> Architecture:
    def attention(path: str, cross: bool = False) -> Attention:
        q, k, v = (Projection(f"{letter}_proj") for letter in "qkv")
        return Attention(path, q, k, v, o="out_proj", keys_from="encoder" if cross else None)

    def stack(name: str, *parts: Attention) -> Stack:
        steps = [
            Step(part, stream_norm=Norm(f"{part.path}_layer_norm", LAYER_NORM)) for part in parts
        ]
        mlp = MLP("", up=Projection("fc1"), down="fc2")
        block = Block(
            (*steps, Step(mlp, stream_norm=Norm("final_layer_norm", LAYER_NORM), out="fc2"))
        )
        return Stack(
            f"{name}.layers", block, embedding=Embedding(f"{name}.embed_tokens"), name=name
        )

    own = attention("self_attn")
    return Architecture(
        stacks=(
            stack("encoder", own),
            stack("decoder", own, attention("encoder_attn", True)),
        ),
        readout=Readout("lm_head", output_transform=Affine(plus="final_logits_bias")),
        no_layer_runs="its decoder needs the encoder's output",
        config_values={"d_mlp": config.encoder_ffn_dim, "attention_dir": "bidirectional"},
    )


def test_granite_multiplies_what_it_adds() -> None:
    register("GranitePreTrainedModel")(granite)
    config = transformers.GraniteConfig(
        **SIZES, **GQA, residual_multiplier=0.3, embedding_multiplier=2.0
    )
    bridge = TransformerBridge(noisy("GraniteForCausalLM", config))
    report = verify(bridge)
    assert report.passed, str(report)
    seen: list[Tensor] = []
    layer = bridge.original_model.model.layers[1]
    with torch.no_grad():
        handle = layer.mlp.register_forward_hook(lambda module, args, out: seen.append(out))
        _, cache = bridge.run_with_cache(TOKENS)
        handle.remove()
        own = bridge.original_model(TOKENS, output_hidden_states=True).hidden_states
        torch.testing.assert_close(cache["mlp_out", 1], 0.3 * seen[0])
        torch.testing.assert_close(cache["resid_pre", 1], own[1])
        terms = cache.decompose_resid(layer=1)
        torch.testing.assert_close(terms[1:].sum(0), cache["resid_pre", 1] - cache["resid_pre", 0])
        bridge.process_weights()
        torch.testing.assert_close(
            bridge(TOKENS).log_softmax(-1), bridge.original_model(TOKENS).logits.log_softmax(-1)
        )
    assert bridge.cfg.processed["fold_ln"] == "done"
    assert "writing to it would change nothing" in bridge.cfg.processed["fold_value_biases"]
    register("GranitePreTrainedModel")(lambda config: llama_like(config))
    wrong = verify(TransformerBridge(noisy("GraniteForCausalLM", config)))
    assert "resid_mid + mlp_out = resid_post" in [
        check.name for check in wrong.checks if not check.passed
    ]


def test_granites_heads_and_neurons_sum_to_what_it_adds() -> None:
    register("GranitePreTrainedModel")(granite)
    config = transformers.GraniteConfig(
        **SIZES, **GQA, residual_multiplier=0.3, attention_bias=True, mlp_bias=True
    )
    bridge = TransformerBridge(noisy("GraniteForCausalLM", config).double())
    with torch.no_grad():
        _, cache = bridge.run_with_cache(TOKENS)
        heads = cache.stack_head_results(layer=1).sum(0) + bridge.b_O[0]
        neurons = cache.get_neuron_results(1).sum(-2) + bridge.b_out[1]
    torch.testing.assert_close(heads, cache["attn_out", 0])
    torch.testing.assert_close(neurons, cache["mlp_out", 1])


def test_olmo2_has_norms_behind_its_parts_only() -> None:
    register("Olmo2PreTrainedModel")(olmo2)
    model = noisy("Olmo2ForCausalLM", transformers.Olmo2Config(**SIZES, **GQA))
    bridge = TransformerBridge(model)
    report = verify(bridge)
    assert report.passed, str(report)
    layer = model.model.layers[0]
    with torch.no_grad():
        _, cache = bridge.run_with_cache(TOKENS)
        model.set_attn_implementation("eager")
        own = model(TOKENS, output_attentions=True, output_hidden_states=True)
        made = layer.self_attn.q_proj(cache["resid_pre", 0])
        right = made / (made.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt()
        torch.testing.assert_close(cache["blocks.0.attn.q_norm.hook_normalized"], right)
        torch.testing.assert_close(cache["pattern", 1], own.attentions[1])
        torch.testing.assert_close(cache["resid_pre", 1], own.hidden_states[1])
        torch.testing.assert_close(
            cache["resid_mid", 0]
            + layer.post_feedforward_layernorm(layer.mlp(cache["resid_mid", 0])),
            cache["resid_post", 0],
        )
    assert "blocks.0.ln1.hook_scale" not in bridge.hook_dict
    assert not bridge.cfg.use_normalization_before_and_after and bridge.cfg.use_qk_norm
    before = bridge(TOKENS).log_softmax(-1)
    bridge.process_weights()
    torch.testing.assert_close(bridge(TOKENS).log_softmax(-1), before, atol=1e-4, rtol=1e-4)
    with pytest.raises(ProcessingError, match="without a norm"):
        bridge.process_weights(center_writing_weights=True)


def test_cohere_shares_a_norm_between_parallel_steps() -> None:
    register("CoherePreTrainedModel")(cohere)
    bridge = TransformerBridge(
        noisy("CohereForCausalLM", transformers.CohereConfig(**SIZES, **GQA))
    )
    report = verify(bridge)
    assert report.passed, str(report)
    assert bridge.cfg.parallel_attn_mlp and "blocks.0.hook_resid_mid" not in bridge.hook_dict
    assert {"blocks.1.ln1.w", "blocks.1.ln2.w"} <= bridge.tl_parameters().keys()


def test_bart_has_two_stacks_with_norms_on_the_stream() -> None:
    register("BartPreTrainedModel")(bart)
    sizes = {
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "vocab_size": 61,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_position_embeddings": 40,
    }
    model = noisy("BartForConditionalGeneration", transformers.BartConfig(**sizes))
    bridge = TransformerBridge(model)
    report = verify(bridge)
    # Positions, and a norm of each stack's embeddings, are left out above: that is noticed, and
    # nothing else.
    assert [check.name for check in report.failed] == [ENDS], str(report)
    more = {"decoder_input_ids": TOKENS[:, :4]}
    with torch.no_grad():
        _, cache = bridge.run_with_cache(TOKENS, **more)
        model.set_attn_implementation("eager")
        own = model(TOKENS, **more, output_attentions=True, output_hidden_states=True)
    for layer in range(2):
        after = f"{layer}.hook_normalized_resid_post"
        torch.testing.assert_close(cache[f"encoder.{after}"], own.encoder_hidden_states[layer + 1])
        torch.testing.assert_close(
            cache[f"decoder_blocks.{after}"], own.decoder_hidden_states[layer + 1]
        )
        torch.testing.assert_close(
            cache[f"decoder.{layer}.cross_attn.hook_pattern"], own.cross_attentions[layer]
        )
        mid = cache[f"decoder.{layer}.hook_resid_mid_cross"]
        normed = model.model.decoder.layers[layer].encoder_attn_layer_norm(mid)
        torch.testing.assert_close(cache[f"decoder.{layer}.ln2.hook_normalized"], normed)
    assert "decoder.1.ln3.w" in bridge.tl_parameters()


# What a declaration cannot say.


def test_steps_that_cannot_be() -> None:
    norm = Norm("norm", RMS_NORM)
    with pytest.raises(ValueError, match="multiplies with 0"):
        Step(FEED_FORWARD, result_chain=times(0.0))
    with pytest.raises(ValueError, match="both pre and stream_norm"):
        Step(FEED_FORWARD, pre=norm, stream_norm=norm)
    with pytest.raises(ValueError, match="step 0 of a block has parallel_to=0"):
        Block((Step(FEED_FORWARD, parallel_to=0),))


def test_an_mlp_without_a_place_where_its_input_enters() -> None:
    bare = replace(FEED_FORWARD, path="")

    def declare(config: transformers.PreTrainedConfig) -> Architecture:
        return llama_like(config, mlp=bare, pre=(None, None))

    register("LlamaPreTrainedModel")(declare)
    with pytest.raises(
        ValueError, match="up_proj and gate_proj read its input: there is no one place"
    ):
        map_model(noisy("LlamaForCausalLM", transformers.LlamaConfig(**SIZES)))


def test_names_of_steps() -> None:
    """Each part and norm has one name, in whatever order they stand."""
    q = Projection("q")
    own, cross = Attention("a", q, q, q, o="o"), Attention("c", q, q, q, o="o", keys_from="encoder")
    norm = Norm("norm", RMS_NORM)

    def named(*steps: Step) -> list[tuple[str, str, str, str]]:
        return [(one.name, one.norm, one.before, one.after) for one in Block(steps).named]

    pre, mid, post = "hook_resid_pre", "hook_resid_mid", "hook_resid_post"
    assert named(Step(own, norm), Step(FEED_FORWARD, norm)) == [
        ("attn", "ln1", pre, mid),
        ("mlp", "ln2", mid, post),
    ]
    assert named(Step(FEED_FORWARD, norm)) == [("mlp", "ln2", pre, post)]
    assert named(Step(own, norm), Step(cross, norm), Step(FEED_FORWARD, norm)) == [
        ("attn", "ln1", pre, mid),
        ("cross_attn", "ln2", mid, "hook_resid_mid_cross"),
        ("mlp", "ln3", "hook_resid_mid_cross", post),
    ]
    four = named(Step(own), Step(FEED_FORWARD), Step(own), Step(FEED_FORWARD))
    assert [name for name, *_ in four] == ["attn", "mlp", "attn_2", "mlp_2"]
    assert [norm for _, norm, *_ in four] == ["ln1", "ln2", "ln1_attn_2", "ln2_mlp_2"]
    assert [before for *_, before, _ in four] == [pre, mid, "hook_resid_mid_2", "hook_resid_mid_3"]
    modules_without_points = named(
        Step(own, norm), Step(Mixer("m"), norm, parallel_to=0), Step(FEED_FORWARD, norm)
    )
    assert modules_without_points == [
        ("attn", "ln1", pre, mid),
        ("mixer", "ln1_mixer", pre, mid),
        ("mlp", "ln2", mid, post),
    ]
