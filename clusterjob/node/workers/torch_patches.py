"""What is changed in torch.distributed, in every Python process of a job that imports it (`hook`).
Reads no other file of the package.

1. torch 2.13 deadlocks, or aborts, where a gloo group is freed while a thread of the group still
  waits for the interpreter:
   ~ProcessGroupGloo (pthread_join) against ~ThreadLocalState (take_gil). So gloo's part of a group
   that was destroyed is not freed before another group was formed, and at the end of the process
   not at all.
2. Under TORCHELASTIC_USE_AGENT_STORE every rank is a client of a store, also where the script names
  an address at which
   no agent serves one. So it holds for the agents' own address alone; elsewhere rank 0 serves the
   store.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

STORE = (
    "CLUSTERJOB_STORE"  # host:port of the store that the agents serve; empty where rank 0 serves it
)
_WAITING_NOTICE = (
    5.0  # seconds after which a process that waits for a store says that nobody listens there
)
_CONNECT_TIMEOUT = 2.0
_GLOO_TIMEOUT = 2.0
_DESTROYED: list[Any] = []  # gloo's parts of process groups, which must not be freed yet
_INHERITED: list[
    Any
] = []  # those of the processes that this one was forked from: their threads are not here
_FORMING = (
    threading.local()
)  # .counter: (store, key) in which the group counts that this thread forms; see _apart


# -- groups that are freed too early -------------------------------------------------------------------------------------


def keep_groups(module: Any) -> None:
    """Change torch.distributed.distributed_c10d: gloo is not freed at once when a group is
    destroyed, nor when the process ends.
    """
    if not hasattr(getattr(module, "_world", None), "pg_map"):
        return  # a torch before 2.1
    for kept in (_DESTROYED, _INHERITED):
        ctypes.pythonapi.Py_IncRef(
            ctypes.py_object(kept)
        )  # so that the end of the interpreter frees none of them
    destroy, rendezvous = module.destroy_process_group, module.rendezvous

    @functools.wraps(destroy)
    def destroy_process_group(*args: Any, **options: Any) -> Any:
        file = _file_of_default_group(module)
        _keep(module)
        result = destroy(*args, **options)
        if file is not None and not module.is_initialized():
            _leave_file(*file)
        return result

    @functools.wraps(rendezvous)
    def rendezvous_apart(*args: Any, **options: Any) -> Any:
        for store, rank, world_size in rendezvous(*args, **options):
            yield _apart(store, rank, world_size=world_size), rank, world_size

    _replace(module, "destroy_process_group", function=destroy_process_group)
    for name in ("init_process_group", "new_group"):
        _replace(module, name, function=_freeing(module, getattr(module, name)))
    module.rendezvous = rendezvous_apart
    atexit.register(_end, module)
    os.register_at_fork(after_in_child=functools.partial(_inherit, module))


def _freeing(module: Any, form: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that forms a group, and then frees those that were destroyed before."""

    @functools.wraps(form)
    def formed(*args: Any, **options: Any) -> Any:
        earlier = list(_DESTROYED)
        _FORMING.counter = None
        group = form(*args, **options)
        _count_formed()
        if group != module.GroupMember.NON_GROUP_MEMBER:  # which has met nobody
            # The ranks have met meanwhile, so this process has waited, and the threads of older
            # groups have come to rest.
            _DESTROYED[:] = [each for each in _DESTROYED if not any(each is old for old in earlier)]
        return group

    return formed


def _end(module: Any) -> None:
    """Leave the groups of a process that ends."""
    file = _file_of_default_group(module)
    _keep(module)
    if file is not None:
        _leave_file(*file)
    _wait_for_gloo()


def _inherit(module: Any) -> None:
    """Keep, in a forked child, the groups of its parent: ~ProcessGroupGloo would wait for ever for
    threads that are not here.
    """
    _keep(module)
    _INHERITED.extend(_DESTROYED)
    _DESTROYED.clear()


def _keep(module: Any) -> None:
    for group in module._world.pg_map:
        _DESTROYED.extend(
            part
            for part in _gloo_of(module, group)
            if not any(part is kept for kept in (*_DESTROYED, *_INHERITED))
        )


def _gloo_of(module: Any, group: Any) -> list[Any]:
    """Return the backends of a group that have threads of gloo; none of another backend is kept,
    such as NCCL's with its memory.
    """
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL each backend is in a wrapper, which has a gloo group of
    # its own.
    kinds = tuple(
        getattr(module, name)
        for name in ("ProcessGroupGloo", "_ProcessGroupWrapper")
        if hasattr(module, name)
    )
    try:
        backends = [group._get_backend(device) for device in group._device_types]
    except (AttributeError, RuntimeError):
        return []  # a group that is written in Python
    return [backend for backend in backends if isinstance(backend, kinds)]


def _wait_for_gloo() -> None:
    """Wait, at most 2 s, until no thread of gloo waits for the interpreter's lock.

    Python 3.13 and older end a thread that wants the lock of an interpreter that ends; inside of
    torch's destructors that is an abort: "terminate called without an active exception". A thread
    that waits for the lock wakes every 5 ms; an idle one does not.
    """
    end = time.monotonic() + _GLOO_TIMEOUT
    before = _wakes_of_gloo()
    while before and time.monotonic() < end:
        time.sleep(0.02)  # gives the lock away
        now = _wakes_of_gloo()
        if now == before and not any(state in "RD" for state, _ in now.values()):
            return
        before = now


def _wakes_of_gloo() -> dict[str, tuple[str, str]]:
    """Return the state of each thread of gloo, and how often it has waited, by its number
    (proc(5)).
    """
    found = {}
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/status") as file:
                fields = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
        except OSError:
            continue  # it has ended
        if "gloo_runloop" in fields.get(
            "Name", ""
        ):  # pt_gloo_runloop; gloo_tcp_loop knows nothing of Python
            found[task] = (fields["State"][0], fields["voluntary_ctxt_switches"])
    return found


def _innermost(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _file_of_default_group(module: Any) -> tuple[Any, int] | None:
    """Return the FileStore of the default group, and for how many ranks it is; None where nothing
    is kept that holds it.
    """
    group = module._world.default_pg
    parts = [] if group is None else _gloo_of(module, group)
    if not parts or any(part is inherited for part in parts for inherited in _INHERITED):
        return None
    store = _innermost(module._world.pg_map[group][1])
    return (store, group.size()) if type(store).__name__ == "FileStore" else None


def _leave_file(store: Any, ranks: int) -> None:
    """Remove a FileStore's file after the last rank, as ~FileStore does: a group that is kept would
    leave it to the next run.
    """
    if not os.path.exists(store.path):
        return  # the script has removed it; add() would make it anew
    try:
        if store.add("clusterjob/left", 1) >= ranks:
            os.unlink(store.path)
    except (OSError, RuntimeError):
        pass  # the script has removed it


def _apart(store: Any, rank: int, world_size: int) -> Any:
    """Return a store with a prefix of its own for each but the first group that is formed over it.

    The store counts: of the processes that form the next group some may be new, such as the
    children of one trial of a sweep. Groups of several sizes count apart, as a rank that only the
    larger ones have is not in the others.
    """
    server = _innermost(store)
    if type(server).__name__ != "TCPStore" or not is_of_the_agents():
        return store
    from torch.distributed import PrefixStore

    counter = f"clusterjob/formed/{world_size}/{rank}"
    number = store.add(counter, 0)
    _FORMING.counter = store, counter
    # The first group has torch's own keys: processes without the hook look for it there.
    if (
        not number
        and store.compare_set("clusterjob/first", "", str(world_size)) == str(world_size).encode()
    ):
        return store
    return PrefixStore(f"clusterjob/group{number}of{world_size}", store)


def _count_formed() -> None:
    """Count the group that this thread has formed, where it has a counter."""
    counter, _FORMING.counter = _FORMING.counter, None
    if counter is not None:
        store, key = counter
        try:
            store.add(key, 1)
        except RuntimeError:
            pass  # rank 0 served the store itself, and has left


def _replace(module: ModuleType, name: str, function: Callable[..., Any]) -> None:
    """Put a function in the place of another one, also where torch.distributed shows it already."""
    old = getattr(module, name)
    package = sys.modules.get("torch.distributed")
    setattr(module, name, function)
    if package is not None and package.__dict__.get(name) is old:
        setattr(package, name, function)


# -- whose store it is -----------------------------------------------------------------------------------------------------


def served_at(host: str, port: int) -> str | None:
    """Return the host at which the job's agents serve the store that an address means; None where
    they serve none there.

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
    # The store is bound to one address of node 0; there every other name of the machine means it
    # too.
    return (
        own_host
        if any(map(_is_of_this_machine, addresses)) and any(map(_is_of_this_machine, own))
        else None
    )


def is_of_the_agents() -> bool:
    """Return whether the variables of this process are those of our agents, and not of a torchrun
    that a worker has started.
    """
    return STORE in os.environ and os.environ.get("TORCHELASTIC_RUN_ID") == os.environ.get(
        "CLUSTERJOB_JOB_ID", ""
    )


def _addresses(host: str) -> set[Any]:

    try:
        return {info[4][0] for info in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return set()


def _is_of_this_machine(address: str) -> bool:

    with socket.socket(
        socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM
    ) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def choose_store(module: Any) -> None:
    """Change torch.distributed.rendezvous: a process is a client of the agents' store at the
    agents' address alone.
    """
    create, asks_agents = (
        getattr(module, "_create_c10d_store", None),
        getattr(module, "_torchelastic_use_agent_store", None),
    )
    if create is None or asks_agents is None:
        return  # a torch before 1.12
    this_thread = threading.local()

    @functools.wraps(asks_agents)
    def use_agent_store() -> bool:
        return asks_agents() and not getattr(this_thread, "elsewhere", False)

    @functools.wraps(create)
    def create_store(hostname: str, port: int, *args: Any, **options: Any) -> Any:
        if not is_of_the_agents():
            return create(hostname, port, *args, **options)
        served = served_at(hostname, port)
        if served is not None:
            return create(served, port, *args, **options)
        this_thread.elsewhere = True
        try:
            with _Waiting(hostname, port):
                return create(hostname, port, *args, **options)
        finally:
            this_thread.elsewhere = False

    module._torchelastic_use_agent_store = use_agent_store
    module._create_c10d_store = create_store


class _Waiting:
    """Says once, after some seconds inside of it, that nobody listens where this process waits for
    a store.
    """

    def __init__(self, host: str, port: int) -> None:

        self._host, self._port = host, port
        self._where = _line_of_the_script(sys._getframe(2))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="clusterjob-store", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:

        while not self._over.wait(_WAITING_NOTICE):
            try:
                socket.create_connection((self._host, self._port), _CONNECT_TIMEOUT).close()
            except OSError as error:
                self._say(error.strerror or str(error))
                return

    def _say(self, why: str) -> None:
        if self._over.is_set():
            return
        address, own = f"{self._host}:{self._port}", os.environ.get(STORE, "")
        text = f"nobody listens at {address}, where this process waits for rank 0's store ({why}); {self._who_set_it(own)}{self._where}"
        sys.stderr.write(
            f"clusterjob: {text}{f'; the store of the job is at {own}' if own else ''}\n"
        )
        sys.stderr.flush()

    def _who_set_it(self, own: str) -> str:
        given = {name: os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")}
        if (given["MASTER_ADDR"], given["MASTER_PORT"]) != (self._host, str(self._port)):
            return "the address is that of init_method"
        own_host, _, own_port = own.rpartition(":")
        changed = [
            f"{name}={given[name]}"
            for name, value in zip(given, (own_host, own_port))  # noqa: B905
            if own and given[name] != value
        ]
        return (
            f"the script has set {' and '.join(changed)}"
            if changed
            else "MASTER_ADDR and MASTER_PORT are the job's own"
        )


def _line_of_the_script(frame: FrameType | None) -> str:
    """Return `` (train.py line 3)`` for the innermost frame that is not torch's."""
    inside = os.sep + "torch" + os.sep
    while frame is not None and (
        inside in frame.f_code.co_filename or frame.f_code.co_filename == __file__
    ):
        frame = frame.f_back
    return (
        ""
        if frame is None
        else f" ({os.path.basename(frame.f_code.co_filename)} line {frame.f_lineno})"
    )
