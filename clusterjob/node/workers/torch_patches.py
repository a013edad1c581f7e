"""Patch torch.distributed in every Python process of a job that imports it.

`hook` applies the patches; in a process that the forkserver has not forked, from a copy of this
file. So it imports no other file of the package, and runs in Python 3.7. The patches:

1. Keep destroyed gloo groups. torch 2.13 deadlocks or aborts if a gloo group is freed while a
   thread of the group still waits for the interpreter's lock: ~ProcessGroupGloo (pthread_join)
   against ~ThreadLocalState (take_gil). So the gloo backends of a destroyed group are freed only
   after another group was formed, and never at the end of the process.
2. Limit the agents' store to its own address. Under TORCHELASTIC_USE_AGENT_STORE every rank is a
   client of a store, even at an address where no agent serves a store. So the variable applies
   only to the agents' address; at any other address rank 0 serves the store.
3. Use a new prefix in the agents' store for each group after the first (`_separate_store`). The
   store outlives a group and still holds the addresses of its processes.
4. Report the phases of a rank to its agent.
5. Write torch's flight recorder of a gloo group to a file when the agent asks for it.
6. Measure how long a rank waits for others in collectives.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import math
import os
import socket
import stat
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

STORE = "CLUSTERJOB_STORE"  # host:port of the agents' store; empty if rank 0 serves the store
WAITS = "CLUSTERJOB_WAITS"  # "1": measure the waits in collectives
_PIPE_FILE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"  # see `flight_recorder`
_DUMP_FILE = "TORCH_FR_DUMP_TEMP_FILE"  # torch with this recorder for gloo has this name
INTERVAL = 5.0  # seconds between two messages about waits
_WAITING_NOTICE = 5.0  # seconds of waiting for a store before the notice that no process listens
_CONNECT_TIMEOUT = 2.0
_GLOO_TIMEOUT = 2.0
_DESTROYED: list[Any] = []  # gloo backends of process groups that must not be freed yet
# Gloo backends of this process's ancestors: their threads do not exist in this process.
_INHERITED: list[Any] = []
# .counter: the (store, key) to increase when this thread has formed its group; see _separate_store.
_FORMING = threading.local()
_started: set[tuple[str, int]] = set()  # what runs once in a process, with its pid


# -- messages to the agent -------------------------------------------------------------------------


def tell(phase: str) -> None:
    """Write the begin of a phase into the agents' report pipe; do nothing outside of a worker.

    Args:
        phase: a value of `clusterjob.node.logs.phases.Phase`, or ``imported``.
    """
    # `forkserver_messages.WorkerPhase`
    send("WorkerPhase", phase=phase, monotonic=time.monotonic())


def send(type_: str, **fields: Any) -> None:
    """Write a message into the agents' report pipe; do nothing outside of a worker.

    Args:
        type_: the name of the message, see `clusterjob.node.workers.forkserver_messages`.
        **fields: its fields without the local rank.
    """
    with contextlib.suppress(OSError, ValueError, KeyError):
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))  # torchrun itself has none
        message = {"type": type_, "local_rank": local_rank, **fields}
        descriptor, opened = _report_pipe()
        try:
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                os.write(descriptor, json.dumps(message).encode() + b"\n")
        finally:
            if opened:
                os.close(descriptor)


def _report_pipe() -> tuple[int, bool]:
    """Return the descriptor of the report pipe, and whether this call has opened it.

    A worker has inherited it. The workers of a torchrun that the agent has started open that of
    their parent.

    Raises:
        OSError, ValueError: this process is no worker of an agent.
    """
    name, _, pid = os.environ.get("CLUSTERJOB_REPORT_FD", "").partition(":")
    if int(pid) == os.getpid():
        return int(name), False
    # Other launchers leave this variable unset: a child of a forked worker is no rank.
    if int(pid) != os.getppid() or "TORCHELASTIC_ERROR_FILE" not in os.environ:
        raise ValueError(pid)
    path = f"/proc/{int(pid)}/fd/{int(name)}"
    return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC), True


# -- process groups --------------------------------------------------------------------------------


def patch_groups(module: Any) -> None:
    """Patch torch.distributed.distributed_c10d; see this file's first lines."""
    import ctypes

    for kept in (_DESTROYED, _INHERITED):
        # The interpreter must not free a backend when it exits.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    destroy, rendezvous = module.destroy_process_group, module.rendezvous
    initialize, form_group = module.init_process_group, module.new_group

    @functools.wraps(destroy)
    def destroy_process_group(*args: Any, **options: Any) -> Any:
        _keep(module)
        return destroy(*args, **options)

    @functools.wraps(rendezvous)
    def separate_rendezvous(*args: Any, **options: Any) -> Iterator[Any]:
        for store, rank, world_size in rendezvous(*args, **options):
            tell("init")
            yield _separate_store(store, rank, world_size=world_size), rank, world_size

    @functools.wraps(form_group)
    def new_group(*args: Any, **options: Any) -> Any:
        earlier = list(_DESTROYED)
        group = form_group(*args, **options)
        if group != module.GroupMember.NON_GROUP_MEMBER:  # a non-member does not wait for ranks
            _free(earlier)
        return group

    @functools.wraps(initialize)
    def init_process_group(*args: Any, **options: Any) -> None:
        # With a store, the script or `worker.group` has made the rendezvous.
        tell("rendezvous" if options.get("store") is None else "init")
        earlier = list(_DESTROYED)
        _FORMING.counter = None
        initialize(*args, **options)
        _count_formed()
        _free(earlier)
        tell("running")
        for start in (_serve_dumps, _measure_waits):
            with contextlib.suppress(Exception):  # another torch; the job runs without it as well
                start(module)

    for function in (destroy_process_group, new_group, init_process_group):
        _replace(module, function)
    module.rendezvous = separate_rendezvous
    atexit.register(_keep_at_exit, module)
    os.register_at_fork(after_in_child=functools.partial(_keep_in_child, module))


def _replace(module: ModuleType, function: Callable[..., Any]) -> None:
    """Replace a function of a module, and its re-export in torch.distributed if there is one."""
    name = function.__name__
    package = sys.modules.get("torch.distributed")
    if package is not None and package.__dict__.get(name) is getattr(module, name):
        setattr(package, name, function)
    setattr(module, name, function)


def _free(earlier: list[Any]) -> None:
    """Free groups destroyed before another one was formed.

    The rendezvous has made this process wait, so the threads of these groups are idle.
    """
    _DESTROYED[:] = [each for each in _DESTROYED if not any(each is old for old in earlier)]


def _keep(module: Any, *, files: bool = False) -> None:
    """Keep the gloo backends of all groups; those that meet in a file only with `files`.

    ~FileStore of the last rank removes the file; the next run would find that of a kept group.
    """
    for group, (_, store) in module._world.pg_map.items():
        if files or type(_innermost(store)).__name__ != "FileStore":
            _DESTROYED.extend(
                part
                for part in _gloo_of(module, group)
                if not any(part is kept for kept in (*_DESTROYED, *_INHERITED))
            )


def _keep_at_exit(module: Any) -> None:
    """Keep the gloo backends when the process ends, and wait until gloo's threads are idle."""
    _keep(module)
    wait_for_gloo()


def _keep_in_child(module: Any) -> None:
    """Keep the parent's groups in a forked child.

    ~ProcessGroupGloo would wait forever for threads that do not exist in the child.
    """
    _keep(module, files=True)
    _INHERITED.extend(_DESTROYED)
    _DESTROYED.clear()


def _gloo_of(module: Any, group: Any) -> list[Any]:
    """Return the backends of a group that have gloo threads.

    Other backends are not kept, such as NCCL's, which holds GPU memory.
    """
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL a wrapper with its own gloo group holds each backend.
    kinds = tuple(
        getattr(module, name)
        for name in ("ProcessGroupGloo", "_ProcessGroupWrapper")
        if hasattr(module, name)
    )
    try:
        backends = [group._get_backend(device) for device in group._device_types]
    except (AttributeError, RuntimeError):
        return []  # a group written in Python
    return [backend for backend in backends if isinstance(backend, kinds)]


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


def _gloo_threads() -> dict[str, tuple[str, str]]:
    """Return each gloo thread's state and count of voluntary context switches, by thread id.

    The source is /proc/self/task (proc(5)).
    """
    found = {}
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/status") as file:
                fields = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
        except OSError:
            continue  # the thread has ended
        # pt_gloo_runloop takes the interpreter's lock; gloo_tcp_loop does not.
        if "gloo_runloop" in fields.get("Name", ""):
            found[task] = (fields["State"][0], fields["voluntary_ctxt_switches"])
    return found


def _innermost(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _separate_store(store: Any, rank: int, world_size: int) -> Any:
    """Return the store with a new prefix; for the first group that uses it, the store itself.

    The count is kept in the store, because some processes of the next group may be new, such as the
    children of one trial of a sweep. Groups of different sizes are counted separately, because some
    ranks belong only to the larger groups.
    """
    server = _innermost(store)
    if type(server).__name__ != "TCPStore" or not has_agent_variables():
        return store
    from torch.distributed import PrefixStore

    counter = f"clusterjob/formed/{world_size}/{rank}"
    number = store.add(counter, 0)
    _FORMING.counter = store, counter
    # The first group uses torch's own keys: processes without the hook use these keys.
    if (
        not number
        and store.compare_set("clusterjob/first", "", str(world_size)) == str(world_size).encode()
    ):
        return store
    return PrefixStore(f"clusterjob/group{number}of{world_size}", store)


def _count_formed() -> None:
    """Count the group that this thread has formed, if it has a counter."""
    counter, _FORMING.counter = _FORMING.counter, None
    if counter is not None:
        store, key = counter
        with contextlib.suppress(RuntimeError):  # rank 0 served the store and has ended
            store.add(key, 1)


# -- limit the agents' store to its own address ----------------------------------------------------


def served_at(host: str, port: int) -> str | None:
    """Return the host of the agents' store if the address is that of the store, else None.

    Args:
        host: the address as the script gives it.
        port: its port.
    """
    own_host, _, own_port = os.environ.get(STORE, "").rpartition(":")
    if not own_host or own_port != str(port):
        return None
    if host == own_host:
        return host
    addresses, own = _addresses(host), _addresses(own_host)
    if addresses & own:
        return host
    # The store is bound to one address of node 0. On node 0, every other name of the machine is
    # an address of the same store.
    on_node_0 = any(map(_is_of_this_machine, addresses)) and any(map(_is_of_this_machine, own))
    return own_host if on_node_0 else None


def has_agent_variables() -> bool:
    """Return whether an agent set this process's variables, not a torchrun inside a worker."""
    return STORE in os.environ and os.environ.get("TORCHELASTIC_RUN_ID") == os.environ.get(
        "CLUSTERJOB_JOB_ID", ""
    )


def _addresses(host: str) -> set[Any]:
    try:
        return {info[4][0] for info in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return set()


def _is_of_this_machine(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def patch_stores(module: Any) -> None:
    """Patch torch.distributed.rendezvous to use the agents' store only at the agents' address."""
    create = getattr(module, "_create_c10d_store", None)
    asks_agents = getattr(module, "_torchelastic_use_agent_store", None)
    if create is None or asks_agents is None:
        return  # another torch
    this_thread = threading.local()

    @functools.wraps(asks_agents)
    def use_agent_store() -> bool:
        return asks_agents() and not getattr(this_thread, "elsewhere", False)

    @functools.wraps(create)
    def create_store(hostname: str, port: int, *args: Any, **options: Any) -> Any:
        if not has_agent_variables():
            return create(hostname, port, *args, **options)
        served = served_at(hostname, port)
        if served is not None:
            return create(served, port, *args, **options)
        notice = threading.Timer(_WAITING_NOTICE, _print_notice, (hostname, port))
        notice.daemon = True
        notice.start()
        this_thread.elsewhere = True
        try:
            return create(hostname, port, *args, **options)
        finally:
            this_thread.elsewhere = False
            notice.cancel()

    module._torchelastic_use_agent_store = use_agent_store
    module._create_c10d_store = create_store


def _print_notice(host: str, port: int) -> None:
    """Print one notice if no process listens at the address where this process waits."""
    try:
        socket.create_connection((host, port), _CONNECT_TIMEOUT).close()
    except OSError as error:
        own = os.environ.get(STORE, "")
        sys.stderr.write(
            f"clusterjob: no process listens at {host}:{port}, where this process waits for rank"
            f" 0's store ({error.strerror or error})"
            f"{f'; the job store is at {own}' if own else ''}\n"
        )
        sys.stderr.flush()


# -- flight recorder of gloo -----------------------------------------------------------------------


def _serve_dumps(module: Any) -> None:
    """Start the thread that writes dumps; torch's own thread serves NCCL.

    It also answers while the main thread is in a collective: torch releases the interpreter's lock.
    """
    from torch._C import _distributed_c10d as torch_c10d

    dump = getattr(torch_c10d, "_dump_fr_trace_json", None)
    pipe, target = os.environ.get(_PIPE_FILE), os.environ.get(_DUMP_FILE)
    once = ("dumps", os.getpid())
    if dump is None or not pipe or not target or once in _started:
        return
    if "gloo" not in module.get_backend_config():
        return
    _started.add(once)
    rank = os.environ.get("RANK", str(module.get_rank()))
    path = pipe + rank + ".json.pipe"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    os.mkfifo(path, 0o600)
    # Open for writing too: the pipe then has no end of file.
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    target += rank + ".json"

    def serve() -> None:
        while os.read(descriptor, 64):
            data = dump()
            with contextlib.suppress(OSError):
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
                with open(os.open(target + ".part", flags, 0o600), "wb") as file:
                    file.write(data)
                os.replace(target + ".part", target)

    threading.Thread(target=serve, name="clusterjob-dumps", daemon=True).start()


# -- waits in collectives --------------------------------------------------------------------------
#
# A rank waits in two places:
#
# - In `Work.wait`, which all collectives of Python call.
# - At the end of a backward pass of DistributedDataParallel, whose all-reduces are started in C++.
#   torch's own timers of DDP measure how long they last after the computation has ended: with a
#   clock on CPUs, with events on a GPU, where no function of Python waits. DDP reads its timers in
#   every hundredth iteration; here they are read about four times a second, or every 5 s on a GPU,
#   because the reading waits for the GPU.
#
# A step ends with a step of an optimizer after a wait. The longest waits are left out: a
# checkpoint, or the first batch, is no reason to call a rank slow.

_WINDOW, _FEWEST, _MOST = 30.0, 8, 1000  # a mean is of the steps of so many seconds; steps
_ENOUGH = 5  # waits without which there is no message
_FIRST_STEPS = 3  # steps that are not measured: memory is allocated, code is compiled
_LONGEST = 20  # one of so many values is left out
_READ_ON_HOST, _READ_ON_DEVICE = 0.25, 5.0  # seconds between two readings of DDP's timers
_RARELY = 100  # iterations between two readings, as torch has it
_NANOSECOND = 1e-9


class Waits:
    """The steps and the waits of this process.

    Args:
        send: sends the mean length of a step, and the mean wait in it, in seconds.
        on_host: returns whether collectives keep the thread that waits for them.
    """

    def __init__(self, send: Callable[[float, float], None], on_host: Callable[[], bool]) -> None:
        self._send = send
        self._on_host = on_host
        self._thread = threading.get_ident()
        self._synchronized = False  # whether the current step had a collective
        self._waited = 0.0
        self._of_ddp: float | None = None  # of this step; None if the timers were not read
        self._has_ddp = False
        self._begin = 0.0  # of the current step
        self._number = 0
        # The end and the length of each step, and the wait if it is known.
        self._steps: deque[tuple[float, float, float | None]] = deque(maxlen=_MOST)
        self._sent = 0.0

    def add_wait(self, seconds: float) -> None:
        """Add a wait of the current step; another thread's does not count."""
        if threading.get_ident() == self._thread:
            self._synchronized = True
            self._waited += seconds

    def add_iteration(self, wait: float | None) -> None:
        """Add an iteration of DDP, with its wait in seconds if the timers were read."""
        self._synchronized = self._has_ddp = True
        if wait is not None:
            self._of_ddp = wait + (self._of_ddp or 0.0)

    def end_step(self) -> None:
        """End the current step; several steps of optimizers without a collective are one."""
        if not self._synchronized:
            return
        moment = time.monotonic()
        wait: float | None = None
        if not self._has_ddp:
            wait = self._waited if self._on_host() else None
        elif self._of_ddp is not None:
            wait = self._waited + self._of_ddp
        self._number += 1
        if self._number > _FIRST_STEPS:
            self._steps.append((moment, moment - self._begin, wait))
        self._begin, self._waited, self._of_ddp, self._synchronized = moment, 0.0, None, False
        if moment - self._sent >= INTERVAL:
            self._sent = moment
            while len(self._steps) > _FEWEST and self._steps[0][0] < moment - _WINDOW:
                self._steps.popleft()
            waits = [wait for _, _, wait in self._steps if wait is not None]
            if len(waits) >= _ENOUGH:
                step = self.step
                self._send(step, min(step, _usual(waits)))

    @property
    def step(self) -> float:
        """The usual length of a step in seconds; 0 if there was none."""
        return _usual([length for _, length, _ in self._steps])


def _usual(values: Iterable[float]) -> float:
    """Return the mean without the largest values."""
    ordered = sorted(values)
    kept = ordered[: len(ordered) - math.ceil(len(ordered) / _LONGEST)] or ordered
    return sum(kept) / len(kept) if kept else 0.0


def _measure_waits(module: Any) -> None:
    """Measure from the first process group on."""
    if os.environ.get(WAITS) != "1" or any(name == "waits" for name, _ in _started):
        return
    _started.add(("waits", os.getpid()))
    import torch
    from torch._C import _distributed_c10d as c10d
    from torch.optim.optimizer import register_optimizer_step_post_hook

    blocking = any(name in str(module.get_backend_config()) for name in ("gloo", "mpi"))
    waits = Waits(_send_waits, on_host=lambda: blocking and not torch.cuda.is_initialized())

    register_optimizer_step_post_hook(_never_compiled(lambda *_: waits.end_step()))
    c10d.Work.wait = _timed(c10d.Work.wait, waits)  # type: ignore[method-assign]
    package = sys.modules["torch.distributed"]
    # DDP sends the buffers of rank 0, such as those of BatchNorm, with this function of C++.
    package._broadcast_coalesced = _timed(package._broadcast_coalesced, waits)  # type: ignore[attr-defined]
    _watch_ddp(c10d, waits, on_device=torch.cuda.is_initialized)


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


def _timed(function: Callable[..., Any], waits: Waits) -> Callable[..., Any]:
    """Wrap a function that waits for a collective."""

    @functools.wraps(function)
    def timed(*args: Any, **options: Any) -> Any:
        begin = time.monotonic()
        try:
            return function(*args, **options)
        finally:
            waits.add_wait(time.monotonic() - begin)

    return _never_compiled(timed)


def _watch_ddp(c10d: Any, waits: Waits, on_device: Callable[[], bool]) -> None:
    """Patch the classes of C++ that DDP calls before each forward pass."""
    set_logger, note = c10d.Reducer.set_logger, c10d.Logger.set_runtime_stats_and_log
    reducers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
    read: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # the last iteration

    def wait_of(logger: Any) -> float | None:
        """Return how long the last iteration has waited, in seconds; None if it is not known."""
        values = logger._get_ddp_logging_data().ints_map
        iteration, reducer = values.get("iteration", 0), reducers[logger]()
        if iteration == read.get(logger, 0) or reducer is None:
            return None
        read[logger] = iteration
        # With TORCH_DISTRIBUTED_DEBUG, each reading may print lines.
        if waits.step > 0 and not os.environ.get("TORCH_DISTRIBUTED_DEBUG"):
            pause = _READ_ON_DEVICE if on_device() else _READ_ON_HOST
            every = min(_RARELY, max(1, round(pause / waits.step)))
            while every > 1 and (every % 2 == 0 or every % 5 == 0):
                every += 1  # what a script does in each tenth step must not always be seen
            reducer._set_ddp_runtime_logging_sample_rate(every)
        # The all-reduces overlap the computation; the rest is a wait.
        wait = values["backward_comm_time"] - values["backward_compute_comm_overlap_time"]
        return float(max(0, wait)) * _NANOSECOND

    @functools.wraps(set_logger)
    def watched_set_logger(reducer: Any, logger: Any) -> Any:
        reducers[logger] = weakref.ref(reducer)
        return set_logger(reducer, logger)

    @functools.wraps(note)
    def watched_note(logger: Any) -> Any:
        result = note(logger)
        if logger in reducers:
            wait = None
            with contextlib.suppress(Exception):  # another torch
                wait = wait_of(logger)
            waits.add_iteration(wait)
        return result

    c10d.Reducer.set_logger = watched_set_logger
    c10d.Logger.set_runtime_stats_and_log = _never_compiled(watched_note)


def _send_waits(step: float, waited: float) -> None:
    send("WorkerWaits", step=step, waited=waited)
