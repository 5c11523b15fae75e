"""One forward pass: inputs, layer ranges, recording, loss."""
