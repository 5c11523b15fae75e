"""Load models and tokenizers."""

from typing import TYPE_CHECKING

from adapters.imports import lazily

if TYPE_CHECKING:
    from bridge.loading import loading as loading
    from bridge.loading import patches as patches

__getattr__, __dir__ = lazily(__name__, "loading", "patches")
