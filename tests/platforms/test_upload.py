"""The upload of a platform job: snapshot files, clusterjob's files and a restore list.

The list names what an upload may drop: modes, links and empty directories.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import executable, new_folder, run, write_tree
from written_job import lines_of

from clusterjob.backends import shared
from clusterjob.backends.batch_command import upload
from clusterjob.backends.batch_command.log_stream import LogStream
from clusterjob.backends.batch_command.upload import ENTRY, OWN
from clusterjob.core import node_zip, snapshot
from clusterjob.core.plans import PlannedFile
from clusterjob.core.render import render
from clusterjob.core.spec import JobSpec, launch_arguments
from clusterjob.errors import SubmitError
from clusterjob.node.logs import ends
from clusterjob.node.logs.log_files import LogReader
from clusterjob.node.program import Program

FILES = [
    PlannedFile(Path("/x/entry.sh"), b"echo\n", mode=0o700),
    PlannedFile(Path("/x/clusterjob-node.pyz"), b"PK", mode=0o600),
]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = new_folder(tmp_path / "work")
    (folder / "train.py").write_text("print('trained')\n")
    return folder


@pytest.fixture
def job_dir(tmp_path: Path) -> Path:
    return new_folder(tmp_path / "job")


def spec_of(work: Path, **fields: object) -> JobSpec:
    return JobSpec(
        Program("script", "train.py"), **{"workdir": work, "python": sys.executable, **fields}
    )  # type: ignore[arg-type]


def listed(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


def test_stage_contains_snapshot_files_and_clusterjob_files(work: Path, job_dir: Path) -> None:
    write_tree(work, **{".gitignore": "*.pyz\n*.log\n", "sub/.gitignore": "big\n"})
    for name in ("a.log", "sub/big", "sub/small", "é ☃\n"):
        (work / name).write_text(name)
    os.utime(work / "train.py", (1e9, 1e9))
    staged = upload.stage(spec_of(work), job_dir, files=FILES)
    assert listed(staged.root) == [
        f"{OWN}/clusterjob-node.pyz",
        f"{OWN}/entry.sh",
        f"{OWN}/kept",
        "sub/small",
        "train.py",
        "é ☃\n",
    ]
    train, entry_script = staged.root / "train.py", staged.root / OWN / "entry.sh"
    assert (train.read_text(), train.stat().st_mtime) == ("print('trained')\n", 1e9)
    assert entry_script.read_bytes() == b"echo\n"
    size = sum(path.stat().st_size for path in staged.root.rglob("*") if path.is_file())
    assert (staged.files, staged.size, bool(staged.digest)) == (6, size, True)
    assert staged.root.stat().st_mode & 0o777 == 0o700
    staged.remove()
    assert not staged.root.exists()


def test_stage_without_sync_contains_clusterjob_files_only(work: Path, job_dir: Path) -> None:
    staged = upload.stage(spec_of(work, sync=False, login="x"), job_dir, files=FILES)
    assert listed(staged.root) == [f"{OWN}/clusterjob-node.pyz", f"{OWN}/entry.sh", f"{OWN}/kept"]
    assert staged.digest == ""


def test_stage_contains_no_symbolic_link(work: Path, job_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of another user")
    (work / "loop").symlink_to(".")
    (work / "out").symlink_to(tmp_path / "secret")
    (work / "inside").symlink_to("train.py")
    staged = upload.stage(spec_of(work), job_dir, files=FILES)
    assert not any(path.is_symlink() for path in staged.root.rglob("*"))
    assert listed(staged.root) == [
        f"{OWN}/clusterjob-node.pyz",
        f"{OWN}/entry.sh",
        f"{OWN}/kept",
        "train.py",
    ]


def test_directory_named_clusterjob_entry_is_refused(work: Path, job_dir: Path) -> None:
    (work / OWN).mkdir()
    with pytest.raises(
        SubmitError, match=r"contains 'clusterjob-entry', a name that clusterjob needs"
    ) as caught:
        upload.stage(spec_of(work), job_dir, files=FILES)
    assert "exclude it in .clusterjobignore" in caught.value.hint
    assert not (job_dir / "upload").exists()
    (work / ".clusterjobignore").write_text(f"/{OWN}\n")
    upload.stage(spec_of(work), job_dir, files=FILES)


@pytest.mark.parametrize("text", ["other", None])
def test_file_that_changes_during_staging_is_refused(
    work: Path, job_dir: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    (work / "other.py").write_text("x")
    old_snapshot, spec = snapshot.take(work), spec_of(work)
    (work / "other.py").unlink()
    if text is not None:
        (work / "other.py").write_text(text)
    monkeypatch.setattr(snapshot, "take", lambda *_, **__: old_snapshot)
    with pytest.raises(SubmitError, match=r"'other\.py' changed while it was being sent"):
        upload.stage(spec, job_dir, files=FILES)
    assert not (job_dir / "upload").exists()


def test_upload_over_limit_is_refused_and_old_upload_is_replaced(work: Path, job_dir: Path) -> None:
    write_tree(job_dir, **{"upload/old": ""})
    (work / "data").write_bytes(bytes(2000))
    with pytest.raises(SubmitError, match="more than the"):
        upload.stage(spec_of(work), job_dir, files=FILES, limit=1000)
    assert not (job_dir / "upload").exists()
    write_tree(job_dir, **{"upload/old": ""})
    assert "old" not in listed(upload.stage(spec_of(work), job_dir, files=FILES).root)


def test_upload_directory_that_cannot_be_written_is_named(work: Path, tmp_path: Path) -> None:
    with pytest.raises(
        SubmitError, match=r"the upload cannot be written to .*: No such file or directory"
    ):
        upload.stage(spec_of(work), tmp_path / "nowhere", files=FILES)


# -- entry script ----------------------------------------------------------------------------------


def entry(spec: JobSpec, job_dir: Path, **values: object) -> list[PlannedFile]:
    common = shared.common_values(spec, "job-abc", job_dir=job_dir) | {
        "uploaded": True,
        "workdir": "",
        "node_zip": "",
    }
    text = render(
        "mlp.sh.j2", common | {"launch_arguments": launch_arguments(spec.launch_options())} | values
    )
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    return [
        shared.script_file(job_dir / ENTRY, text),
        PlannedFile(job_dir / node_zip.NAME, node_zip.node_zip(job_dir)),
    ]


def uploaded(root: Path, destination: Path) -> Path:
    """Copy staged files as a platform's upload does: without empty directories, modes and links.

    Return the path of the entry script.
    """
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            target = destination / path.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            target.chmod(0o644)
    return destination / OWN / ENTRY


ALONE = {"MLP_WORKER_NUM": "1", "MLP_ROLE_INDEX": "0", "MLP_TASK_ID": "t-1"}
SHOW = """
import json, os, sys
print(json.dumps({
    "at": os.getcwd(), "argv": sys.argv, "token": os.environ.get("CLUSTERJOB_TOKEN"),
    "job": os.environ["CLUSTERJOB_JOB_ID"], "stream": os.environ.get("CLUSTERJOB_STREAM"),
    "index": os.environ.get("CLUSTERJOB_ARRAY_INDEX"), "word": os.environ.get("WORD"),
}))
"""


def printed(job_dir: Path, out: str) -> dict[str, object]:
    LogStream(job_dir, 0).take(out.split("\n")[:-1])
    lines = lines_of(LogReader(job_dir), end=True)
    (line,) = [line.text for line in lines if line.text.startswith("{")]
    found: dict[str, object] = json.loads(line)
    return found


def test_job_without_sync_runs_in_its_workdir(work: Path, job_dir: Path, tmp_path: Path) -> None:
    (work / "train.py").write_text(SHOW)
    spec = spec_of(work, sync=False)
    staged = upload.stage(spec, job_dir, files=entry(spec, job_dir, workdir=str(work)))
    ran = run(["bash", uploaded(staged.root, tmp_path / "code")], tmp_path, ALONE, code=0)
    assert printed(job_dir, ran.out)["at"] == str(work)


def test_entry_script_restores_modes_links_and_empty_directories(
    work: Path, job_dir: Path, tmp_path: Path
) -> None:
    (work / "empty -rf" / "deeper").mkdir(parents=True)
    executable(work / "tool.sh", "#!/bin/sh\necho ran the tool\n")
    (work / "-link \n'x'").symlink_to("tool.sh")
    (work / "data").symlink_to("/nonexistent/on the platform")
    (work / "train.py").write_text(
        "import os, subprocess\n"
        "assert os.path.isdir('empty -rf/deeper')\n"
        "assert os.readlink('data') == '/nonexistent/on the platform'\n"
        "subprocess.run(['./-link \\n\\'x\\''], check=True)\n"
    )
    spec = spec_of(work)
    staged = upload.stage(spec, job_dir, files=entry(spec, job_dir))
    path = uploaded(staged.root, tmp_path / "code")
    for _ in range(2):  # two nodes may share the directory
        ran = run(["bash", path], work, ALONE, code=0)
        assert "ran the tool" in ran.out
        assert ran.err == ""


@pytest.mark.parametrize(
    ("fields", "values", "code", "reason"),
    [
        ({"setup": ("false",)}, {}, 1, "a setup line failed: false"),
        (
            {"setup": ("exit_with() { return 7; }", "exit_with")},
            {},
            7,
            "a setup line failed: exit_with",
        ),
        (
            {},
            {"workdir": "/nonexistent/it's"},
            1,
            "the working directory /nonexistent/it's cannot be entered",
        ),
    ],
)
def test_node_that_cannot_start_reports_reason_in_log(
    work: Path,
    job_dir: Path,
    tmp_path: Path,
    fields: dict[str, object],
    values: dict[str, object],
    code: int,
    reason: str,
) -> None:
    spec = spec_of(work, **fields)
    ran = run(
        [
            "bash",
            uploaded(
                upload.stage(spec, job_dir, files=entry(spec, job_dir, **values)).root,
                tmp_path / "code",
            ),
        ],
        work,
        ALONE,
    )
    assert ran.code == code
    LogStream(job_dir, 0).take((ran.out + ran.err).split("\n")[:-1])
    (failure,) = ends.refusals(job_dir)
    assert (failure.exit_code, failure.message.startswith(reason), failure.host) == (
        code,
        True,
        os.uname().nodename,
    )


def test_agent_that_cannot_start_reports_reason_in_log(
    work: Path, job_dir: Path, tmp_path: Path
) -> None:
    spec = spec_of(work)
    path = uploaded(upload.stage(spec, job_dir, files=entry(spec, job_dir)).root, tmp_path / "code")
    # The other MLP variables of a two-node task are missing.
    ran = run(["bash", path], work, ALONE | {"MLP_WORKER_NUM": "2"}, code=2)
    LogStream(job_dir, 0).take((ran.out + ran.err).split("\n")[:-1])
    (failure,) = ends.refusals(job_dir)
    assert (failure.exit_code, "MLP_WORKER_0_HOST is not set" in failure.message) == (2, True)
