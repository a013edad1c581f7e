"""Checks before a job: the engine, this machine, the fitness tests."""
