"""What is run of other people's repositories: a file for each, which imports it as its own scripts
do.

Nothing of them is in here. `numbers()` calls their functions on small models that a seed decides,
and returns what they computed, by name. `python -m tests.clients.programs NAME FOLDER FILE` runs
one with the checkout in a folder.
"""
