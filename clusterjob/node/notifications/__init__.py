"""Notifications of a job: node 0's agent reports events, and a child process sends them."""

from __future__ import annotations

START, END, FAILURE, REQUEUE = KINDS = ("start", "end", "failure", "requeue")
DEFAULT_KINDS = (END, FAILURE, REQUEUE)
ARRAY_TASKS = "array_tasks"  # each element of an array, as in sbatch's --mail-type
