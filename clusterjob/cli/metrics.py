"""The command `metrics`: CPU, memory, I/O and GPUs of a job's nodes and workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from clusterjob.cli.job_filters import LatestId, named_or_latest
from clusterjob.cli.job_options import Json
from clusterjob.cli.logs import Nodes, Ranks, numbers
from clusterjob.errors import UsageError

if TYPE_CHECKING:
    from clusterjob.core.records import Record
    from clusterjob.insight.metrics import Wanted


def metrics(
    job_id: LatestId = None,
    node: Nodes = None,
    rank: Ranks = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="DURATION",
            help="With --json and --csv, samples of the last 10m before each node's newest one "
            "(default: all).",
        ),
    ] = None,
    as_csv: Annotated[  # noqa: FBT002
        bool, typer.Option("--csv", help="All samples as CSV (default: a table of the latest).")
    ] = False,
    as_json: Json = False,  # noqa: FBT002
) -> int:
    """Show what a job's nodes, workers and GPUs use.

    The table has the latest values; --json and --csv print all samples. Samples are 5 s apart
    in the first hour, and at most 20 s apart after four hours.
    """
    from clusterjob.cli import output
    from clusterjob.core.times import parse_age
    from clusterjob.insight import metrics as insight

    if as_csv and as_json:
        raise UsageError("--csv and --json are both given", "give only one of them")
    age = None if since is None else parse_age(since)
    if since is not None and age is None:
        raise UsageError(f"--since {since!r} is not a duration", "write 90s, 30m or 2h")
    wanted = insight.Wanted(numbers("--node", node), numbers("--rank", rank), since=age)
    record = named_or_latest(job_id)
    nodes = insight.collect(record, wanted, output.print_message)
    if as_json:
        output.print_json(insight.to_json(record, nodes, wanted))
    elif as_csv:
        _print_csv(record, nodes, wanted)
    else:
        _print_table(record, nodes, wanted)
    return 0


def _print_csv(record: Record, nodes: Sequence[int], wanted: Wanted) -> None:
    import csv
    import sys

    from clusterjob.insight import metrics as insight

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(insight.COLUMNS)
    for row in insight.rows(record, nodes, wanted):
        writer.writerow([_csv_cell(cell) if isinstance(cell, str) else cell for cell in row])


def _csv_cell(text: str) -> str:
    """Return a text that a spreadsheet does not take for a formula."""
    from clusterjob.node.system.sanitize import sanitize

    return ("'" if text.startswith(("=", "+", "-", "@", "\t")) else "") + sanitize(text)


def _print_table(record: Record, nodes: Sequence[int], wanted: Wanted) -> None:
    from clusterjob.cli import tables
    from clusterjob.insight import metrics as insight

    found = [one for node in nodes if (one := insight.latest(record, node, wanted)) is not None]
    if not found:
        ranks = ",".join(map(str, wanted.ranks or ()))
        raise UsageError(
            f"job {record.job_id} has no samples of rank {ranks}",
            f"`clusterjob metrics {record.job_id}` shows all ranks",
        )
    table = [("NODE", "HOST", "", "CPU", "MEMORY", "READ", "WRITTEN", "THREADS", "OUTPUT")]
    gpus = [("NODE", "GPU", "NAME", "USE", "MEMORY", "POWER", "TEMP", "SM", "ECC", "XID")]
    for facts, sample in found:
        node = str(facts.node_rank)
        quiet = f"{sample.quiet:.0f} s ago"
        rest = (_rate(sample.read), _rate(sample.written), "", quiet)
        size = f"{_size(sample.memory)} of {_size(facts.memory)}"
        table.append((node, facts.host, "node", _percent(sample.cpu), size, *rest))
        for worker in sample.workers:
            use = (
                _percent(worker.cpu),
                _size(worker.rss),
                _rate(worker.read),
                _rate(worker.written),
            )
            row = (node, facts.host, f"rank {worker.rank}", *use, str(worker.threads), "")
            table.append(row)
        for gpu, now in zip(facts.gpus, sample.gpus, strict=False):
            used = f"{_size(now.memory)} of {_size(gpu.memory)}"
            state = (_percent(now.use), used, _unit(now.power, " W"), _unit(now.temperature, " °C"))
            errors = (_unit(now.sm_clock, " MHz"), _unit(now.ecc), _unit(now.xid))
            gpus.append((node, str(gpu.index), gpu.name, *state, *errors))
    tables.print_table(table, fit=True)
    if len(gpus) > 1:
        print()
        tables.print_table(gpus, fit=True)


def _percent(value: float | None) -> str:
    return _unit(value, "%")


def _unit(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.0f}{unit}"


def _size(value: int | None) -> str:
    from clusterjob.core.units import show_size

    return "-" if value is None else show_size(value)


def _rate(value: float) -> str:
    from clusterjob.core.units import show_size

    return f"{show_size(int(value))}/s"
