"""Shapes of activations in a model's own sizes."""

from __future__ import annotations

from adapters.config import ModelConfig


def shape_text(cfg: ModelConfig, axes: str) -> str:
    """The axes of a hook point with the model's sizes where they are fixed.

    Args:
        cfg: the facts about the model.
        axes: such as ``batch pos n_heads d_head``.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.hooks.shapes import shape_text
        >>> shape_text(TransformerBridge.boot_embedded().cfg, "batch pos n_heads d_head")
        '[batch, pos, 4, 32]'
    """
    sizes = [(axis, size_of(cfg, axis)) for axis in axes.split()]
    return f"[{', '.join(axis if size is None else str(size) for axis, size in sizes)}]"


def size_of(cfg: ModelConfig, axis: str) -> int | None:
    """The size of an axis; None where the model does not fix it.

    Args:
        cfg: the facts about the model.
        axis: such as ``n_heads``.
    """
    known = {"n_key_value_heads": cfg.n_kv_heads, "n_experts": cfg.num_experts}
    value = known.get(axis, getattr(cfg, axis, None) if not axis.isdigit() else int(axis))
    return value if isinstance(value, int) else None


def heads_shown(cfg: ModelConfig, axes: str) -> int:
    """How many query heads an activation shows: some models have more in one layer than in another.

    Args:
        cfg: the facts about the model.
        axes: of a layer's ``hook_z``, or of its ``hook_pattern``.
    """
    names = axes.split()
    return size_of(cfg, names[1] if names[-1] == "key_pos" else names[-2]) or cfg.n_heads


class BatchAxisError(ValueError, AssertionError):
    """A batch of several has no axis to drop. HookedTransformer's programs expect an `AssertionError`."""

    def __init__(self, rows: int, name: str, shape: list[int]) -> None:
        super().__init__(f"cannot remove a batch axis of {rows}: {name} has {shape}")
