"""What HookedTransformer's encoder-decoder computes, written out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from tests.adapters.by_hand.families import Sorter, new_gelu
from tests.adapters.by_hand.transformer import Model, Run

#: ``plain``; ``split``: queries, keys and values read inputs of their own, the MLP and each head's
#: result stand alone; ``joint``: each head reads one input, and cross attention one of its own
#: (HookedTransformer's ``use_attn_in``).
Mode = Literal["plain", "split", "joint"]


def t5_by_hand(hf: PreTrainedModel) -> Model:
    """The weights of a T5 model in float64."""
    config = hf.config
    heads = config.num_heads
    sort = Sorter(
        {name: value.double() for name, value in hf.state_dict().items()},
        heads,
        heads,
        offset=False,
    )
    weights = sort.weights
    sort.linear["embed"] = weights["encoder.embed_tokens.weight"], 0.0
    for stack, n in (("encoder", config.num_layers), ("decoder", config.num_decoder_layers)):
        if f"{stack}.final_layer_norm.weight" not in weights:
            continue
        parts = {"attn": "SelfAttention"} | (
            {"cross_attn": "EncDecAttention"} if stack == "decoder" else {}
        )
        for i in range(n):
            at, name = f"{stack}.block.{i}.layer", f"{stack}.{i}"
            for layer, (part, module) in enumerate(parts.items()):
                sort.add_norm(f"{name}.ln{layer + 1}", f"{at}.{layer}.layer_norm")
                for letter in "qkv":
                    weight = weights[f"{at}.{layer}.{module}.{letter}.weight"]
                    sort.add_heads(f"{name}.{part}.{letter}", weight, 0.0, heads)
                out = weights[f"{at}.{layer}.{module}.o.weight"].unflatten(1, (heads, -1))
                sort.linear[f"{name}.{part}.o"] = out, 0.0
            last = len(parts)
            sort.add_norm(f"{name}.ln{last + 1}", f"{at}.{last}.layer_norm")
            gated = {"gate": "wi_0", "in": "wi_1"} if config.is_gated_act else {"in": "wi"}
            for ours, theirs in (gated | {"out": "wo"}).items():
                sort.add_linear(f"{name}.mlp.{ours}", f"{at}.{last}.DenseReluDense.{theirs}")
        table = weights[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
        sort.linear[f"{stack}.positions"] = table, 0.0
        sort.add_norm(f"{stack}_final_ln", f"{stack}.final_layer_norm")
    if "lm_head.weight" in weights:
        factor = config.d_model**-0.5 if config.scale_decoder_outputs else 1.0
        sort.linear["unembed"] = weights["lm_head.weight"] * factor, 0.0
    act = new_gelu if config.is_gated_act else F.relu
    sizes = {"layers": config.num_layers, "heads": heads, "kv_heads": heads, "scale": 1.0}
    return Model(
        sort.linear, sort.norm, act=act, eps=config.layer_norm_epsilon, centered=False, **sizes
    )


def bucket(distance: int, both_ways: bool, buckets: int, longest: int) -> int:
    """Which row of the table of position biases is for a key that lies `distance` positions after
    the query.
    """
    first = 0
    if both_ways:
        buckets //= 2
        first = buckets if distance > 0 else 0
    steps = abs(distance) if both_ways else max(-distance, 0)
    exact = buckets // 2
    if steps < exact:
        return first + steps
    rough = exact + int(math.log(steps / exact) / math.log(longest / exact) * (buckets - exact))
    return first + min(rough, buckets - 1)


class EncoderDecoderRun(Run):
    """One run.

    The decoder's self attention looks backwards only, and sorts distances into buckets for that.
    HookedTransformer's looks both ways, which is not what T5 does; we follow T5.

    Args:
        model: the model, from `t5_by_hand`.
        tokens: ``[batch, pos]`` for the encoder.
        decoder_tokens: ``[batch, decoder_pos]``; None: the model has no decoder. buckets, longest:
        how many position biases there are, and the distance from which on there is only one.
        mode: see `Mode`.
        edits: see `Run`.

    Attributes:
        seen: see `Run`.
        logits: ``[batch, decoder_pos, d_vocab]``; without a decoder the encoder's output, ``[batch,
            pos, d_model]``.
    """

    def __init__(
        self,
        model: Model,
        tokens: Tensor,
        decoder_tokens: Tensor | None,
        buckets: int,
        longest: int,
        mode: Mode = "plain",
        edits: dict[str, Callable[[Tensor], Tensor]] | None = None,
    ) -> None:
        self.decoder_tokens, self.buckets, self.longest, self.mode = (
            decoder_tokens,
            buckets,
            longest,
            mode,
        )
        super().__init__(model, tokens, mode == "split", edits)

    def run(self, tokens: Tensor) -> Tensor:
        table = self.model.linear["embed"][0]
        read = self.stack("encoder", self.hook("hook_embed", table[tokens]), None)
        if self.decoder_tokens is None:
            return read
        return self.apply("unembed", self.stack("decoder", table[self.decoder_tokens], read))

    def stack(self, stack: str, x: Tensor, read: Tensor | None) -> Tensor:
        decoder = read is not None
        size = x.shape[1]
        rows = [
            [bucket(k - q, not decoder, self.buckets, self.longest) for k in range(size)]
            for q in range(size)
        ]
        bias = self.model.linear[f"{stack}.positions"][0][torch.tensor(rows)].permute(2, 0, 1)
        if decoder:
            bias = bias.masked_fill(torch.ones(size, size).triu(1).bool(), -math.inf)
        for layer in range(self.layers(stack)):
            block = f"{stack}.{layer}"
            x = self.hook(f"{block}.hook_resid_pre", x)
            x = x + self.hook(
                f"{block}.hook_attn_out",
                self.attend(f"{block}.attn", self.self_inputs(block, x), bias),
            )
            x = self.hook(f"{block}.hook_resid_mid", x)
            last = "ln2"
            if decoder:
                queries = self.hook(f"{block}.hook_cross_attn_in", x) if self.mode == "joint" else x
                inputs = {"q": self.normed(f"{block}.ln2", queries), "k": read, "v": read}
                x = x + self.hook(
                    f"{block}.hook_cross_attn_out", self.attend(f"{block}.cross_attn", inputs, None)
                )
                x = self.hook(f"{block}.hook_resid_mid_cross", x)
                last = "ln3"
            if self.fine:
                x = self.hook(f"{block}.hook_mlp_in", x)
            out = self.feed_forward(self.normed(f"{block}.{last}", x), f"{block}.mlp")
            x = self.hook(f"{block}.hook_resid_post", x + self.hook(f"{block}.hook_mlp_out", out))
        return self.normed(f"{stack}_final_ln", x)

    def layers(self, stack: str) -> int:
        return sum(
            name.startswith(stack) and name.endswith(".mlp.out") for name in self.model.linear
        )

    def self_inputs(self, block: str, x: Tensor) -> dict[str, Tensor]:
        """What queries, keys and values are made of; the norm runs once for each."""
        heads = x.unsqueeze(2).expand(-1, -1, self.model.heads, -1)
        if self.mode == "split":
            inputs = {letter: self.hook(f"{block}.hook_{letter}_input", heads) for letter in "qkv"}
        else:
            inputs = dict.fromkeys(
                "qkv", self.hook(f"{block}.hook_attn_in", heads) if self.mode == "joint" else x
            )
        return {letter: self.normed(f"{block}.ln1", value) for letter, value in inputs.items()}

    def attend(self, name: str, inputs: dict[str, Tensor], bias: Tensor | None) -> Tensor:
        made = {}
        for letter, value in inputs.items():
            pattern = "bphm,hdm->bphd" if value.ndim == 4 else "bpm,hdm->bphd"
            weight = self.model.linear[f"{name}.{letter}"][0]
            made[letter] = self.hook(f"{name}.hook_{letter}", torch.einsum(pattern, value, weight))
        scores = torch.einsum("bqhd,bkhd->bhqk", made["q"], made["k"])
        scores = self.hook(f"{name}.hook_attn_scores", scores if bias is None else scores + bias)
        pattern = self.hook(f"{name}.hook_pattern", scores.softmax(-1))
        z = self.hook(f"{name}.hook_z", torch.einsum("bhqk,bkhd->bqhd", pattern, made["v"]))
        result = torch.einsum("bphd,mhd->bphm", z, self.model.linear[f"{name}.o"][0])
        return (self.hook(f"{name}.hook_result", result) if self.fine else result).sum(2)
