"""Hook points in a user-defined basis, and the bases of this package."""

from adapters.views.basis import Basis
from bridge.bases.bases import CrossLayer, Directions, Neurons, Rotation
from bridge.bases.components import Components

__all__ = ["Basis", "Components", "CrossLayer", "Directions", "Neurons", "Rotation"]
