"""How much one run may hold at once."""

from __future__ import annotations

import torch

from adapters.config import ModelConfig
from bridge.run.memory import free_memory

#: What a run may take of the memory that is free.
SHARE = 0.25
#: Tokens beyond which a larger batch was not faster on a processor (12-layer GPT-2), and on other devices.
MOST_TOKENS, MOST_TOKENS_ELSEWHERE = 4096, 65536


def tokens_per_run(cfg: ModelConfig, device: torch.device, length: int, itemsize: int) -> int:
    """How many tokens one run may have, all prompts of its batch together.

    Args:
        cfg: the facts about the model.
        device: where it is.
        length: how many tokens a prompt has.
        itemsize: bytes of one number.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.patching.memory import tokens_per_run
        >>> tokens_per_run(TransformerBridge.boot_embedded().cfg, torch.device("cpu"), 15, 4) > 0
        True
    """
    # What one block holds of a token at most: streams, projections, the MLP's inside, scores twice.
    numbers = 16 * cfg.d_model + 6 * (cfg.d_mlp or 0) + 3 * cfg.n_heads * length
    most = MOST_TOKENS if device.type == "cpu" else MOST_TOKENS_ELSEWHERE
    return max(1, min(most, int(SHARE * free_memory(device) / (numbers * itemsize))))
