"""Record a model's run: module inputs and outputs, softmaxes, and gradients between them."""
