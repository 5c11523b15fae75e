"""A tiny model whose layers all differ: every form that a residual step can have, written out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

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
)
from adapters.norms import LAYER_NORM, RMS_NORM
from adapters.views import times

WIDTH, HEADS, WORDS = 16, 2, 61
FACTOR, HALF = -0.7, 0.5


class HybridConfig(PreTrainedConfig):
    model_type = "hybrid_of_the_tests"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hidden_size, self.num_attention_heads, self.num_hidden_layers = WIDTH, HEADS, 4
        self.vocab_size, self.intermediate_size, self.hidden_act = WORDS, 24, "relu"
        self.tie_word_embeddings = False


class OwnAttention(nn.Module):
    """Causal attention that computes its softmax itself, and returns a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        scores = q @ k.mT / (WIDTH // HEADS) ** 0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        pattern = scores.masked_fill(mask, torch.finfo(scores.dtype).min).softmax(-1)
        return self.o((pattern @ v).transpose(1, 2).flatten(-2))


class RunningMean(nn.Module):
    """A mixer: the mean of what came before, projected. It returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        count = torch.arange(1, x.shape[1] + 1, dtype=x.dtype, device=x.device)[:, None]
        return self.out(x.cumsum(1) / count), None


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (
            nn.Linear(WIDTH, 24),
            nn.Linear(WIDTH, 24),
            nn.Linear(24, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x).relu() * self.up(x))


class MixesThenFeeds(nn.Module):
    """A mixer and an MLP, each with a factor; a norm behind the MLP too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.RMSNorm(WIDTH, eps=1e-5), RunningMean()
        self.before, self.mlp, self.after = (
            nn.RMSNorm(WIDTH, eps=1e-5),
            FeedForward(),
            nn.RMSNorm(WIDTH, eps=1e-5),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + FACTOR * self.mix(self.norm(x))[0]
        return x + HALF * self.after(self.mlp(self.before(x)))


class AllAtOnce(nn.Module):
    """Attention, a mixer and an MLP that read one stream, the first two through one norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn, self.mix = nn.RMSNorm(WIDTH, eps=1e-5), OwnAttention(), RunningMean()
        self.other, self.mlp = nn.LayerNorm(WIDTH), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + FACTOR * self.attn(normed) + self.mix(normed)[0] + self.mlp(self.other(x))


class NormsAfter(nn.Module):
    """No norm before attention and MLP, one behind each."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.after_attn = OwnAttention(), nn.RMSNorm(WIDTH, eps=1e-5)
        self.mlp, self.after_mlp = FeedForward(), nn.RMSNorm(WIDTH, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.after_attn(self.attn(x))
        return x + self.after_mlp(self.mlp(x))


class NormsOnTheStream(nn.Module):
    """The MLP alone has no module of its own; the norms are behind the sums; a second attention in
    the middle.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.first = OwnAttention(), nn.LayerNorm(WIDTH)
        self.again, self.second = OwnAttention(), nn.LayerNorm(WIDTH)
        self.up, self.down, self.third = (
            nn.Linear(WIDTH, 24),
            nn.Linear(24, WIDTH),
            nn.LayerNorm(WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x + self.attn(x))
        x = self.second(x + HALF * self.again(x))
        return self.third(x + self.down(self.up(x).relu()))


class HybridModel(PreTrainedModel):
    config_class = HybridConfig
    base_model_prefix = "model"

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            [MixesThenFeeds(), AllAtOnce(), NormsAfter(), NormsOnTheStream()]
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor]:
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            x = layer(x)
        return (self.head(self.norm(x)),)


def hybrid(config: PreTrainedConfig) -> Architecture:
    """The declaration."""

    def attention(path: str) -> Attention:
        q, k, v = (Projection(letter) for letter in "qkv")
        return Attention(path, q, k, v, o="o")

    def rms(path: str) -> Norm:
        return Norm(path, RMS_NORM)

    def layer_norm(path: str) -> Norm:
        return Norm(path, LAYER_NORM)

    mixer = Mixer("mix")
    mlp = MLP("mlp", up=Projection("up"), gate=Projection("gate"), down="down")
    bare = MLP("", up=Projection("up"), down="down")
    blocks = [
        Block(
            (
                Step(mixer, pre=rms("norm"), result_chain=times(FACTOR)),
                Step(mlp, pre=rms("before"), result_chain=(rms("after"), *times(HALF))),
            )
        ),
        Block(
            (
                Step(attention("attn"), pre=rms("norm"), result_chain=times(FACTOR)),
                Step(mixer, pre=rms("norm"), parallel_to=0),
                Step(mlp, pre=layer_norm("other"), parallel_to=0),
            )
        ),
        Block(
            (
                Step(attention("attn"), result_chain=(rms("after_attn"),)),
                Step(mlp, result_chain=(rms("after_mlp"),)),
            )
        ),
        Block(
            (
                Step(attention("attn"), stream_norm=layer_norm("first")),
                Step(
                    attention("again"), result_chain=times(HALF), stream_norm=layer_norm("second")
                ),
                Step(bare, stream_norm=layer_norm("third"), out="down"),
            )
        ),
    ]
    stack = Stack(
        "layers", blocks[0], dict(enumerate(blocks)), layer_norm("norm"), Embedding("embed")
    )
    return Architecture((stack,), Readout("head"))


def tiny_hybrid() -> HybridModel:
    """With random parameters, none of them trivial."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = HybridModel(HybridConfig())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()
