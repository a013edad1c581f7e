"""Define the `Context` of `bootstrap.init`: rank, device, helpers for a training script."""

from __future__ import annotations

import atexit
import ctypes
import math
import numbers
import os
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from clusterjob.errors import UsageError
from clusterjob.node import program
from clusterjob.node.environments import this_node
from clusterjob.node.verdict import PREEMPTED_EXIT_CODE
from clusterjob.node.workers import torch_patches
from clusterjob.worker import preemption
from clusterjob.worker.checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch

_ABANDON_TIMEOUT = 5.0  # seconds to leave a group whose peers may have ended
_BEAT_INTERVAL = 1.0  # seconds between two heartbeats that are sent
_OPERATIONS: dict[str, Callable[[list[int | float]], int | float]] = {
    "mean": lambda values: sum(values) / len(values), "sum": sum, "min": min, "max": max,
    "product": math.prod,
}  # fmt: skip


@dataclass(kw_only=True, eq=False)
class Context:
    """One process's rank, device and process group; `bootstrap.init` creates it.

    At the end of its with block, the context leaves the process group. After an exception it leaves
    at once and does not wait for the other processes, which may have ended.

    Attributes:
        rank: index of this process in the job, 0 to world_size - 1.
        local_rank: index of this process on its node, 0 to local_world_size - 1.
        world_size: number of processes in the job.
        local_world_size: number of processes on this node.
        node_rank: index of this node, 0 to nnodes - 1.
        nnodes: number of nodes in the job.
        master_addr: host name or address of rank 0's node; None if it is unknown (a world of one,
            an adopted group).
        master_port: TCP port of torch's store on that node; None if master_addr is None.
        backend: backend of the process group's collectives on `device`, ``nccl`` or ``gloo``; None
            without a process group.
        device: device of this process: ``cuda:N``, ``xpu:N`` or ``cpu``.
        source: family of variables that the rank was read from, such as ``clusterjob`` or
            ``torchrun``; ``none`` for a plain ``python train.py``, ``arguments`` if it was given to
            init, ``process group`` if only an adopted group gives it.
    """

    source: str
    device: torch.device = field(init=False)
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    nnodes: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    backend: str | None = field(default=None, init=False)
    _group: Any = field(default=None, init=False, repr=False)
    # The backend that serves each device type.
    _devices: dict[str, str] = field(default_factory=dict, init=False, repr=False)
    # Whether leaving destroys the group.
    _owned: bool = field(default=False, init=False, repr=False)
    # The `GroupStore` by which the group was formed.
    _store: Any = field(default=None, init=False, repr=False)
    # A forked child inherits this context and must not leave the parent's group.
    _pid: int = field(default_factory=os.getpid, init=False, repr=False)
    _depth: int = field(default=0, init=False, repr=False)
    _beat_at: float = field(default=0.0, init=False, repr=False)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the process that prints and writes checkpoints."""
        return self.rank == 0

    def __enter__(self) -> Context:
        self._check_open()
        self._depth += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._depth > 0 or state.context is not self:
            return  # this is an inner block; the outer block still needs the group
        ends_well = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        leave(failed=not ends_well)

    def join_group(self, *, owned: bool, store: Any = None) -> None:
        """Use torch's default process group as this context's group.

        Args:
            owned: whether leaving the context destroys the group; False for a group that the
                script created itself.
            store: the `GroupStore` by which it was formed; None if another one was used.
        """
        import torch.distributed as dist

        self._group = dist.group.WORLD
        self._owned, self._store = owned, store
        # Such as "cpu:gloo,cuda:nccl"; get_backend() is "undefined" if torch chose the backend.
        self._devices = dict(part.split(":", 1) for part in dist.get_backend_config().split(","))
        self.backend = self._devices.get(self.device.type) or next(iter(self._devices.values()))

    def holds_group(self) -> bool:
        """Return whether this context's group is still torch's default process group."""
        import torch.distributed as dist

        return self._group is not None and dist.is_initialized() and dist.group.WORLD is self._group

    def close(self, *, failed: bool) -> None:
        """Close this context, and leave the process group if this context owns it.

        Args:
            failed: whether this process ends in the middle of its work and must not wait for other
                processes.
        """
        if os.getpid() != self._pid:
            return
        if self._store is not None and not failed:
            self._store.await_formed()
        self._store = None  # rank 0 may serve it
        joined, leaving = self._group is not None, self._owned and self.holds_group()
        self._group = None
        if leaving and failed and self.world_size > 1:
            _call_within(_ABANDON_TIMEOUT, self._abandon, device=self.device)
            state.abandoned = True
            return
        if leaving:
            import torch.distributed as dist

            dist.destroy_process_group()
        if joined:
            # Objects that hold the destroyed group, such as a DDP model, keep gloo's threads alive.
            torch_patches.wait_for_gloo()

    def _abandon(self) -> None:
        """Leave the group during a collective, without waiting for peers that may have ended.

        gloo's destructor waits for running collectives, such as those of DDP when backward() fails.
        destroy_process_group() and the exit of the interpreter call this destructor. With torch
        2.13 it waited until the peer ended or 30 minutes had passed. For NCCL, torch has a function
        that aborts the group.
        """
        import torch.distributed as dist

        c10d = dist.distributed_c10d
        abort = getattr(c10d, "_abort_process_group", None)
        if self.backend == "nccl" and abort is not None:
            abort()
        else:
            for group in (dist.group.WORLD, *c10d._world.pg_map):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # it never runs
            dist.destroy_process_group()

    def barrier(self) -> None:
        """Wait until every process of the job has called this; return at once in a world of one.

        Raises:
            UsageError: the context was shut down, or there are other processes and no process
                group.
        """
        if self._can_communicate():
            import torch.distributed as dist

            # Without a device NCCL's barrier guesses one, warns, and may create a CUDA context on
            # another process's GPU.
            is_nccl = self._devices.get("cuda") == "nccl"
            dist.barrier(device_ids=[self.device.index] if is_nccl else None)

    def reduce(self, value: Any, op: str = "mean") -> Any:
        """Combine one value from each process and return the result to all of them.

        Every process has to call this. Numbers are sent unchanged and combined in rank order, so
        every process gets the same bits, and ints stay exact. Some processes may give an int and
        others a float. One NaN makes the result NaN, also for ``min`` and ``max``.

        Args:
            value: a Python (or numpy) number, or a tensor of any shape, the same on every process.
            op: ``mean``, ``sum``, ``min``, ``max`` or ``product``.

        Returns:
            For a number, a Python int or float (always a float for ``mean``). For a tensor, a new
            tensor of the same shape, device and dtype, without gradient; the input is not changed.
            Two results have another dtype: the mean of an integer or bool tensor has torch's
            default float type, and the sum of a bool tensor has int64. Half precision is combined
            in float32.

        Raises:
            UsageError: the operation is unknown, the value is neither a number nor a tensor, an int
                does not fit into 64 bits, the context was shut down, or there are other processes
                and no process group.
        """
        if op not in _OPERATIONS:
            raise UsageError(
                f"reduce: unknown operation {op!r}: must be one of {', '.join(_OPERATIONS)}"
            )
        grouped = self._can_communicate()
        import torch

        if isinstance(value, torch.Tensor):
            return self._reduce_tensor(value, op, grouped=grouped)
        if not isinstance(value, numbers.Real):  # numpy's numbers and bool are
            raise UsageError(f"reduce takes a number or a tensor, not {type(value).__name__}")
        number = int(value) if isinstance(value, numbers.Integral) else float(value)
        values = self._gather(number) if grouped else [number]
        # Only NaN differs from itself; math.isnan refuses a large int.
        is_nan = any(each != each for each in values)  # noqa: PLR0124
        return math.nan if is_nan else _OPERATIONS[op](values)

    def print(self, *values: object, **options: Any) -> None:
        """Print on rank 0 only, and flush, so that the line appears at once.

        Args:
            values: as for Python's own print.
            options: as for Python's own print: sep, end, file, flush.
        """
        if self.is_main:
            options.setdefault("flush", True)
            print(*values, **options)

    def wrap(
        self, model: torch.nn.Module, *, sync_batchnorm: bool = False, **ddp_options: Any
    ) -> torch.nn.Module:
        """Move a model to `device` and wrap it in DistributedDataParallel.

        Args:
            model: the same architecture on every process; DDP sends rank 0's weights to all.
            sync_batchnorm: let batch normalisation layers use the statistics of all processes.
                torch's SyncBatchNorm refuses CPU tensors: on CPU the layers do not change, and
                rank 0 warns.
            ddp_options: further arguments of torch.nn.parallel.DistributedDataParallel, such as
                find_unused_parameters.

        Returns:
            The wrapped model; without a process group, the model itself, on `device`.

        Raises:
            UsageError: the context was shut down.
        """
        self._check_open()
        model = model.to(self.device)
        if self._group is None:
            return model
        import torch

        if sync_batchnorm and self.device.type != "cpu":
            model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
        elif sync_batchnorm and self.is_main:
            warnings.warn(
                "sync_batchnorm has no effect on CPU: torch's SyncBatchNorm is for GPUs only",
                stacklevel=2,
            )
        ddp_options.setdefault(
            "device_ids", [self.device.index] if self.device.type != "cpu" else None
        )
        return torch.nn.parallel.DistributedDataParallel(model, **ddp_options)

    def sampler(self, dataset: Any, *, shuffle: bool = True, **options: Any) -> Any:
        """Return a DistributedSampler that gives this process its share of a dataset.

        It works in a world of one too. Call its set_epoch before each epoch; otherwise every epoch
        has the same order. If the dataset's length is not a multiple of world_size, a few samples
        appear twice, which changes the result of an evaluation that counts samples.

        Args:
            dataset: anything with a length, in samples.
            shuffle: draw a new order each epoch.
            options: further arguments of torch.utils.data.DistributedSampler, such as seed and
                drop_last.
        """
        from torch.utils.data import DistributedSampler

        return DistributedSampler(
            dataset, num_replicas=self.world_size, rank=self.rank, shuffle=shuffle, **options
        )

    # -- preemption, progress and checkpoints ------------------------------------------------------

    @property
    def attempt(self) -> int:
        """Number of the job's attempt, from 0; a restart of the workers does not count."""
        return this_node.read_attempt(os.environ)

    @property
    def preempted(self) -> bool:
        """Whether the job has a preemption warning; each call costs a few microseconds.

        Processes may see the warning at different steps. To leave at the same step they must agree:
        ``ctx.reduce(ctx.preempted, "max")``.
        """
        return preemption.watch().warned(self._pid)

    def on_preempt(self, callback: Callable[[], object]) -> None:
        """Call a function once when the preemption warning arrives.

        Functions are called in the order of registration. They run on the main thread as soon as
        that thread runs Python code, so a training step may be half done. An exception of a
        function is raised on that thread and may end the script. A function registered after the
        warning runs at once.

        Args:
            callback: a function without arguments.

        Raises:
            UsageError: this is not the main thread of the process that called `init`.
        """
        preemption.watch().call_when_warned(callback, self._pid)

    def requeue(self) -> NoReturn:
        """Leave the process group and exit with code 75, so that the job is requeued.

        Every process calls it after the checkpoint is saved. A process that fails because a peer
        has left this way does not fail the job. Without a preemption warning, exit code 75 is an
        ordinary failure.

        Raises:
            SystemExit: always.
        """
        # Report first: peers may fail as soon as this process leaves.
        torch_patches.fail("left to be queued again", PREEMPTED_EXIT_CODE, kind="preempted")
        if not _call_within(_ABANDON_TIMEOUT, lambda: leave(failed=False), self.device):
            atexit.register(_end_process, PREEMPTED_EXIT_CODE)  # the group is stuck
        raise SystemExit(PREEMPTED_EXIT_CODE)

    def heartbeat(self, step: int | None = None) -> None:
        """Tell clusterjob that this process makes progress; only `--hang-timeout` uses it.

        A training loop that prints nothing may call it in each step: it costs less than a
        microsecond, and once per second a small message. Under another launcher it does nothing.

        Args:
            step: the number of the training step, for the verdict of a job that hangs.
        """
        moment = time.monotonic()
        if moment >= self._beat_at:
            self._beat_at = moment + _BEAT_INTERVAL
            torch_patches.send("WorkerAlive", step=-1 if step is None else max(-1, int(step)))

    def checkpoint(self, directory: str | os.PathLike[str], *, sharded: bool = False) -> Checkpoint:
        """Return the checkpoints in a directory that all nodes share; it may not exist yet.

        Args:
            directory: the directory; it should contain nothing else.
            sharded: whether each process saves its own part with torch.distributed.checkpoint, for
                models that no process holds as a whole (FSDP, DTensor); else rank 0 saves all.
        """
        return Checkpoint(self, directory, sharded=sharded)

    # -- communication -----------------------------------------------------------------------------

    def _check_open(self) -> None:
        if state.context is not self:
            raise UsageError("this context was shut down: call bootstrap.init() again")

    def _can_communicate(self) -> bool:
        """Return whether there is a process group; False in a world of one.

        Raises:
            UsageError: the context was shut down, or there are other processes and no process
                group.
        """
        self._check_open()
        if self._group is None and self.world_size > 1:
            # Do not return the value itself: it would look like all processes' result.
            raise UsageError(
                f"there are {self.world_size} processes and no process group: "
                "init was called with process_group=False"
            )
        return self._group is not None

    def _reduce_tensor(self, value: torch.Tensor, op: str, *, grouped: bool) -> torch.Tensor:
        import torch
        import torch.distributed as dist

        exact = not (value.is_floating_point() or value.is_complex())
        # gloo does not support bool and int16.
        work_type = torch.int64 if exact else value.dtype
        if value.is_floating_point() and value.element_size() < 4:
            work_type = torch.float32  # promote_types refuses float8
        result_type = value.dtype
        if exact and op == "mean":
            result_type = torch.get_default_dtype()
        elif op == "sum" and value.dtype == torch.bool:
            result_type = torch.int64
        is_sent = not grouped or value.device.type in self._devices
        place = value.device if is_sent else self._exchange_device()
        work = value.detach().to(
            device=place, dtype=work_type, copy=True, memory_format=torch.contiguous_format
        )
        if grouped:
            name = "SUM" if op == "mean" else op.upper()  # gloo has no mean operation
            dist.all_reduce(work, op=getattr(dist.ReduceOp, name))
        if op == "mean":
            work = (work.double() if exact else work) / self.world_size
        return work.to(device=value.device, dtype=result_type)

    def _gather(self, number: int | float) -> list[int | float]:
        """Return every process's number, in rank order.

        Each number is sent as two words: a flag for int or float, and 64 bits.
        """
        import torch
        import torch.distributed as dist

        integral = isinstance(number, int)
        try:
            bits = struct.pack("=q" if integral else "=d", number)
        except struct.error as error:
            raise UsageError(f"reduce: {number} does not fit into 64 bits") from error
        own = torch.tensor(
            [int(integral), *struct.unpack("=q", bits)], device=self._exchange_device()
        )
        parts = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(parts, own)
        return [
            word if is_int else struct.unpack("=d", struct.pack("=q", word))[0]
            for is_int, word in torch.stack(parts).tolist()
        ]

    def _exchange_device(self) -> torch.device:
        """Return the device of tensors that the process group can send."""
        import torch

        return torch.device("cpu") if "cpu" in self._devices else self.device


# -- the end of this process -----------------------------------------------------------------------


@dataclass
class ProcessState:
    """State of this process between `init` and its end.

    Attributes:
        context: the context that `init` returned; None after the end of the context.
        timeout: the timeout that `init` was given, in seconds.
        watched: pid of the process that `watch` has installed its hooks in. A forked child
            inherits this state.
        abandoned: whether threads of an abandoned group may still run.
    """

    context: Context | None = None
    timeout: float | None = None
    watched: int = 0
    abandoned: bool = False


state = ProcessState()


def leave(*, failed: bool) -> None:
    """Leave the process group that this process made, and drop the context, if there is one.

    Args:
        failed: whether this process ends in the middle of its work and must not wait for other
            processes.
    """
    context, state.context = state.context, None
    if context is not None:
        context.close(failed=failed)


def watch() -> None:
    """Leave the group at exit, and report an uncaught exception to the agent at once.

    A second call in a process does nothing.
    """
    pid = os.getpid()
    if state.watched == pid:
        return
    state.watched = pid
    atexit.register(leave, failed=False)
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        own = os.getpid() == pid and threading.current_thread() is threading.main_thread()
        if own:
            torch_patches.fail(
                program.summary(error),
                exit_code=130 if kind is KeyboardInterrupt else 1,
                kind=program.failure_kind(error),
                where=program.place(error),
            )
        previous(kind, error, trace)
        if own and not (sys.flags.interactive or hasattr(sys, "ps1")):
            leave(failed=True)
            # After a KeyboardInterrupt the interpreter itself ends the process, by SIGINT.
            if state.abandoned and kind is not KeyboardInterrupt:
                _end_process(1)

    sys.excepthook = hook


def _end_process(exit_code: int) -> None:
    """Exit like the interpreter, but skip its finalisation.

    Threads of an abandoned group still hold tensors. A thread that releases a tensor during
    finalisation aborts the process with SIGABRT ("terminate called without an active exception"),
    which then hides the real failure (pytorch#179291; with torch 2.13 in 1 of 15 runs).
    """
    atexit.unregister(_end_process)  # this call may itself be an exit function
    try:
        getattr(threading, "_shutdown", lambda: None)()  # waits for the non-daemon threads
        atexit._run_exitfuncs()
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        ctypes.CDLL(None).fflush(None)  # output of C libraries, such as NCCL's log
    finally:
        os._exit(exit_code)


def _call_within(seconds: float, function: Callable[[], None], device: Any) -> bool:
    """Call a function on a daemon thread, and return whether it ended in time.

    Args:
        seconds: maximum time to wait for its end.
        function: the function; it may leave a process group.
        device: the torch device of this process: a new thread's current device is cuda:0.
    """

    def call() -> None:
        if device.type != "cpu":
            import torch

            getattr(torch, device.type).set_device(device)
        function()

    thread = threading.Thread(target=call, daemon=True, name="clusterjob-leave")
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
