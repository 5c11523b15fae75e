"""Which module of a Hugging Face model plays which part: declarations, and the hook points they make."""

from adapters.architecture import Architecture, Block, Embedding, Head, Readout, Stack, Step
from adapters.attention import Attention, Projection
from adapters.feed_forward import MLP, MoE
from adapters.mixers.part import Mixer
from adapters.model import ModelMap, map_model
from adapters.norms import Norm
from adapters.registry import UnsupportedModelError, register, supported
from adapters.verification import Report, verify
from adapters.weights import Weights

__all__ = [
    "MLP",
    "Architecture",
    "Attention",
    "Block",
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
