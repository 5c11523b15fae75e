"""``transformer_lens.components.rms_norm``."""

from bridge.legacy.components import RMSNorm as RMSNorm
