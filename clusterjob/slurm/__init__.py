"""Slurm as a client sees it: its options, its commands, its queue. `clusterjob.backends.slurm` makes a backend of it."""
