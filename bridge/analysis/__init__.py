"""What activations and weights say: the residual stream in parts, attribution, lenses, heads, singular vectors."""
