"""``transformer_lens.components.transformer_block``."""

from bridge.legacy.components import TransformerBlock as TransformerBlock
