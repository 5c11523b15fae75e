"""Detection of heads that attend by a pattern: previous-token, duplicate-token, induction, others.

Each head is compared with a detection pattern, ``[query, key]``, which marks where heads of a kind
attend (kinds of Olsson et al. 2022, "In-context Learning and Induction Heads", and Wang et al.
2022). Names, arguments and scores are those of ``transformer_lens.head_detector``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

from bridge.analysis.analysis import AnalysedRun
from bridge.arguments import CannotBeDoneError, check_choice, heads_shown, refuse_wrong_types
from bridge.hooks.studied_bridge import StudiedBridge

__all__ = [
    "HEAD_NAMES",
    "compute_head_attention_similarity_score",
    "detect_head",
    "get_duplicate_token_head_detection_pattern",
    "get_induction_head_detection_pattern",
    "get_previous_token_head_detection_pattern",
    "get_supported_heads",
]

HeadName = Literal["previous_token_head", "duplicate_token_head", "induction_head"]
HEAD_NAMES: list[str] = list(get_args(HeadName))
ErrorMeasure = Literal["abs", "mul"]
LayerHeadTuple = tuple[int, int]
LayerToHead = dict[int, list[int]]

#: Pairs of layer and head, or each layer's heads; None: all.
SomeHeads = Sequence[LayerHeadTuple] | Mapping[int, Sequence[int]] | None

INVALID_HEAD_NAME_ERR = (
    f"the detection pattern must be a tensor or one of {', '.join(HEAD_NAMES)}; it is %s"
)
SEQ_LEN_ERR = (
    "the text must be two tokens or more, BOS included, and no longer than the model's context"
)
DET_PAT_NOT_SQUARE_ERR = (
    "the detection pattern must be lower triangular, with the text's %d tokens along both axes; its"
    " shape is %s"
)

_log = logging.getLogger(__name__)


@refuse_wrong_types
def detect_head(
    model: StudiedBridge,
    seq: str | Sequence[str] | Int[Tensor, "pos"] | Int[Tensor, "batch pos"],
    detection_pattern: Num[Tensor, "query key"] | str,
    heads: SomeHeads = None,
    cache: Mapping[str, Tensor] | None = None,
    *,
    exclude_bos: bool = False,
    exclude_current_token: bool = False,
    error_measure: str = "mul",
) -> Float[Tensor, "layer head"]:
    """Score how well each head's attention on a text matches a detection pattern.

    Induction heads are only visible on repeated text: pass tokens whose second half repeats the
    first.

    Args:
        model: the bridge.
        seq: a text, or several, whose scores are averaged; or tokens, ``[pos]`` or ``[batch,
            pos]``, with BOS and without padding.
        detection_pattern: ``[query, key]`` over the text's tokens, or the name of a kind of head:
            one of `HEAD_NAMES`.
        heads: pairs of layer and head, or for each layer its heads; None: all.
        cache: the activations of one run on the text, with or without batch axis; None: computed by
            this function.
        exclude_bos: leave out attention to the first token.
        exclude_current_token: leave out attention of tokens to themselves.
        error_measure: ``"mul"`` or ``"abs"``, see `compute_head_attention_similarity_score`.

    Returns:
        ``[layer, head]``, on the CPU, in the model's dtype; -1 for heads that were not requested,
        or that a layer lacks.

    Raises:
        CannotBeDoneError: (a ValueError) an unknown kind of head or measure, a text or pattern of a
            wrong size, a head that the model lacks, or a cache that does not belong to one text.
        TypeError: `seq` is neither text nor tokens.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.head_detector import detect_head
        >>> bridge = TransformerBridge.boot_embedded()
        >>> scores = detect_head(bridge, "Mary and John went to the store", "previous_token_head")
        >>> scores.shape, bool(scores.max() > 0.5)
        (torch.Size([4, 4]), True)
        >>> half = torch.randint(
        ...     10, bridge.cfg.d_vocab, (25,), generator=torch.Generator().manual_seed(0)
        ... )
        >>> scores = detect_head(bridge, torch.cat([half, half]), "induction_head")
        >>> divmod(int(scores.argmax()), 4)[0]  # the layer
        1
    """
    check_choice("error_measure", error_measure, get_args(ErrorMeasure), CannotBeDoneError)
    if isinstance(detection_pattern, str) and detection_pattern not in HEAD_NAMES:
        raise CannotBeDoneError(INVALID_HEAD_NAME_ERR % detection_pattern)
    chosen = _heads(model, heads)
    if isinstance(seq, Tensor):
        texts: list[str | Tensor] = list(seq[None] if seq.ndim == 1 else seq)
    else:
        texts = [seq] if isinstance(seq, str) else list(seq)
    if not texts:
        raise CannotBeDoneError("there are no texts: the list is empty")
    if cache is not None and len(texts) > 1:
        raise CannotBeDoneError(f"a cache is of one text; there are {len(texts)}")
    options = {
        "exclude_bos": exclude_bos,
        "exclude_current_token": exclude_current_token,
        "error_measure": error_measure,
    }
    scores = [_detect(model, text, detection_pattern, chosen, cache, options) for text in texts]
    return torch.stack(scores).mean(0)


def _detect(
    model: StudiedBridge,
    text: str | Tensor,
    detection_pattern: Tensor | str,
    heads: Mapping[int, Sequence[int]],
    cache: Mapping[str, Tensor] | None,
    options: dict[str, Any],
) -> Tensor:
    """Return the scores of heads on one text, ``[layer, head]``."""
    cfg = model.cfg
    if isinstance(text, str):
        tokens = model.to_tokens(text, truncate=False)
    else:
        tokens = text[None].to(cfg.device)
    length = tokens.shape[1]
    if length < 2 or (cfg.n_ctx is not None and length > cfg.n_ctx):
        raise CannotBeDoneError(SEQ_LEN_ERR)
    pattern = _checked_pattern(detection_pattern, tokens, options["error_measure"])
    if cache is None:
        names = [f"blocks.{layer}.attn.hook_pattern" for layer in heads]
        _, cache = model.run_with_cache(tokens, names_filter=names)
    n_heads = max(_n_heads(model, layer) for layer in range(cfg.n_layers))
    scores = torch.full((cfg.n_layers, n_heads), -1.0, dtype=cfg.dtype, device="cpu")
    for layer, of_layer in heads.items():
        for head in of_layer:
            attention = _cached_pattern(cache, layer, length, head)
            scores[layer, head] = compute_head_attention_similarity_score(
                attention, pattern.to(attention.device), **options
            )
    return scores


def _checked_pattern(pattern: Tensor | str, tokens: Tensor, error_measure: str) -> Tensor:
    """Return the detection pattern for one text.

    Raises:
        CannotBeDoneError: it has another size, or marks later tokens.
    """
    length = tokens.shape[1]
    if isinstance(pattern, str):
        pattern = _PATTERNS[pattern](tokens)
    if pattern.shape != (length, length) or not torch.equal(pattern, pattern.tril()):
        raise CannotBeDoneError(DET_PAT_NOT_SQUARE_ERR % (length, pattern.shape))
    if error_measure == "mul" and not bool(((pattern == 0) | (pattern == 1)).all()):
        _log.warning(
            "the detection pattern holds other values than 0 and 1, which 'mul' takes as weights"
        )
    return pattern


def _cached_pattern(
    cache: Mapping[str, Tensor], layer: int, length: int, head: int
) -> Float[Tensor, "query key"]:
    """Return a head's attention pattern; a deferred pattern is computed only for this head.

    Raises:
        CannotBeDoneError: it is not in the cache, or belongs to another input.
    """
    name = f"blocks.{layer}.attn.hook_pattern"
    if name not in cache:
        raise CannotBeDoneError(
            f"the cache does not hold {name}: leave it out, or make it with that name"
        )
    attention: Tensor | None = None
    if isinstance(cache, AnalysedRun):
        with suppress(ValueError):  # a cache without a model does not know its axes
            attention = cache.part(name, heads=[head])
    if attention is None:
        attention = cache[name]
    else:
        head = 0
    if attention.ndim == 4 and len(attention) == 1:
        attention = attention[0]
    if attention.shape[1:] != (length, length):
        shape = list(attention.shape)
        raise CannotBeDoneError(
            f"the cache belongs to another input: its pattern is {shape}, the text {length} tokens"
        )
    return attention[head]


def _n_heads(model: StudiedBridge, layer: int) -> int:
    """Return the number of heads in a layer."""
    hook = model.hook_dict.get(f"blocks.{layer}.attn.hook_pattern")
    return heads_shown(model.cfg, hook.point.axes) if hook else model.cfg.n_heads


def _heads(model: StudiedBridge, heads: SomeHeads) -> dict[int, list[int]]:
    """Return the requested heads of each requested layer."""
    cfg = model.cfg
    if heads is None:
        return {layer: list(range(_n_heads(model, layer))) for layer in range(cfg.n_layers)}
    if isinstance(heads, Mapping):
        pairs: Sequence[LayerHeadTuple] = [(i, head) for i, some in heads.items() for head in some]
    else:
        pairs = heads
    chosen: dict[int, list[int]] = {}
    for layer, head in pairs:
        if not (0 <= layer < cfg.n_layers and 0 <= head < _n_heads(model, layer)):
            raise CannotBeDoneError(
                f"there is no head {head} in layer {layer}: the model has {cfg.n_layers} layers of "
                f"{_n_heads(model, layer)} heads"
            )
        chosen.setdefault(layer, []).append(head)
    if not chosen:
        raise CannotBeDoneError("no heads were given; None looks at all")
    return chosen


def get_previous_token_head_detection_pattern(
    tokens: Int[Tensor, "1 pos"],
) -> Float[Tensor, "pos pos"]:
    """Return the pattern of a previous-token head: each query attends one token back.

    Args:
        tokens: of one text, ``[1, pos]``.

    Returns:
        ``[query, key]``, ones and zeros.

    Example:
        >>> import torch
        >>> from bridge.analysis.head_detector import get_previous_token_head_detection_pattern
        >>> get_previous_token_head_detection_pattern(torch.tensor([[5, 6, 7]])).tolist()
        [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    """
    return torch.ones(tokens.shape[-1] - 1, device="cpu").diag(-1)


def get_duplicate_token_head_detection_pattern(
    tokens: Int[Tensor, "1 pos"],
) -> Float[Tensor, "pos pos"]:
    """Return the pattern of a duplicate-token head: it attends to earlier copies of the token.

    Args:
        tokens: of one text, ``[1, pos]``.

    Returns:
        ``[query, key]``, ones and zeros.

    Example:
        >>> import torch
        >>> from bridge.analysis.head_detector import get_duplicate_token_head_detection_pattern
        >>> get_duplicate_token_head_detection_pattern(torch.tensor([[5, 6, 5]])).tolist()
        [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    """
    row = tokens.reshape(-1).cpu()
    return (row[:, None] == row[None]).float().tril(-1)


def get_induction_head_detection_pattern(tokens: Int[Tensor, "1 pos"]) -> Float[Tensor, "pos pos"]:
    """Return the pattern of an induction head: it attends to the token after an earlier copy.

    Args:
        tokens: of one text, ``[1, pos]``.

    Returns:
        ``[query, key]``, ones and zeros.

    Example:
        >>> import torch
        >>> from bridge.analysis.head_detector import get_induction_head_detection_pattern
        >>> get_induction_head_detection_pattern(torch.tensor([[5, 6, 5]])).tolist()
        [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    """
    duplicates = get_duplicate_token_head_detection_pattern(tokens)
    return torch.nn.functional.pad(duplicates[:, :-1], (1, 0))


_PATTERNS: dict[str, Callable[[Tensor], Tensor]] = {
    "previous_token_head": get_previous_token_head_detection_pattern,
    "duplicate_token_head": get_duplicate_token_head_detection_pattern,
    "induction_head": get_induction_head_detection_pattern,
}


def get_supported_heads() -> None:
    """Print the kinds of heads that `detect_head` knows by name.

    Example:
        >>> from bridge.analysis.head_detector import get_supported_heads
        >>> get_supported_heads()
        Supported heads: ['previous_token_head', 'duplicate_token_head', 'induction_head']
    """
    print(f"Supported heads: {HEAD_NAMES}")


@refuse_wrong_types
def compute_head_attention_similarity_score(
    attention_pattern: Float[Tensor, "query key"],
    detection_pattern: Num[Tensor, "..."],
    *,
    exclude_bos: bool,
    exclude_current_token: bool,
    error_measure: str,
) -> float:
    """Score how well one head's attention matches a detection pattern.

    Args:
        attention_pattern: ``[query, key]``; it is not changed.
        detection_pattern: ``[query, key]``.
        exclude_bos: leave out attention to the first token.
        exclude_current_token: leave out attention of tokens to themselves.
        error_measure: ``"mul"``: the share of the attention that lies where the detection pattern
            is 1. ``"abs"``: one minus the absolute difference, summed over keys and averaged over
            queries, to three decimals: 1 is perfect agreement, -1 attention to entirely different
            positions.

    Raises:
        CannotBeDoneError: a pattern that is not square, or patterns of different sizes; an unknown
            measure; with ``"abs"``, attention to later tokens.

    Example:
        >>> import torch
        >>> from bridge.analysis.head_detector import (
        ...     compute_head_attention_similarity_score as score,
        ... )
        >>> attention = torch.tensor([[1.0, 0.0], [0.25, 0.75]])
        >>> score(
        ...     attention,
        ...     torch.eye(2),
        ...     exclude_bos=False,
        ...     exclude_current_token=False,
        ...     error_measure="mul",
        ... )
        0.875
    """
    check_choice("error_measure", error_measure, get_args(ErrorMeasure), CannotBeDoneError)
    shape = attention_pattern.shape
    if len(shape) != 2 or shape[0] != shape[1]:
        raise CannotBeDoneError(f"the attention pattern must be square; its shape is {list(shape)}")
    if detection_pattern.shape != shape:
        raise CannotBeDoneError(
            f"the attention pattern is {list(shape)}, the detection pattern"
            f" {list(detection_pattern.shape)}"
        )

    counted = torch.ones_like(attention_pattern)
    if exclude_bos:
        counted[:, 0] = 0
    if exclude_current_token:
        counted.fill_diagonal_(0)
    if error_measure == "mul":
        attention = attention_pattern * counted
        return ((attention * detection_pattern).sum() / attention.sum()).item()
    difference = (attention_pattern - detection_pattern).abs()
    if not torch.equal(difference, difference.tril()):
        raise CannotBeDoneError(
            '"abs" compares lower triangular patterns; one of these attends to later tokens'
        )
    return 1 - round((difference * counted).sum(-1).mean().item(), 3)
