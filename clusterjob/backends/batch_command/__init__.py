"""Shared code of the backends for platforms with their own submit command."""
