"""Run one node's part of a job: join the coordinator, follow its orders, record the end.

An agent that loses the coordinator looks for it at its old address and at those of the nodes that
may take its place. Such a node becomes the coordinator itself when its turn comes.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from clusterjob.errors import ClusterJobError, RendezvousError
from clusterjob.node.agent.connection import Link, Search
from clusterjob.node.agent.node_workers import NodeMetrics, NodeWorkers, StateReport
from clusterjob.node.agent.parent import AgentParent
from clusterjob.node.coordinator import Coordinator, MinorityError
from clusterjob.node.decide import MEASURED
from clusterjob.node.environments import this_node, worker_variables
from clusterjob.node.logs import ends, log_files
from clusterjob.node.logs.console import Console
from clusterjob.node.logs.events import Phase, now
from clusterjob.node.logs.job_dir import PREFLIGHT_LOG
from clusterjob.node.notifications import Notifier
from clusterjob.node.rendezvous import messages, succession
from clusterjob.node.rendezvous.identity import NodeJob
from clusterjob.node.rendezvous.messages import ConnectionLost, Succession
from clusterjob.node.rendezvous.succession import Earlier
from clusterjob.node.states import Measure, Order, Stop
from clusterjob.node.system import crashes, files, network, processes
from clusterjob.node.verdict import CANCELLED_EXIT_CODE, Failure, JobState, Verdict
from clusterjob.node.workers.forkserver_client import ForkserverClient

# Seconds in which a second SIGINT belongs to the same Ctrl-C: a command between the terminal and
# this agent may forward it.
_ONE_KEYSTROKE = 0.5
_RENEW_INTERVAL = 0.5  # seconds
_QUIET_INTERVAL = 0.3  # seconds between two looks at the workers' output while they write none
_GONE_SECONDS, _PAUSE = 6.0, 0.02  # seconds for the workers to end before this node joins again
_END_SECONDS = 2.0  # seconds for the coordinator to close its connections
# Seconds to look for the coordinator before another node takes its place: if it was killed, as it
# may come back, and if it is silent.
_RETURN_SECONDS, _SEARCH_SECONDS = 3.0, 1.0
_AGAIN_SECONDS = 5.0  # more seconds for each time that no other node has joined this one
_LOOK_SECONDS = 0.5  # seconds for a coordinator that runs to answer
_TURN_SECONDS = 3.0  # seconds for each successor to become the coordinator


class Agent:
    """The agent of one node; it needs a running event loop.

    Args:
        node: the job, as this node sees it.
        nproc: workers of this node.
        forkserver: the forkserver, which was forked before.
        console: prints the agent's messages and the workers' output.
        parent: starts this agent again if it is killed.
        notifications: the value of CLUSTERJOB_NOTIFICATIONS; empty without --notify.
    """

    def __init__(
        self,
        node: NodeJob,
        nproc: int,
        forkserver: ForkserverClient,
        console: Console,
        parent: AgentParent,
        notifications: str = "",
    ) -> None:
        self._node = node
        self._node_rank = node.topology.node_rank
        self._options = node.options
        self._forkserver = forkserver
        self._console = console
        self._notifier = Notifier(
            notifications, node.identity.job_id, node.directory, print_line=console.print
        )
        self._parent = parent
        self._supervisor = this_node.supervisor(os.environ, parent.pid)
        self._crashes = crashes.Crashes()
        self._report = StateReport(
            parent.note.read().get("round", (0, 0)),
            tells_life=node.options.hang_timeout is not None,
        )
        self._interrupted_at = math.inf  # by Ctrl-C; workers then get SIGINT instead of SIGTERM
        # One more port, which rank 0 binds itself.
        self._held = worker_variables.hold_ports(nproc + 1)
        address = node.topology.master_addr  # at which the other nodes reach this one
        if self._node_rank:
            address = network.address_towards(address) or this_node.node_name()
        # Node 0 of hosts with several addresses has them all in `address`.
        host = address.partition(",")[0]
        self._hello = messages.Hello(
            node_rank=self._node_rank,
            host=this_node.node_name(),
            pid=os.getpid(),
            attempt=node.identity.attempt,
            nnodes=node.topology.nnodes,
            nproc=nproc,
            address=address,
            endpoints=tuple(
                network.with_port(host, holder.getsockname()[1]) for holder in self._held
            ),
            # PaddlePaddle needs them; a command may have an interpreter of its own.
            wants_endpoints=not node.options.program.is_python or find_spec("paddle") is not None,
            key=node.identity.key,
        )
        self._workers = NodeWorkers(node, forkserver, self._report, self._send)
        self._metrics = NodeMetrics(node, self._workers)
        self._order = Order()  # the last one
        self._measuring: asyncio.Task[None] | None = None  # of the preflight
        self._orders: asyncio.Queue[Any] = asyncio.Queue()  # messages of the coordinator
        self._link: Link | None = None  # if the coordinator is on another node
        self._coordinator: Coordinator | None = None  # if it is, or was, in this process
        self._coordinating: asyncio.Task[None] | None = None
        self._resigned: Failure | None = None  # why the round ended, if this node gave up then
        self._earlier: Earlier | None = None  # the coordinator whose place this one may take
        self._position = 0.0  # how many nodes come before this one
        self._deadline: float | None = None  # of the search that goes on
        self._alone = 0  # how often this agent has become the coordinator since the last round

    # -- from join to verdict ----------------------------------------------------------------------

    async def run(self) -> Verdict:
        """Run this node's part of the job until its processes have ended; return the verdict."""
        files.use_thread()
        first = not self._parent.why  # no agent that was killed
        if first:  # the node's script has become this process, or its parent
            self._workers.begin_phase(
                Phase.SETUP, at=time.monotonic() - processes.age(self._parent.pid)
            )
        self._workers.begin_phase(Phase.IMPORT)
        asyncio.get_running_loop().add_reader(self._forkserver.control, self._receive)
        self._listen()
        self._workers.spared = self._notifier.pids
        if self._node_rank == 0 and first:
            self._notifier.attempt_begins(self._node.identity.attempt)
        await self._metrics.start()
        following = self._start(self._follow_output())
        self._start(self._send_states())
        self._start(self._keep_lease())
        serving = asyncio.create_task(self._serve())
        either: set[asyncio.Future[Any]] = {serving, self._crashes.first}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        error = serving.exception() if serving.done() else self._crashes.first.result()
        verdict = serving.result() if error is None else self._failed(error)
        serving.cancel()
        following.cancel()
        await self._end(verdict)
        await self._notifier.close()
        processes.kill_descendants()
        return verdict

    async def _serve(self) -> Verdict:
        """Follow one coordinator after the other until the job has ended."""
        verdict: Verdict | None = None
        kept, attempt = self._parent.note.read(), self._node.identity.attempt
        why = self._parent.why or f"the agent of node {self._node_rank} was started again"
        lost = ConnectionLost(why, ended=True)
        earlier = succession.from_disk(self._node.directory, attempt, why=why)
        if earlier is not None and "successors" not in kept:
            # Another node may have become the coordinator before this one was started again.
            self._parent.keep(successors=earlier.state.addresses)
        if not kept.get("coordinates", self._node_rank == 0):
            verdict = await self._join(lost, first=not kept.get("joined"))
        elif earlier is not None:
            self._earlier = earlier
            verdict = await self._join(lost, _LOOK_SECONDS)
        else:
            await self._coordinate(None)
        while verdict is None:
            match await self._orders.get():
                case messages.End() as end:
                    verdict = end.verdict
                case ConnectionLost() as end_of_link:
                    verdict = await self._on_coordinator_lost(end_of_link)
                case messages.Heartbeat():
                    self._renew_lease()
                case Succession() as known:
                    self._note_succession(known)
                case Order() as order:
                    self._follow(order)
        return verdict

    def _follow(self, order: Order) -> None:
        """Do what the coordinator wants and this node does not do yet."""
        if order.round < self._report.state.round:
            return
        done, self._order = self._order, order
        if order.round > self._report.state.round and (order.world or order.stop):
            self._report.begin(order.round)
            if order.world is not None:
                self._renew_lease()  # that of the last coordinator may be over
                self._workers.start(order, self._store())
        if order.stop is not None and (order.round, order.stop) != (done.round, done.stop):
            self._workers.stop(order.stop)
        if order.warned and not done.warned:
            self._workers.warn()
        if order.measure is not None and done.measure is None:
            self._measuring = self._start(self._measure(order.measure))
        elif order.measure is None and self._measuring is not None:
            self._measuring.cancel()
        if order.round == self._report.state.round:
            done = done if done.round == order.round else Order()
            self._workers.answer(order, done)
            self._start(self._workers.look(order, done))

    async def _on_coordinator_lost(self, lost: ConnectionLost) -> Verdict | None:
        """Stop the workers, and go on with the next coordinator; else return the verdict."""
        # The coordinator may still receive messages of this node.
        self._send(ConnectionLost(f"it has lost the coordinator: {lost.why}"))
        self._workers.stop(Stop(0.0, signal.SIGKILL))
        if self._link is not None:
            link, self._link = self._link, None
            await link.close()
        why = f"node {self._node_rank} lost the coordinator: {lost.why}"
        if not self._options.restarts:
            # An error of the connection may have discarded the end of the job.
            return self._end_without_coordinator(why)
        self._console.print(f"{why}; it may come back")
        deadline = time.monotonic() + _GONE_SECONDS
        while not self._report.state.idle and time.monotonic() < deadline:
            await asyncio.sleep(_PAUSE)
        if self._report.state.idle:  # the next coordinator may begin a round of the same number
            self._report.begin(-1, idle=True)
        # An agent that was killed comes back after a second.
        return await self._join(lost, _RETURN_SECONDS if lost.ended else _SEARCH_SECONDS)

    # -- join, or coordinate -----------------------------------------------------------------------

    async def _join(
        self, lost: ConnectionLost, after: float = 0.0, *, first: bool = False
    ) -> Verdict | None:
        """Join the coordinator, or become it; else return the verdict of this node.

        Args:
            lost: how the last connection ended.
            after: seconds after which the first of the other nodes becomes the coordinator.
            first: whether this node has never joined.

        Raises:
            RendezvousError: the coordinator refused this agent, or was not found in time.
        """
        options, deadline = self._options, self._deadline
        if first:
            deadline = time.monotonic() + options.join_timeout
        elif deadline is None:
            goes_on = options.spares or options.min_nodes is not None  # without this node
            wait = max(options.return_timeout, options.join_timeout if goes_on else 0.0)
            deadline = self._deadline = time.monotonic() + wait
        after += self._alone * _AGAIN_SECONDS + self._position * _TURN_SECONDS
        addresses = [self._node.topology.master_addr]
        addresses += self._parent.note.read().get("successors", [])
        search = Search(self._node, self._hello, self._report, deadline, first=first)
        turn = math.inf if self._earlier is None else time.monotonic() + after
        try:
            channel = await search.run(addresses, turn)
        except RendezvousError as error:
            if first and not self._report.state.request.cancel:
                raise
            why = f"node {self._node_rank} lost the coordinator: {lost.why}; {error.message}"
            return self._end_without_coordinator(why)
        if channel is None:
            assert self._earlier is not None
            self._alone += 1
            await self._coordinate(
                replace(self._earlier, why=lost.why, ended=lost.ended, failure=self._resigned)
            )
            return None
        self._resigned = None
        self._orders = asyncio.Queue()
        self._link = Link(channel, options, self._orders, self._start)
        self._parent.keep(joined=True, coordinates=False)
        self._report.changed.set()
        return None

    def _note_succession(self, message: Succession) -> None:
        """Record which nodes may take the coordinator's place, and that this node knows it."""
        nodes = [node for node, _ in message.successors]
        state, own = message.state, self._node_rank
        self._earlier = None
        if state is not None and own in nodes:
            # Could the job go on if all nodes but the coordinator's joined this one?
            others = set(range(self._node.topology.nnodes)) - ({state.node} - {own})
            if succession.may_go_on(state.lasting.groups, others):
                self._position = nodes.index(own)
                self._earlier = Earlier(
                    state,
                    why="",
                    ended=False,
                    moved=state.node != own,
                    received_at=time.monotonic(),
                )
        addresses = [address for _, address in message.successors]
        self._parent.keep(successors=addresses)
        # Not a round with the same number: a node counts for one part of a split job alone.
        if message.seen > self._report.state.seen:
            self._deadline, self._alone = None, 0  # the search was successful
            self._report.set(seen=message.seen, seen_of=message.seen_of)
            self._parent.keep(round=(message.seen, message.seen_of))

    async def _coordinate(self, earlier: Earlier | None) -> None:
        """Become the coordinator: at the start of the job, or in the place of an earlier one."""
        self._parent.keep(joined=True, coordinates=True)
        topology = replace(self._node.topology, master_addr=self._hello.address)
        node = replace(self._node, topology=topology)
        self._coordinator = Coordinator(node, self._crashes.watch, self._notifier, earlier)
        self._orders = asyncio.Queue()
        self._peer = self._coordinator.membership.join(self._hello, self._orders.put_nowait)
        if self._supervisor is not None:
            # The coordinator informs the other nodes.
            self._start(self._poll_job_dir())
            await asyncio.sleep(0)
        # Requests may have arrived during the imports: the coordinator then starts no workers.
        self._send(self._report.now())
        self._coordinating = self._start(self._run_coordinator(self._coordinator))

    async def _run_coordinator(self, coordinator: Coordinator) -> None:
        try:
            await coordinator.run()
        except MinorityError as error:
            self._coordinator, self._resigned = None, error.failure
            self._orders.put_nowait(ConnectionLost(error.message))

    # -- messages ----------------------------------------------------------------------------------

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a background task; its error ends the job."""
        task = asyncio.create_task(work)
        self._crashes.watch(task)
        return task

    def _send(self, message: Any) -> None:
        """Send the coordinator a message, if there is one."""
        if self._link is not None:
            self._link.send(message)
        elif self._coordinator is not None:
            self._coordinator.membership.receive(self._peer, message)

    def _store(self) -> socket.socket | None:
        """Return the socket of torch's store if the coordinator is in this process."""
        return self._coordinator.store if self._coordinator is not None else None

    async def _send_states(self) -> None:
        """Send the state of the node whenever it changes."""
        while True:
            await self._report.changed.wait()
            self._report.changed.clear()
            self._send(self._report.now())

    def _receive(self) -> None:
        """Handle one message of the forkserver; if it was lost, let another agent replace this."""
        if not (why := self._workers.receive()):
            return
        asyncio.get_running_loop().remove_reader(self._forkserver.control)
        if self._parent.left and not self._report.state.request.cancel:
            self._send(self._report.now())  # this process ends before its next turn
            self._parent.keep(why=why)
            os.kill(os.getpid(), signal.SIGKILL)

    async def _keep_lease(self) -> None:
        """Tell the forkserver, which outlives this process, until when the workers may run."""
        while True:
            self._renew_lease()
            await asyncio.sleep(_RENEW_INTERVAL)

    def _renew_lease(self) -> None:
        source = self._link or self._coordinator
        if source is not None:
            self._parent.keep(until=source.heard_at + self._options.lease)

    async def _follow_output(self) -> None:
        loop, pause = asyncio.get_running_loop(), log_files.INTERVAL
        while True:
            await asyncio.sleep(pause)
            grown = await loop.run_in_executor(files.disk, self._workers.timeline.note)
            self._workers.note_output(grown)
            # Looks at files that do not grow are most of what an agent costs.
            pause = log_files.INTERVAL if grown else min(1.5 * pause, _QUIET_INTERVAL)
            if (waits := self._workers.waits_due()) is not None:
                self._send(waits)
            self._console.show()
            if self._supervisor is not None:
                name, pid = self._supervisor
                if pid != processes.parent(self._parent.pid):
                    self._supervisor = None
                    why = f"{name}, the parent of this node's agent, was killed"
                    self._workers.fail_node(why)
                    if self._options.restarts:  # the next round must not use this node
                        raise ClusterJobError(why)

    # -- requests to end the job -------------------------------------------------------------------

    def _listen(self) -> None:
        """Accept requests to cancel or preempt the job: signals, and the end of the lifeline.

        A scheduler that takes a job's nodes away sends SIGTERM too. In a job that may be preempted,
        it is a warning, unless the job directory records that the job is cancelled.
        """
        loop, preemptible = asyncio.get_running_loop(), self._options.warning is not None
        for number in processes.handled_signals(preemptible=preemptible):
            loop.add_signal_handler(number, self._on_signal, number)
        for number in self._forkserver.early:
            self._on_signal(number)
        if self._options.lifeline:
            try:
                loop.add_reader(0, self._on_lifeline)
            except PermissionError:  # epoll refuses a file or /dev/null, which counts as ended
                self._on_lifeline()
        if (
            preemptible
            and ends.warning_file(self._node.directory, self._node.identity.attempt).exists()
        ):
            why = f"a warning on {this_node.node_name()}, while the job was starting"
            self._report.ask(warning=why[:300])

    def _on_lifeline(self) -> None:
        asyncio.get_running_loop().remove_reader(0)
        if not ends.detached(self._node.directory):
            self._cancel("the command that ran the job is gone")

    async def _poll_job_dir(self) -> None:
        """Check every 2 s for the file that cancels the job: a signal may not reach this node."""
        loop, job_dir = asyncio.get_running_loop(), self._node.directory
        found = ends.cancelled(job_dir)
        while not found:
            await asyncio.sleep(ends.REQUEST_SECONDS)
            found = await loop.run_in_executor(files.disk, ends.cancelled, job_dir)
        self._cancel("cancelled", interrupt=ends.interrupted(job_dir))

    def _on_signal(self, number: int) -> None:
        why = f"{processes.signal_name(number)} on {this_node.node_name()}"
        terminated = number == signal.SIGTERM and not ends.cancelled(self._node.directory)
        if self._options.warning is not None and (terminated or number == signal.SIGUSR1):
            self._report.ask(warning=why[:300])
            return
        if time.monotonic() > self._interrupted_at + _ONE_KEYSTROKE:
            self._report.ask(kill=True)
        self._cancel(why, stacks=terminated, interrupt=number == signal.SIGINT)

    def _cancel(self, why: str, *, stacks: bool = False, interrupt: bool = False) -> None:
        if self._report.state.request.cancel:
            return
        if interrupt:
            self._interrupted_at = time.monotonic()
        self._report.ask(
            cancel="cancelled" if ends.cancelled(self._node.directory) else why[:300],
            interrupt=interrupt,
            stacks=ends.stacks_wanted(self._node.directory) or stacks,
        )

    # -- the preflight -----------------------------------------------------------------------------

    async def _measure(self, wanted: Measure) -> None:
        """Measure this node in a process of its own, which ends with this call."""
        from clusterjob.node import preflight  # few jobs have one

        topology, store = self._node.topology, self._store()
        directory = log_files.node_directory(self._node.directory, topology.node_rank)
        given = vars(wanted) | {
            "node": topology.node_rank,
            "start_seconds": self._options.join_timeout,
            "listener": store.fileno() if store is not None else None,
            "parent": os.getpid(),
        }
        package = os.fspath(Path(preflight.__file__).parents[2])  # a directory, or the node zip
        code = f"from {preflight.__name__} import main; main()"
        found, process = {"error": "it has ended; its log is preflight.log"}, None
        try:
            with os.fdopen(files.open_log(directory / PREFLIGHT_LOG), "ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-c", f"import sys; sys.path.insert(0, {package!r}); {code}"),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    cwd=directory,  # no module of the script's directory replaces another
                    env=os.environ
                    | worker_variables.quiet_defaults(
                        os.environ, topology.master_addr, nnodes=topology.nnodes
                    ),
                    pass_fds=[store.fileno()] if store is not None else [],
                    start_new_session=True,  # no Ctrl-C of a terminal
                )
            data, _ = await process.communicate(json.dumps(given).encode())
            found = json.loads(data)
        except OSError as error:
            found = {"error": error.strerror or str(error)}
        except ValueError:
            pass  # it was killed
        finally:
            if store is not None:
                store.close()
            if process is not None and process.returncode is None:
                process.kill()
        if self._coordinator is not None:  # before the state: it needs both
            self._coordinator.measured = found
        self._report.set(measured=found.get("error", MEASURED)[:300])

    # -- the end -----------------------------------------------------------------------------------

    def _failed(self, error: BaseException) -> Verdict:
        """Return the verdict of an agent that cannot go on; if it is broken, the job ends.

        After another error, the other nodes may go on.
        """
        if self._coordinating is not None:
            self._coordinating.cancel()
        if isinstance(error, ClusterJobError):
            return self._own_verdict(JobState.FAILED, error.message)
        who = f"the agent of node {self._node_rank} on {this_node.node_name()} (pid {os.getpid()})"
        verdict = self._own_verdict(JobState.FAILED, f"{who} failed: {crashes.summary(error)}")
        if self._coordinator is not None:
            self._coordinator.membership.broadcast(messages.End(verdict))
        return verdict

    async def _end(self, verdict: Verdict) -> None:
        """End all processes of this node, and record the end."""
        self._parent.left = 0  # no other agent replaces this one
        coordinates = self._coordinator is not None
        # The other nodes go on without a lost one if they are the larger part.
        ends_here = verdict.state is not JobState.LOST or self._node.topology.nnodes <= 2
        if coordinates or (self._node_rank == 0 and self._link is None and ends_here):
            self._notifier.ended(verdict)
        self._report.stop()
        await self._forkserver.quit()
        self._workers.flight_recorder.close()
        # Background processes of the setup lines.
        processes.kill_descendants(*self._workers.spared)
        # After all earlier writes.
        await asyncio.get_running_loop().run_in_executor(files.disk, self._workers.timeline.note)
        self._console.finish()
        self._record_end(verdict)
        if coordinates:
            self._console.print(verdict.text())
            self._console.print_verdict(verdict)
        elif verdict.state is not JobState.SUCCEEDED:
            self._console.print(f"{verdict.state}: {verdict.reason}")
        if self._coordinating is not None:  # it lets the others read the verdict
            await asyncio.wait([self._coordinating], timeout=_END_SECONDS)
            self._coordinating.cancel()

    def _own_verdict(self, state: JobState, reason: str) -> Verdict:
        """Return the verdict of this node, whose coordinator gives none."""
        cancelled = state is JobState.CANCELLED
        return Verdict(
            state,
            CANCELLED_EXIT_CODE if cancelled else 1,
            reason=reason,
            failure=None if cancelled else self._workers.failures.of_node(reason),
            attempt=self._node.identity.attempt,
            ended_at=now(),
        )

    def _end_without_coordinator(self, why: str) -> Verdict:
        """Return the verdict if the job was cancelled or has ended; else LOST for this reason."""
        if why_cancelled := self._report.state.request.cancel:
            return self._own_verdict(JobState.CANCELLED, why_cancelled)
        recorded = ends.read_result(self._node.directory)
        if recorded is not None and recorded.attempt == self._node.identity.attempt:
            return recorded
        return self._own_verdict(JobState.LOST, why)

    def _record_end(self, verdict: Verdict) -> None:
        """Write this node's end, and the job's verdict if the coordinator here could not."""
        job_dir, node_rank = self._node.directory, self._node_rank
        try:
            usage = self._metrics.end()
            end = verdict.to_json() | {"host": this_node.node_name(), "usage": usage}
            # One node looks at each copy of the code: the coordinator's, and those with a copy.
            shared = node_rank and log_files.node_directory(job_dir, 0).exists()
            if self._coordinator is None and not shared:
                end["in_code"] = ends.files_in_code()
            ends.write(job_dir, node_rank, end=end)
            recorded = ends.has_result(job_dir, self._node.identity.attempt)
            if self._coordinator is not None and not recorded:
                ends.write_result(job_dir, verdict)
        except OSError as error:
            self._console.print(
                f"the end of node {node_rank} cannot be recorded in {job_dir}: {error.strerror}"
            )
