"""Hook points in a user-defined basis, and the bases of this package."""

from adapters.views.basis import Basis
from bridge.bases.bases import CrossLayer, Directions, Neurons, Rotation

__all__ = ["Basis", "CrossLayer", "Directions", "Neurons", "Rotation"]
