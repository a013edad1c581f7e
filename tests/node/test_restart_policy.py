"""The kind of a failure decides on restarts, and the verdict lists every round."""

from __future__ import annotations

from typing import Any

from procs import Job, MakeJob

BOOM = """
    import os, time
    if os.environ["RANK"] == "1":
        raise ValueError(f"boom {os.getpid()}")
    time.sleep(1000)
"""


def attempts(job: Job, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(each[name] for name in names) for each in job.result["attempts"]]


def test_same_exception_in_two_rounds_ends_the_job(make_job: MakeJob) -> None:
    job = make_job(2)
    job.run("--max-restarts", "5", job.script(BOOM), code=1)
    why = "(not restarted: the same error at script.py:4 in two attempts: it would fail again)"
    assert job.result["reason"].endswith(why)
    assert why in job.stderr(job.agents[0])
    assert job.result["restarts"] == 1
    assert attempts(job, "attempt", "restart", "kind", "node", "rank", "where") == [
        (0, number, "code", 1, 1, "script.py:4") for number in (0, 1)
    ]
    first, second = job.result["attempts"]
    assert first["started_at"] <= first["ended_at"] <= second["started_at"] <= second["ended_at"]
    assert [each["restart"] for each in job.events("round_ended")] == [0, 1]


def test_round_of_killed_node_0_is_listed_after_requeue(make_job: MakeJob) -> None:
    job = make_job(1)
    script = job.script("""
        import os, pathlib, time
        if os.environ["CLUSTERJOB_ATTEMPT"] == "0":
            pathlib.Path("up").touch()
            time.sleep(1000)
    """)
    killed = job.start(0, script, until=("up",))
    killed.kill()
    assert job.wait() == [-9]
    job.start(0, script, env={"CLUSTERJOB_ATTEMPT": "1"})
    assert job.wait() == [-9, 0]
    assert attempts(job, "attempt", "kind", "node") == [(0, "node_lost", 0), (1, "", None)]
    assert job.result["attempts"][0]["ended_at"] is None
