"""The Slurm backend: clients, planning, submission, status, checks."""
