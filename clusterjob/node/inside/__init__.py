"""Run commands and relays inside a running job, on the node of a worker.

`clusterjob exec`, `shell` and `forward` start `program` next to the worker: in a child process,
over SSH, or in an overlapping Slurm step. Both sides exchange frames (`streams`) on its stdin and
stdout, so no transport needs a terminal or a port.
"""
