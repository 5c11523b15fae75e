"""Tracing: a forward pass that pauses where ordinary Python asks for an activation."""
