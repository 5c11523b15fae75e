"""Shapes that many families share, with places for what a family does differently."""
