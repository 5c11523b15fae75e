"""Masks and samples of tokens, as HookedTransformer's utils have them."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper


def lm_accuracy(
    logits: Float[Tensor, "batch pos d_vocab"], tokens: Int[Tensor, "batch pos"], per_token: bool = False
) -> Float[Tensor, ""] | Bool[Tensor, "batch pos-1"]:
    """How often the likeliest next token is the right one."""
    right = logits[:, :-1].argmax(-1) == tokens[:, 1:]
    return right if per_token else right.sum() / right.numel()


def sample_logits(
    final_logits: Float[Tensor, "batch d_vocab"],
    top_k: int | None = None,
    top_p: float | None = None,
    temperature: float = 1.0,
    freq_penalty: float = 0.0,
    tokens: Int[Tensor, "batch pos"] | None = None,
) -> Int[Tensor, " batch"]:
    """Samples a token for each row."""
    if temperature == 0:
        return final_logits.argmax(-1)
    if top_k is not None and top_k <= 0:
        raise ValueError(f"top_k is {top_k}; it must be more than 0")
    if top_k is None and top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must be more than 0 and at most 1")
    logits = final_logits / temperature
    if freq_penalty:
        if tokens is None or tokens.ndim != 2:
            raise ValueError("freq_penalty needs the tokens so far, [batch, pos]")
        tokens = tokens.to(logits.device)
        logits = logits.scatter_add(-1, tokens, torch.full_like(tokens, -1, dtype=logits.dtype) * freq_penalty)
    if top_k is not None:
        logits = TopKLogitsWarper(top_k)(tokens, logits)
    elif top_p is not None:
        logits = TopPLogitsWarper(top_p)(tokens, logits)
    return torch.distributions.Categorical(logits=logits.float()).sample()


def get_cumsum_along_dim(tensor: Tensor, dim: int, reverse: bool = False) -> Tensor:
    """Sums along an axis from the start, or from the end."""
    return tensor.flip(dim).cumsum(dim).flip(dim) if reverse else tensor.cumsum(dim)


def get_tokens_with_bos_removed(tokenizer: Any, tokens: Int[Tensor, "... pos"]) -> Int[Tensor, "... pos-1"]:
    """Rows of tokens without the BOS that each starts with; where padding is on the right, without the first token.

    Raises:
        ValueError: where padding is on the left, a row has no BOS.
    """
    if tokenizer.padding_side == "right":
        return tokens[..., 1:]
    is_bos = tokens == tokenizer.bos_token_id
    if tokenizer.bos_token_id == tokenizer.pad_token_id:
        is_bos = is_bos.long().cumprod(-1).bool()  # those in front: the last of them is BOS, others are padding
        place = is_bos.sum(-1, keepdim=True) - 1
    else:
        place = is_bos.long().argmax(-1, keepdim=True)
    if not bool(is_bos.any(-1).all()):
        raise ValueError(f"a row of the tokens has no BOS (token {tokenizer.bos_token_id})")
    keep = torch.ones_like(tokens, dtype=torch.bool).scatter(-1, place, False)
    return tokens[keep].reshape(*tokens.shape[:-1], -1)


def get_attention_mask(
    tokenizer: Any, tokens: Int[Tensor, "batch pos"], prepend_bos: bool, padding_side: str | None = None
) -> Int[Tensor, "batch pos"]:
    """1 for tokens and 0 for padding, which is looked for on the side on which the tokenizer pads."""
    if tokenizer is None or tokenizer.pad_token_id is None:
        return torch.ones_like(tokens)
    right = (padding_side or tokenizer.padding_side) == "right"
    mask = (get_cumsum_along_dim((tokens != tokenizer.pad_token_id).long(), -1, right) > 0).to(tokens.dtype)
    if not right and prepend_bos and tokenizer.bos_token_id == tokenizer.pad_token_id:
        first = (mask == 0).sum(-1, keepdim=True) - 1
        mask.scatter_(-1, first.clamp(min=0), 1)
    return mask


def get_offset_position_ids(
    past_kv_pos_offset: int, attention_mask: Int[Tensor, "batch offset_pos"]
) -> Int[Tensor, "batch pos"]:
    """The position of each new token, counted from the first that is no padding."""
    return (attention_mask.cumsum(1) - 1).clamp(min=0)[:, past_kv_pos_offset:]


def position_embeddings(
    table: Float[Tensor, "n_ctx d_model"],
    tokens: Int[Tensor, "batch pos"],
    past_kv_pos_offset: int = 0,
    attention_mask: Int[Tensor, "batch offset_pos"] | None = None,
) -> Float[Tensor, "batch pos d_model"]:
    """The embedding of each token's position, and zero for padding."""
    if attention_mask is None:
        return table[past_kv_pos_offset : past_kv_pos_offset + tokens.shape[1]].expand(len(tokens), -1, -1)
    mask = attention_mask.to(table.device)
    return table[get_offset_position_ids(past_kv_pos_offset, mask)] * mask[:, past_kv_pos_offset:, None]


def report_on_prompt(
    prompt: str,
    answer: str | list[str],
    model: Any,
    prepend_space_to_answer: bool = True,
    print_details: bool = True,
    prepend_bos: bool | None = None,
    top_k: int = 10,
) -> None:
    """Prints how well a model continues a prompt."""
    answers, several = ([answer], "") if isinstance(answer, str) else (answer, "s" * (len(answer) > 1))
    if prepend_space_to_answer:
        answers = [" " + text.removeprefix(" ") for text in answers]
    start = model.to_tokens(prompt, prepend_bos=prepend_bos)
    rows = [model.to_tokens(text, prepend_bos=False)[0] for text in answers]
    ends = torch.stack([row[:1] for row in rows]) if several else rows[0][None]
    tokens = torch.cat([start.expand(len(ends), -1), ends], dim=1)
    with torch.no_grad():
        logits = model(tokens)[:, start.shape[1] - 1 : -1]
    if print_details:
        texts = [model.to_str_tokens(text, prepend_bos=False) for text in answers]
        print("Tokenized prompt:", model.to_str_tokens(prompt, prepend_bos=prepend_bos))
        print(f"Tokenized answer{several}:", texts if several else texts[0])
    ranks = []
    for at, right in zip(logits.unbind(1), ends.unbind(1), strict=True):
        probs, order = at.softmax(-1).sort(descending=True)
        places = (order == right[:, None]).int().argmax(-1).tolist()
        names = [model.to_string(token) for token in right[:, None]]
        ranks.append(list(zip(names, places, strict=True)))
        if not print_details:
            continue
        print(f"Performance on answer token{several}:")
        lines = [(f"Rank: {place: <8}", row, place) for row, place in enumerate(places)]
        lines += [(f"Top {place}th token.", 0, place) for place in range(min(top_k, at.shape[-1]))]
        for title, row, place in lines:
            token = order[row, place]
            print(
                f"{title} Logit: {float(at[row, token]):5.2f} Prob: {float(probs[row, place]):6.2%} "
                f"Token: |{model.to_string(token)}|"
            )
    print(f"Ranks of the answer tokens: {ranks if several else [rank[0] for rank in ranks]}")


report_on_prompt.__dict__["__test__"] = False  # no test of pytest's, whatever it is imported as
