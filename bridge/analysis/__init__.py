"""Analyses of activations and weights: attribution, lenses, heads, singular vectors."""
