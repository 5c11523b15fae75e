"""Loading models and tokenizers."""
