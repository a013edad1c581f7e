"""A job submits another job.

The node zip on its PYTHONPATH shadows the installed package and contains all needed modules.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

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
SCRIPTS = {"outer.py": textwrap.dedent(OUTER), "inner.py": textwrap.dedent(INNER)}
SUBMITS_FUNCTION = """
    import os, clusterjob
    def add(a, b):
        return a + b
    if __name__ == "__main__" and os.environ["RANK"] == "0":
        job = clusterjob.submit(add, 2, 3, cluster="local")
        print("result", job.result())
"""


def expected(out: str) -> list[str]:
    return sorted(line[line.index("inner") :] for line in out.splitlines() if "inner" in line)


SHOWN = [f"inner {rank} 2 clusterjob-node.pyz" for rank in (0, 1)]


def test_local_job_runs_local_job(tmp_path: Path) -> None:
    write_tree(tmp_path, **SCRIPTS)
    options = ("--cluster", "local", "--start", "exec", "--nodes", "2")
    done = command(tmp_path, "run", *options, "outer.py", "local")
    assert expected(done.stdout) == SHOWN
    records = Records().all()
    assert sorted(record.name for record in records) == ["inner", "outer"]
    zips = {(record.job_dir / "clusterjob-node.pyz").read_bytes() for record in records}
    assert len(zips) == 1


def test_job_submits_function(tmp_path: Path) -> None:
    (tmp_path / "outer.py").write_text(textwrap.dedent(SUBMITS_FUNCTION))
    done = command(tmp_path, "run", "--cluster", "local", "--start", "exec", "outer.py")
    assert "result 5" in done.stdout
