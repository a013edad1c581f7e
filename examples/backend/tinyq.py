#!/usr/bin/env python3
"""A queue on this machine, in one file: an example of a platform with a submit command.

    tinyq submit FILE             submit a task and print its id; FILE is JSON with the keys name,
                                  workers, code (a directory), command, env, retries
    tinyq list                    print all tasks as JSON
    tinyq workers ID              print a task's workers as JSON
    tinyq logs ID WORKER COUNT    print the last COUNT lines of a worker's log
    tinyq cancel ID               cancel a task

TINYQ_HOME is the directory of the tasks (default: ~/.tinyq). Each worker runs the command in its
own copy of the code, with TINYQ_TASK, TINYQ_WORKERS, TINYQ_INDEX and TINYQ_FIRST set. A failed task
that has retries left is queued again, as a new task of the same name.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HOME = Path(os.environ.get("TINYQ_HOME") or Path.home() / ".tinyq")
GRACE = 20.0  # seconds between SIGTERM and SIGKILL


def now() -> str:
    return (
        dt.datetime.now(dt.timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


def save(path: Path, value: Any) -> None:
    part = path.with_suffix(".part")
    part.touch(0o600)
    part.write_text(json.dumps(value))
    part.replace(path)


def submit(task: dict[str, Any]) -> str:
    HOME.mkdir(mode=0o700, parents=True, exist_ok=True)
    number = len(list(HOME.iterdir()))
    while True:
        folder = HOME / f"q-{number:06d}"
        try:
            folder.mkdir(mode=0o700)
            break
        except FileExistsError:
            number += 1
    shutil.copytree(task["code"], folder / "code")
    save(
        folder / "state.json",
        {
            "state": "queued",
            "created": now(),
            "started": None,
            "ended": None,
            "codes": [None] * task["workers"],
        },
    )
    save(folder / "task.json", task | {"code": str(folder / "code")})
    subprocess.Popen(
        [sys.executable, os.path.abspath(__file__), "keep", folder.name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd=folder,
    )
    return folder.name


def keep(folder: Path) -> None:
    """Run a task to its end; queue it again if it failed and has retries left."""
    task, state = (
        json.loads((folder / "task.json").read_text()),
        json.loads((folder / "state.json").read_text()),
    )
    own = {
        "TINYQ_TASK": folder.name,
        "TINYQ_WORKERS": str(task["workers"]),
        "TINYQ_FIRST": "127.0.0.1",
    }
    workers = []
    for index in range(task["workers"]):
        code = folder / f"code_{index}"
        shutil.copytree(folder / "code", code)
        with (folder / f"worker_{index}.log").open("wb") as log:
            environ = os.environ | task["env"] | own | {"TINYQ_INDEX": str(index)}
            workers.append(
                subprocess.Popen(
                    task["command"],
                    cwd=code,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
    state |= {"state": "running", "started": now()}
    save(folder / "state.json", state)
    stopped_at = None
    while any(worker.poll() is None for worker in workers):
        time.sleep(0.05)
        if stopped_at is None and (
            (folder / "cancel").exists() or any(worker.poll() for worker in workers)
        ):
            stopped_at = time.monotonic()  # a failed worker ends the task, as on real platforms
            stop(workers, signal.SIGTERM)
        elif stopped_at is not None and time.monotonic() > stopped_at + GRACE:
            stop(workers, signal.SIGKILL)
    codes = [worker.returncode for worker in workers]
    how = (
        "succeeded" if not any(codes) else "cancelled" if (folder / "cancel").exists() else "failed"
    )
    save(folder / "state.json", state | {"state": how, "ended": now(), "codes": codes})
    if how == "failed" and task["retries"]:
        submit(task | {"retries": task["retries"] - 1})


def stop(workers: list[subprocess.Popen[bytes]], number: int) -> None:
    for worker in workers:
        if worker.poll() is None:
            os.killpg(worker.pid, number) if number == signal.SIGKILL else worker.send_signal(
                number
            )


def rows() -> list[dict[str, Any]]:
    found = []
    for folder in sorted(HOME.glob("q-*")):
        if (folder / "task.json").exists():
            state, task = (
                json.loads((folder / "state.json").read_text()),
                json.loads((folder / "task.json").read_text()),
            )
            found.append({"id": folder.name, "name": task["name"], **state})
    return found


def main() -> int:
    verb, *words = sys.argv[1:] or ["help"]
    if verb == "submit":
        print(submit(json.loads(Path(words[0]).read_text())))
    elif verb == "keep":
        keep(HOME / words[0])
    elif verb == "list":
        print(json.dumps(rows()))
    elif verb == "workers":
        (state,) = (row for row in rows() if row["id"] == words[0])
        print(
            json.dumps(
                [
                    {"name": f"worker_{k}", "index": k, "state": state["state"], "code": code}
                    for k, code in enumerate(state["codes"])
                ]
            )
        )
    elif verb == "logs":
        log = HOME / words[0] / f"{words[1]}.log"
        lines = log.read_bytes().split(b"\n")[:-1] if log.exists() else []
        sys.stdout.buffer.write(b"".join(line + b"\n" for line in lines[-int(words[2]) :]))
    elif verb == "cancel":
        (HOME / words[0] / "cancel").touch()
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
