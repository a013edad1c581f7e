"""Measure all nodes before the first round, and name the slow ones.

The forkserver of each node forks one measuring process. These processes talk through a store of
torch alone. The one on the coordinator's node directs the others: it sets what each of them
measures in the next step, waits for the answers, and compares them. Values are numbers and short
texts in JSON.

A slow host is slow again: in its first measure, and in later ones next to healthy hosts. Load that
comes and goes makes a measure smaller, never larger. So the best of several values counts, of the
suspect and of the hosts next to it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import select
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from clusterjob.node.logs.job_dir import PREFLIGHT_LOG
from clusterjob.node.preflight_table import THRESHOLD, amount_text
from clusterjob.node.system import devices, files, processes
from clusterjob.node.system.sanitize import sanitize

SECONDS = 20.0  # the longest preflight, from when all processes have started
PACKET_BYTES = 1 << 16
# Seconds since all processes have started: the last first measure begins; suspects are measured
# again until the end.
_FIRST_END, _AGAIN_END = 10.0, 19.0
_MEASURE_SECONDS, _GROUP_SECONDS, _STEP_SECONDS = 0.4, 0.25, 5.0
_MAX_PAIR_ROUNDS, _MAX_RING = 8, 32
_CROWDED = 15  # rounds of pairs, times the nodes of one machine, which are measured in turn
# How often a suspect must be slow again: if the time is short, fewer times are enough; and if it is
# below half of the healthy nodes, even fewer.
_AGAIN, _SHORT_AGAIN, _CLEAR_AGAIN, _CLEAR = 4, 3, 2, 0.5
_MAX_TEXT = 300  # characters of an error
_MOST_HOSTS = 4  # in a finding
_MAX_AMOUNT = 1e9
_MATRIX, _GPU_MATRIX = 768, 8192  # rows
_COPIED, _GPU_COPIED = 64 << 20, 512 << 20  # bytes; larger than a usual cache
_CHUNK, _WRITTEN = 1 << 20, 64 << 20  # bytes; a slow disk gets fewer
_REDUCED, _GPU_REDUCED = 4 << 20, 64 << 20  # bytes of an all-reduce
_TIMEOUT = timedelta(seconds=4)
_NVIDIA_VERSION = "/proc/driver/nvidia/version"

# What each probe measures: name and unit. All nodes of a ring have the value of its slowest link,
# so it shows no host.
CPU, GPU, PAIR, RING, DISK = "cpu", "gpu", "pair", "ring", "disk"
MEASURES = {
    CPU: (("matrix multiply", "GFLOP/s"), ("memory", "GB/s")),
    DISK: (("disk write", "MB/s"), ("disk read", "MB/s")),
    GPU: (("GPU matrix multiply", "GFLOP/s"), ("GPU memory", "GB/s")),
    PAIR: (("all-reduce", "GB/s"),),
    RING: (("ring all-reduce", "GB/s"),),
}
Measure = tuple[str, int]  # a probe, and the index of one of its measures
Task = tuple[str, tuple[int, ...]]  # a probe, and the nodes that take part


# -- comparison: pure functions --------------------------------------------------------------------


def median_of(values: Mapping[int, float]) -> float:
    """Return the median of the values of all nodes; 0 without any."""
    return statistics.median(values.values()) if values else 0.0


def suspects(values: Mapping[int, float]) -> list[int]:
    """Return the nodes with a value below `THRESHOLD` of the median of all nodes."""
    median = median_of(values)
    return sorted(node for node, value in values.items() if value < THRESHOLD * median)


def of_pairs(pairs: Mapping[tuple[int, ...], float]) -> dict[int, float]:
    """Return the value of each node: the upper median over its pairs.

    A slow node makes all its pairs slow; its partners have other pairs.
    """
    by_node: dict[int, list[float]] = {}
    for pair, value in pairs.items():
        for node in pair:
            by_node.setdefault(node, []).append(value)
    return {node: sorted(own)[len(own) // 2] for node, own in by_node.items()}


def references(values: Mapping[int, float], excluded: Collection[int], count: int) -> list[int]:
    """Return healthy nodes to compare a suspect with: those nearest to the median."""
    median = median_of(values)
    healthy = [node for node in values if node not in excluded and values[node] > 0]
    return sorted(healthy, key=lambda node: (abs(values[node] - median), node))[:count]


def is_cleared(suspect: Sequence[float], healthy: Collection[Sequence[float]]) -> bool:
    """Return whether a suspect is not slow, compared with healthy nodes measured next to it.

    A slow host is below `THRESHOLD` of the best value of each healthy node. On a busy machine, all
    values vary by more than that: a slow host is also below three quarters of the single values of
    healthy nodes.

    Args:
        suspect: its later values; without any, it stays a suspect.
        healthy: the values of each healthy node.
    """
    best = max(suspect, default=0.0)
    limit = THRESHOLD * min(max(values, default=0.0) for values in healthy)
    single = sorted(value for values in healthy for value in values)
    return best > 0 and best >= min(limit, single[len(single) // 4] if single else 0.0)


def is_slow(suspect: Sequence[float], healthy: Collection[Sequence[float]]) -> bool:
    """Return whether a suspect that was never cleared is slow, although the time has ended."""
    if len(suspect) < _CLEAR_AGAIN or not all(healthy):
        return False
    clear = max(suspect) < _CLEAR * min(map(max, healthy))
    return clear or len(suspect) >= _SHORT_AGAIN


def pair_rounds(nodes: Sequence[int], rounds: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs, as in a round-robin tournament: no node is twice in a round."""
    circle: list[int | None] = [*nodes]
    if len(circle) % 2:
        circle.append(None)  # who meets it pauses
    found = []
    for _ in range(min(rounds, len(circle) - 1)):
        half = len(circle) // 2
        met = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(a, b) for a, b in met if a is not None and b is not None])
        circle.insert(1, circle.pop())
    return found


def rings(nodes: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """Divide the nodes into rings of two to `size` nodes; a single node forms none."""
    count = -(-len(nodes) // size)
    parts = [tuple(nodes[index::count]) for index in range(count)]
    return [part for part in parts if len(part) > 1]


def steps(tasks: Sequence[Task], machine_of: Callable[[int], str]) -> list[list[Task]]:
    """Divide tasks into steps: in each of them, no machine has two tasks."""
    found: list[list[Task]] = []
    used: list[set[str]] = []
    for task in tasks:
        machines = set(map(machine_of, task[1]))
        free = (
            n for n, step in enumerate(found) if step[0][0] == task[0] and not machines & used[n]
        )
        number = next(free, len(found))
        if number == len(found):
            found.append([])
            used.append(set())
        found[number].append(task)
        used[number] |= machines
    return found


def checked(data: bytes) -> dict[str, Any] | None:
    """Return the result of the preflight; None if it has another form.

    Other nodes have sent its texts and numbers.
    """
    try:
        found = json.loads(data)
        return {
            "seconds": float(found["seconds"]),
            "slow": {int(node): _text(why) for node, why in found["slow"].items()},
            "findings": [_text(each) for each in found["findings"]],
            "versions": {
                _text(part): {
                    _text(version): list(map(int, nodes)) for version, nodes in of.items()
                }
                for part, of in found["versions"].items()
            },
            "columns": found["columns"],
            "rows": {int(node): cells for node, cells in found["rows"].items()},
        }
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return None


def differing(
    versions_: Mapping[str, Mapping[str, Sequence[int]]], names: Mapping[int, str]
) -> list[str]:
    """Return one line for each part whose version is not the same on all nodes."""

    def hosts(nodes: Sequence[int]) -> str:
        known = [names[node] for node in nodes if node in names]
        return f"{len(known)} hosts" if len(known) > _MOST_HOSTS else ", ".join(known)

    return [
        f"{part} is not the same: "
        + ", ".join(
            f"{version} on {hosts(nodes)}"
            for version, nodes in sorted(of.items(), key=lambda item: -len(item[1]))
        )
        for part, of in versions_.items()
    ]


def _text(value: Any) -> str:
    return sanitize(str(value))[:_MAX_TEXT]


# -- the director ----------------------------------------------------------------------------------


@dataclass
class Director:
    """The measures of all nodes, by one of the measuring processes.

    Attributes:
        ask: lets nodes take a step; returns the values of each task by node, an error, or None
            without an answer. Other nodes have sent them.
        hello: what each process has said of itself.
        values: the best value of each measure, by node.
        pairs: the best value of each pair.
        again: the later values of a suspect or of a pair, by measure.
        notes: the slowest GPU of a node, or the error of a measure.
        broken: nodes that do not answer any more, with the reason.
        slow: the slow nodes, with the reasons.
    """

    ask: Callable[[list[Task]], dict[tuple[Task, int], Any]]
    hello: Mapping[int, Mapping[str, Any]]
    values: dict[Measure, dict[int, float]] = field(default_factory=dict)
    pairs: dict[tuple[int, ...], float] = field(default_factory=dict)
    again: dict[tuple[Measure, tuple[int, ...]], list[float]] = field(default_factory=dict)
    notes: dict[tuple[Measure, int], str] = field(default_factory=dict)
    broken: dict[int, str] = field(default_factory=dict)
    slow: dict[int, str] = field(default_factory=dict)

    def run(self, begin: float) -> None:
        """Measure all nodes, then suspects again, until the time is over."""
        nodes = sorted(self.hello)
        tasks: list[Task] = [(CPU, (node,)) for node in nodes]
        tasks += [(GPU, (node,)) for node in nodes if self.hello[node]["gpus"]]
        if len(nodes) > 1:
            crowd = max(Counter(map(self._machine, nodes)).values())
            rounds = min(_MAX_PAIR_ROUNDS, max(3, _CROWDED // crowd))
            tasks += [(PAIR, pair) for pairs in pair_rounds(nodes, rounds) for pair in pairs]
            tasks += [(RING, ring) for ring in rings(nodes, _MAX_RING)]
        tasks += [(DISK, (node,)) for node in nodes]
        self._take(tasks, begin + _FIRST_END)
        self.again.clear()
        self._find_slow(begin + _AGAIN_END)

    def findings(self) -> list[str]:
        """Return one line for each measure that could not be taken anywhere."""
        return [
            f"{_name(measure)} could not be measured: {self._error(measure)}"
            for measure, values in self.values.items()
            if not median_of(values)
        ]

    def versions(self) -> dict[str, dict[str, list[int]]]:
        """Return the nodes of each version of the parts whose version differs."""
        found: dict[str, dict[str, list[int]]] = {}
        for node, said in sorted(self.hello.items()):
            for part, version in said["versions"].items():
                found.setdefault(part, {}).setdefault(version, []).append(node)
        return {part: versions for part, versions in found.items() if len(versions) > 1}

    def _machine(self, node: int) -> str:
        return str(self.hello[node].get("machine"))

    def _take(self, tasks: Sequence[Task], until: float) -> None:
        """Take tasks step by step until a monotonic time, and keep their values."""
        for step in steps(tasks, self._machine):
            if time.monotonic() > until:
                return
            alive = [task for task in step if not self.broken.keys() & set(task[1])]
            for ((probe, nodes), node), answer in self.ask(alive).items():
                if answer is None:
                    self.broken[node] = f"no answer in {_STEP_SECONDS:g} s"
                else:
                    self._keep(probe, nodes, node, answer)
            self.values[PAIR, 0] = of_pairs(self.pairs)

    def _keep(self, probe: str, nodes: tuple[int, ...], node: int, answer: Any) -> None:
        count = len(MEASURES[probe])
        for index in range(count):
            measure, amount = (probe, index), 0.0
            if not _are_amounts(answer) or len(answer) % count:
                text = answer if isinstance(answer, str) else "a wrong answer"
                self.notes[measure, node] = _text(text)
            else:  # of several GPUs, the slowest one
                of_devices = answer[index::count]
                amount = min(of_devices)
                if len(of_devices) > 1:
                    self.notes[measure, node] = f"GPU {of_devices.index(amount)}"
            if probe == PAIR:  # both measure the same; who lies makes only its own pairs slow
                key = tuple(sorted(nodes))
                taken = self.again.setdefault((measure, key), [])
                if node == nodes[0]:
                    taken.append(amount)
                elif taken:
                    taken[-1] = min(taken[-1], amount)
                    self.pairs[key] = max(self.pairs.get(key, 0.0), taken[-1])
            else:
                self.again.setdefault((measure, (node,)), []).append(amount)
                best = self.values.setdefault(measure, {})
                best[node] = max(best.get(node, 0.0), amount)

    def _suspects(self) -> list[tuple[Measure, int]]:
        """Return measures and nodes with small values, the smallest first."""
        found = []
        for measure, values in self.values.items():
            median = median_of(values)
            if median and measure[0] != RING:
                found += [
                    (values[node] / median, measure, node)
                    for node in suspects(values)
                    if node not in self.broken
                ]
        return [(measure, node) for _, measure, node in sorted(found)]

    def _find_slow(self, until: float) -> None:
        """Measure suspects again, next to healthy nodes, and name those that are slow again."""
        left = self._suspects()
        healthy = {
            probe: references(
                {n: v for n, v in self.values.get((probe, 0), {}).items() if n not in self.broken},
                {node for (suspected, _), node in left if suspected == probe},
                count=2,
            )
            for probe in MEASURES
        }
        while left and time.monotonic() < until:
            worst = {node: measure for measure, node in reversed(left)}
            tasks: list[Task] = []
            for probe in dict.fromkeys(measure[0] for measure in worst.values()):
                nodes = [node for node, measure in worst.items() if measure[0] == probe]
                others = healthy[probe]
                if probe == PAIR and len(others) > 1:
                    tasks += [(PAIR, tuple(others)), *((PAIR, (n, others[0])) for n in nodes)]
                elif probe != PAIR:
                    tasks += [(probe, (node,)) for node in (*others[:1], *nodes, *others[1:])]
            self._take(tasks, until)
            for node, measure in worst.items():
                own, compared = self._compared(measure, node, healthy[measure[0]])
                if not compared or is_cleared(own, compared):
                    left.remove((measure, node))
                elif len(own) >= _AGAIN:
                    self._name(node, left)
            left = [(m, node) for m, node in left if node not in {*self.slow, *self.broken}]
        for measure, node in left:
            own, compared = self._compared(measure, node, healthy[measure[0]])
            if node not in self.slow and is_slow(own, compared):
                self._name(node, left)

    def _compared(
        self, measure: Measure, node: int, healthy: list[int]
    ) -> tuple[list[float], list[list[float]]]:
        """Return the later values of a suspect, and those of each healthy node or pair."""

        def taken(*nodes: int) -> list[float]:
            return self.again.get((measure, tuple(sorted(nodes))), [])

        if measure[0] != PAIR:
            return taken(node), [taken(one) for one in healthy]
        if len(healthy) < 2:
            return [], []
        return taken(node, healthy[0]), [taken(*healthy)]

    def _name(self, node: int, left: Sequence[tuple[Measure, int]]) -> None:
        """Name a slow node with its smallest value, and the other values that were small."""
        worst, *others = [measure for measure, one in left if one == node]
        value, median = self.values[worst][node], median_of(self.values[worst])
        unit = MEASURES[worst[0]][worst[1]][1]
        why = f"{_name(worst)} {value / median:.2f} of the median"
        why += f" ({amount_text(value)} of {amount_text(median)} {unit}"
        note = self.notes.get((worst, node))
        why += f"; {note})" if note else ")"
        self.slow[node] = why + (f"; also small: {', '.join(map(_name, others))}" if others else "")

    def _error(self, measure: Measure) -> str:
        notes = (note for (noted, _), note in self.notes.items() if noted == measure)
        return next(notes, "no value")


def _are_amounts(answer: Any) -> bool:
    return (
        isinstance(answer, list)
        and bool(answer)
        and all(type(each) in (int, float) and 0 <= each <= _MAX_AMOUNT for each in answer)
    )


def _name(measure: Measure) -> str:
    return MEASURES[measure[0]][measure[1]][0]


# -- the process -----------------------------------------------------------------------------------


def start(
    control: int,
    directory: Path,
    variables: Mapping[str, str],
    close: Sequence[int],
    *,
    fork: bool,
) -> None:
    """Fork the measuring process; without it, the agent sees the end of the connection.

    Args:
        control: its end of the socket pair with the agent; it is closed in this process.
        directory: where it writes its log and a file to measure the disk.
        variables: environment variables, added to the inherited ones.
        close: descriptors of this process that the new one must not keep.
        fork: whether the forked process may measure. After an import that makes a fork unsafe, a
            new process is executed.
    """
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        pid = -1
    if pid != 0:
        os.close(control)
        return
    try:
        processes.die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        for descriptor in close:
            os.close(descriptor)
        log = os.open(directory / PREFLIGHT_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.environ.update(variables)
        if fork:
            serve(control, directory)
        os.set_inheritable(control, True)
        os.execv(
            sys.executable, [sys.executable, "-m", __name__, str(control), os.fspath(directory)]
        )
    except BaseException as error:
        os.write(2, f"the measuring process failed: {error!r}\n".encode())
    os._exit(1)


def serve(control: int, directory: Path) -> NoReturn:
    """Measure what the director wants; the director sends the agent the result.

    The agent has sent where the store is, the number of this process, and the number of all.
    """
    connection = socket.socket(fileno=control)
    data, descriptors, _, _ = socket.recv_fds(connection, PACKET_BYTES, 1)
    if not data:
        os._exit(0)
    order = json.loads(data)
    # A call that never returns, such as one to a broken disk, must not outlive the preflight.
    signal.alarm(math.ceil(order["seconds"]))
    threading.Thread(target=_exit_with_agent, args=(connection,), daemon=True).start()
    try:
        from torch import distributed
    except Exception as error:
        connection.send(json.dumps({"error": f"torch cannot be imported: {error}"}).encode())
        os._exit(0)
    address, port, number = order["address"], order["port"], order["number"]
    server: Any = None
    if descriptors:
        server = distributed.TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptors[0]
        )

    def store() -> Any:
        timeout = timedelta(seconds=order["seconds"])
        return distributed.TCPStore(address, port, is_master=False, timeout=timeout)

    if server is not None:
        direct = threading.Thread(target=_direct, args=(store(), order, connection), daemon=True)
        direct.start()
    _follow(store(), number, directory)
    if server is not None:
        direct.join()
    else:
        connection.send(b"{}")  # it has not been killed
    os._exit(0)


def _direct(store: Any, order: Mapping[str, Any], connection: socket.socket) -> None:
    """Direct the processes, and send the agent the result."""
    hello: dict[int, Any] = {}
    start_until = time.monotonic() + order["start_seconds"]
    for number in range(order["count"]):
        if _is_hello(said := _get(store, f"hello{number}", start_until)):
            hello[number] = said
    begin, number_of_step = time.monotonic(), 0

    def ask(tasks: list[Task]) -> dict[tuple[Task, int], Any]:
        nonlocal number_of_step
        number_of_step += 1
        plan = {node: [probe, nodes] for probe, nodes in tasks for node in nodes}
        store.set(f"step{number_of_step}", json.dumps(plan))
        until = time.monotonic() + _STEP_SECONDS
        return {
            ((probe, nodes), node): _get(store, f"answer{number_of_step}.{node}", until)
            for probe, nodes in tasks
            for node in nodes
        }

    director = Director(ask, hello)
    director.run(begin)
    number_of_step += 1
    store.set(f"step{number_of_step}", json.dumps(None))
    until = time.monotonic() + _STEP_SECONDS
    for number in hello.keys() - director.broken.keys():  # the store ends with this process
        _get(store, f"left{number}", until)
    for number in range(order["count"]):
        if number not in hello:
            director.broken[number] = "the measuring process has not started"
    columns = [m for m, values in director.values.items() if median_of(values)]
    medians = [median_of(director.values[measure]) for measure in columns]
    rows = {
        node: [
            round(director.values[m][node] / median, 3) if node in director.values[m] else None
            for m, median in zip(columns, medians, strict=True)
        ]
        for node in hello
    }
    result = {
        "seconds": round(time.monotonic() - begin, 1),
        "slow": director.broken | director.slow,
        "findings": director.findings(),
        "versions": director.versions(),
        "columns": [
            [*MEASURES[m[0]][m[1]], median] for m, median in zip(columns, medians, strict=True)
        ],
        "rows": rows,
    }
    connection.sendall(json.dumps(result).encode())
    connection.shutdown(socket.SHUT_WR)


def _is_hello(said: Any) -> bool:
    return (
        isinstance(said, dict)
        and type(said.get("gpus")) is int
        and isinstance(said.get("versions"), dict)
        and all(isinstance(version, str) for version in said["versions"].values())
    )


def _get(store: Any, key: str, until: float) -> Any:
    """Return the value of a key; None if it is not there in time."""
    left = max(0.01, until - time.monotonic())
    try:
        store.wait([key], timedelta(seconds=left))
        return json.loads(store.get(key))
    except (RuntimeError, ValueError):
        return None


def _follow(store: Any, number: int, directory: Path) -> None:
    """Say what this node is, and take each step until the last one."""
    said = {
        "machine": processes.boot_id() or str(number),
        "gpus": devices.visible_gpus(os.environ),
        "versions": versions(),
    }
    store.set(f"hello{number}", json.dumps(said))
    step = 0
    while True:
        step += 1
        store.wait([f"step{step}"])
        plan = json.loads(store.get(f"step{step}"))
        if plan is None:
            store.set(f"left{number}", "true")
            return
        if (task := plan.get(str(number))) is None:
            continue
        probe, nodes = task
        try:
            answer: Any = _measure(probe, nodes, number, step, store, directory)
        except Exception as error:
            text = (getattr(error, "strerror", None) or str(error) or type(error).__name__).strip()
            answer = text.split("\n", 1)[0][:_MAX_TEXT]
        store.set(f"answer{step}.{number}", json.dumps(answer))


def _exit_with_agent(connection: socket.socket) -> None:
    """End this process as soon as the agent has closed its end, also during a measure."""
    poll = select.poll()
    poll.register(connection, 0)  # POLLHUP needs no registration
    poll.poll()
    os._exit(0)


# -- measures --------------------------------------------------------------------------------------


def _measure(
    probe: str, nodes: Sequence[int], number: int, step: int, store: Any, directory: Path
) -> list[float]:
    if probe == CPU:
        return [_multiply(), _copy()]
    if probe == DISK:
        return _disk(directory)
    if probe == GPU:
        return _gpus()
    return [_all_reduce(nodes, number, step, store)]


def _rate(work: float, do: Callable[[], object], seconds: float) -> float:
    """Return how much work is done per second, if `do` does `work`."""
    do()
    done, begin = 0.0, time.perf_counter()
    while True:
        do()
        done += work
        elapsed = time.perf_counter() - begin
        if elapsed >= seconds:
            return done / elapsed


def _multiply() -> float:
    """Return the GFLOP/s of a product of matrices on all cores that this process may use."""
    import torch

    torch.set_num_threads(devices.usable_cores())
    left, product = torch.ones(_MATRIX, _MATRIX), torch.empty(_MATRIX, _MATRIX)
    multiply = lambda: torch.mm(left, left, out=product)  # noqa: E731 - one use
    return _rate(2e-9 * _MATRIX**3, multiply, _MEASURE_SECONDS)


def _copy() -> float:
    """Return the GB/s of copies in memory: bytes read and written."""
    import torch

    tensor = torch.ones(_COPIED // 4)
    other = torch.empty_like(tensor)
    return _rate(2e-9 * _COPIED, lambda: other.copy_(tensor), _MEASURE_SECONDS / 2)


def _disk(directory: Path) -> list[float]:
    """Return the MB/s of writing a file to the disk and of reading it again.

    The file has no name, so nothing is left if this process is killed.
    """
    chunk = os.urandom(_CHUNK)  # a disk may compress
    with tempfile.TemporaryFile(dir=directory, buffering=0) as stream:
        begin, written = time.perf_counter(), 0
        while written < _WRITTEN and (
            written < 4 * _CHUNK or time.perf_counter() - begin < _MEASURE_SECONDS
        ):
            written += stream.write(chunk)
        os.fsync(stream.fileno())
        write_rate = written / (time.perf_counter() - begin) / 1e6

        def read() -> None:
            # The kernel must forget what it has cached.
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            stream.seek(0)
            while stream.read(_CHUNK):
                pass

        return [write_rate, _rate(written / 1e6, read, _MEASURE_SECONDS / 2)]


def _gpus() -> list[float]:
    """Return the GFLOP/s of a product in 16 bits and the GB/s of copies, for each GPU."""
    import torch

    found: list[float] = []
    for index in range(torch.cuda.device_count()):
        with torch.cuda.device(index):
            matrix = torch.ones(_GPU_MATRIX, _GPU_MATRIX, dtype=torch.float16, device="cuda")
            product = torch.empty_like(matrix)
            source = torch.ones(_GPU_COPIED // 4, device="cuda")
            target = torch.empty_like(source)

            def multiply(matrix: Any = matrix, product: Any = product) -> None:
                torch.mm(matrix, matrix, out=product)
                torch.cuda.synchronize()

            def copy(source: Any = source, target: Any = target) -> None:
                target.copy_(source)
                torch.cuda.synchronize()

            found.append(_rate(2e-9 * _GPU_MATRIX**3, multiply, _MEASURE_SECONDS / 2))
            found.append(_rate(2e-9 * _GPU_COPIED, copy, _MEASURE_SECONDS / 2))
            del matrix, product, source, target
            torch.cuda.empty_cache()
    return found


def _all_reduce(nodes: Sequence[int], number: int, step: int, store: Any) -> float:
    """Form a group of nodes, and return the bus bandwidth of its all-reduce in GB/s.

    The bus bandwidth is the bytes that each node sends per second. It does not depend on the number
    of nodes (as in nccl-tests), so pairs and rings can be compared.
    """
    import torch
    from torch import distributed

    torch.set_num_threads(1)  # the network is measured, not the addition
    on_gpu = distributed.is_nccl_available() and torch.cuda.device_count() > 0
    device = torch.device("cpu")
    if on_gpu:  # another GPU, and so another network card, in each step
        device = torch.device("cuda", step % torch.cuda.device_count())
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=distributed.PrefixStore(f"group{step}.{nodes[0]}", store),
        rank=list(nodes).index(number),
        world_size=len(nodes),
        timeout=_TIMEOUT,
    )
    size = _GPU_REDUCED if on_gpu else _REDUCED
    try:
        seconds = _time_of_all_reduce(torch.zeros(size // 4, device=device))
    finally:
        with contextlib.suppress(Exception):  # the error of the measure counts
            distributed.destroy_process_group()
    return 2 * (len(nodes) - 1) / len(nodes) * size / max(seconds, 1e-6) / 1e9


def _time_of_all_reduce(data: Any) -> float:
    """Return the median time of an all-reduce.

    The first element of the data tells whether a rank wants to stop, so all ranks stop together.
    """
    from torch import distributed

    distributed.all_reduce(data)  # connects
    times: list[float] = []
    begin = time.perf_counter()
    while True:
        data.zero_()
        data[0] = float(time.perf_counter() - begin >= _GROUP_SECONDS and len(times) > 0)
        before = time.perf_counter()
        distributed.all_reduce(data)
        stop = data[0].item() > 0  # waits for a GPU
        times.append(time.perf_counter() - before)
        if stop:
            return statistics.median(times)


def versions() -> dict[str, str]:
    """Return the version of each part that should be equal on all nodes; "none" if absent."""
    import torch

    # A line such as "NVRM version: NVIDIA ... Module  570.86.15  ...".
    line = files.read_text(_NVIDIA_VERSION).partition("\n")[0]
    words = [word for word in line.split() if word[:1].isdigit() and "." in word]
    found = {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or getattr(torch.version, "hip", None) or "none",
        "NVIDIA driver": words[0] if words else "none",
        "kernel": platform.release(),
    }
    return {part: str(version)[:100] for part, version in found.items()}


if __name__ == "__main__":
    serve(int(sys.argv[1]), Path(sys.argv[2]))
