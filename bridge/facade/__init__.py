"""What a user calls on a `TransformerBridge`, by subject: each method with its documentation, and
one line of code.
"""
