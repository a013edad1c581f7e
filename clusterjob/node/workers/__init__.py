"""Start and end the workers of a node; only this package forks.

The agent uses only `forkserver_client`; the forkserver process runs `forkserver`.
"""
