"""Stacks of the workers of a node: offer them, request them, group them.

`offer` runs in the workers, `request` and `collect` in the process that asks. `frames` is the data;
`waits` recognizes waiting functions, `grouping` makes the headline from them. `kernel` and
`activity` read /proc; with them and the stacks, `progress` tells whether workers move.
"""
