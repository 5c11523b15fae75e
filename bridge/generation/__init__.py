"""Generating text: the model's own ``generate``, with hooks, step by step or as a stream."""
