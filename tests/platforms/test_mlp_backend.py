"""The mlp cluster's plan: the entry script and the task, what is in them and what is refused.
Submitting: test_mlp_cluster.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import finish, run, start

from clusterjob.backends.base import names
from clusterjob.backends.mlp import backend
from clusterjob.core.spec import JobSpec, Resources
from clusterjob.errors import SpecError, SubmitError
from clusterjob.node.program import Program


def entry(spec: JobSpec) -> str:
    return backend.MlpBackend().plan(spec).files[-1].text()


def make(directory: Path, **fields: object) -> JobSpec:
    (directory / "train.py").write_text("print('trained')\n")
    return JobSpec(
        Program("script", "train.py", args=("--x",)),
        **{"workdir": directory, "python": sys.executable, **fields},
    )  # type: ignore[arg-type]


def test_it_is_a_cluster_by_name() -> None:
    assert "mlp" in names()


@pytest.mark.parametrize(
    ("left_open", "nproc", "words"),
    [(True, 1, ""), (False, 1, "--nproc-per-node 1 "), (False, 4, "--nproc-per-node 4 ")],
)
def test_the_platform_counts_the_workers_unless_the_user_does(
    tmp_path: Path, left_open: bool, nproc: int, words: str
) -> None:
    last = entry(make(tmp_path, nproc_open=left_open, nproc_per_node=nproc)).splitlines()[-1]
    assert last == f'exec "$CLUSTERJOB_PYTHON" -m clusterjob launch {words}train.py --x'


def test_one_worker_that_the_user_asked_for_is_one_worker(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    texts = [
        finish(
            start(
                [
                    sys.executable,
                    "-m",
                    "clusterjob",
                    "render",
                    "--cluster",
                    "mlp",
                    *flags,
                    "train.py",
                ],
                tmp_path,
            )
        ).out
        for flags in ([], ["--nproc-per-node", "1"], ["--gpus-per-node", "8"])
    ]
    assert ["--nproc-per-node" in text for text in texts] == [False, True, True]


def test_the_script_runs_whatever_its_words_are(weird_path: Path) -> None:
    spec = make(weird_path, env={"WORD": 'it\'s\n$HOME "x"'}, setup=("export LINE='a b'", "true"))
    (weird_path / "train.py").write_text(
        "import json, os, sys; print(json.dumps([os.environ['WORD'], os.environ['LINE'], os.getcwd(), sys.argv]))\n"
    )
    (weird_path / "entry.sh").write_text(entry(spec))
    ran = run(["bash", "./entry.sh"], weird_path, {"MLP_WORKER_NUM": "1", "MLP_ROLE_INDEX": "0"})
    assert ran.code == 0, ran.err
    assert json.loads(ran.out[ran.out.index('["') :].splitlines()[0]) == [
        'it\'s\n$HOME "x"',
        "a b",
        str(weird_path),
        ["train.py", "--x"],
    ]


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        (
            {"setup": ("exit_with() { return 7; }", "exit_with")},
            7,
            "a setup line failed: exit_with",
        ),
        (
            {"options": {"workdir": "/nonexistent/it's"}},
            1,
            "the working directory /nonexistent/it's cannot be entered: --set workdir=DIR",
        ),
    ],
)
def test_a_node_that_cannot_start_says_why(
    tmp_path: Path, fields: dict[str, object], code: int, words: str
) -> None:
    (tmp_path / "entry.sh").write_text(entry(make(tmp_path, **fields)))
    ran = run(["bash", "entry.sh"], tmp_path, {"MLP_WORKER_NUM": "1", "MLP_ROLE_INDEX": "0"})
    assert ran.code == code
    assert words in ran.err


def test_an_interpreter_that_is_not_there_gives_way_to_the_image_s(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(sys.executable)
    (tmp_path / "entry.sh").write_text(entry(make(tmp_path, python="/opt/nowhere/python")))
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    ran = run(
        ["bash", "entry.sh"], tmp_path, {"MLP_WORKER_NUM": "1", "MLP_ROLE_INDEX": "0", "PATH": path}
    )
    assert ran.code == 0, ran.err
    assert "trained" in ran.out


def test_where_the_nodes_see_the_submitter_s_files_they_use_them(tmp_path: Path) -> None:
    plan = backend.MlpBackend().plan(make(tmp_path))
    plan.job_dir.mkdir(parents=True, mode=0o700)
    for file in plan.files:
        file.path.write_bytes(file.data)
    (plan.job_dir / "token").write_text("secret")
    ran = run(
        ["bash", plan.files[-1].path],
        tmp_path,
        {"MLP_WORKER_NUM": "1", "MLP_ROLE_INDEX": "0", "PYTHONPATH": ""},
    )
    assert ran.code == 0, ran.err
    assert (plan.job_dir / "result.json").exists()


def test_the_script_is_sound_shell(tmp_path: Path) -> None:
    text = entry(make(tmp_path, env={"A": "b"}, setup=("module load cuda",)))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"options": {"account": "x"}}, "no option 'account'"),
        ({"array": "0-3%2"}, "does not limit"),
        ({"launcher": "srun"}, "needs Slurm"),
    ],
)
def test_what_it_cannot_do_is_refused(
    tmp_path: Path, fields: dict[str, object], words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        backend.MlpBackend().plan(make(tmp_path, resources=Resources(nodes=2), **fields))


def test_without_an_image_a_flavor_and_a_queue_nothing_is_submitted(tmp_path: Path) -> None:
    plan = backend.MlpBackend().plan(make(tmp_path))
    assert "name image and flavor and queue" in plan.notes[0]
    with pytest.raises(SubmitError) as caught:
        backend.MlpBackend().submit(plan)
    assert "clusterjob render --cluster mlp" in caught.value.hint
    ran = run(
        [
            sys.executable,
            "-m",
            "clusterjob",
            "submit",
            "--cluster",
            "mlp",
            "--set",
            "queue=q-1",
            "train.py",
        ],
        tmp_path,
    )
    assert (ran.code, ran.out) == (1, "")
    assert "the platform takes no task without image and flavor" in ran.err
    assert "--set image=..." in ran.err
    home = Path(os.environ["CLUSTERJOB_HOME"])
    assert not list(home.glob("jobs/*")), "nothing is left of it"
