"""``transformer_lens.components.rms_norm_pre``."""

from bridge.legacy.components import RMSNormPre as RMSNormPre
