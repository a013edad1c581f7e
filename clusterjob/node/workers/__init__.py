"""Start and end the workers of a node.

The agent uses only `forkserver_client`; the forkserver process runs `forkserver`.
"""
