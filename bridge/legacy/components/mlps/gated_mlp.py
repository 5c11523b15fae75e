"""``transformer_lens.components.mlps.gated_mlp``."""

from bridge.legacy.kinds import GatedMLP as GatedMLP
