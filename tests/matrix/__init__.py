"""Every family in every surrounding under every operation, compared with plain torch hooks on the Hugging Face modules."""
