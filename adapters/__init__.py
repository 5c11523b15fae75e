"""Which module of a Hugging Face model plays which part: declarations, and the hook points they make."""

from adapters.architecture import MLP, Architecture, Block, MoE
from adapters.attention import Attention, Projection
from adapters.model import Anatomy, anatomy
from adapters.registry import UnsupportedModelError, register, supported
from adapters.verification import Report, verify
from adapters.weights import Weights

__all__ = [
    "MLP",
    "Anatomy",
    "Architecture",
    "Attention",
    "Block",
    "MoE",
    "Projection",
    "Report",
    "UnsupportedModelError",
    "Weights",
    "anatomy",
    "register",
    "supported",
    "verify",
]
