"""What stands before the first block."""
