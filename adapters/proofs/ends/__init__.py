"""What comes before the first block."""
