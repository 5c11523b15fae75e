"""``transformer_lens.components.layer_norm``."""

from bridge.legacy.components import LayerNorm as LayerNorm
