"""--nodes and --spares: how many machines a job has, and how many of them have workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterjob.core import job_settings, node_count
from clusterjob.core.spec import JobSpec
from clusterjob.errors import SpecError
from clusterjob.node.program import Program


@pytest.mark.parametrize(
    ("value", "read"),
    [(3, 3), (" 3 ", 3), ("-3", -3), ("2:4", "2:4"), (" 2 : 4 ", "2:4"), ("4:4", 4)],
)
def test_number_of_nodes_is_a_count_or_a_range(value: Any, read: int | str) -> None:
    assert node_count.read_nodes(value) == read


@pytest.mark.parametrize("value", ["0:2", "4:2", "1:2:3", ":4", "4:", "x", "", True, 1.5, None, []])
def test_other_numbers_of_nodes_are_refused(value: Any) -> None:
    with pytest.raises(SpecError):
        node_count.read_nodes(value)


@pytest.mark.parametrize(
    ("flags", "machines", "working", "least"),
    [
        ({}, 1, 1, None),
        ({"nodes": 2}, 2, 2, None),
        ({"spares": 1}, 2, 1, None),
        ({"nodes": 2, "spares": 1}, 3, 2, None),
        ({"nodes": "2:4"}, 4, 4, 2),
        ({"nodes": "2:4", "spares": 2}, 6, 4, 2),
        ({"nodes": "4:4"}, 4, 4, None),
        ({"hosts": "a,b,c"}, 3, 3, None),
        ({"hosts": "a,b,c", "spares": 1}, 3, 2, None),
        ({"hosts": "a,b,c,d", "nodes": 2, "spares": 1}, 3, 2, None),
        ({"hosts": "a,b,c", "nodes": "1:3"}, 3, 3, 1),
    ],
)
def test_machines_of_a_job_include_its_spares(
    tmp_path: Path, flags: dict[str, Any], machines: int, working: int, least: int | None
) -> None:
    settings = job_settings.resolve(flags, None, tmp_path)
    spec: JobSpec = job_settings.make_spec(Program("command", "true"), settings, tmp_path)
    assert (spec.resources.nodes, spec.working_nodes, spec.min_nodes) == (machines, working, least)
