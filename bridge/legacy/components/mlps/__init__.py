"""``transformer_lens.components.mlps``'s modules."""

from bridge.legacy.components.mlps import can_be_used_as_mlp, gated_mlp, mlp, moe

__all__ = ["can_be_used_as_mlp", "gated_mlp", "mlp", "moe"]
