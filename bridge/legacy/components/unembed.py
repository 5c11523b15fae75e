"""``transformer_lens.components.unembed``."""

from bridge.legacy.components import Unembed as Unembed
