"""One forward pass: inputs, torch hooks, layer ranges, recording, loss."""
