"""Which columns are which head's, found by gradient, against layouts that were made by hand."""

from __future__ import annotations

import pytest
import torch
from einops import rearrange
from torch import Tensor

from adapters.observe.gradients import disjoint_sets, gradients_of_scores, gradients_of_z

BATCH, POS, HEADS, KV, WIDTH = 3, 7, 4, 2, 5


def fused(layout: str, kv: int) -> dict[str, list[list[int]]]:
    """The columns of each head of a projection that makes queries, keys and values, in some
    layout.
    """
    if layout == "interleaved":
        index = torch.arange(3 * HEADS * WIDTH).view(HEADS, 3, WIDTH)
        return {letter: index[:, i].tolist() for i, letter in enumerate("qkv")}
    sizes = [HEADS * WIDTH, kv * WIDTH, kv * WIDTH]
    parts = torch.arange(sum(sizes)).split(sizes)
    order = (
        torch.randperm(HEADS * WIDTH, generator=torch.Generator().manual_seed(1))
        if layout == "gather"
        else None
    )
    q = parts[0] if order is None else parts[0][order]
    return {
        letter: part.view(-1, WIDTH).tolist()
        for letter, part in zip("qkv", (q, *parts[1:]), strict=True)
    }


def attention(made: Tensor, columns: dict[str, list[list[int]]]) -> tuple[Tensor, Tensor]:
    """Scores, with a row's maximum taken away, and z with the pattern held."""
    q, k, v = (rearrange(made[..., torch.tensor(columns[x])], "b p h d -> b h p d") for x in "qkv")
    angle = torch.arange(POS)[:, None] * torch.tensor([1.0, 0.1])
    turn = torch.cat([angle.cos(), angle.sin(), torch.ones(POS, 1)], -1)
    q, k = q * turn.to(q), k * turn.to(k)  # depends on the position, as a rotation does
    k, v = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / WIDTH**0.5
    scores = scores.masked_fill(
        torch.ones(POS, POS, dtype=torch.bool).triu(1), torch.finfo(scores.dtype).min
    )
    scores = scores - scores.amax(-1, keepdim=True)
    return scores, rearrange(scores.softmax(-1).detach() @ v, "b h p d -> b p h d")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("layout", "kv"), [("thirds", 4), ("thirds", 2), ("gather", 2), ("interleaved", 4)]
)
def test_columns_of_each_head(layout: str, kv: int, dtype: torch.dtype) -> None:
    columns = fused(layout, kv)
    torch.manual_seed(0)
    width = sum(len(head) for heads in columns.values() for head in heads)
    made = torch.randn(BATCH, POS, width, dtype=dtype, requires_grad=True)
    unrelated = torch.randn(BATCH, POS, 6, dtype=dtype, requires_grad=True)
    scores, z = attention(made, columns)
    found = gradients_of_scores(
        scores, [made, unrelated], query=5, keys=[2, 3, 4], query_pos=POS, key_pos=POS
    )
    values = gradients_of_z(z, [made, unrelated], query=5, key_pos=POS)
    seen = {"q": found.from_query, "k": found.from_keys, "v": values}
    for letter, (of_made, of_unrelated) in seen.items():
        assert of_unrelated is None
        assert of_made is not None
        sets = disjoint_sets(of_made)
        assert sets is not None
        assert [sorted(each) for each in columns[letter]] == [list(each) for each in sets], letter


def test_flat_rows_and_heads_first_are_read() -> None:
    torch.manual_seed(0)
    rows = torch.randn(BATCH * POS, 3 * HEADS * WIDTH, requires_grad=True)
    first = rearrange(rows, "(b p) (x h d) -> x b h p d", b=BATCH, x=3, h=HEADS).contiguous()
    made = rearrange(first, "x b h p d -> b p (x h d)")
    scores, z = attention(made, fused("thirds", HEADS))
    found = gradients_of_scores(
        scores, [rows, first], query=5, keys=[3, 4], query_pos=POS, key_pos=POS
    )
    assert found.from_query[0] is not None
    assert disjoint_sets(found.from_query[0]) == tuple(
        tuple(range(h * 5, h * 5 + 5)) for h in range(HEADS)
    )
    assert found.from_query[1] is None  # five axes: no layout that is known
    values = gradients_of_z(z, [rows], query=5, key_pos=POS)[0]
    assert values is not None
    assert values.nonzero()[:, 1].min() == 2 * HEADS * WIDTH


def test_what_is_mixed_is_no_layout_of_heads() -> None:
    torch.manual_seed(0)
    latent = torch.randn(BATCH, POS, 8, requires_grad=True)
    made = latent @ torch.randn(8, 3 * HEADS * WIDTH)
    scores, _ = attention(made, fused("thirds", HEADS))
    found = gradients_of_scores(
        scores, [latent], query=5, keys=[3, 4], query_pos=POS, key_pos=POS
    ).from_query[0]
    assert found is not None and bool(found.all())
    assert disjoint_sets(found) == (tuple(range(8)),)  # all heads read the same columns
    found[0, 0] = False
    assert disjoint_sets(found) is None


def test_a_run_without_gradients_is_refused() -> None:
    made = torch.randn(BATCH, POS, 3 * HEADS * WIDTH)
    scores, _ = attention(made, fused("thirds", HEADS))
    with pytest.raises(ValueError, match="no gradient can be taken"):
        gradients_of_scores(scores, [made], query=5, keys=[3, 4], query_pos=POS, key_pos=POS)
    with pytest.raises(ValueError, match="2 to 8 keys"):
        gradients_of_scores(scores, [made], query=5, keys=[3], query_pos=POS, key_pos=POS)
