"""What proves a declaration on a model, without knowing its family: by gradients, by recomputing, by effects."""

from typing import TYPE_CHECKING

from adapters.imports.lazily import lazily

if TYPE_CHECKING:
    from adapters.proofs import search as search
    from adapters.proofs import verification as verification

__getattr__, __dir__ = lazily(__name__, "search", "verification")
