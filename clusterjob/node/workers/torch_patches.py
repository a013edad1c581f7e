"""Patch torch.distributed in every Python process of a job that imports it.

`hook` applies the patches. This file imports no other file of the package. There are three patches:

1. Keep destroyed gloo groups. torch 2.13 deadlocks or aborts if a gloo group is freed while a
   thread of the group still waits for the interpreter's lock: ~ProcessGroupGloo (pthread_join)
   against ~ThreadLocalState (take_gil). So the gloo backends of a destroyed group are freed only
   after another group was formed, and never at the end of the process.
2. Limit the agents' store to its own address. Under TORCHELASTIC_USE_AGENT_STORE every rank is a
   client of a store, even at an address where no agent serves a store. So the variable applies
   only to the agents' address; at any other address rank 0 serves the store.
3. Use a new prefix in the agents' store for each group after the first (`_separate_store`). The
   store outlives a group and still holds the addresses of its processes.
"""

from __future__ import annotations

import atexit
import contextlib
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

STORE = "CLUSTERJOB_STORE"  # host:port of the agents' store; empty if rank 0 serves the store
_WAITING_NOTICE = 5.0  # seconds of waiting for a store before the notice that no process listens
_CONNECT_TIMEOUT = 2.0
_GLOO_TIMEOUT = 2.0
_DESTROYED: list[Any] = []  # gloo backends of process groups that must not be freed yet
# Gloo backends of this process's ancestors: their threads do not exist in this process.
_INHERITED: list[Any] = []
# .counter: the (store, key) to increase when this thread has formed its group; see _separate_store.
_FORMING = threading.local()


# -- keep destroyed gloo groups --------------------------------------------------------------------


def keep_groups(module: Any) -> None:
    """Patch torch.distributed.distributed_c10d to keep the gloo backends of destroyed groups.

    A backend is freed some time after its group was destroyed, and never when the process ends.
    """
    if not hasattr(getattr(module, "_world", None), "pg_map"):
        return  # a torch before 2.1
    for kept in (_DESTROYED, _INHERITED):
        # The interpreter must not free a backend when it exits.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    destroy, rendezvous = module.destroy_process_group, module.rendezvous

    @functools.wraps(destroy)
    def destroy_process_group(*args: Any, **options: Any) -> Any:
        file = _file_of_default_group(module)
        _keep(module)
        result = destroy(*args, **options)
        if file is not None and not module.is_initialized():
            _count_exit(*file)
        return result

    @functools.wraps(rendezvous)
    def separate_rendezvous(*args: Any, **options: Any) -> Any:
        for store, rank, world_size in rendezvous(*args, **options):
            yield _separate_store(store, rank, world_size=world_size), rank, world_size

    _replace(module, "destroy_process_group", function=destroy_process_group)
    for name in ("init_process_group", "new_group"):
        _replace(module, name, function=_wrap_formation(module, getattr(module, name)))
    module.rendezvous = separate_rendezvous
    atexit.register(_keep_at_exit, module)
    os.register_at_fork(after_in_child=functools.partial(_keep_in_child, module))


def _wrap_formation(module: Any, form: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that forms a group: after it, free the groups that were destroyed before."""

    @functools.wraps(form)
    def formed(*args: Any, **options: Any) -> Any:
        earlier = list(_DESTROYED)
        _FORMING.counter = None
        group = form(*args, **options)
        _count_formed()
        if group != module.GroupMember.NON_GROUP_MEMBER:  # a non-member does not wait for ranks
            # The rendezvous has made this process wait, so the threads of older groups are idle.
            _DESTROYED[:] = [each for each in _DESTROYED if not any(each is old for old in earlier)]
        return group

    return formed


def _keep_at_exit(module: Any) -> None:
    """Keep the gloo backends when the process ends, and wait until gloo's threads are idle."""
    file = _file_of_default_group(module)
    _keep(module)
    if file is not None:
        _count_exit(*file)
    wait_for_gloo()


def _keep_in_child(module: Any) -> None:
    """Keep the parent's groups in a forked child.

    ~ProcessGroupGloo would wait forever for threads that do not exist in the child.
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


def _file_of_default_group(module: Any) -> tuple[Any, int] | None:
    """Return the default group's FileStore and its number of ranks.

    Return None if the group has another store, or no gloo backend of this process.
    """
    group = module._world.default_pg
    parts = [] if group is None else _gloo_of(module, group)
    if not parts or any(part is inherited for part in parts for inherited in _INHERITED):
        return None
    store = _innermost(module._world.pg_map[group][1])
    return (store, group.size()) if type(store).__name__ == "FileStore" else None


def _count_exit(store: Any, ranks: int) -> None:
    """Count this rank's exit in a FileStore; the last rank removes the file, as ~FileStore does.

    A kept group never runs ~FileStore, and the next run would find the old file.
    """
    if not os.path.exists(store.path):
        return  # the script has removed the file; add() would create it again
    with contextlib.suppress(OSError, RuntimeError):  # the script may remove the file meanwhile
        if store.add("clusterjob/left", 1) >= ranks:
            os.unlink(store.path)


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


def _replace(module: ModuleType, name: str, function: Callable[..., Any]) -> None:
    """Replace a function of a module, and its re-export in torch.distributed if there is one."""
    old = getattr(module, name)
    package = sys.modules.get("torch.distributed")
    setattr(module, name, function)
    if package is not None and package.__dict__.get(name) is old:
        setattr(package, name, function)


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


def choose_store(module: Any) -> None:
    """Patch torch.distributed.rendezvous to use the agents' store only at the agents' address."""
    create = getattr(module, "_create_c10d_store", None)
    asks_agents = getattr(module, "_torchelastic_use_agent_store", None)
    if create is None or asks_agents is None:
        return  # a torch before 1.12
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
        this_thread.elsewhere = True
        try:
            with _WaitNotice(hostname, port):
                return create(hostname, port, *args, **options)
        finally:
            this_thread.elsewhere = False

    module._torchelastic_use_agent_store = use_agent_store
    module._create_c10d_store = create_store


class _WaitNotice:
    """Print one notice if no process listens at the address where this process waits.

    It is a context manager around the wait for a store, and prints the notice after
    `_WAITING_NOTICE` seconds.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._where = _script_line(sys._getframe(2))
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
                if not self._over.is_set():
                    self._print_notice(error.strerror or str(error))
                return

    def _print_notice(self, why: str) -> None:
        address, own = f"{self._host}:{self._port}", os.environ.get(STORE, "")
        text = (
            f"no process listens at {address}, where this process waits for rank 0's store ({why});"
            f" {self._source_of_address(own)}{self._where}"
        )
        sys.stderr.write(f"clusterjob: {text}{f'; the job store is at {own}' if own else ''}\n")
        sys.stderr.flush()

    def _source_of_address(self, own: str) -> str:
        given = {name: os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")}
        if (given["MASTER_ADDR"], given["MASTER_PORT"]) != (self._host, str(self._port)):
            return "the address comes from init_method"
        own_host, _, own_port = own.rpartition(":")
        changed = [
            f"{name}={given[name]}"
            for name, value in zip(given, (own_host, own_port))  # noqa: B905
            if own and given[name] != value
        ]
        if changed:
            return f"the script has set {' and '.join(changed)}"
        return "MASTER_ADDR and MASTER_PORT are the job's own"


def _script_line(frame: FrameType | None) -> str:
    """Return `` (train.py line 3)`` for the innermost frame outside torch and the hook's files."""
    inside = os.sep + "torch" + os.sep
    own = os.path.dirname(__file__)
    while frame is not None and (
        inside in frame.f_code.co_filename or os.path.dirname(frame.f_code.co_filename) == own
    ):
        frame = frame.f_back
    if frame is None:
        return ""
    return f" ({os.path.basename(frame.f_code.co_filename)} line {frame.f_lineno})"
