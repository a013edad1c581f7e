"""A job submits another job.

The node zip on its PYTHONPATH shadows the installed package and contains all needed modules.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from commands import command
from launching import write_tree

from clusterjob.core.records import Records

# Jobs start workers by exec, so that nothing imports torch.
OUTER = """
    import os, subprocess, sys
    if os.environ["RANK"] == "0":
        command = [sys.executable, "-m", "clusterjob", "run", "--cluster", sys.argv[1]]
        options = ["--start", "exec", "--nodes", "2"]
        sys.exit(subprocess.run([*command, *options, "inner.py"]).returncode)
"""
INNER = """
    import os, clusterjob
    print("inner", os.environ["RANK"], os.environ["WORLD_SIZE"], clusterjob.__file__.split("/")[-3])
"""
SUBMITS_FUNCTION = """
    import os, clusterjob
    def add(a, b):
        return a + b
    if __name__ == "__main__" and os.environ["RANK"] == "0":
        job = clusterjob.submit(add, 2, 3, cluster="local")
        print("result", job.result())
"""


@pytest.mark.parametrize(
    ("outer", "shown"),
    [
        (OUTER, [f"inner {rank} 2 clusterjob-node.pyz" for rank in (0, 1)]),
        (SUBMITS_FUNCTION, ["result 5"]),
    ],
    ids=["script", "function"],
)
def test_local_job_runs_local_job(tmp_path: Path, outer: str, shown: list[str]) -> None:
    files = {"outer.py": outer, "inner.py": INNER}
    write_tree(tmp_path, **{name: textwrap.dedent(text) for name, text in files.items()})
    options = ("--cluster", "local", "--start", "exec", "--nodes", "2")
    out = command(tmp_path, "run", *options, "outer.py", "local").stdout
    assert sorted(re.findall(r"(?:inner|result) .*", out)) == shown
    records = Records().all()
    assert len(records) == 2
    zips = {(record.job_dir / "clusterjob-node.pyz").read_bytes() for record in records}
    assert len(zips) == 1
