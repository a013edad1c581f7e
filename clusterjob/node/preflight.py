"""Measure all nodes before the first round, and name the slow ones.

The agent of each node runs this module as a process with torch. The processes meet in a store of
torch, and all take the same measures several times. The one on the coordinator's node compares the
values.

The best value of a node counts: load that comes and goes makes values smaller, but not each time.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any

from clusterjob.node.system import codec, devices, processes
from clusterjob.node.system.codec import Limit
from clusterjob.node.system.sanitize import sanitize

SECONDS = 20.0  # the longest preflight, from when all processes have started
_TIMES, _BEGIN_SECONDS = 5, 12.0  # how often a node measures, within seconds to begin a probe
_TIMEOUT = timedelta(seconds=4)  # of an answer, and of a connection between nodes
_MEASURE_SECONDS, _REDUCTIONS = 0.3, 8
_ROUNDS = 5  # of pairs
_MATRIX, _GPU_MATRIX = 768, 8192  # rows
_REDUCED, _GPU_REDUCED = 4 << 20, 64 << 20  # bytes of an all-reduce
_MAX_TEXT = 300  # characters

CPU, GPU, PAIR = "matrix multiply", "GPU matrix multiply", "all-reduce"
# The unit of each measure, in their order: nodes that are slower alone wait for each other in the
# last one.
UNITS = {CPU: "GFLOP/s", GPU: "GFLOP/s", PAIR: "GB/s"}


# -- the table -------------------------------------------------------------------------------------

THRESHOLD = 0.7  # of the median of all hosts; a host below it is slow
MAX_ROWS, _MAX_SHOWN = 500, 16  # of a table, and of its text
Column = tuple[str, str, float]
Row = tuple[str, Sequence[float | None]]


def table_lines(columns: Sequence[Column], rows: Sequence[Row], hosts: int) -> list[str]:
    """Return a table as text; of many hosts, those with the smallest cells.

    Args:
        columns: the measures: name, unit and median of all hosts.
        rows: hosts, each with a part of the median per column, or None without a value.
        hosts: the number of measured hosts; there may be fewer rows.
    """
    shown = smallest_rows(rows, _MAX_SHOWN)
    medians = [quantity(median, unit) for _, unit, median in columns]
    texts = [("", [name for name, _, _ in columns]), ("median", medians)]
    texts += [
        (name, ["-" if cell is None else f"{cell:.2f}" for cell in cells]) for name, cells in shown
    ]
    width = max(len(name) for name, _ in texts)
    lines = [
        f"{name:{width}}  " + "  ".join(f"{cell:>16}" for cell in cells) for name, cells in texts
    ]
    if hosts > len(shown):
        lines.append(f"{hosts - len(shown)} more hosts are not shown")
    return [line.rstrip() for line in lines]


def quantity(amount: float, unit: str) -> str:
    """Return an amount with three digits and its unit."""
    return f"{amount:.0f} {unit}" if amount >= 100 else f"{amount:.3g} {unit}"


def smallest_rows(rows: Sequence[Row], most: int) -> Sequence[Row]:
    """Return the rows; of many, those with the smallest cells."""
    return rows if len(rows) <= most else sorted(rows, key=least)[:most]


def least(row: Row) -> float:
    """Return the smallest cell of a row; infinity without a value."""
    return min((cell for cell in row[1] if cell is not None), default=math.inf)


# -- comparison: pure functions --------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What one node has measured.

    Attributes:
        amounts: the measures, each with its amount and a note: its error, or the slowest GPU. An
            error has the amount 0.
    """

    amounts: Annotated[
        tuple[tuple[str, float, Annotated[str, Limit(_MAX_TEXT, cuts=True)]], ...], Limit(16)
    ] = ()


def pairs_of(nodes: Sequence[int], rounds: int = _ROUNDS) -> list[tuple[int, int]]:
    """Return the pairs of the first rounds of a tournament; nobody is twice in a round."""
    circle: list[int | None] = [*nodes]
    if len(circle) % 2:
        circle.append(None)  # who meets it pauses
    half, found = len(circle) // 2, list[tuple[int, int]]()
    for _ in range(min(rounds, len(circle) - 1)):
        met = zip(circle[:half], reversed(circle[half:]), strict=True)
        found += [(a, b) for a, b in met if a is not None and b is not None]
        circle.insert(1, circle.pop())
    return found


def compare(answers: Mapping[int, Answer]) -> dict[str, Any]:
    """Compare what the nodes have measured; return what the coordinator reports."""
    found, notes = dict[str, dict[int, float]](), dict[tuple[str, int], str]()
    for node, answer in answers.items():
        for name, amount, note in answer.amounts:
            if name in UNITS:
                found.setdefault(name, {})[node] = amount
                notes[name, node] = sanitize(note)
    medians = {name: statistics.median(of.values()) for name, of in found.items()}
    small = [
        (own / medians[name], name, node)
        for name, of in found.items()
        for node, own in of.items()
        if own < THRESHOLD * medians[name]
    ]
    slow = dict[int, str]()
    for part, name, node in sorted(small, key=lambda each: each[0]):
        if node in slow:
            slow[node] += f"; also small: {name}"
        else:
            median, unit = medians[name], UNITS[name]
            note = "; ".join(filter(None, (quantity(median, unit), notes[name, node])))
            own = quantity(found[name][node], unit)
            slow[node] = f"{name} {part:.2f} of the median ({own} of {note})"
    columns = [(name, unit, medians[name]) for name, unit in UNITS.items() if medians.get(name)]
    errors = {name: text for (name, _), text in notes.items() if not medians[name]}
    return {
        "slow": slow,
        "findings": [f"{name} could not be measured: {text}" for name, text in errors.items()],
        "columns": columns,
        "rows": {
            node: [
                round(found[name][node] / median, 3) if node in found[name] else None
                for name, _, median in columns
            ]
            for node in answers
        },
    }


# -- the process -----------------------------------------------------------------------------------


def main() -> None:
    """Measure this node, as the agent says on stdin; write the result, or an error, to stdout."""
    given = json.load(sys.stdin)
    processes.die_with_parent(given["parent"])
    output = os.dup(1)
    os.dup2(2, 1)  # what libraries print
    try:
        found = _meet(given)
    except Exception as error:
        what = "torch cannot be imported: " if isinstance(error, ImportError) else ""
        found = {"error": f"{what}{error}"}
    os.write(output, json.dumps(found).encode())
    os._exit(0)  # threads of torch may hang


def _meet(given: Mapping[str, Any]) -> dict[str, Any]:
    """Measure with the processes of the other nodes; return the result on the coordinator's."""
    from torch.distributed import TCPStore

    compares = given["listener"] is not None
    store: Any = TCPStore(
        given["address"],
        given["port"],
        is_master=compares,
        master_listen_fd=given["listener"],
        timeout=timedelta(seconds=given["start_seconds"] + SECONDS),
        wait_for_workers=False,
    )
    store.set(f"started{given['node']}", "true")
    if compares:
        return _compare_all(store, given)
    with contextlib.suppress(RuntimeError):  # the store has ended, and its process with it
        _measure(store, given, json.loads(store.get("nodes")))
    return {}


def _compare_all(store: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Let all processes begin at once; return what they have found."""
    slow, answers = dict[int, str](), dict[int, Answer]()
    until = time.monotonic() + given["start_seconds"]
    for node in given["nodes"]:
        try:
            _get(store, f"started{node}", until)
        except RuntimeError:
            slow[node] = "the measuring process has not started"
    begin, nodes = time.monotonic(), [node for node in given["nodes"] if node not in slow]
    store.set("nodes", json.dumps(nodes))
    _measure(store, given, nodes)
    for node in nodes:
        try:
            answers[node] = codec.read(Answer, _get(store, f"answer{node}", begin + SECONDS))
        except (RuntimeError, ValueError):  # none, or a wrong one
            slow[node] = "the measuring process does not answer"
    found = compare(answers)
    return found | {"slow": slow | found["slow"], "seconds": round(time.monotonic() - begin, 1)}


def _measure(store: Any, given: Mapping[str, Any], nodes: list[int]) -> None:
    """Measure this node some times, and put the best amounts into the store."""
    from torch.distributed import PrefixStore

    node, best = given["node"], dict[str, tuple[float, str]]()
    until = time.monotonic() + _BEGIN_SECONDS
    for number in range(_TIMES if node in nodes else 0):
        group = PrefixStore(f"group{number}", store)
        probes: dict[str, Callable[[], list[float]]] = {
            CPU: _cpu,
            GPU: _gpus,
            PAIR: functools.partial(_pairs, nodes, node, until, group),
        }
        for name, do in probes.items():
            if time.monotonic() < until and (found := _measured(do)) is not None:
                best[name] = max(best.get(name, (0.0, "")), found)
    amounts = [(name, *own) for name, own in best.items()]
    store.set(f"answer{node}", json.dumps({"amounts": amounts}))


def _get(store: Any, key: str, until: float) -> Any:
    """Return the value of a key.

    Raises:
        RuntimeError: it is not there at the monotonic time `until`.
        ValueError: it is not JSON.
    """
    store.wait([key], timedelta(seconds=max(0.1, until - time.monotonic())))
    return json.loads(store.get(key))


# -- measures --------------------------------------------------------------------------------------


def _measured(do: Callable[[], list[float]]) -> tuple[float, str] | None:
    """Return the smallest amount of the devices, and its GPU; 0 and the error; None without one."""
    try:
        amounts = do()
    except Exception as error:
        text = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return 0.0, text.strip().partition("\n")[0]
    if not amounts:
        return None
    smallest = min(amounts)
    return smallest, f"GPU {amounts.index(smallest)}" if len(amounts) > 1 else ""


def _cpu() -> list[float]:
    import torch

    torch.set_num_threads(devices.usable_cores())
    return [_multiply("cpu", _MATRIX, torch.float32)]


def _gpus() -> list[float]:
    import torch

    def multiply(index: int) -> float:
        return _multiply(f"cuda:{index}", _GPU_MATRIX, torch.float16)

    with ThreadPoolExecutor() as pool:  # one after the other, eight would need 8 s
        return list(pool.map(multiply, range(torch.cuda.device_count())))


def _multiply(device: str, rows: int, dtype: Any) -> float:
    """Return the GFLOP/s of a product of matrices; the first one prepares the device."""
    import torch

    factor = torch.ones(rows, rows, dtype=dtype, device=device)
    product = torch.empty_like(factor)
    done, elapsed, begin = -1, 0.0, 0.0
    while elapsed < _MEASURE_SECONDS:
        torch.mm(factor, factor, out=product)[0, 0].item()  # waits for a GPU
        done += 1
        begin = begin or time.perf_counter()
        elapsed = time.perf_counter() - begin
    return 2e-9 * rows**3 * done / elapsed


def _pairs(nodes: Sequence[int], node: int, until: float, store: Any) -> list[float]:
    """Return the upper median of the all-reduces of a node: a slow partner has one of them."""
    amounts, error = list[float](), None
    for index, pair in enumerate(pairs_of(nodes)):
        if node in pair and time.monotonic() < until:
            try:
                amounts.append(_all_reduce(pair, node, store, index))
            except Exception as failed:
                amounts.append(0.0)
                error = failed
    if error is not None and not statistics.median_high(amounts):
        raise error
    return [statistics.median_high(amounts)] if amounts else []


def _all_reduce(pair: Sequence[int], node: int, store: Any, number: int) -> float:
    """Return the bus bandwidth of an all-reduce of two nodes: GB/s that each of them sends."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)  # the network is measured, not the addition
    gpus = torch.cuda.device_count() if distributed.is_nccl_available() else 0
    # Another GPU, and so another network card, with each partner.
    device = f"cuda:{sum(pair) % gpus}" if gpus else "cpu"
    distributed.init_process_group(
        "nccl" if gpus else "gloo",
        store=distributed.PrefixStore(str(number), store),
        rank=pair.index(node),
        world_size=2,
        timeout=_TIMEOUT,
    )
    size, times = _GPU_REDUCED if gpus else _REDUCED, list[float]()
    data = torch.zeros(size // 4, device=device)
    try:
        for _ in range(_REDUCTIONS + 1):
            begin = time.perf_counter()
            distributed.all_reduce(data)
            data[0].item()  # waits for a GPU
            times.append(time.perf_counter() - begin)
    finally:
        with contextlib.suppress(Exception):  # the error of the measure counts
            distributed.destroy_process_group()
    return size / max(statistics.median(times[1:]), 1e-6) / 1e9  # the first one connects
