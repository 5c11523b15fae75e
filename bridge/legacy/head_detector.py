"""``transformer_lens.head_detector``'s names."""

# ruff: noqa: F401
from bridge.analysis.head_detector import (
    DET_PAT_NOT_SQUARE_ERR,
    HEAD_NAMES,
    INVALID_HEAD_NAME_ERR,
    SEQ_LEN_ERR,
    ErrorMeasure,
    HeadName,
    LayerHeadTuple,
    LayerToHead,
    compute_head_attention_similarity_score,
    detect_head,
    get_duplicate_token_head_detection_pattern,
    get_induction_head_detection_pattern,
    get_previous_token_head_detection_pattern,
    get_supported_heads,
)  # fmt: skip
