"""Preflight: measure every node before the workers start, and name the slow hosts.

`host_measures` and `group_measures` run in a process of their own on each node
(`measuring_process`); `turns`, `measures` and `heat_table` are the coordinator's.
"""
