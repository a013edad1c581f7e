"""The SSH backend: a job on bare hosts."""
