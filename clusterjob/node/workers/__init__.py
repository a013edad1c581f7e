"""How a node's workers come to be and end: the one room that forks. `starter` is its process; the
agent talks to that alone.
"""
