"""Declarations that are kept in files: what they say, of which model, and where they lie."""
