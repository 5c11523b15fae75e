"""How the shipped model was trained, and what of it is measured."""
