"""Run Slurm's client commands with a timeout, on this machine or on a login host."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterjob.errors import SubmitError
from clusterjob.node.environments.slurm_env import slurm_environment

if TYPE_CHECKING:
    from clusterjob.backends.slurm.login_host import LoginHost
    from clusterjob.backends.slurm.remote_command import RemoteCommand

UNREACHED = -1000  # exit code of a command whose result the login host did not send
# Timeout in seconds of `scontrol ping` if no cluster is named. Without a configuration, the command
# takes 0.06 s.
_PING = 3.0
_MAX_MESSAGE = 2000  # maximum characters of an error message
TIMEOUT = 60.0  # seconds for one command; Slurm's commands have their own timeout of 10 to 30 s

# After these errors the controller may have accepted the job, and may start the job when the
# controller runs again.
_IN_DOUBT = re.compile(
    r"timed out|Zero Bytes were transmitted|Unexpected message|Insane message"
    r"|communication failure",
    re.IGNORECASE,
)

_SILENT = re.compile(
    r"Unable to contact slurm controller|configuration source|slurm\.conf", re.IGNORECASE
)

_HINTS = (
    (
        r"DNS SRV|configuration source|slurm.conf",
        "no Slurm configuration found: set SLURM_CONF to the path of slurm.conf",
    ),
    (r"Unable to contact slurm controller", "`scontrol ping` shows whether the controller answers"),
    (r"invalid partition", "`sinfo -s` lists the partitions; choose one with --partition"),
    (r"generic resource|gres", "`sinfo -o '%P %D %G'` shows the GPUs of each partition"),
    (
        r"invalid account|account/partition",
        "`sacctmgr show assoc user=$USER` lists your accounts; choose one with --account",
    ),
    (r"invalid qos|QOS", "`sacctmgr show qos` lists them; choose one with --qos NAME"),
    (
        r"time limit",
        "`sinfo -o '%P %l'` shows the limit of each partition; set the job's with --time",
    ),
    (
        r"invalid feature",
        "`sinfo -o '%P %f'` lists the features; choose one with --set constraint=NAME",
    ),
    (
        r"node count|more processors|node configuration|nodes required|CPU count",
        "`sinfo -o '%P %D %c %m %G'` shows what the nodes have",
    ),
    (r"node name", "`sinfo -N` lists the nodes"),
    (r"dependency", "`clusterjob list` shows your jobs"),
    (r"array", "`scontrol show config` shows MaxArraySize"),
    (r"unrecognized option|invalid option", "`sbatch --help` lists the options"),
)


@dataclass(frozen=True)
class SlurmOutput:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """The start of stderr as one line, without the prefix ``COMMAND: error:``."""
        lines = [
            re.sub(r"^(?:\w+: (?:error: )?)?(?:allocation failure: )?", "", line).strip()
            for line in self.err[: 4 * _MAX_MESSAGE].splitlines()
        ]
        text = "; ".join(dict.fromkeys(filter(None, lines)))
        return text[:_MAX_MESSAGE] or f"exit code {self.code}"

    @property
    def silent(self) -> bool:
        """Whether Slurm's controller did not answer, or its configuration was not found."""
        return self.in_doubt or _SILENT.search(self.err) is not None

    @property
    def in_doubt(self) -> bool:
        """Whether the controller may have executed the command although it failed."""
        return self.code != 0 and (self.code < 0 or _IN_DOUBT.search(self.err) is not None)


@dataclass(frozen=True)
class Client:
    """Runs Slurm's commands.

    Attributes:
        conf: the configuration that the job was submitted with (SLURM_CONF); None for the
            configuration of this process's environment.
        cluster: name of the cluster in a federation, as printed by ``sbatch --parsable``; None if
            there is only one cluster.
        host: the login host that runs the commands; None for this machine.
        job_id: the job in whose directory on the login host the commands run; empty for none.
        hidden: variables of this process that the commands do not get: sbatch would pass them to
            the job.
    """

    conf: str | None = None
    cluster: str | None = None
    host: LoginHost | None = None
    job_id: str = ""
    hidden: Collection[str] = ()

    @property
    def key(self) -> str:
        """A string that differs between clusters."""
        place = (
            self.conf or os.environ.get("SLURM_CONF", "")
            if self.host is None
            else f"login\0{self.host.name}"
        )
        return f"{place}\0{self.cluster or ''}"

    def start(
        self, argv: Sequence[str], more: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str] | RemoteCommand:
        """Start a Slurm command, without variables of an enclosing job (submitit#1814).

        Raises:
            SubmitError: the command is not installed.
        """
        command = [argv[0], *([f"--clusters={self.cluster}"] if self.cluster else []), *argv[1:]]
        added = ({"SLURM_CONF": self.conf} if self.conf else {}) | dict(more or {})
        if self.host is not None:
            return self.host.start(command, added, job_id=self.job_id)
        own = {
            name: value
            for name, value in slurm_environment(os.environ, argv[0]).items()
            if name not in self.hidden
        }
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                env=own | added,
                errors="surrogateescape",
            )
        except OSError as error:
            raise SubmitError(
                f"{argv[0]} cannot be run: {error.strerror}",
                "add Slurm's client commands to PATH",
            ) from error

    def run(
        self, argv: Sequence[str], more: Mapping[str, str] | None = None, timeout: float = TIMEOUT
    ) -> SlurmOutput:
        """Run a Slurm command to its end; kill it after timeout (seconds).

        Raises:
            SubmitError: the command is not installed.
        """
        process = self.start(argv, more)
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException as error:
            process.kill()
            process.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return SlurmOutput(-9, "", err=f"{argv[0]}: timed out after {timeout:g} s")
        return SlurmOutput(process.returncode, out, err=err)


def hint(message: str) -> str:
    """Return the hint for an error message of Slurm; empty if the message is not known."""
    return next(
        (text for pattern, text in _HINTS if re.search(pattern, message, re.IGNORECASE)), ""
    )


def is_here() -> bool:
    """Return whether Slurm's commands on this machine have a configuration.

    If no usual place has one, `scontrol ping` decides: with a configuration it prints the
    controllers, up or down.
    """
    configured = (
        "/etc/slurm/slurm.conf",
        "/etc/slurm-llnl/slurm.conf",
        "/run/slurm/conf/slurm.conf",
        "/etc/default/sackd",
    )
    if any(map(os.environ.get, ("SLURM_CONF", "SLURM_CONF_SERVER"))) or any(
        map(os.path.exists, configured)
    ):
        return True
    try:
        return "Slurmctld(" in Client().run(["scontrol", "ping"], timeout=_PING).out
    except SubmitError:
        return False
