"""Declarations of the modules of a Hugging Face model, and the hook points made from them."""

from typing import TYPE_CHECKING

from adapters.imports import lazily  # first: it checks the versions

# isort: split

from adapters.architecture import Architecture, Block, Embedding, Head, Readout, Stack, Step
from adapters.attention import Attention, Projection
from adapters.feed_forward import MLP, MoE
from adapters.mixers import Mixer
from adapters.model import ModelMap, map_model
from adapters.norms import Norm
from adapters.registry import UnsupportedModelError, register, supported
from adapters.weights import Weights

if TYPE_CHECKING:
    from adapters.kept import Declaration, DeclarationError
    from adapters.proofs.evidence import Report
    from adapters.proofs.proofs import verify

__all__ = [
    "MLP",
    "Architecture",
    "Attention",
    "Block",
    "Declaration",
    "DeclarationError",
    "Embedding",
    "Head",
    "Mixer",
    "MoE",
    "ModelMap",
    "Norm",
    "Projection",
    "Readout",
    "Report",
    "Stack",
    "Step",
    "UnsupportedModelError",
    "Weights",
    "map_model",
    "register",
    "supported",
    "verify",
]

__getattr__, __dir__ = lazily(
    __name__,
    Declaration="kept",
    DeclarationError="kept",
    Report="proofs.evidence",
    verify="proofs.proofs",
)
