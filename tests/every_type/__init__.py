"""What the documentation promises, as properties that are tried on every type of transformers."""
