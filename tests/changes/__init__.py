"""Five changes that the library must stay cheap to make, as patches, each with a script that shows
that it works.
"""
