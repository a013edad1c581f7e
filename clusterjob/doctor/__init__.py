"""Checks before a job: the engine, this machine, and findings about any machine."""
