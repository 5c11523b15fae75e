"""HookedTransformer's weight processing, on the Hugging Face model's own parameters."""

from bridge.processing.check import ProcessingError
from bridge.processing.methods import OFF, ON, Choice, ProcessingMethods, is_processed

__all__ = ["OFF", "ON", "Choice", "ProcessingError", "ProcessingMethods", "is_processed"]
