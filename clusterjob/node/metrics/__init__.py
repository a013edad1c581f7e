"""Metrics of a node, its workers and its GPUs: sample, store and read them."""
