"""Proofs of a declaration on a model, without knowing its family: by gradients, recomputation and
edits.
"""

from typing import TYPE_CHECKING

from adapters.imports import lazily

if TYPE_CHECKING:
    from adapters.proofs import proofs as proofs

__getattr__, __dir__ = lazily(__name__, "proofs")
