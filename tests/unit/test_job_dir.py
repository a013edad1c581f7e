"""One module defines the file names of a job directory."""

from __future__ import annotations

import ast
from pathlib import Path

import clusterjob
from clusterjob.node.logs import job_dir

PACKAGE = Path(clusterjob.__file__).parent
# Only names with a dot: a name such as "secrets" may also be another word in the code.
FILE_NAMES = {value for name, value in vars(job_dir).items() if name.isupper() and "." in value}


def test_no_other_module_writes_a_file_name_of_a_job_directory() -> None:
    assert {"result.json", "events.jsonl", "spec.json", "agent.log"} <= FILE_NAMES
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "job_dir.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value in FILE_NAMES:
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.value!r}")
    assert found == []
