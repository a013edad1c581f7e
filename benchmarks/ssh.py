"""Measure how fast jobs start on SSH hosts, against ssh with torchrun and against pdsh.

The hosts are sshd servers on this machine, each in a network namespace of its own
(`tests/support/ssh_network.py`; needs root). The sides of a comparison take turns. The exit code is
1 if a target is missed. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from measuring import WORKERS, Failed, command, environment, run
from ssh_network import SshNetwork, skip_reason, ssh_network_in

PARTS = ("start", "fan", "resend")
START_TARGET = 0.40  # ours / ssh and torchrun
FAN_TARGET, HANDSHAKE_TARGET = 0.8, 1.2  # ours / pdsh; ours / the handshakes alone
RESEND_TARGET = 0.5  # additional seconds for 2,000 files that the hosts already have
HOSTS, FILES = 64, 2000
JOB_TIMEOUT = 300.0  # seconds for one job


def in_turns(runs: int, sides: Sequence[Callable[[], float]]) -> list[float]:
    """Run the sides in turns; return their median seconds without the first turn."""
    taken: list[list[float]] = [[] for _ in sides]
    for turn in range(runs + 1):
        for index, side in enumerate(sides):
            seconds = side()
            if turn:
                taken[index].append(seconds)
    return [statistics.median(times) for times in taken]


class Bench:
    """The hosts and the directory from which jobs are submitted."""

    def __init__(self, ssh_network: SshNetwork, directory: Path, runs: int) -> None:
        self.ssh_network = ssh_network
        self.directory = directory
        self.runs = runs
        self.environ = environment(directory / "home") | {
            "PYTHONPATH": str(Path(__file__).resolve().parent.parent)
        }
        self.missed = 0

    def show(self, what: str, value: float, target: float, unit: str, detail: str) -> None:
        """Print one line of the result."""
        met = value <= target
        self.missed += not met
        print(
            f"{what:<48} {value:6.2f} {unit}  target {target:.2f}  "
            f"{'met' if met else 'MISSED'}   ({detail})",
            flush=True,
        )

    def place(self, name: str, files: int = 0) -> Path:
        """Make a working directory with the script and this number of small files."""
        place = self.directory / name
        place.mkdir()
        shutil.copy(WORKERS / "first_all_reduce.py", place)
        for number in range(files):
            folder = place / f"part{number % 20}"
            folder.mkdir(exist_ok=True)
            (folder / f"module{number}.py").write_text(f"VALUE = {number}\n" * (number % 200 + 1))
        return place

    def submit(self, place: Path, *arguments: str) -> tuple[float, float, str]:
        """Submit a job; return the begin and end of the submission and the job's id."""
        argv = [
            command("clusterjob"),
            "submit",
            "--hosts",
            "gpu[1-2]",
            "--set",
            f"ssh_config={self.ssh_network.config}",
            *arguments,
        ]
        begin, end, code, output = run(argv, self.environ, place)
        if code:
            raise Failed(f"{argv} ended with exit code {code}: {output[-600:]}")
        return begin, end, output.split()[-1]

    def finish(self, job_id: str, place: Path) -> None:
        """Wait until a job has ended."""
        _, _, code, output = run([command("clusterjob"), "wait", job_id], self.environ, place)
        if code:
            raise Failed(f"{job_id} ended with exit code {code}: {output[-600:]}")

    def start(self) -> None:
        """Measure the time to rank 0's first all-reduce on 2 hosts with 4 ranks each."""
        place, done = self.place("start"), self.directory / "done"

        def ours() -> float:
            done.unlink(missing_ok=True)
            remote = (
                "--python",
                sys.executable,
                "--nproc-per-node",
                "4",
                "first_all_reduce.py",
                str(done),
            )
            begin, _, job_id = self.submit(place, *remote)
            while not done.exists() and time.monotonic() < begin + JOB_TIMEOUT:
                time.sleep(0.05)  # `clusterjob wait` would use the few cores that the job needs
            self.finish(job_id, place)
            return float(done.read_text()) - begin

        def theirs() -> float:
            done.unlink(missing_ok=True)
            lines = []
            for node in range(2):
                # Without GLOO_SOCKET_IFNAME, gloo binds to the loopback interface here, because
                # no resolver knows the hosts.
                torchrun = [
                    "env",
                    "GLOO_SOCKET_IFNAME=eth0",
                    command("torchrun"),
                    "--nnodes",
                    "2",
                    "--node-rank",
                    str(node),
                ]
                rendezvous = [
                    "--nproc-per-node",
                    "4",
                    "--master-addr",
                    "10.77.0.1",
                    "--master-port",
                    "29511",
                ]
                remote = [*torchrun, *rendezvous, str(place / "first_all_reduce.py"), str(done)]
                words = shlex.quote(shlex.join(remote))
                lines.append(f"ssh -F {self.ssh_network.config} gpu{node + 1} {words} &")
            begin, _, code, output = run(
                ["sh", "-c", "\n".join([*lines, "wait"])], self.environ, place
            )
            if code or not done.exists():
                raise Failed(f"ssh and torchrun ended with exit code {code}: {output[-600:]}")
            return float(done.read_text()) - begin

        mine, other = in_turns(self.runs, (ours, theirs))
        self.show(
            "2 hosts x 4 ranks, to the first all-reduce",
            mine / other,
            START_TARGET,
            "x",
            f"{mine:.2f} s, torchrun {other:.2f} s",
        )

    def fan(self) -> None:
        """Measure one command on each of many hosts, against pdsh and against bare logins."""
        if shutil.which("pdsh") is None:
            raise Failed("there is no pdsh to compare with: apt-get install pdsh")
        names = f"gpu[1-{HOSTS}]"
        fan_out = [sys.executable, str(WORKERS / "fan_out.py"), str(self.ssh_network.config), names]
        pdsh = ["pdsh", "-f", str(HOSTS), "-R", "ssh", "-S", "-w", names, "true"]
        environ = self.environ | {"PDSH_SSH_ARGS": f"-F {self.ssh_network.config} -2 -a -x -l%u %h"}

        def timed(argv: list[str]) -> Callable[[], float]:
            def side() -> float:
                begin, end, code, output = run(argv, environ, self.directory)
                if code:
                    raise Failed(f"{argv} ended with exit code {code}: {output[-600:]}")
                return end - begin

            return side

        mine, other, bare = in_turns(
            self.runs, (timed([*fan_out, "true"]), timed(pdsh), timed(fan_out))
        )
        self.show(
            f"{HOSTS} hosts, one command each, beside pdsh",
            mine / other,
            FAN_TARGET,
            "x",
            f"{mine:.2f} s, pdsh {other:.2f} s",
        )
        self.show(
            f"{HOSTS} hosts, beside the handshakes alone",
            mine / bare,
            HANDSHAKE_TARGET,
            "x",
            f"handshakes {bare:.2f} s",
        )

    def resend(self) -> None:
        """Compare a second submission of 2,000 unchanged files with one of a single file."""
        small, large = self.place("small"), self.place("large", FILES)
        store = self.ssh_network.hosts["gpu2"].home / ".clusterjob" / "store"

        def side(place: Path) -> Callable[[], float]:
            def submit() -> float:
                begin, end, job_id = self.submit(place, "--set", "need_torch=false", "--", "true")
                self.finish(job_id, place)
                return end - begin

            return submit

        side(large)()
        before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
        one, many = in_turns(self.runs, (side(small), side(large)))
        if {path: path.stat().st_mtime_ns for path in store.rglob("*")}.keys() - before.keys():
            raise Failed("file data was sent again")
        self.show(
            f"{FILES} unchanged files, beside a single one",
            many - one,
            RESEND_TARGET,
            "s",
            f"{many:.2f} s and {one:.2f} s",
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all of them")
    parser.add_argument("--runs", type=int, default=7, help="turns that count; default 7")
    arguments = parser.parse_args()
    parts = arguments.parts or list(PARTS)
    if why := skip_reason():
        print(why, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="clusterjob-bench-") as name:
        directory = Path(name)
        (directory / "ssh").mkdir()
        with ssh_network_in(
            directory / "ssh", gpus=HOSTS if "fan" in parts else 2, inner=0
        ) as ssh_network:
            bench = Bench(ssh_network, directory, arguments.runs)
            with ssh_network.client():
                print(
                    f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, "
                    f"{time.strftime('%Y-%m-%d')}"
                )
                for part in parts:
                    getattr(bench, part)()
    return 1 if bench.missed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (Failed, subprocess.SubprocessError) as error:
        print(f"benchmarks/ssh.py: {error}", file=sys.stderr)
        sys.exit(1)
