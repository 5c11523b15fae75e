"""From a declaration to hook points: blocks, and what stands before and behind them."""
