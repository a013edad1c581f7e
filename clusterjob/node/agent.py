"""The agent of one node: obeys the lead, has the starter start and stop the workers, and says how
they fare.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterjob.errors import ClusterJobError
from clusterjob.node import contract
from clusterjob.node.contract import World
from clusterjob.node.environments import paddle_endpoints
from clusterjob.node.environments.topology import Topology
from clusterjob.node.logs import ends, log_files
from clusterjob.node.logs.console import Voice
from clusterjob.node.logs.events import now
from clusterjob.node.options import LaunchOptions
from clusterjob.node.rendezvous.coordinator import Lead
from clusterjob.node.rendezvous.identity import JobIdentity
from clusterjob.node.rendezvous.member import Link, OwnLead, find_lead
from clusterjob.node.rendezvous.protocol import Message
from clusterjob.node.rendezvous.stop_requests import Wishes
from clusterjob.node.system import crashes, devices, network, processes
from clusterjob.node.verdict import CANCELLED_EXIT_CODE, Failure, JobState, Verdict
from clusterjob.node.workers import forkserver
from clusterjob.node.workers.forkserver_client import StarterProcess
from clusterjob.node.workers.worker_failures import Failures, how
from clusterjob.node.workers.worker_status import WorkerStatus

_LOST_GRACE = 0.5  # between SIGTERM and SIGKILL for workers whose lead is gone
_QUIT_PATIENCE = 3.0  # for a starter that was told to quit


class Agent:
    """One node's agent.

    Args:
        topology: this node's place.
        nproc: workers of this node.
        options: what the node was told.
        job: the job's identity and secret.
        job_dir: the job's directory as this node sees it.
        starter_process: the starter, forked already.
        voice: what this agent says, and shows of its workers' output.
    """

    def __init__(
        self,
        topology: Topology,
        nproc: int,
        options: LaunchOptions,
        job: JobIdentity,
        job_dir: Path,
        starter_process: StarterProcess,
        voice: Voice,
    ) -> None:
        self._topology = topology
        self._nproc = nproc
        self._options = options
        self._job = job
        self._job_dir = job_dir
        self._starter = starter_process
        self._voice = voice
        self._host = network.own_name()
        self._link: Link | None = None
        self._lead: Lead | None = None  # node 0's
        self._lead_task: asyncio.Task[Verdict] | None = None
        self._world: World | None = None
        self._running: set[int] = set()  # local ranks
        self._exec_reason = ""  # why the workers are not forked, until the lead was told
        # A step's task is slurmstepd's child. Where that is killed, Slurm does not notice: the job
        # stays RUNNING, and a scancel of it reaches nobody here. Elsewhere a parent may go as it
        # likes.
        self._keeper = (
            os.getppid()
            if os.environ.get("SLURM_STEP_ID") and os.environ.get("CLUSTERJOB_TASK")
            else None
        )
        self._stop_ordered = False
        self._warning_told = self._haste_told = False
        self._starter_end: asyncio.Future[None] | None = None
        self._held = paddle_endpoints.HeldPorts(
            nproc + (topology.node_rank == 0)
        )  # the first node's last one is where they meet
        self._directory = log_files.node_directory(job_dir, topology.node_rank)
        self._timeline = log_files.Timeline(self._directory)
        self._failures = Failures(
            topology.node_rank,
            self._host,
            directory=self._directory,
            attempt=job.attempt,
            under_torchrun=options.launcher == "torchrun",
        )
        self._status = WorkerStatus(
            topology.node_rank,
            self._host,
            directory=self._directory,
            attempt=job.attempt,
            failures=self._failures,
        )

    # -- the story -----------------------------------------------------------------------------------------------------

    async def run(self) -> Verdict:
        """Meet the other agents, obey the lead, and return the verdict once no process of this node
        is left.
        """
        loop = asyncio.get_running_loop()
        self._starter_end = loop.create_future()
        self._crashes = crashes.Crashes()
        loop.add_reader(self._starter.control, self._hear_starter)
        self._wishes = Wishes(self._options, self._job_dir, attempt=self._job.attempt)
        self._wishes.listen(self._starter.early)
        if (
            self._keeper is not None and self._topology.node_rank == 0
        ):  # under Slurm; it tells the others
            self._wishes.watch()
        noting = asyncio.create_task(self._note_growth())
        self._crashes.watch(noting)
        try:
            verdict = await self._serve()
        except ClusterJobError as error:
            verdict = self._own_verdict(JobState.FAILED, error.message)
        except Exception as error:
            why = f"the agent of node {self._topology.node_rank} on {self._host} (pid {os.getpid()}) broke: {crashes.in_words(error)}"
            verdict = self._own_verdict(JobState.FAILED, why)
            if self._lead is not None:
                self._lead.give_up(verdict)
        finally:
            noting.cancel()
        if self._lead_task is not None:
            self._lead_task.cancel()  # one that has ended does not mind
            await asyncio.wait([self._lead_task])
        await self._dismiss_starter()
        self._sweep()  # what setup lines left in the background
        self._timeline.note()
        self._voice.finish()
        self._record_end(verdict)
        self._held.close()
        if self._link is not None:
            await self._link.close()
        return verdict

    async def _serve(self) -> Verdict:
        await self._join()
        if self._link is None:
            return self._own_verdict(JobState.CANCELLED, self._wishes.cancelled.result())
        while True:
            order = await self._next_order()
            if order is None:
                continue
            kind = order["t"]
            if kind == "start":
                self._start_workers(order)
            elif kind == "stop":
                self._stop_workers(float(order["grace"]), int(order.get("signal", signal.SIGTERM)))
            elif kind == "warn":
                self._warn_workers()
            elif kind == "where":
                self._look_for(order)
            elif kind == "found":
                self._status.note_found(int(order["local_rank"]), order["lines"])
            elif kind == "check":
                self._check()
            elif kind == "end":
                return Verdict.from_json(order["verdict"])
            elif kind == "lost":
                self._tell_lead(
                    {"t": "gave_up", "why": order["why"]}
                )  # it may hear this node all the same
                self._stop_workers(_LOST_GRACE)
                return self._own_verdict(
                    JobState.LOST, f"node {self._topology.node_rank} lost node 0: {order['why']}"
                )

    async def _next_order(self) -> Message | None:
        """Return the lead's next order; None after an interruption that was dealt with."""
        assert self._link is not None
        ordering = asyncio.ensure_future(self._link.orders.get())
        waiting: set[asyncio.Future[Any]] = {ordering, self._crashes.first}
        if not self._stop_ordered:
            waiting.add(self._wishes.cancelled)
        if not self._warning_told:
            waiting.add(self._wishes.warned)
        if self._lead_task is not None:
            waiting.add(self._lead_task)
        if not self._haste_told:
            waiting.add(self._wishes.at_once)
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if self._crashes.first.done():
            raise self._crashes.first.result()
        if ordering.done():
            return ordering.result()
        ordering.cancel()
        if (
            self._lead_task is not None
            and self._lead_task.done()
            and self._lead_task.exception() is not None
        ):
            self._lead_task.result()  # raises: the lead cannot lead
        self._pass_on_wishes()
        return None

    def _pass_on_wishes(self) -> None:
        """Tell the lead each wish that it was not told yet."""
        assert self._link is not None
        if self._wishes.warned.done() and not self._warning_told:
            self._warning_told = True
            self._link.send({"t": "warned", "why": self._wishes.warned.result()})
        if self._wishes.cancelled.done() and not self._stop_ordered:
            self._stop_ordered = True  # once is enough; the lead's order to stop follows
            self._link.send(
                {
                    "t": "interrupt" if self._wishes.interrupted else "cancel",
                    "why": self._wishes.cancelled.result(),
                }
            )
        if self._wishes.at_once.done() and not self._haste_told:
            self._haste_told = True
            self._link.send({"t": "at_once"})

    async def _join(self) -> None:
        """Become part of the gang. No link is set if the wish to end came first."""
        hello = {
            "job": self._job.job_id, "attempt": self._job.attempt,
            "node_rank": self._topology.node_rank, "nnodes": self._topology.nnodes,
            "nproc": self._nproc, "host": self._host, "pid": os.getpid(),
            "counted_by": self._job.counted_by, "endpoints": self._endpoints(),
            "wants_endpoints": paddle_endpoints.may_be_used(self._options.program),
        }  # fmt: skip
        if self._topology.node_rank == 0:
            self._lead = Lead(
                self._topology,
                self._options,
                job=self._job,
                job_dir=self._job_dir,
                say=self._voice.say,
                watch=self._crashes.watch,
            )
            self._link = OwnLead(self._lead.gathering, hello)
            # That came while this process was loading: the lead hears them before it starts
            # workers.
            self._pass_on_wishes()
            self._lead_task = asyncio.create_task(self._lead.lead())
            return
        finding = asyncio.create_task(
            find_lead(
                self._topology,
                self._options,
                job=self._job,
                hello=hello,
                say=self._voice.say,
                given_up=self._lead_given_up,
            )
        )
        either: set[asyncio.Future[Any]] = {finding, self._wishes.cancelled, self._crashes.first}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._crashes.first.done():
            finding.cancel()
            raise self._crashes.first.result()
        if finding.done():
            self._link = link = finding.result()
            for task in link.tasks:
                self._crashes.watch(task)
        else:
            finding.cancel()

    def _endpoints(self) -> list[str]:
        address = paddle_endpoints.own_address(self._topology.master_addr, self._topology.node_rank)
        return [paddle_endpoints.endpoint(address, port) for port in self._held.ports]

    def _lead_given_up(self) -> str:
        """Node 0's script may say in the job's directory, where nodes share it, that it cannot
        start.
        """
        return next(
            (
                failure.message
                for failure in ends.refusals(self._job_dir, self._job.attempt)
                if failure.node_rank == 0
            ),
            "",
        )

    # -- workers -------------------------------------------------------------------------------------------------------

    def _start_workers(self, order: Message) -> None:
        assert self._link is not None
        gpus = devices.visible_gpus(os.environ)
        world = replace(World(**order["world"]), gpus=gpus)
        self._world = world
        self._stop_ordered = False
        self._status.begin(world)
        self._running = set(range(1 if self._options.launcher == "torchrun" else world.nproc))
        if self._starter.trouble:
            self._node_failed(self._starter.trouble)
            return
        variables = contract.quiet_defaults(
            os.environ, world.master_addr, nnodes=world.nnodes
        ) | paddle_endpoints.backend_default(os.environ, gpus)
        variables |= {
            contract.JOB_ID: self._job.job_id,
            contract.JOB_DIR: str(self._job_dir),
            contract.ATTEMPT: str(self._job.attempt),
            contract.STORE: contract.store_address(world, self._options.launcher),
            contract.STORE_KEY: contract.store_key(
                self._job.token, self._job.job_id, attempt=self._job.attempt, restart=world.restart
            ),
        }
        self._tell_exec_reason()
        if self._starter.begin(forkserver.world_message(world, variables), order.get("store")):
            self._tell_lead({"t": "running"})

    def _tell_lead(self, message: Message) -> None:
        if self._link is not None:
            self._link.send(message)

    def _tell_exec_reason(self) -> None:
        if self._link is not None and self._exec_reason:
            self._link.send({"t": "exec", "why": self._exec_reason})
            self._exec_reason = ""

    def _stop_workers(self, grace: float, number: int = signal.SIGTERM) -> None:
        self._stop_ordered = True
        if self._starter.ready and not self._starter.gone:
            self._starter.tell({"t": "stop", "grace": grace, "signal": number})
            return
        self._starter.call_off()
        self._workers_gone()

    def _warn_workers(self) -> None:
        """Have the workers told, and leave word for those that were started by somebody else than
        our starter.
        """
        ends.warn(self._job_dir, self._job.attempt)
        self._starter.tell({"t": "warn"})

    def _workers_gone(self) -> None:
        self._tell_lead({"t": "stopped"})

    def _hear_starter(self) -> None:
        message = self._starter.hear()
        if message is None:
            self._starter_ended()
            return
        kind = message["t"]
        if kind == "ready":
            self._starter_ready(message["why"])
        elif kind == "failing":
            self._worker_failing(message)
        elif kind == "exit":
            self._worker_ended(message)
        elif kind == "missing" and self._world is not None and self._link is not None:
            self._link.send(message | {"restart": self._world.restart})
        elif kind == "where":
            found = [self._status.sighting(**answer) for answer in message["answers"]]
            self._tell_lead(self._status.where(found, final=message["final"]))
        elif kind == "store" and not self._stop_ordered:
            ended = how(*processes.exit_code_of(message["status"]))
            last = log_files.last_lines(self._directory / "store.log", 1)
            self._node_failed(": ".join([f"torch's store was lost ({ended})", *last]))
        elif kind == "checked" and self._world is not None:
            self._tell_lead(self._status.exits())
        elif kind == "gone":
            self._workers_gone()

    def _starter_ready(self, why: str | None) -> None:
        """The starter takes orders; why it cannot fork workers, if it cannot."""
        if self._starter.serve():
            self._tell_lead({"t": "running"})
        if why and self._options.start == "fork":
            self._starter_trouble(f"--start fork is impossible: {why}")
        elif why:
            self._exec_reason = f"node {self._topology.node_rank} starts its workers by exec: {why}"
            self._voice.say(self._exec_reason)
            self._tell_exec_reason()

    def _starter_ended(self) -> None:
        """The starter is gone; if it was not told to go, its workers were killed with it and this
        node has failed.
        """
        assert self._starter_end is not None
        asyncio.get_running_loop().remove_reader(self._starter.control)
        ended = how(*self._starter.reap())
        if not self._starter_end.done():
            self._starter_end.set_result(None)
        self._sweep()
        if self._stop_ordered:
            self._workers_gone()
        else:
            self._starter_trouble(f"the process that starts the workers was lost ({ended})")

    def _starter_trouble(self, why: str) -> None:
        """The starter cannot serve: said at once while workers run, else when they are to start."""
        self._starter.trouble = why
        if self._world is not None:
            self._node_failed(why)

    def _sweep(self) -> None:
        """Kill every process below this one, orphans that it has adopted included."""
        for _ in range(100):
            try:
                left = processes.descendants(os.getpid())
            except (
                OSError
            ):  # no descriptor is left to look; the kernel ends the workers with their starter
                return
            if not left:
                return
            for pid in left:
                processes.send_signal(pid, signal.SIGKILL)
            time.sleep(0.01)

    # -- workers that others wait for ----------------------------------------------------------------------------------

    def _look_for(self, order: Message) -> None:
        """Say of each of these workers what it does; the starter asks those that run."""
        if self._world is None:
            return
        wanted = [rank - self._world.first_rank for rank in order["ranks"]]
        started = self._starter.ready and not self._starter.waiting
        note = order.get("note", "")  # for the log of each that still runs
        known = [] if note else self._status.known(wanted, started=started)
        if known:
            self._tell_lead(self._status.where(known, final=order["final"]))
        running = [rank for rank in wanted if rank in self._running and started]
        if running:
            self._starter.tell(
                {"t": "where", "local_ranks": running, "final": order["final"], "note": note}
            )

    def _check(self) -> None:
        """Tell what is known of ends so far; the starter first tells of all that it knows."""
        if self._starter.ready and not self._starter.gone:
            self._starter.tell({"t": "check"})
        elif self._world is not None:
            self._tell_lead(self._status.exits())

    # -- failures ------------------------------------------------------------------------------------------------------

    def _worker_failing(self, message: Message) -> None:
        assert self._world is not None
        failure = self._failures.of_worker(
            self._world,
            int(message["local_rank"]),
            int(message["exit_code"]),
            None,
            message["message"],
        )
        self._send_failure(failure, message["monotonic"], exited=bool(message.get("fatal")))

    def _worker_ended(self, message: Message) -> None:
        assert self._world is not None
        local_rank = int(message["local_rank"])
        self._running.discard(local_rank)
        code, signal_name = processes.exit_code_of(message["status"])
        self._status.ended[local_rank] = how(code, signal_name)
        if code == 0 and self._options.launcher == "agent":
            self._status.note_exit(local_rank, message["monotonic"])
            self._tell_lead({"t": "succeeded", "local_rank": local_rank})
        if code != 0:
            failure = self._failures.of_worker(
                self._world, local_rank, code, signal_name, how(code, signal_name)
            )
            self._send_failure(failure, message["monotonic"], exited=True)
        if not self._running:
            self._tell_lead({"t": "done"})

    def _node_failed(self, why: str) -> None:
        self._send_failure(self._failures.of_node(why), time.monotonic(), exited=True)

    def _send_failure(self, failure: Failure, monotonic: float, *, exited: bool) -> None:
        age = max(0.0, time.monotonic() - monotonic)
        self._tell_lead(
            {"t": "failing", "failure": failure.to_json(), "age": age, "exited": exited}
        )

    # -- output -------------------------------------------------------------------------------------------------------------

    async def _note_growth(self) -> None:
        while True:
            await asyncio.sleep(log_files.INTERVAL)
            self._show()
            if self._keeper not in (None, os.getppid()):
                self._keeper = None
                self._node_failed(
                    "Slurm's own process that kept this node's part of the job is gone (slurmstepd)"
                )

    def _show(self) -> None:
        self._timeline.note()
        self._voice.show()

    # -- the end -------------------------------------------------------------------------------------------------------

    async def _dismiss_starter(self) -> None:
        assert self._starter_end is not None
        self._stop_ordered = True
        if self._starter.ready:
            self._starter.tell({"t": "quit"})
        elif not self._starter.gone:
            processes.send_signal(self._starter.pid, signal.SIGKILL)
        try:
            await asyncio.wait_for(asyncio.shield(self._starter_end), _QUIT_PATIENCE)
        except asyncio.TimeoutError:
            processes.send_signal(self._starter.pid, signal.SIGKILL)
            await self._starter_end

    def _own_verdict(self, state: JobState, reason: str) -> Verdict:
        cancelled = state is JobState.CANCELLED
        failure = None if cancelled else self._failures.of_node(reason)
        return Verdict(
            state,
            CANCELLED_EXIT_CODE if cancelled else 1,
            reason=reason,
            failure=failure,
            attempt=self._job.attempt,
            ended_at=now(),
        )

    def _record_end(self, verdict: Verdict) -> None:
        """Write this node's end where it happened, and the job's where node 0 could not come to
        one.
        """
        try:
            ends.write(
                self._job_dir,
                self._topology.node_rank,
                end=verdict.to_json() | {"host": self._host},
            )
            if self._topology.node_rank == 0 and not ends.has_result(
                self._job_dir, self._job.attempt
            ):
                ends.write_result(self._job_dir, verdict)
        except OSError as error:
            self._voice.say(
                f"the end of node {self._topology.node_rank} cannot be recorded in {self._job_dir}: {error.strerror}"
            )
