"""``transformer_lens.components.mlps.mlp``."""

from bridge.legacy.kinds import MLP as MLP
