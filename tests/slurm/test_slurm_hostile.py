"""Job inputs reach a real sbatch byte for byte; none becomes an option or a command."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

from commands import CLUSTERJOB
from procs import wait_for_no_processes
from slurm_user import PROMPT, User

# Prints its arguments, environment and paths as encoded bytes.
WITNESS = """
    import base64, json, os, pathlib, sys
    def encoded(text):
        return base64.b64encode(os.fsencode(text)).decode()
    report = {
        "args": [encoded(arg) for arg in sys.argv[1:]],
        "env": {name: encoded(value) for name, value in os.environ.items() if name[:2] == "X_"},
        "cwd": encoded(os.getcwd()),
        "file": encoded(sys.argv[0]),
        "name": encoded(os.environ["SLURM_JOB_NAME"]),
    }
    print(json.dumps(report))
"""
INJECTIONS = (
    "\n#SBATCH --hold\n",
    "#SBATCH --partition=nowhere",
    "'; touch pwned; '",
    '"; touch pwned; "',
    "$(touch pwned)",
    "`touch pwned`",
    "a,b=c,",
    "-x",
    "--",
    "%j",
    "\\n\\",
    "\r\n",
    "ünï ☃",
    "{lr}",
    "~",
    "*",
    "${HOME}",
    "a\tb",
    " ",
    "",
    "!x",
    "\x01\x7f",
    "EOF",
    "{{ 7 }}",
)


def encoded(text: str) -> str:
    return base64.b64encode(os.fsencode(text)).decode()


def test_invalid_utf8_and_sbatch_directives_arrive_unchanged(user: User) -> None:
    """User text follows the first command of the script, where sbatch reads no options."""
    args = (b"\xff\xfe".decode(errors="surrogateescape"), *INJECTIONS)
    env = "\n#SBATCH --nice=55\n\udcff"
    done = user.run(
        WITNESS,
        "--name",
        "#SBATCH --hold",
        "--env",
        f"X_A={env}",
        "--setup",
        "#SBATCH --nice=66",
        "--setup",
        "\n:",
        args=args,
    )
    report = json.loads(done.stdout)
    assert report["args"] == [encoded(arg) for arg in args]
    assert report["env"] == {"X_A": encoded(env)}
    [job] = user.jobs()
    slurm_job = user.slurm.job(job["backend_id"])
    assert (slurm_job["Nice"], slurm_job["Priority"] != "0") == ("0", True)
    assert not user.path("pwned").exists()


def test_job_home_with_slurm_patterns_is_not_expanded(user: User, tmp_path: Path) -> None:
    home = tmp_path / "-h %j %% $(touch pwned) 'ö\" ,;#"
    user.patch.setenv("CLUSTERJOB_HOME", str(home))
    user.home = home
    out = user.run(WITNESS, "--nodes", "2").stdout
    labels = {line.partition("]")[0] for line in out.splitlines()}
    assert labels in ({"[0-1"}, {"[0", "[1"}), (
        "folded if both lines came within one poll, which depends on the machine's load"
    )
    job_id = user.submit("print('element')", "--array", "1")
    user("wait", job_id)
    assert user.output(f"{job_id}_1") == "element\n"
    for bad, message in (
        ("a\\b", "contains a backslash"),
        ("a:b", "contains a colon"),
        ("a\nb", "contains a backslash or a line break"),
    ):
        user.patch.setenv("CLUSTERJOB_HOME", str(tmp_path / bad))
        assert message in user("submit", "--cluster", "slurm", user.script("pass"), code=2).stderr


def test_job_submitted_inside_job_inherits_no_rank_or_slurm_variables(user: User) -> None:
    """Only SLURM_CONF of the outer job reaches the inner job."""
    inner = """
        import json, os
        watched = ("SLURM", "SBATCH", "CUDA", "RANK", "WORLD")
        print(json.dumps({name: value for name, value in os.environ.items()
                          if name.startswith(watched)}))
    """
    user.script(inner, "inner.py")
    outer = f"""
        import os, subprocess
        if os.environ["RANK"] == "0":
            environ = os.environ | {{
                "CLUSTERJOB_HOME": {str(user.home)!r}, "CLUSTERJOB_PYTHON": {str(user.python)!r},
            }}
            environ["PYTHONPATH"] = {str(Path(__file__).resolve().parents[2])!r}
            command = {CLUSTERJOB!r} + [
                "submit", "--cluster", "slurm", "--nodes", "1", "--nproc-per-node", "3", "inner.py",
            ]
            done = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
            print("inner", done.stdout.strip())
            command = {CLUSTERJOB!r} + ["submit", "inner.py"]
            refused = subprocess.run(command, env=environ, capture_output=True, text=True)
            print("refused", refused.returncode,
                  "this process already runs inside a job" in refused.stderr)
    """
    out = user.run(
        outer,
        "--no-require-gpus",
        "--nodes",
        "2",
        "--gpus-per-node",
        "4",
        "--nproc-per-node",
        "2",
        "--mem",
        "1G",
    ).stdout
    output = dict(line.partition("] ")[2].split(" ", 1) for line in out.splitlines())
    assert output["refused"] == "2 True"
    user("wait", output["inner"])
    ranks = [
        json.loads(line.partition("] ")[2]) for line in user.output(output["inner"]).splitlines()
    ]
    assert sorted(rank["RANK"] for rank in ranks) == ["0", "1", "2"]
    for rank in ranks:
        assert (rank["WORLD_SIZE"], rank["SLURM_JOB_NUM_NODES"], rank["SLURM_CONF"]) == (
            "3",
            "1",
            str(user.slurm.conf),
        )
        assert "CUDA_VISIBLE_DEVICES" not in rank or not rank["CUDA_VISIBLE_DEVICES"]
        assert "SLURM_MEM_PER_NODE" not in rank
        assert not [name for name in rank if name.startswith("SBATCH_")]
    wait_for_no_processes(PROMPT)
