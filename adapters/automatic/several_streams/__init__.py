"""Blocks that carry several residual streams: what mixes them, before the first block and behind the last."""
