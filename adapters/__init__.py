"""Which module of a Hugging Face model plays which part: declarations, and the hook points they make."""

from adapters.architecture import MLP, Architecture, Block
from adapters.attention import Attention, Projection
from adapters.model import Anatomy, anatomy
from adapters.registry import UnsupportedModelError, register, supported
from adapters.verification import Report, verify

__all__ = [
    "MLP",
    "Anatomy",
    "Architecture",
    "Attention",
    "Block",
    "Projection",
    "Report",
    "UnsupportedModelError",
    "anatomy",
    "register",
    "supported",
    "verify",
]
