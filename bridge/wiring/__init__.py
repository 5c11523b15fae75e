"""Wiring of hook points to torch: the torch hooks and taps that are attached for listeners."""
