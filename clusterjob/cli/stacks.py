"""The command `stacks`: where the ranks of a job are."""

from __future__ import annotations

from typing import Annotated

import typer

from clusterjob.cli.job_filters import LatestId, named_or_latest


def stacks(
    job_id: LatestId = None,
    rank: Annotated[
        int | None,
        typer.Option(
            "--rank", min=0, metavar="R", help="Rank, with all its threads (default: all ranks)."
        ),
    ] = None,
    node: Annotated[
        int | None, typer.Option("--node", min=0, metavar="N", help="Node (default: all nodes).")
    ] = None,
    native: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--native",
            help="Frames of C and C++ too, above those of Python; stops each thread for a few "
            "milliseconds (default: Python frames, without a stop).",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON (default: text).")] = False,  # noqa: FBT002
) -> int:
    """Show where the ranks of a running job are: their Python stacks, in groups of equal ones.

    The smallest group is first: it often shows the rank that all others wait for. Of an ended job,
    the stacks that were saved at its stop are shown. The exit code is 255 if the job does not run
    and has no saved stacks, or if a node did not answer; the other nodes are shown.
    """
    from clusterjob.cli import output
    from clusterjob.errors import InsideError
    from clusterjob.insight.stacks import of_job
    from clusterjob.node.stacks import grouping
    from clusterjob.node.system.sanitize import sanitize

    record = named_or_latest(job_id)
    found = of_job(record, node=node, rank=rank, native=native)
    if found.saved:
        output.print_message(found.saved)
    if as_json:
        output.print_json(grouping.to_json(record.job_id, found.stacks))
    else:
        for line in grouping.text(found.stacks, all_threads=rank is not None):
            print(sanitize(line))
    for line in (*found.warnings, *found.errors):
        output.print_message(line)
    return InsideError.exit_code if found.errors else 0
