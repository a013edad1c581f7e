"""Detect a rank assignment from the environment variables of a launcher or platform.

Each family of variables is a row of `families.FAMILIES`. A family whose variables are set but give
no rank assignment has conflicts that say why. If no family applies, the finding's source is
``none``.
"""
