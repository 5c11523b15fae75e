"""Inference of a declaration: what plays which part, found in one recorded run, without knowing the family."""
