"""The reason of a job that ended without a verdict."""

from __future__ import annotations

import os
from pathlib import Path

from launching import new_folder

from clusterjob.backends import shared
from clusterjob.backends.job_progress import Progress
from clusterjob.node.logs import ends
from clusterjob.node.logs.job_dir import ENDS
from clusterjob.node.logs.log_files import node_directory


def lost(job_dir: Path) -> str:
    verdict = shared.verdict_without_coordinator(job_dir, Progress(), otherwise="all were killed")
    return verdict.reason


def test_lost_job_names_when_each_node_was_seen_last(tmp_path: Path) -> None:
    """Both agents were frozen, then killed: neither has written an end."""
    for node, last in enumerate((3600.0, 3665.0)):
        folder = new_folder(node_directory(tmp_path, node))
        for name, at in (("rank.out", last - 9), ("phases.jsonl", last)):
            (folder / name).touch()
            os.utime(folder / name, (at, at))
    expected = "all were killed; last written (UTC): node 0 at 01:00:00, node 1 at 01:01:05"
    assert lost(tmp_path) == expected


def test_lost_job_names_what_each_node_has_recorded(tmp_path: Path) -> None:
    (tmp_path / ENDS).mkdir()
    for node in range(2):
        ends.write_lost(tmp_path, node, 0, f"the agent of node {node} was killed")
    assert lost(tmp_path) == "the agent of node 0 was killed; the agent of node 1 was killed"
