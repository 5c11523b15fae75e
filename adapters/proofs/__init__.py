"""What proves a declaration on a model, without knowing its family: by gradients, by recomputing, by effects."""
