"""Measure how long a rank waits for others in collectives, and tell its agent every 5 s.

`hook` loads a copy of this file into the workers, so it imports no other file of the package. A
rank waits in two places:

- **In `Work.wait`**, which all collectives of Python call.
- **At the end of a backward pass of DistributedDataParallel**, whose all-reduces are started in
  C++. torch's own timers of DDP measure how long they last after the computation has ended: with a
  clock on CPUs, with events on a GPU, where no function of Python waits. DDP reads its timers in
  every hundredth iteration; here they are read about four times a second, or every 5 s on a GPU,
  because the reading waits for the GPU.

A step ends with a step of an optimizer after a wait. The longest waits are left out: a checkpoint,
or the first batch, is no reason to call a rank slow.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

VARIABLE = "CLUSTERJOB_WAITS"  # "1": measure
INTERVAL = 5.0  # seconds between two messages
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


# -- patches ---------------------------------------------------------------------------------------


def measure(module: Any) -> None:
    """Patch torch.distributed.distributed_c10d to measure from the first process group on."""
    form = module.init_process_group
    started: list[bool] = []

    @functools.wraps(form)
    def init_process_group(*args: Any, **options: Any) -> Any:
        result = form(*args, **options)
        if not started and os.environ.get(VARIABLE) == "1":
            started.append(True)
            with contextlib.suppress(Exception):  # a torch without one of these parts
                _start(module)
        return result

    module.init_process_group = init_process_group
    package = sys.modules.get("torch.distributed")
    if package is not None and package.__dict__.get("init_process_group") is form:
        package.init_process_group = init_process_group  # type: ignore[attr-defined]


def _start(module: Any) -> None:
    import torch
    from torch._C import _distributed_c10d as c10d
    from torch.optim.optimizer import register_optimizer_step_post_hook

    blocking = any(name in str(module.get_backend_config()) for name in ("gloo", "mpi"))
    waits = Waits(_tell, on_host=lambda: blocking and not torch.cuda.is_initialized())

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


class _Timers:
    """The timers of one DDP model, and when to read them."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = weakref.ref(reducer)
        self._iteration = 0  # the last one that was read
        self._skip = 0  # calls until the next reading

    def read(self, logger: Any, waits: Waits, pause: float) -> float | None:
        """Return how long the last iteration has waited, in seconds; None if it is not known.

        Args:
            logger: torch's object that has the results of the timers.
            waits: knows the length of an iteration.
            pause: seconds between two readings.
        """
        if self._skip > 0:
            self._skip -= 1
            return None
        values = logger._get_ddp_logging_data().ints_map
        iteration = values.get("iteration", 0)
        if iteration == self._iteration:
            return None
        self._iteration = iteration
        self._choose_next(iteration, waits.step, pause)
        # The all-reduces overlap the computation; the rest is a wait.
        wait = values["backward_comm_time"] - values["backward_compute_comm_overlap_time"]
        return float(max(0, wait)) * _NANOSECOND

    def _choose_next(self, iteration: int, step: float, pause: float) -> None:
        reducer = self._reducer()
        if reducer is None or step <= 0:
            return
        every = _RARELY
        if not os.environ.get("TORCH_DISTRIBUTED_DEBUG"):  # each reading may print lines then
            every = min(_RARELY, max(1, round(pause / step)))
            while every > 1 and (every % 2 == 0 or every % 5 == 0):
                every += 1  # what a script does in each tenth step must not always be seen
            reducer._set_ddp_runtime_logging_sample_rate(every)
        self._skip = max(0, every - iteration % every - 1)


def _watch_ddp(c10d: Any, waits: Waits, on_device: Callable[[], bool]) -> None:
    """Patch the classes of C++ that DDP calls before each forward pass."""
    set_logger, note = c10d.Reducer.set_logger, c10d.Logger.set_runtime_stats_and_log
    timers: weakref.WeakKeyDictionary[Any, _Timers] = weakref.WeakKeyDictionary()

    @functools.wraps(set_logger)
    def watched_set_logger(reducer: Any, logger: Any) -> Any:
        timers[logger] = _Timers(reducer)
        return set_logger(reducer, logger)

    @functools.wraps(note)
    def watched_note(logger: Any) -> Any:
        result = note(logger)
        own = timers.get(logger)
        if own is not None:
            wait = None
            with contextlib.suppress(Exception):  # another torch
                pause = _READ_ON_DEVICE if on_device() else _READ_ON_HOST
                wait = own.read(logger, waits, pause=pause)
            waits.add_iteration(wait)
        return result

    c10d.Reducer.set_logger = watched_set_logger
    c10d.Logger.set_runtime_stats_and_log = _never_compiled(watched_note)


def _tell(step: float, waited: float) -> None:
    names = ("clusterjob.node.workers.rank_phases", "clusterjob_rank_phases")
    phases: Any = next(filter(None, map(sys.modules.get, names)), None)
    if phases is not None:
        # `forkserver_messages.WorkerWaits`
        phases.send("WorkerWaits", step=step, waited=waited)
