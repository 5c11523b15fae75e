"""``transformer_lens.head_detector``'s names."""

from bridge.analysis.head_detector import *  # noqa: F403
