"""What a model is given: tokens, and what else it needs, images or sound."""
