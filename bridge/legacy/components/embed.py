"""``transformer_lens.components.embed``."""

from bridge.legacy.components import Embed as Embed
