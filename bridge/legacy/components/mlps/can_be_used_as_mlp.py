"""``transformer_lens.components.mlps.can_be_used_as_mlp``."""

from bridge.legacy.kinds import CanBeUsedAsMLP as CanBeUsedAsMLP
