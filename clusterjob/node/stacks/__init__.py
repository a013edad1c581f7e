"""Stacks of the workers of a node: offer them, collect them, group them, compare them.

`offer` runs in the workers, `collect` in the process that asks. `frames` is the data; `waits`
recognizes waiting functions, `grouping` makes the headline from them. `progress` tells from the
stacks and from /proc whether workers move.
"""
