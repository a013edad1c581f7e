"""The layout of a job directory: the name of every file in it.

A job directory is on the submitter's machine. Hosts that do not share it each have a
job directory with the same layout for their own node.
"""

from __future__ import annotations

import re
from pathlib import Path

SPEC = "spec.json"  # the job as it was submitted
RESULT = "result.json"  # the verdict of the coordinator
EVENTS = "events.jsonl"  # the coordinator's record, one event per line
# The record of a coordinator that has moved to another node: the number of the move, the node.
_moved_events = re.compile(r"events\.([1-9]\d{0,3})\.node(\d{1,7})\.jsonl", re.ASCII)
COORDINATOR = "coordinator.json"  # with restarts: the state with which a coordinator goes on
TOKEN = "token"
CODE = "code"  # the submitted code: the sent files, or a link to the only directory in TREE
TREE = "tree"
CODE_GIT = "code.git"  # the .git directory of sent code, made at the submission
DIFF = "code.diff"  # uncommitted changes of the code at the submission
SECRETS = "secrets"  # NUL-separated variables of --secret
DETACHED = "detached"  # exists if the job continues after its submitter ends
CANCELLED = "cancelled"  # exists if the job was cancelled
CANCEL_STACKS = "cancel.stacks"  # exists if a cancel must save the stacks of the workers first
CODE_LIST = "code.list"  # compressed list of the files of the sent code, with their digests
ARCHIVE = "archive"  # on a host: the digest of the environment archive that the job needs
STDIN_SCRIPT = "stdin.py"  # a script that the submitter has read from its standard input
CALLS = "call.*.pkl"  # pickled calls of Python functions; see `clusterjob.worker.call`
OUTCOMES = "call"  # the folder of their outcomes
ELEMENTS = "elements"  # one job directory per element of an array, by index
NOTIFIED = "notified"  # of an array: the elements that have ended, and the events that were sent

ENDS = "ends"  # the end of each node; see `clusterjob.node.logs.ends`
AGENTS = "agents"  # on a host: the process of each agent
ALIVE = "alive"  # in ENDS: touched by Slurm's batch script

LOGS = "logs"
SLURM_LOG = "slurm.out"  # in LOGS: output of the batch script
COMPLETE = "whole"  # in LOGS: exists when all logs of an ended job have been fetched

# Files in logs/node<k>. `clusterjob.node.logs.log_files` names the workers' files.
AGENT_LOG = "agent.log"
STORE_LOG = "store.log"
PREFLIGHT_LOG = "preflight.log"
TIMELINE = "timeline"
PHASES = "phases.jsonl"  # see `clusterjob.node.logs.events`
ENVIRONMENT = "environment.jsonl"  # see `clusterjob.node.logs.events`
METRICS = "metrics.jsonl"  # see `clusterjob.node.metrics.samples`


def event_files(job_dir: Path) -> list[Path]:
    """Return the files with the events of a job, in order of time."""
    moved = [path for path in job_dir.glob("events.*.jsonl") if events_node(path.name) is not None]
    return [job_dir / EVENTS, *sorted(moved, key=lambda path: int(path.name.split(".")[1]))]


def events_node(name: str) -> int | None:
    """Return the node whose coordinator writes an event file; None for any other file."""
    if name == EVENTS:
        return 0
    moved = _moved_events.fullmatch(name)
    return int(moved[2]) if moved else None


def moved_events(moves: int, node_rank: int) -> str:
    """Return the name of the file with the events of a coordinator that has moved."""
    return f"events.{moves}.node{node_rank}.jsonl"
