"""``transformer_lens.components.mlps.moe``."""

from bridge.legacy.kinds import MoE as MoE
