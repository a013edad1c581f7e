"""Specify, plan, record and follow jobs, independent of any backend."""
