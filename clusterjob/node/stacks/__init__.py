"""Stacks of the workers of a node: offer them, collect them, group them, compare them.

`offer` runs in the workers, `collect` in the process that asks. `grouping` has the data, the groups
and the files. `progress` tells from the stacks and from /proc whether workers move.
"""
