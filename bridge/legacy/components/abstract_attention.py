"""``transformer_lens.components.abstract_attention``."""

from bridge.legacy.components import AbstractAttention as AbstractAttention
