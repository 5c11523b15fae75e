"""The model that a command names."""

from __future__ import annotations

from bridge.bridge import TransformerBridge


def named_model(name: str) -> TransformerBridge:
    """Loads a model in evaluation mode.

    Args:
        name: a hub name, a folder, or ``embedded``.
    """
    found = TransformerBridge.boot_embedded() if name == "embedded" else TransformerBridge.boot_transformers(name)
    found.eval()
    return found
