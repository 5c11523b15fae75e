"""The parameters under canonical names, and products of them."""
