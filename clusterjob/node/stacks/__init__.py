"""Stacks of the workers of a node: offer them, request them, group them."""
