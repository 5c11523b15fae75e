"""``transformer_lens.components.layer_norm_pre``."""

from bridge.legacy.components import LayerNormPre as LayerNormPre
