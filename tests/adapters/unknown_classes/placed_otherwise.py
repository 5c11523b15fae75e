"""Blocks that stand elsewhere than in a list of modules, run several times, or return something
else than a tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from tests.adapters.unknown_classes.parts import (
    D_HEAD,
    D_MLP,
    D_MODEL,
    D_VOCAB,
    N_LAYERS,
    Attention,
    CausalModel,
    Config,
    Decoder,
    DecoderLayer,
    GatedMLP,
    OtherModel,
    Rms,
    by_head,
    mixed,
    rotated,
)
from tests.adapters.unknown_classes.shown import at, outside


class Attributes(CausalModel):
    """Its layers are attributes: ``layer_0``, ``layer_1``."""

    def base(self) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed_tokens, self.norm = nn.Embedding(D_VOCAB, D_MODEL), Rms()
                for i in range(N_LAYERS):
                    setattr(self, f"layer_{i}", DecoderLayer(i, Attention(i), GatedMLP(i)))

            def forward(self, input_ids: Tensor) -> Tensor:
                x = outside("hook_embed", self.embed_tokens(input_ids))
                for i in range(N_LAYERS):
                    x = getattr(self, f"layer_{i}")(x)
                return outside("ln_final.hook_out", self.norm(x))

        return Model()


class PhiEmbedding(nn.Module):
    """Tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(D_VOCAB, D_MODEL)

    def forward(self, input_ids: Tensor) -> Tensor:
        return outside("hook_embed", self.wte(input_ids))


class PhiMixer(nn.Module):
    """A fused projection, the heads of queries, keys and values one after the other."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.Wqkv, self.out_proj = (
            layer,
            nn.Linear(D_MODEL, 3 * D_MODEL),
            nn.Linear(D_MODEL, D_MODEL),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (by_head(each) for each in self.Wqkv(x).chunk(3, -1))
        return self.out_proj(mixed(self.layer, q, k, v, lambda x: rotated(x, 4)))


class PhiBlock(nn.Module):
    """A parallel block with one norm."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.ln, self.mixer = layer, nn.LayerNorm(D_MODEL), PhiMixer(layer)
        self.fc1, self.fc2 = nn.Linear(D_MODEL, D_MLP), nn.Linear(D_MLP, D_MODEL)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = at(self.layer, "hook_resid_pre", hidden_states)
        h = self.ln(x)
        attn = at(self.layer, "hook_attn_out", self.mixer(h))
        post = at(
            self.layer,
            "mlp.hook_post",
            nn.functional.gelu(at(self.layer, "mlp.hook_pre", self.fc1(h)), approximate="tanh"),
        )
        return at(
            self.layer, "hook_resid_post", attn + at(self.layer, "hook_mlp_out", self.fc2(post)) + x
        )


class PhiHead(nn.Module):
    """A norm and the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.ln, self.linear = nn.LayerNorm(D_MODEL), nn.Linear(D_MODEL, D_VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        return outside("unembed.hook_out", self.linear(outside("ln_final.hook_out", self.ln(x))))


class PhiSequential(OtherModel):
    """phi-1's file: embedding, blocks and head in one `nn.Sequential`."""

    base_model_prefix = ""

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config or Config())
        self.layers = nn.Sequential(
            PhiEmbedding(), *(PhiBlock(i) for i in range(N_LAYERS)), PhiHead()
        )
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.layers[0].wte

    def get_output_embeddings(self) -> nn.Module:
        return self.layers[-1].linear

    def forward(self, input_ids: Tensor | None = None) -> CausalLMOutput:
        return CausalLMOutput(logits=self.layers(input_ids))


class SharedLayer(DecoderLayer):
    """A block that is told which time it runs."""

    def forward(self, hidden_states: Tensor, time: int = 0) -> Tensor:
        for module in self.modules():
            module.layer = time
        return super().forward(hidden_states)


class OneBlock(CausalModel):
    """One block, called several times."""

    def base(self) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed_tokens, self.norm = nn.Embedding(D_VOCAB, D_MODEL), Rms()
                self.block = SharedLayer(0, Attention(0), GatedMLP(0))

            def forward(self, input_ids: Tensor) -> Tensor:
                x = outside("hook_embed", self.embed_tokens(input_ids))
                for time in range(4):
                    x = self.block(x, time)
                return outside("ln_final.hook_out", self.norm(x))

        return Model()


class LLaDABlock(nn.Module):
    """Layer and parts in one: all layers stand in the block itself."""

    def __init__(self, layer: int, fused: bool = False) -> None:
        super().__init__()
        self.layer = layer
        self.attn_norm, self.ff_norm = Rms(), Rms()
        self.q_proj, self.attn_out = (
            nn.Linear(D_MODEL, D_MODEL, bias=False),
            nn.Linear(D_MODEL, D_MODEL, bias=False),
        )
        self.k_proj, self.v_proj = (nn.Linear(D_MODEL, 2 * D_HEAD, bias=False) for _ in range(2))
        self.ff_proj, self.up_proj = (nn.Linear(D_MODEL, D_MLP, bias=False) for _ in range(2))
        self.act, self.ff_out = nn.SiLU(), nn.Linear(D_MLP, D_MODEL, bias=False)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """In both directions."""
        q, k, v = by_head(q), by_head(k, 2), by_head(v, 2)
        return self.attn_out(mixed(self.layer, q, k, v, rotated, mask=lambda scores: scores))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        x = at(self.layer, "hook_resid_pre", x)
        h = self.attn_norm(x)
        q, k, v = self.q_proj(h), self.k_proj(h), self.v_proj(h)
        x = at(
            self.layer,
            "hook_resid_mid",
            x + at(self.layer, "hook_attn_out", self.attention(q, k, v)),
        )
        h = self.ff_norm(x)
        gate, up = (
            at(self.layer, "mlp.hook_pre", self.ff_proj(h)),
            at(self.layer, "mlp.hook_pre_linear", self.up_proj(h)),
        )
        post = at(self.layer, "mlp.hook_post", self.act(gate) * up)
        return (
            at(
                self.layer, "hook_resid_post", x + at(self.layer, "hook_mlp_out", self.ff_out(post))
            ),
            None,
        )


class LLaDA(OtherModel):
    """A base model of modules in a `ModuleDict`."""

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config or Config())
        self.model = nn.Module()
        self.model.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(D_VOCAB, D_MODEL),
                "blocks": nn.ModuleList(LLaDABlock(i) for i in range(N_LAYERS)),
                "ln_f": Rms(),
                "ff_out": nn.Linear(D_MODEL, D_VOCAB, bias=False),
            }
        )
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.transformer["wte"]

    def get_output_embeddings(self) -> nn.Module:
        return self.model.transformer["ff_out"]

    def forward(self, input_ids: Tensor | None = None) -> CausalLMOutput:
        parts = self.model.transformer
        x = outside("hook_embed", parts["wte"](input_ids))
        for block in parts["blocks"]:
            x, _ = block(x)
        logits = parts["ff_out"](outside("ln_final.hook_out", parts["ln_f"](x)))
        return CausalLMOutput(logits=outside("unembed.hook_out", logits))


class DictLayer(DecoderLayer):
    """A block that returns a dictionary."""

    def forward(self, hidden_states: Tensor) -> dict[str, Tensor | None]:
        return {"attentions": None, "hidden_states": super().forward(hidden_states)}


class Dictionaries(CausalModel):
    """Blocks that return dictionaries."""

    def base(self) -> nn.Module:
        class Model(Decoder):
            def forward(self, input_ids: Tensor) -> Tensor:
                x = outside("hook_embed", self.embed_tokens(input_ids))
                for layer in self.layers:
                    x = layer(x)["hidden_states"]
                return outside("ln_final.hook_out", self.norm(x))

        return Model([DictLayer(i, Attention(i), GatedMLP(i)) for i in range(N_LAYERS)])


class AnyNames(CausalModel):
    """First arguments of other names, given by name; a forward whose first argument is not called
    self.
    """

    def base(self) -> nn.Module:
        class OddMLP(GatedMLP):
            def forward(this, residual_stream: Tensor) -> Tensor:
                return GatedMLP.forward(this, residual_stream)

        class OddAttention(Attention):
            def forward(this, to_attend: Tensor) -> Tensor:
                return Attention.forward(this, to_attend)

        class OddLayer(DecoderLayer):
            def forward(this, scale: float = 1.0, *, what_came: Tensor) -> Tensor:
                x = at(this.layer, "hook_resid_pre", what_came)
                x = x + at(
                    this.layer, "hook_attn_out", this.self_attn(to_attend=this.input_layernorm(x))
                )
                x = at(this.layer, "hook_resid_mid", x)
                x = x + at(
                    this.layer,
                    "hook_mlp_out",
                    this.mlp(residual_stream=this.post_attention_layernorm(x)),
                )
                return at(this.layer, "hook_resid_post", x)

        class Model(Decoder):
            def forward(this, ids: Tensor) -> Tensor:
                x = outside("hook_embed", this.embed_tokens(ids))
                for layer in this.layers:
                    x = layer(what_came=x)
                return outside("ln_final.hook_out", this.norm(x))

        return Model([OddLayer(i, OddAttention(i), OddMLP(i)) for i in range(N_LAYERS)])

    def forward(module, input_ids: Tensor | None = None) -> CausalLMOutput:
        return CausalLMOutput(logits=module.lm_head(module.model(input_ids)))


class Dream(CausalModel):
    """Attends in both directions, and takes no mask of two axes: the kernel is given it as it is,
    with four.
    """

    def base(self) -> nn.Module:
        class Both(Attention):
            def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
                q, k, v = (
                    by_head(self.q_proj(x)),
                    by_head(self.k_proj(x), 2),
                    by_head(self.v_proj(x), 2),
                )

                def hidden(scores: Tensor) -> Tensor:
                    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)

                return self.o_proj(mixed(self.layer, q, k, v, rotated, mask=hidden))

        class Layer(DecoderLayer):
            def forward(
                self, hidden_states: Tensor, attention_mask: Tensor | None = None
            ) -> Tensor:
                x = at(self.layer, "hook_resid_pre", hidden_states)
                x = x + at(
                    self.layer,
                    "hook_attn_out",
                    self.self_attn(self.input_layernorm(x), attention_mask),
                )
                x = at(self.layer, "hook_resid_mid", x)
                x = x + at(self.layer, "hook_mlp_out", self.mlp(self.post_attention_layernorm(x)))
                return at(self.layer, "hook_resid_post", x)

        class Model(Decoder):
            def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
                x = outside("hook_embed", self.embed_tokens(input_ids))
                for layer in self.layers:
                    x = layer(x, attention_mask)
                return outside("ln_final.hook_out", self.norm(x))

        return Model([Layer(i, Both(i), GatedMLP(i)) for i in range(N_LAYERS)])

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | str | None = None
    ) -> CausalLMOutput:
        mask = attention_mask if isinstance(attention_mask, Tensor) else None
        if mask is not None and mask.ndim != 4:
            raise ValueError("attention_mask must have four axes")
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids, mask)))
