"""The shipped model: a small language model, and prompts with known correct answers.

Importing this module loads neither torch nor transformers.

Example:
    >>> from bridge.embedded import MODEL_DIR, prompts
    >>> (MODEL_DIR / "config.json").is_file()
    True
    >>> prompts("fact", 1)[0].kind
    'fact'
"""

from __future__ import annotations

from pathlib import Path

from bridge.embedded.prompts import Prompt, prompts

MODEL_DIR: Path = Path(__file__).resolve().parent / "model"
"""The folder of the shipped model and its tokenizer, to be given to `from_pretrained`."""

__all__ = ["MODEL_DIR", "Prompt", "prompts"]
