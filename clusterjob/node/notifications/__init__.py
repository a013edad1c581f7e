"""Notifications of a job: the coordinator's node starts one process for each event."""

from __future__ import annotations

START, END, FAILURE, REQUEUE = KINDS = ("start", "end", "failure", "requeue")
DEFAULT_KINDS = (END, FAILURE, REQUEUE)
ARRAY_TASKS = "array_tasks"  # each element of an array, as in sbatch's --mail-type
