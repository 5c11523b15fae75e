"""Language models that transformers does not contain, one structure a file, and what plain torch
says of them.
"""
