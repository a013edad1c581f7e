"""Detect a rank assignment from the environment variables of a launcher or platform.

Each family of variables has one file with one function, ``detect(environ) -> Finding | None``. The
function returns None if none of the family's variables is set. If they are set but give no rank
assignment, it returns a finding with the source ``none`` and the reason. To add a family, write its
file and add it to `detection.FAMILIES` in the right order, with a comment that gives the reason.
"""
