"""Every picture, at twelve layers of twelve heads and twenty tokens."""

from __future__ import annotations

import torch

from bridge import pictures
from bridge.hooks.studied_bridge import StudiedBridge
from bridge.pictures import Picture

LAYERS, HEADS = 12, 12
TOKENS = [
    "<bos>",
    "When",
    " Mary",
    " and",
    " John",
    " went",
    " to",
    " the",
    " store",
    ",",
    " John",
    " gave",
    " a",
]
TOKENS += [" bottle", " of", " milk", "\n", " to", " internationalization", " "]


class Words(StudiedBridge):
    """A vocabulary with words of every length."""

    words = (*TOKENS, "x" * 30, "\t", *(f" word{i}" for i in range(100)))

    def to_single_str_token(self, int_token: int) -> str:
        return self.words[int_token % len(self.words)]

    def to_single_token(self, string: str) -> int:
        return self.words.index(string)

    def to_answer_token(self, answer: str) -> int:
        return self.words.index(answer)


def all_pictures() -> dict[str, Picture]:
    """One of each kind, by name."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    n = len(TOKENS)
    mask = torch.ones(n, n).triu(1).bool()
    components = ["embed", *(f"{i}_{part}_out" for i in range(LAYERS) for part in ("attn", "mlp"))]
    growing = torch.linspace(1, 30, LAYERS + 1)[:, None, None]
    weights = (normal(LAYERS, n, 8) * 2).softmax(-1)
    chosen = weights * (weights >= weights.topk(2, -1).values[..., -1:])
    edges = [("embed", f"L0H{h}", 0.2 * h - 0.5) for h in range(4)]
    edges += [
        (f"L{i}H{h}", f"L{i + 2 + h % 2}H{(h + i) % 4}", float(normal(1)))
        for i in range(9)
        for h in range(4)
    ]
    edges += [
        (name, "logits", float(normal(1))) for name in ("L9H0", "L10H1", "L10H3", "L11H2", "embed")
    ]
    return {
        "lens": pictures.logit_lens(normal(LAYERS + 1, n, 200) * growing / 6, TOKENS, Words()),
        "attention": pictures.attention(
            (normal(HEADS, n, n) * 2).masked_fill(mask, -torch.inf).softmax(-1), TOKENS
        ),
        "scores": pictures.attention(
            normal(4, n, n).masked_fill(mask, -torch.inf), TOKENS, title="Scores"
        ),
        "all layers": pictures.attention(
            normal(LAYERS, 1, HEADS, n, n).masked_fill(mask, -torch.inf).softmax(-1),
            TOKENS,
            title="All layers",
        ),
        "patching": pictures.patching(normal(LAYERS, n) ** 3, "layer pos", TOKENS),
        "every": pictures.patching(
            normal(3, LAYERS, n), "layer pos", TOKENS, panels=["resid_pre", "attn_out", "mlp_out"]
        ),
        "by position": pictures.patching(normal(LAYERS, n, HEADS), "layer pos head", TOKENS),
        "attribution": pictures.attribution(normal(len(components), n), components, TOKENS),
        "one position": pictures.attribution(normal(len(components)), components),
        "heads": pictures.heads(normal(LAYERS, HEADS)),
        "composition": pictures.composition(
            torch.rand(LAYERS, HEADS, LAYERS, HEADS, generator=random)
        ),
        "norms": pictures.residual_norms(
            normal(LAYERS + 1, n, 64) * growing,
            TOKENS,
            [*(f"{i}_pre" for i in range(LAYERS)), "final_post"],
        ),
        "routing": pictures.routing({i: chosen[i] for i in range(LAYERS)}, TOKENS),
        "circuit": pictures.circuit(edges),
        "tokens": pictures.tokens(normal(n), TOKENS, measure="feature 7"),
        "attention text": pictures.attention_text(
            (normal(HEADS, n, n) * 2).masked_fill(mask, -torch.inf).softmax(-1), TOKENS
        ),
        "chosen": pictures.chosen_lens(
            normal(LAYERS + 1, n, 200) * growing / 6, TOKENS, Words(), [" Mary", " John"]
        ),
        "nine heads": pictures.attention(
            normal(9, n, n).masked_fill(mask, -torch.inf).softmax(-1), TOKENS
        ),
        "together": pictures.together(
            [pictures.heads(normal(LAYERS, HEADS)), pictures.heads(normal(3, 3))], "Two"
        ),
    }
