"""Families, surroundings and operations, all with all, compared with plain torch hooks on the
Hugging Face modules.
"""
