"""``transformer_lens.components.attention``."""

from bridge.legacy.components import Attention as Attention
