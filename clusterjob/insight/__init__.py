"""Answers to questions of a person about a job: its stacks, metrics, efficiency and report."""
