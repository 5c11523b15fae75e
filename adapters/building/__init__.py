"""From a declaration to hook points: blocks, and what comes before and behind them."""
