"""``transformer_lens.components.pos_embed``."""

from bridge.legacy.components import PosEmbed as PosEmbed
