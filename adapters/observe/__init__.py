"""Watching a model run: what passes the borders of its modules, its softmaxes, and what reaches them by gradient."""
