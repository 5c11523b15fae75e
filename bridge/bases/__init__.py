"""Hook points in a basis of the user's: how one is placed, and the bases that come with the package."""

from adapters.views.basis import Basis
from bridge.bases.bases import CrossLayer, Directions, Neurons, Rotation

__all__ = ["Basis", "CrossLayer", "Directions", "Neurons", "Rotation"]
