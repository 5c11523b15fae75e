"""Logits of some tokens alone, where two runs are compared: they are the model's own, and what is
wrong is found.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adapters.proofs.evidence import few_tokens, step_of_tokens
from adapters.proofs.mechanics import Mechanics
from adapters.proofs.slopes import SLOPES
from bridge import TransformerBridge
from tests.tiny_models import tiny_model

TOKENS = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(0))
MANY = 9000


@pytest.mark.parametrize(
    ("kind", "rows"), [("llama", 8), ("phi", 8), ("gemma2", 8)]
)  # tied; with a bias; with a cap
@torch.no_grad()
def test_they_are_the_model_s_own(kind: str, rows: int) -> None:
    bridge = TransformerBridge(tiny_model(kind, vocab_size=MANY))
    whole = bridge(TOKENS)
    assert step_of_tokens(bridge, TOKENS, {}) == rows
    with few_tokens(bridge, rows):
        torch.testing.assert_close(bridge(TOKENS), whole[..., ::rows])
    assert torch.equal(bridge(TOKENS), whole)
    mechanics = Mechanics(bridge, TOKENS, {}, 1e-4)
    with mechanics.of_few_tokens():
        assert (
            torch.equal(mechanics.plain, mechanics.logits())
            and mechanics.plain.shape[-1] == MANY // rows
        )
    assert torch.equal(mechanics.plain, whole)


def test_where_there_are_few_or_the_model_looks_at_all_nothing_is_done() -> None:
    looks = tiny_model("llama", vocab_size=MANY)
    own = looks.forward
    looks.forward = lambda *args, **more: scaled(own(*args, **more))

    def scaled(output: Any) -> Any:
        output.logits = output.logits + torch.ones(MANY)
        return output

    for model in (tiny_model("llama"), tiny_model("bart", "seq2seq", vocab_size=MANY), looks):
        bridge = TransformerBridge(model)
        assert step_of_tokens(bridge, TOKENS, {}) == 1


def test_a_model_that_knows_tokens_by_their_numbers() -> None:
    """Image tokens that are never written (Chameleon): among some tokens, others have their
    numbers.
    """
    model = tiny_model("llama", vocab_size=MANY)
    own = model.forward
    model.forward = lambda *args, **more: masked(own(*args, **more))

    def masked(output: Any) -> Any:
        output.logits[..., :1125] = torch.finfo(output.logits.dtype).min
        return output

    assert step_of_tokens(TransformerBridge(model), TOKENS, {}) == 1


def test_an_accelerator_is_given_no_number_that_is_too_large() -> None:
    """A token's number behind the last of some is an error on a CPU; a GPU is lost to the process
    with it.
    """
    bridge = TransformerBridge(tiny_model("llama", vocab_size=MANY).to("meta"))
    assert step_of_tokens(bridge, TOKENS.to("meta"), {}) == 1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor, detached: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)))) + 0.5 * detached.tanh()


class Cut(nn.Module):
    """A second path from the first stream, of which the graph is cut: its gradient is not the slope
    of an edit.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.blocks = (
            nn.Embedding(vocabulary, 16),
            nn.ModuleList(Block() for _ in range(2)),
        )
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = first = self.embed(tokens)
        for block in self.blocks:
            x = block(x, first.detach())
        return self.head(self.norm(x))


@pytest.mark.parametrize("vocabulary", [60, MANY])
def test_what_is_wrong_is_found_in_the_logits_of_some(vocabulary: int) -> None:
    torch.manual_seed(0)
    reasons = TransformerBridge(Cut(vocabulary).eval()).offered().not_offered
    assert SLOPES in reasons["hook_embed"]


def test_what_is_inferred_is_the_same_of_many_tokens() -> None:
    few, many = (
        TransformerBridge(
            tiny_model("olmo2", vocab_size=size), automatic="always", cache_declaration=False
        )
        for size in (99, MANY)
    )
    assert (
        few.architecture == many.architecture
        and few.offered().not_offered == many.offered().not_offered
    )
