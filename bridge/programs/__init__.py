"""A run with its hooks, lowered once into a plain module that can be compiled, exported and served."""
