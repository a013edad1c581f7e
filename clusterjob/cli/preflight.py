"""Run a job of nothing but the preflight, and show what it has measured."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any


def measure_hosts(flags: dict[str, Any], *, as_json: bool) -> int:
    """Measure the hosts of a job with these flags; return 1 if one is slow or not measured.

    The job's program does nothing, and no code is sent.

    Args:
        flags: the options of the command line.
        as_json: print JSON.
    """
    from clusterjob.cli import output
    from clusterjob.cli.job_options import flags_given
    from clusterjob.core import job_settings, jobs, polling
    from clusterjob.core.live import live
    from clusterjob.insight.preflight import read_preflight
    from clusterjob.node.program import Program

    program = Program("command", "true")
    cluster = flags.pop("cluster")
    given = {"name": "preflight", "preflight": "refuse", "nproc_per_node": 1, "snapshot": False}
    settings = job_settings.resolve(
        given | flags_given(flags),
        cluster,
        directory=Path.cwd(),
        executes=True,
    )
    spec = job_settings.make_spec(program, settings, directory=Path.cwd())
    with tempfile.TemporaryDirectory(prefix="clusterjob-") as empty:
        if (spec.hosts or spec.login) and spec.sync:
            spec = replace(spec, workdir=Path(empty))
        plan = jobs.plan(spec, settings, foreground=False)
        for note in plan.notes:
            output.print_message(note)
        record = jobs.submit(plan, settings.cluster, detach=True)
    live.show([f"measuring the hosts: job {record.job_id}"])
    try:
        verdict = polling.follow(record, lambda _batches: None, progress=lambda _status: None)
    except KeyboardInterrupt:
        jobs.cancel([record])
        raise
    finally:
        live.clear()
    polling.collect(record)
    found = read_preflight(record.job_dir)
    if as_json:
        output.print_json(
            {
                "id": record.job_id,
                "state": str(verdict.state),
                "reason": verdict.reason,
                "slow": found.slow if found else [],
                "findings": found.findings if found else [],
                "table": vars(found.table) if found else None,
            }
        )
        return verdict.exit_code
    if found is not None:
        for line in (*found.table.lines(), *found.findings, *found.slow):
            print(line)
    output.print_verdict(record, verdict)
    return verdict.exit_code
