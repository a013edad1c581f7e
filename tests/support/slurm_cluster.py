"""A real Slurm on this machine: four nodes with eight GPUs each.

Tests use it, and developers start it from the command line:

    python tests/support/slurm_cluster.py --dir D [--accounting]

This starts a cluster and prints the variables that a client has to export. The cluster stops when
standard input ends, at SIGTERM or at SIGINT.

Each cluster has its own directory, ports, munge key and database. Several clusters can therefore
run at the same time, next to a Slurm that is installed on the machine. The daemons fork into the
background, are children of init and have an environment that no test changes. The pid files name
them; before a signal is sent, the process's environment must show that it belongs to this cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pwd
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from launching import write_tree
from procs import T, alive, all_pids

NODES = 4
GPUS = 8
# Below the kernel's ephemeral ports (32768 and up) and below the agents' ports (20000 and up).
PORTS = range(10_000, 19_990, 10)
TEST_TIMEOUT = 60.0  # seconds, for a step that takes 1 s or 2 s
PACKAGES = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "munged": "munge",
}
ACCOUNTING = {
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server-core",
    "mariadb-install-db": "mariadb-server-core",
    "my_print_defaults": "mariadb-client-core",
}
ENDED = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "PREEMPTED",
    "OUT_OF_MEMORY",
    "DEADLINE",
    "BOOT_FAIL",
    "SPECIAL_EXIT",
)
DAEMON = "TEST_SLURM_DAEMON_OF"  # a variable of the daemons' environment: the cluster's directory
# Debian installs the daemons in sbin, which is not on every user's PATH.
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class ClusterError(RuntimeError):
    """A command or a daemon of the cluster failed; most messages end with the log tails."""


class SlurmCluster:
    """A cluster of the four nodes n1 to n4 with 8 CPUs and 8 GPUs each.

    Partition ``main`` has all nodes, partition ``small`` has only n1.

    Args:
        directory: the cluster's directory. ``start`` creates it, the caller removes it. Its path
            must be short: a socket's path has at most 107 bytes.
        accounting: run slurmdbd and MariaDB; otherwise accounting_storage/none.
        settings: lines of slurm.conf that replace those of ``_settings``.
    """

    def __init__(
        self, directory: str | Path, *, accounting: bool = False, **settings: object
    ) -> None:
        self.directory = Path(directory).absolute()
        self.accounting = accounting
        self.settings = settings
        self.user = pwd.getpwuid(os.getuid()).pw_name
        self._claim: socket.socket | None = None
        self._port = 0

    # -- clients and jobs --------------------------------------------------------------------------

    @property
    def conf(self) -> Path:
        return self.directory / "etc" / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that a client needs to find this cluster."""
        return {"SLURM_CONF": str(self.conf)}

    def run(
        self, *argv: str, check: bool = True, timeout: float = TEST_TIMEOUT, **options: object
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as a client of this cluster, with text output."""
        done: subprocess.CompletedProcess[str] = subprocess.run(
            argv,
            env=os.environ | self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
            **options,
        )  # type: ignore[call-overload]
        if check and done.returncode:
            raise ClusterError(
                f"{argv} ended with exit code {done.returncode}:\n{done.stdout}{done.stderr}"
            )
        return done

    def submit(self, *arguments: str, script: str | None = None, **options: object) -> int:
        """Submit with sbatch and return the job's id.

        ``script`` is a shell command for ``sbatch --wrap``.
        """
        wrapped = () if script is None else (f"--wrap={script}",)
        return int(
            self.run("sbatch", "--parsable", *arguments, *wrapped, **options).stdout.split(";")[0]
        )

    def job(self, job_id: int | str) -> dict[str, str]:
        """Return the fields of a job from slurmctld; empty if slurmctld does not know the job."""
        done = self.run("scontrol", "--oneliner", "show", "job", str(job_id), check=False)
        return dict(re.findall(r"(\S+?)=(\S*)", done.stdout)) if done.returncode == 0 else {}

    def wait_for_job(
        self, job_id: int | str, *states: str, timeout: float = TEST_TIMEOUT
    ) -> dict[str, str]:
        """Wait until a job is in one of these states; without states, until it has ended."""

        def job_in_state() -> dict[str, str] | None:
            job = self.job(job_id)
            return (
                job
                if (job.get("JobState") in states if states else job and job["JobState"] in ENDED)
                else None
            )

        return self._wait(
            job_in_state, timeout, f"job {job_id} to be {' or '.join(states) or 'at its end'}"
        )

    def cancel_all(self) -> None:
        """Cancel all jobs."""
        jobs = self.run("squeue", "--noheader", "--format=%A").stdout.split()
        if jobs:
            self.run("scancel", *sorted(set(jobs)), check=False)

    def wait_idle(self, timeout: float = TEST_TIMEOUT) -> None:
        """Wait until all nodes are idle, the queue is empty and no slurmstepd runs."""

        def idle() -> bool:
            nodes = self.run(
                "sinfo", "--Node", "--noheader", "--partition=main", "--format=%T", check=False
            ).stdout.split()
            jobs = self.run("squeue", "--noheader", "--format=%i", check=False)
            return (
                nodes == ["idle"] * NODES
                and jobs.returncode == 0
                and not jobs.stdout.strip()
                and not self.stepd_pids()
            )

        self._wait(idle, timeout, "the nodes to be idle")

    # -- start, stop and restore -------------------------------------------------------------------

    def start(self) -> None:
        """Start the cluster and wait until its nodes are idle; after an error, nothing runs."""
        missing = missing_packages(accounting=self.accounting)
        if missing:
            raise ClusterError(f"there is no {', '.join(missing)}: `make packages` installs them")
        try:
            self._claim_ports()
            self._write_files()
            self._start_munged()
            if self.accounting:
                self._start_accounting()
            self.start_controller()
            for number in range(1, NODES + 1):
                self._daemon(["slurmd", "-N", f"n{number}"])
            self.wait_idle()
        except BaseException:
            self.stop()
            raise

    @classmethod
    def attached(cls, directory: str | Path) -> SlurmCluster:
        """Return a cluster that another process has started and will stop."""
        cluster = cls(directory)
        conf_lines = dict(
            line.split("=", 1)
            for line in cluster.conf.read_text().splitlines()
            if not line.startswith(("NodeName", "PartitionName"))
        )
        cluster._port = int(conf_lines["SlurmctldPort"])
        cluster.accounting = conf_lines["AccountingStorageType"] != "accounting_storage/none"
        cluster.settings = {
            name: value
            for name, value in conf_lines.items()
            if str(cluster._settings().get(name)) != value
        }
        return cluster

    def restore(self) -> None:
        """Restart killed daemons, resume frozen ones, cancel all jobs and resume all nodes."""
        if (pid := self._pid("slurmctld")) is None:
            self.start_controller()
        else:
            _signal(pid, signal.SIGCONT)
        for number in range(1, NODES + 1):
            if self._pid(f"slurmd.n{number}") is None:
                self._daemon(["slurmd", "-N", f"n{number}"])
        self.cancel_all()
        for line in self.run(
            "sinfo", "--Node", "--noheader", "--partition=main", "--format=%N %T"
        ).stdout.splitlines():
            node, state = line.split()
            if state.startswith(("drain", "down", "fail")):
                self.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
        self.wait_idle()

    def stop(self) -> None:
        """Stop all daemons and kill what jobs have left running; keep the directory."""
        for name in (
            "slurmctld",
            *(f"slurmd.n{number}" for number in range(1, NODES + 1)),
            "slurmdbd",
            "mariadb",
            "munged",
        ):
            self._end(name, signal.SIGTERM)
        # The rest: slurmstepds, processes of jobs, daemons without a pid file yet.
        for pid in self.processes():
            _signal(pid, signal.SIGKILL)
        if self._claim is not None:
            self._claim.close()
            self._claim = None

    def kill_node(self, number: int, number_of_signal: int = signal.SIGKILL) -> None:
        """Kill the slurmd of node n<number>; job steps on the node keep running."""
        self._end(f"slurmd.n{number}", number_of_signal)

    def stop_controller(self, number_of_signal: int = signal.SIGTERM) -> None:
        """End slurmctld; it saves its state at SIGTERM, not at SIGKILL."""
        self._end("slurmctld", number_of_signal)

    def start_controller(self) -> None:
        """Start slurmctld and wait until it answers."""
        self._daemon(["slurmctld"])
        self._wait(
            lambda: self.run("scontrol", "ping", check=False).returncode == 0,
            TEST_TIMEOUT,
            "slurmctld to answer",
        )

    def thaw_controller(self) -> None:
        _signal(self._running("slurmctld"), signal.SIGCONT)

    @contextlib.contextmanager
    def configured(self, **settings: object) -> Iterator[None]:
        """Use these lines of slurm.conf inside the context; restart slurmctld before and after."""
        before = self.settings
        try:
            self._reconfigure(before | settings)
            yield
        finally:
            self._reconfigure(before)

    def processes(self) -> list[int]:
        """Return the live processes of this cluster: its daemons and the processes of its jobs.

        A client that only has SLURM_CONF set does not count.
        """
        conf, daemon = f"SLURM_CONF={self.conf}".encode(), f"{DAEMON}={self.directory}".encode()
        found = []
        for pid in all_pids():
            environ = _read(pid, "environ").split(b"\0")
            ours = daemon in environ or (
                conf in environ and any(entry.startswith(b"SLURM_JOB_ID=") for entry in environ)
            )
            if ours and pid != os.getpid() and alive(pid):
                found.append(pid)
        return found

    def stepd_pids(self) -> list[int]:
        """Return the live slurmstepds of this cluster: one per job step and node."""
        return [
            pid
            for pid in self.processes()
            if _read(pid, "cmdline").startswith((b"slurmstepd", b"/usr/sbin/slurmstepd"))
        ]

    # -- configuration and daemons -----------------------------------------------------------------

    def _claim_ports(self) -> None:
        """Find ten consecutive free ports and reserve them.

        An abstract Unix socket keeps other test clusters from the same ports.
        """
        for first in PORTS:
            claim = socket.socket(socket.AF_UNIX)
            try:
                claim.bind(f"\0clusterjob-test-slurm-{first}")
            except OSError:
                claim.close()
                continue
            if all(_free(port) for port in range(first, first + 10)):
                self._claim, self._port = claim, first
                return
            claim.close()
        raise ClusterError(f"no ten free ports in a row between {PORTS.start} and {PORTS.stop}")

    def _write_files(self) -> None:
        for name in ("etc", "run", "log", "state", "spool", "devices", "munge", "tmp"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        for number in range(GPUS):
            device = self.directory / "devices" / f"gpu{number}"
            try:
                os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))  # the device of /dev/null
            except FileExistsError:
                pass
            except PermissionError:  # not root, or a container without CAP_MKNOD
                device.symlink_to("/dev/null")
        files = f"{self.directory}/devices/gpu[0-{GPUS - 1}]"
        write_tree(
            self.directory,
            **{
                "etc/gres.conf": f"AutoDetect=off\nName=gpu Type=a100 File={files}\n",
                "etc/cgroup.conf": "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n",
            },
        )
        self._write_conf()

    def _settings(self) -> dict[str, object]:
        """Return the cluster-wide lines of slurm.conf; see slurm.conf(5)."""
        directory = self.directory
        return {
            "ClusterName": "test",
            "SlurmctldHost": f"{socket.gethostname().split('.')[0]}(127.0.0.1)",
            "SlurmctldPort": self._port,
            "SlurmUser": self.user,
            "SlurmdUser": self.user,
            "AuthType": "auth/munge",
            # A requeued job starts again only after its credential has expired.
            "AuthInfo": f"socket={directory}/munge/socket,cred_expire=10",
            "StateSaveLocation": directory / "state",
            "SlurmdSpoolDir": directory / "spool" / "%n",
            "SlurmctldPidFile": directory / "run" / "slurmctld.pid",
            "SlurmdPidFile": directory / "run" / "slurmd.%n.pid",
            "SlurmctldLogFile": directory / "log" / "slurmctld",
            "SlurmdLogFile": directory / "log" / "slurmd.%n",
            # Take CPUs and memory from slurm.conf; use no cgroups and no core binding.
            "SlurmdParameters": "config_overrides",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "MpiDefault": "none",
            "SwitchType": "switch/none",
            # Schedule at once; a production site batches this work.
            "SchedulerType": "sched/backfill",
            "SchedulerParameters": "sched_min_interval=0,sched_interval=2,batch_sched_delay=0,"
            "bf_interval=1,bf_min_age_reserve=0",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "KillWait": 3,
            "InactiveLimit": 0,
            "SlurmctldTimeout": 10,
            "SlurmdTimeout": 15,
            "MessageTimeout": 10,
            "TCPTimeout": 2,
            "MinJobAge": 300,
            "MaxArraySize": 1001,
            # Each element of an array counts as a job until MinJobAge after its end.
            "MaxJobCount": 100_000,
            "ReturnToService": 2,
            "JobRequeue": 1,
            "RebootProgram": "/bin/false",
            "GresTypes": "gpu",
            "AccountingStorageType": "accounting_storage/none",
        } | (
            {
                "AccountingStorageType": "accounting_storage/slurmdbd",
                "AccountingStorageHost": "127.0.0.1",
                "AccountingStoragePort": self._port + 9,
                "AccountingStoragePass": directory / "munge" / "socket",
                "AccountingStorageTRES": "gres/gpu",
            }
            if self.accounting
            else {}
        )

    def _reconfigure(self, settings: dict[str, object]) -> None:
        self.settings = settings
        self._write_conf()
        self.stop_controller()
        self.start_controller()
        self.run("scontrol", "reconfigure")  # for the slurmds

    def _write_conf(self) -> None:
        lines = [f"{name}={value}" for name, value in (self._settings() | self.settings).items()]
        for number in range(1, NODES + 1):
            node = (
                f"NodeName=n{number} NodeHostname=localhost NodeAddr=127.0.0.{number}"
                f" Port={self._port + number}"
            )
            lines.append(f"{node} CPUs=8 RealMemory=64000 Gres=gpu:a100:{GPUS}")
        lines.append(f"PartitionName=main Nodes=n[1-{NODES}] Default=YES MaxTime=INFINITE State=UP")
        lines.append("PartitionName=small Nodes=n1 MaxTime=1:00:00 State=UP")
        self.conf.write_text("\n".join(lines) + "\n")

    def _start_munged(self) -> None:
        folder = self.directory / "munge"
        (folder / "key").touch(0o600)
        (folder / "key").write_bytes(os.urandom(128))
        files = [
            f"--{name}={folder}/{name.partition('-')[0]}"
            for name in ("key-file", "log-file", "pid-file", "seed-file", "socket")
        ]
        self._daemon(["munged", "--force", "--num-threads=10", *files])
        (self.directory / "run" / "munged.pid").symlink_to(folder / "pid")

    def _start_accounting(self) -> None:
        database = self.directory / "database"
        server_options = [
            "--no-defaults",
            f"--datadir={database}",
            f"--user={self.user}",
            "--innodb-log-file-size=8M",
            "--innodb-buffer-pool-size=16M",
        ]
        self._call(
            [
                "mariadb-install-db",
                *server_options,
                f"--auth-root-socket-user={self.user}",
                "--skip-test-db",
            ]
        )
        run = self.directory / "run"
        with (self.directory / "log" / "mariadb").open("wb") as log:
            # mariadbd cannot put itself into the background: use setsid and a shell that exits.
            self._call(
                [
                    "sh",
                    "-c",
                    'setsid "$@" & :',
                    "sh",
                    "mariadbd",
                    *server_options,
                    "--skip-networking",
                    f"--socket={run}/mariadb.socket",
                    f"--pid-file={run}/mariadb.pid",
                    "--innodb-flush-log-at-trx-commit=0",
                    "--skip-log-bin",
                    "--innodb-lock-wait-timeout=900",
                ],
                log=log.fileno(),
            )
        conf = {
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={self.directory}/munge/socket",
            "DbdHost": "localhost",
            "DbdAddr": "127.0.0.1",
            "DbdPort": self._port + 9,
            "SlurmUser": self.user,
            "LogFile": f"{self.directory}/log/slurmdbd",
            "PidFile": f"{run}/slurmdbd.pid",
            "StorageType": "accounting_storage/mysql",
            "StorageHost": "localhost",
            "StorageUser": self.user,
            "StorageLoc": "slurm",
            "CommitDelay": 0,
        }
        path = self.directory / "etc" / "slurmdbd.conf"
        path.touch(0o600)  # slurmdbd accepts no other mode
        path.write_text("".join(f"{name}={value}\n" for name, value in conf.items()))
        self._wait((run / "mariadb.socket").exists, TEST_TIMEOUT, "MariaDB to listen")
        self._daemon(["slurmdbd"])
        show_cluster = ["sacctmgr", "--immediate", "--readonly", "show", "cluster"]
        self._wait(
            lambda: self.run(*show_cluster, check=False).returncode == 0,
            TEST_TIMEOUT,
            "slurmdbd to answer",
        )
        self.run("sacctmgr", "--immediate", "add", "cluster", "test")

    @property
    def _daemons_environment(self) -> dict[str, str]:
        return self.environment | {
            DAEMON: str(self.directory),
            "PATH": _PATH,
            "LANG": "C.UTF-8",
            # At its start, MariaDB removes temporary tables in TMPDIR, also those of other servers.
            "TMPDIR": f"{self.directory}/tmp",
            # The MySQL client library in slurmdbd connects to this socket.
            "MYSQL_UNIX_PORT": f"{self.directory}/run/mariadb.socket",
        }

    def _daemon(self, argv: list[str]) -> None:
        """Start a daemon that puts itself into the background."""
        with (self.directory / "log" / f"start-{Path(argv[0]).name}").open("ab") as log:
            self._call(argv, log=log.fileno())

    def _call(self, argv: list[str], log: int | None = None) -> None:
        output = subprocess.PIPE if log is None else log
        done = subprocess.run(
            argv,
            env=self._daemons_environment,
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            executable=shutil.which(argv[0], path=_PATH),
            timeout=TEST_TIMEOUT,
            check=False,
        )
        if done.returncode:
            output_text = (
                "" if log is not None else (done.stdout + done.stderr).decode(errors="replace")
            )
            raise ClusterError(
                f"{argv[0]} ended with exit code {done.returncode}\n{output_text}{self.tails()}"
            )

    def _pid(self, name: str) -> int | None:
        """Return a daemon's pid; None if it does not run or belongs to another cluster."""
        try:
            pid = int((self.directory / "run" / f"{name}.pid").read_text())
        except (OSError, ValueError):
            return None
        ours = f"{DAEMON}={self.directory}".encode() in _read(pid, "environ").split(b"\0")
        return pid if ours and alive(pid) else None

    def _running(self, name: str) -> int:
        pid = self._pid(name)
        if pid is None:
            raise ClusterError(f"{name} does not run\n{self.tails()}")
        return pid

    def _end(self, name: str, number: int) -> None:
        """Signal a daemon and wait for its end; send SIGKILL if it still runs after 10 s."""
        pid = self._pid(name)
        if pid is None:
            return
        _signal(pid, number)
        _signal(pid, signal.SIGCONT)
        try:
            self._wait(lambda: self._pid(name) != pid, 10, f"the end of {name}")
        except ClusterError:
            _signal(pid, signal.SIGKILL)
            self._wait(lambda: self._pid(name) != pid, 10, f"the end of {name}")

    def _wait(self, predicate: Callable[[], T | None], timeout: float, what: str) -> T:
        """Return the predicate's first true value."""
        end = time.monotonic() + timeout
        while not (value := predicate()):
            if time.monotonic() > end:
                raise ClusterError(f"waited {timeout:g} s for {what}\n{self.tails()}")
            time.sleep(0.05)
        return value

    def tails(self) -> str:
        """Return the last lines of all logs."""
        return "\n".join(
            f"-- {path.name}:\n" + "\n".join(path.read_text(errors="replace").splitlines()[-15:])
            for path in sorted((self.directory / "log").glob("*"))
        )


def missing_packages(*, accounting: bool) -> list[str]:
    """Return the Debian packages that are missing on this machine."""
    wanted = PACKAGES | (ACCOUNTING if accounting else {})
    return sorted(
        {
            package
            for program, package in wanted.items()
            if shutil.which(program, path=_PATH) is None
        }
    )


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dir",
        required=True,
        metavar="D",
        help="the cluster's directory; it must not exist, and is removed at the end",
    )
    parser.add_argument("--accounting", action="store_true", help="with slurmdbd and MariaDB")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a line of slurm.conf"
    )
    options = parser.parse_args()
    directory = Path(options.dir)
    if directory.exists():
        parser.error(f"{directory} exists")
    settings = dict(setting.split("=", 1) for setting in options.set)
    cluster = SlurmCluster(directory, accounting=options.accounting, **settings)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        cluster.start()
        print(
            "\n".join(f"export {name}={value}" for name, value in cluster.environment.items()),
            flush=True,
        )
        while sys.stdin.read(4096):
            pass
    except KeyboardInterrupt:
        pass
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        cluster.stop()
        shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
