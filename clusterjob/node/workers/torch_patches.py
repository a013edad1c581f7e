"""Patch torch.distributed in every Python process of a job that imports it.

`hook` applies the patches; in a process that the forkserver has not forked, from a copy of this
file. So it imports no other file of the package, and runs in Python 3.7. The patches:

1. Wait for the threads of gloo before a group is destroyed. torch 2.13 deadlocks or aborts if a
   gloo group is freed while one of its threads still waits for the interpreter's lock:
   ~ProcessGroupGloo (pthread_join) against ~ThreadLocalState (take_gil). A group that is left at
   the end of the process is not freed.
2. Limit the agents' store to its own port. Under TORCHELASTIC_USE_AGENT_STORE every rank is a
   client of a store, even at an address where no agent serves a store. So the variable applies
   only to the agents' port; at any other port rank 0 serves the store.
3. Use a prefix in the agents' store for each group. The store outlives a group and still holds the
   addresses of its processes.
4. Report the phases of a rank to its agent.
5. Measure how long a rank waits for others in DistributedDataParallel.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import os
import re
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

STORE = "CLUSTERJOB_STORE"  # host:port of the agents' store; empty if rank 0 serves the store
WAITS = "CLUSTERJOB_WAITS"  # "1": measure the waits for other ranks
INTERVAL = 5.0  # seconds between two messages about waits
_WAITING_NOTICE = 5.0  # seconds of waiting for a store before the notice that none answers
_GLOO_TIMEOUT = 2.0
# With TORCH_DISTRIBUTED_DEBUG=DETAIL a wrapper with its own gloo group holds each backend.
_GLOO = ("ProcessGroupGloo", "_ProcessGroupWrapper")


# -- messages to the agent -------------------------------------------------------------------------


def tell(phase: str) -> None:
    """Write the begin of a phase into the agents' report pipe; do nothing outside of a worker.

    Args:
        phase: a value of `clusterjob.node.logs.events.Phase`.
    """
    send("WorkerPhase", phase=phase, monotonic=time.monotonic())


def fail(message: str, exit_code: int, kind: str, where: str = "") -> None:
    """Report that this worker fails, with the fields of `forkserver_messages.WorkerFailing`.

    Lines of several workers must not mix: the text is cut to what a pipe takes at once (4096 bytes
    on Linux, pipe(7)).
    """
    now, text, where = time.monotonic(), message[:900], where[:300]
    send("WorkerFailing", monotonic=now, message=text, exit_code=exit_code, kind=kind, where=where)


def send(type_: str, **fields: Any) -> None:
    """Write a message into the agents' report pipe; do nothing outside of a worker.

    Args:
        type_: the name of the message, see `clusterjob.node.workers.forkserver_messages`.
        **fields: its fields without the local rank.
    """
    name, _, rest = os.environ.get("CLUSTERJOB_REPORT_FD", "").partition(":")
    local_rank, _, owner = rest.rpartition(":")
    if owner != str(os.getpid()):  # a child of a worker is no rank
        return
    with contextlib.suppress(OSError, ValueError):
        # Not by LOCAL_RANK, which a program may change.
        own = {"type": type_, "local_rank": int(local_rank), **fields}
        line = json.dumps(own, ensure_ascii=False)
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(f"/proc/{owner}/fd/{int(name)}", flags), "wb", 0) as pipe:
            if stat.S_ISFIFO(os.fstat(pipe.fileno()).st_mode):
                pipe.write(f"{line}\n".encode(errors="replace"))


# -- process groups --------------------------------------------------------------------------------


def patch_groups(module: Any) -> None:
    """Patch torch.distributed.distributed_c10d; see this file's first lines."""
    destroy, rendezvous = module.destroy_process_group, module.rendezvous
    initialize = module.init_process_group

    @functools.wraps(destroy)
    def destroy_process_group(*args: Any, **options: Any) -> Any:
        wait_for_gloo()
        return destroy(*args, **options)

    @functools.wraps(rendezvous)
    def separate_rendezvous(*args: Any, **options: Any) -> Iterator[Any]:
        for store, rank, world_size in rendezvous(*args, **options):
            tell("init")
            yield _separate_store(store, rank, world_size=world_size), rank, world_size

    @functools.wraps(initialize)
    def init_process_group(*args: Any, **options: Any) -> None:
        # With a store, the script or `worker.group` has made the rendezvous.
        tell("rendezvous" if options.get("store") is None else "init")
        initialize(*args, **options)
        tell("running")
        with contextlib.suppress(Exception):  # another torch; the job runs without it as well
            _measure_waits()

    for function in (destroy_process_group, init_process_group, separate_rendezvous):
        setattr(module, function.__name__, function)
    atexit.register(wait_for_gloo)
    atexit.register(_never_free, module)  # runs before it
    os.register_at_fork(after_in_child=functools.partial(_never_free, module, files=True))


def _never_free(module: Any, *, files: bool = False) -> None:
    """Keep the gloo backends of all groups for ever; those over a file only with `files`.

    ~ProcessGroupGloo in a forked child would wait for threads that do not exist there. ~FileStore
    of the last rank removes the file; the next run would find it.
    """
    for group, (_, store) in module._world.pg_map.items():
        if files or _kind(store) != "FileStore":
            with contextlib.suppress(AttributeError, RuntimeError):  # a group written in Python
                for device in group._device_types:
                    backend = group._get_backend(device)
                    if type(backend).__name__ in _GLOO:
                        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))


def wait_for_gloo() -> None:
    """Wait up to 2 s until no gloo thread waits for the interpreter's lock.

    When the interpreter exits, Python 3.13 and older end each thread that waits for the lock.
    Inside torch's destructors this aborts the process: "terminate called without an active
    exception". A thread that waits for the lock wakes every 5 ms; an idle thread does not.
    """
    end = time.monotonic() + _GLOO_TIMEOUT
    before = _gloo_threads()
    while before and time.monotonic() < end:
        time.sleep(0.02)  # releases the lock
        now = _gloo_threads()
        if now == before and not any(state in "RD" for state, _ in now.values()):
            return
        before = now


def _gloo_threads() -> dict[str, Any]:
    """Return each gloo thread's state and count of voluntary context switches, by thread id.

    The source is /proc/self/task (proc(5)).
    """
    found = {}
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # the thread has ended
            with open(f"/proc/self/task/{task}/status") as file:
                text = file.read()
            # pt_gloo_runloop takes the interpreter's lock; gloo_tcp_loop does not.
            if "gloo_runloop" in text.partition("\n")[0]:
                found[task] = re.findall(r"^(?:State|voluntary_ctxt_switches):\t(\w+)", text, re.M)
    return found


def _kind(store: Any) -> str:
    """Return the class of a store below its prefixes, such as ``TCPStore``."""
    return type(getattr(store, "_underlying_non_prefix_store", store)).__name__


def _separate_store(store: Any, rank: int, world_size: int) -> Any:
    """Return the agents' store with a prefix of this group.

    The count is kept in the store, because some processes of the next group may be new, such as the
    children of one trial of a sweep. Groups of different sizes are counted separately, because some
    ranks belong only to the larger groups.
    """
    if _kind(store) != "TCPStore" or not has_agent_variables():
        return store
    from torch.distributed import PrefixStore

    number = store.add(f"clusterjob/groups/{world_size}/{rank}", 1)
    return PrefixStore(f"clusterjob/group{number}of{world_size}", store)


# -- limit the agents' store to its own port -------------------------------------------------------


def served_at(port: int) -> str | None:
    """Return the host of the agents' store if a port is that of the store, else None.

    The port decides: a script may name the store's machine as it likes.
    """
    host, _, own_port = os.environ.get(STORE, "").rpartition(":")
    return host if own_port == str(port) else None


def has_agent_variables() -> bool:
    """Return whether an agent set this process's variables, not a torchrun inside a worker."""
    return STORE in os.environ and os.environ.get("TORCHELASTIC_RUN_ID") == os.environ.get(
        "CLUSTERJOB_JOB_ID", ""
    )


def patch_stores(module: Any) -> None:
    """Patch torch.distributed.rendezvous to use the agents' store only at the agents' port."""
    create = getattr(module, "_create_c10d_store", None)
    asks_agents = getattr(module, "_torchelastic_use_agent_store", None)
    if create is None or asks_agents is None:
        return  # another torch

    @functools.wraps(create)
    def create_store(hostname: str, port: int, rank: int, *args: Any, **options: Any) -> Any:
        by_agents = asks_agents() and has_agent_variables()
        served = served_at(port) if by_agents else hostname
        if served is not None:
            return create(served, port, rank, *args, **options)
        from torch.distributed import TCPStore

        text = (
            f"clusterjob: no store answers at {hostname}:{port}, where this process waits for rank"
            f" 0's; the job store is at {os.environ[STORE]}"
        )
        shown = {"file": sys.stderr, "flush": True}
        notice = threading.Timer(_WAITING_NOTICE, print, (text,), shown)
        notice.daemon = True
        if rank:
            notice.start()
        try:  # as torch does where no agent serves a store
            world_size, timeout = args[:2]
            return TCPStore(hostname, port, world_size, rank == 0, timeout, multi_tenant=True)
        finally:
            notice.cancel()

    module._create_c10d_store = create_store


# -- waits for other ranks -------------------------------------------------------------------------
#
# torch's own timers of DistributedDataParallel measure how long the all-reduces of a backward pass
# last after its computation has ended: with a clock on CPUs, with events on a GPU, where no
# function of Python waits. DDP reads its timers in every hundredth iteration; here they are read
# about four times a second, or every 5 s on a GPU, because the reading waits for the GPU. Medians
# are sent: a checkpoint, or the first batch, is no reason to call a rank slow.

_ENOUGH = 3  # readings without which there is no message
_READ_ON_HOST, _READ_ON_DEVICE = 0.25, 5.0  # seconds between two readings of DDP's timers
# Iterations between two readings. What a script does in each tenth step must not always be seen.
_RATES = (1, 3, 7, 13, 29, 61, 101)


class Waits:
    """The steps of this process, which are iterations of DDP, and its waits in them, in seconds."""

    def __init__(self) -> None:
        self._read: list[tuple[float, float]] = []
        self._sent = 0.0

    def add(self, step: float, wait: float) -> None:
        """Add a reading of the timers; send the medians of those of the last 5 s."""
        self._read.append((step, wait))
        moment = time.monotonic()
        if moment >= self._sent + INTERVAL and len(self._read) >= _ENOUGH:
            step, wait = (sorted(each)[len(each) // 2] for each in zip(*self._read))  # noqa: B905 - 3.7
            send("WorkerWaits", step=step, waited=min(step, wait))
            self._sent, self._read = moment, []


def _measure_waits() -> None:
    """Patch the classes of C++ that DDP calls before each forward pass, once in a process."""
    import torch
    from torch._C import _distributed_c10d as c10d

    set_logger, note = c10d.Reducer.set_logger, c10d.Logger.set_runtime_stats_and_log
    if os.environ.get(WAITS) != "1" or hasattr(note, "__wrapped__"):
        return
    waits = Waits()
    # The reducer, the last iteration that was read, and when, by logger.
    known: weakref.WeakKeyDictionary[Any, tuple[Any, int, float]] = weakref.WeakKeyDictionary()

    def read(logger: Any) -> None:
        """Read the timers of the last iteration, if it was timed."""
        values = logger._get_ddp_logging_data().ints_map
        iteration, (reducer, last, begin) = values.get("iteration", 0), known[logger]
        if iteration == last:
            return
        known[logger] = reducer, iteration, time.monotonic()
        step = (time.monotonic() - begin) / (iteration - last)
        # With TORCH_DISTRIBUTED_DEBUG, each reading may print lines.
        if not os.environ.get("TORCH_DISTRIBUTED_DEBUG"):
            pause = _READ_ON_DEVICE if torch.cuda.is_initialized() else _READ_ON_HOST
            rate = max(each for each in _RATES if each <= max(1, pause / step))
            reducer()._set_ddp_runtime_logging_sample_rate(rate)
        # The all-reduces overlap the computation; the rest is a wait.
        wait = values["backward_comm_time"] - values["backward_compute_comm_overlap_time"]
        waits.add(step, max(0, wait) / 1e9)

    @functools.wraps(set_logger)
    def watched_set_logger(reducer: Any, logger: Any) -> Any:
        known[logger] = weakref.ref(reducer), 0, time.monotonic()
        return set_logger(reducer, logger)

    @functools.wraps(note)
    def watched_note(logger: Any) -> Any:
        result = note(logger)
        with contextlib.suppress(Exception):  # another torch, or a reducer that was freed
            read(logger)
        return result

    c10d.Reducer.set_logger = watched_set_logger  # type: ignore[assignment, method-assign]
    c10d.Logger.set_runtime_stats_and_log = _never_compiled(watched_note)  # type: ignore[method-assign]


def _never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that torch.compile calls as it is, instead of a warning about the clock.

    It is what torch.compiler.disable() does, which would import the compiler.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # inside a compiled one
    with contextlib.suppress(ImportError, AttributeError):  # another torch
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(skip, skip)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function
