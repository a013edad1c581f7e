"""The local backend: a job of one or more nodes on this machine."""
