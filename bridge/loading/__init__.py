"""Loading models and tokenizers."""

from typing import TYPE_CHECKING

from adapters.imports.lazily import lazily

if TYPE_CHECKING:
    from bridge.loading import boot as boot
    from bridge.loading import patches as patches
    from bridge.loading import request as request

__getattr__, __dir__ = lazily(__name__, "boot", "patches", "request")
