"""Parts that mix positions without a softmax: state spaces, linear attention, short convolutions, gated recurrences."""
