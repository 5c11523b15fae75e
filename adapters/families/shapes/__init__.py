"""Shapes that many families share, with arguments for a family's differences."""
