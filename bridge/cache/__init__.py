"""What a run left: the activations, by hook name."""
