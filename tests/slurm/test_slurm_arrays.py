"""Arrays, sweeps and dependencies under a real Slurm."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from procs import wait_for_no_processes, wait_until
from slurm_user import PROMPT, SLEEPER, User

COUNT = (
    'case "$*" in *--test-only*) ;; *) printf "%s\\n" "$*" >> "$NOTES" ;; esac\nexec "$REAL" "$@"\n'
)
ECHO = """
    import json, os, sys
    print(json.dumps([os.environ["CLUSTERJOB_ARRAY_INDEX"], sys.argv[1:]]))
    sys.exit(int(os.environ.get("FAIL", "")  == os.environ["CLUSTERJOB_ARRAY_INDEX"]) * 5)
"""


def lines(notes: Path) -> list[str]:
    return notes.read_text().splitlines()


def echoed(user: User, job_id: str) -> list[object]:
    [line] = user.output(job_id).splitlines()
    report: list[object] = json.loads(line)
    return report


def test_sweep_is_one_sbatch_call_and_each_element_is_job(user: User) -> None:
    notes = user.command_first_on_path("sbatch", COUNT)
    sweep = ("--sweep", "lr=0.1,0.01", "--sweep", 'text="a\nb; \'$(id)",☃', "--array", "%3")
    job_id = user.submit(ECHO, *sweep, "--env", "FAIL=2", args=("first\nline", "{lr}", "-x"))
    assert len(lines(notes)) == 1
    assert "--array=0-3%3" in notes.read_text()
    done = user("wait", job_id, code=5)
    assert sorted(re.findall(r"job (\S+) (\w+)", done.stderr)) == [
        (f"{job_id}_{index}", "FAILED" if index == 2 else "SUCCEEDED") for index in range(4)
    ]
    values = [(lr, text) for lr in ("0.1", "0.01") for text in ("a\nb; '$(id)", "☃")]
    for index, (lr, text) in enumerate(values):
        assert echoed(user, f"{job_id}_{index}") == [
            str(index),
            ["first\nline", lr, "-x", f"--text={text}"],
        ]
    element = user.job(f"{job_id}_2")
    assert element["values"] == {"lr": "0.01", "text": "a\nb; '$(id)"}
    shown = user("logs", job_id).stdout.splitlines()
    assert [line.partition("] ")[0] for line in shown] == [
        f"[{index} lr={lr} text={text}".replace("\n", "\\n")
        for index, (lr, text) in enumerate(values)
    ]
    assert sorted(user("logs", "-f", job_id, code=5).stdout.splitlines()) == sorted(shown)
    assert "VALUES" in user("list").stdout.splitlines()[0]
    assert " lr=0.01 text=☃" in user("status", job_id).stdout
    assert (element["state"], element["exit_code"], element["backend_id"]) == (
        "FAILED",
        5,
        f"{user.slurm_id(job_id)}_2",
    )
    assert element["failure"]["rank"] == 0
    assert user("wait", f"{job_id}_1").returncode == 0
    assert len(user.jobs()) == 4
    row = user("list").stdout.splitlines()[1]
    assert row.startswith(f"{job_id}  MIXED")
    assert "3 SUCCEEDED, 1 FAILED" in row
    assert "has no element 4" in user("status", f"{job_id}_4", code=2).stderr
    wait_for_no_processes(PROMPT)


@pytest.mark.slow
def test_elements_are_cancelled_singly_and_together(user: User) -> None:
    """Elements that have not started and have no directory yet are cancelled, too."""
    text = SLEEPER.replace("os.environ['RANK']", "os.environ['CLUSTERJOB_ARRAY_INDEX']")
    job_id = user.submit(text, "--array", "2,4,6,8,9%2", until=("up2", "up4"))
    notes = user.command_first_on_path("scancel", COUNT)
    user("cancel", f"{job_id}_9")
    user("cancel", f"{job_id}_2")
    assert [
        user.wait_for_state(f"{job_id}_{index}", "CANCELLED")["exit_code"] for index in (9, 2)
    ] == [143, 143]
    user.wait_for("up6")
    # the next query of Slurm, within 5 s, shows these states
    states = ["CANCELLED", "RUNNING", "RUNNING", "PENDING", "CANCELLED"]
    wait_until(
        lambda: [job["state"] for job in user.jobs(job_id)] == states,
        PROMPT,
        "element 6 in the place of element 2",
    )
    assert lines(notes) == [f"{user.slurm_id(job_id)}_[9]", f"{user.slurm_id(job_id)}_[2]"]
    # the user runs scancel for an element that has no directory yet
    user.slurm.run("scancel", f"{user.slurm_id(job_id)}_8")
    assert user.wait_for_state(f"{job_id}_8", "CANCELLED", timeout=PROMPT)["started_at"] is None
    assert "2 of 5 elements are cancelled" in user("cancel", job_id).stderr
    assert lines(notes)[3:] == ["{0}_[4] {0}_[6]".format(user.slurm_id(job_id))]
    assert user("wait", job_id, code=143).returncode == 143
    assert {job["state"] for job in user.jobs(job_id)} == {"CANCELLED"}
    wait_for_no_processes(PROMPT)


@pytest.mark.slow
def test_array_longer_than_max_array_size_is_split(user: User) -> None:
    with user.slurm.configured(MaxArraySize=10):
        notes = user.command_first_on_path("sbatch", COUNT)
        job_id = user.submit(ECHO, "--array", "7-12,29%8", "--env", "FAIL=29")
        calls = lines(notes)
        assert [
            re.search(r"--array=(\S+)", call)[1]  # type: ignore[index]
            for call in calls
        ] == ["7-9%3", "0-2%3", "9%2"]
        assert [call.rpartition("slurm.sh")[2] for call in calls] == ["", " 10", " 20"]
        user("wait", job_id, code=5)
        for index in (7, 10, 12, 29):
            assert echoed(user, f"{job_id}_{index}") == [str(index), []]
        ids = json.loads((user.home / "records" / f"{job_id}.json").read_text())["handle"]["data"][
            "ids"
        ]
        assert [job["backend_id"] for job in user.jobs(job_id)] == [
            *(f"{ids[0]}_{index}" for index in (7, 8, 9)),
            *(f"{ids[1]}_{index}" for index in (0, 1, 2)),
            f"{ids[2]}_9",
        ]


def test_refused_part_of_array_cancels_earlier_parts(user: User) -> None:
    refusing = (
        'case "$*" in *--test-only*) ;; '
        '*" 20") echo "sbatch: error: no more" >&2; exit 1 ;; esac\nexec "$REAL" "$@"\n'
    )
    with user.slurm.configured(MaxArraySize=10):
        user.command_first_on_path("sbatch", refusing)
        message = user(
            "submit",
            "--cluster",
            "slurm",
            "--array",
            "0-29",
            "--set",
            "hold=true",
            user.script("pass"),
            code=1,
        ).stderr
        assert "Slurm refuses the job: no more" in message
        assert user.slurm.run("squeue", "--noheader").stdout == ""
        assert user.remaining_files() == []


@pytest.mark.parametrize(
    ("kind", "code", "runs"),
    [("", 3, False), ("afterany:", 3, True)],
)
def test_dependent_job_runs_or_is_cancelled_by_kind_and_exit_code(
    user: User, kind: str, code: int, *, runs: bool
) -> None:
    first = user.submit(
        "import os, sys, time\nwhile not os.path.exists('leave'):\n    time.sleep(0.02)\n"
        f"sys.exit({code})"
    )
    second = user.submit("print('after')", "--after", f"{kind}{first}")
    waiting = user.job(second)
    assert (
        waiting["state"],
        "Dependency" in waiting["reason"] or waiting["reason"] in ("", "None"),
    ) == ("PENDING", True)
    user.path("leave").touch()
    user("wait", first, code=code)
    if runs:
        user("wait", second)
        assert user.output(second) == "after\n"
        return
    # Slurm cancels a job whose dependency can never be satisfied.
    ended = user.wait_for_state(second, "CANCELLED")
    assert ended["exit_code"] == 143
    assert "Dependency" in ended["reason"]


@pytest.mark.slow
def test_dependency_on_array_element_or_ended_job_is_waited_for_or_dropped(user: User) -> None:
    array = user.submit(ECHO, "--array", "0-2", "--env", "FAIL=1")
    after_all = user.submit("print('all')", "--after", f"afterany:{array}")
    after_one = user.submit(
        "print('one')", "--after", f"{array}_2", "--after", f"afternotok:{array}_1"
    )
    user("wait", after_all)
    user("wait", after_one)
    assert {job["state"] for job in user.jobs(array)} == {"SUCCEEDED", "FAILED"}
    raw = user.submit("print('raw')", "--after", f"afterany:{user.slurm_id(array)}")
    user("wait", raw)
    before = sorted(os.listdir(user.home / "jobs"))
    for dependency, error in (
        ("nobody-222222", "there is no job"), ("afterwards:x", "is not a kind of dependency"),
        (array, f"job {array}_1 has ended FAILED"), (f"{array}_1", "has ended FAILED"),
        (f"afternotok:{raw}", "has ended SUCCEEDED"),
    ):  # fmt: skip
        assert (
            error
            in user(
                "submit", "--cluster", "slurm", "--after", dependency, user.script("pass"), code=2
            ).stderr
        )
    assert sorted(os.listdir(user.home / "jobs")) == before
    # A dependency that is satisfied already is not passed on: Slurm forgets jobs, and takes a
    # forgotten job for a success.
    for dependency in (
        raw,
        f"afterany:{array}",
        f"{array}_2",
        f"afternotok:{array}_1",
        f"afternotok:{array}",
        f"after:{raw}",
    ):
        assert (
            "--dependency"
            not in user(
                "render", "--cluster", "slurm", "--after", dependency, user.script("pass")
            ).stdout
        )
