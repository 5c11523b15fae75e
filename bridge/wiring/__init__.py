"""Where hook points meet torch: the torch hooks and taps that stand while somebody listens."""
