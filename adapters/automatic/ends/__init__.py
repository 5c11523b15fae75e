"""How a stream begins and how logits are read from it, found in a recording."""
