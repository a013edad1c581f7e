"""Slurm's commands, run as a client runs them: with an environment that names no other job, and
never for ever.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from clusterjob.errors import SubmitError
from clusterjob.node.environments.slurm_commands import slurm_environment

UNREACHED = -1000  # in the place of an exit code: nobody knows what became of the command
# Seconds for `scontrol ping`, where nobody names a cluster; 0.06 where there is no configuration.
_PING = 3.0
_MOST_WORDS = 2000  # characters of a complaint
PATIENCE = 60.0  # seconds for one command; a client of Slurm gives up by itself after 10 to 30

# After these words nobody knows whether the controller has taken the job: it may run once it is
# back.
_IN_DOUBT = re.compile(
    r"timed out|Zero Bytes were transmitted|Unexpected message|Insane message|communication failure",
    re.IGNORECASE,
)

_SILENT = re.compile(
    r"Unable to contact slurm controller|configuration source|slurm\.conf", re.IGNORECASE
)

_HINTS = (
    (
        r"DNS SRV|configuration source|slurm.conf",
        "there is no configuration of Slurm's: SLURM_CONF names one",
    ),
    (r"Unable to contact slurm controller", "`scontrol ping` shows whether the controller answers"),
    (r"invalid partition", "`sinfo -s` lists the partitions; --partition names one"),
    (r"generic resource|gres", "`sinfo -o '%P %D %G'` shows the GPUs of each partition"),
    (
        r"invalid account|account/partition",
        "`sacctmgr show assoc user=$USER` lists your accounts; --account names one",
    ),
    (r"invalid qos|QOS", "`sacctmgr show qos` lists them; --set qos=NAME names one"),
    (r"time limit", "`sinfo -o '%P %l'` shows the limit of each partition; --time sets the job's"),
    (
        r"invalid feature",
        "`sinfo -o '%P %f'` lists the features; --set constraint=NAME asks for one",
    ),
    (
        r"node count|more processors|node configuration|nodes required|CPU count",
        "`sinfo -o '%P %D %c %m %G'` shows what the nodes have",
    ),
    (r"node name", "`sinfo -N` lists the nodes"),
    (r"dependency", "`clusterjob list` shows your jobs"),
    (r"array", "`scontrol show config` shows MaxArraySize"),
    (r"unrecognized option|invalid option", "`sbatch --help` lists what there is here"),
)


@dataclass(frozen=True)
class Answer:
    """What a command said."""

    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """The beginning of its complaint as one line, without the command's name before each."""
        begin = self.err[: 4 * _MOST_WORDS].splitlines()
        lines = [
            re.sub(r"^(?:\w+: (?:error: )?)?(?:allocation failure: )?", "", line).strip()
            for line in begin
        ]
        return (
            "; ".join(dict.fromkeys(line for line in lines if line))[:_MOST_WORDS]
            or f"exit code {self.code}"
        )

    @property
    def silent(self) -> bool:
        """Whether there was nobody who could have answered, or who did."""
        return self.in_doubt or _SILENT.search(self.err) is not None

    @property
    def in_doubt(self) -> bool:
        """Whether the controller may have done what it was asked to do."""
        return self.code != 0 and (self.code < 0 or _IN_DOUBT.search(self.err) is not None)


class Started(Protocol):
    """A command that was started, as `subprocess.Popen` has it."""

    returncode: int | Any

    def communicate(self, *, timeout: float | None = None) -> tuple[str, str]:
        """Return stdout and stderr once it has ended; raises `subprocess.TimeoutExpired`."""

    def kill(self) -> None:
        """End it."""


class Shell(Protocol):
    """Another machine that Slurm's commands can be run on; see
    `clusterjob.backends.slurm.login_host`.
    """

    @property
    def name(self) -> str:
        """What tells it from other machines."""

    def start(self, argv: Sequence[str], more: Mapping[str, str]) -> Started:
        """Start a command in a clean environment of that machine's, with `more` added.

        Raises:
            SubmitError: it is not installed there.
        """


class Client:
    """Runs Slurm's commands.

    Args:
        conf: the configuration that the job was submitted with (SLURM_CONF); None for the
            environment's.
        cluster: name of the cluster in a federation, as ``sbatch --parsable`` told it; None for the
            only one.
        shell: where they are run; None for this machine.
        hidden: variables of this process that the commands are not to see: sbatch hands all of its
            own to the job.
    """

    def __init__(
        self,
        conf: str | None = None,
        cluster: str | None = None,
        shell: Shell | None = None,
        hidden: Collection[str] = (),
    ) -> None:
        self.conf = conf
        self.cluster = cluster
        self._shell = shell
        self._hidden = hidden

    @property
    def is_local(self) -> bool:
        """Whether the commands are run on this machine."""
        return self._shell is None

    @property
    def key(self) -> str:
        """What tells clusters apart."""
        place = (
            self.conf or os.environ.get("SLURM_CONF", "")
            if self._shell is None
            else f"login\0{self._shell.name}"
        )
        return f"{place}\0{self.cluster or ''}"

    @staticmethod
    def is_here() -> bool:
        """Return whether this machine can submit to a Slurm: sbatch is there, and something says
        where the controller is.

        Where its configuration lies in another place than usual, `scontrol ping` knows: it names a
        controller, up or down.
        """
        if shutil.which("sbatch") is None:
            return False
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
            return "Slurmctld(" in Client().run(["scontrol", "ping"], patience=_PING).out
        except SubmitError:
            return False

    def start(self, argv: Sequence[str], more: Mapping[str, str] | None = None) -> Started:
        """Start a command of Slurm's, with the environment's own words of no job (submitit#1814).

        Raises:
            SubmitError: it is not installed.
        """
        words = [argv[0], *([f"--clusters={self.cluster}"] if self.cluster else []), *argv[1:]]
        added = ({"SLURM_CONF": self.conf} if self.conf else {}) | dict(more or {})
        if self._shell is not None:
            return self._shell.start(words, added)
        own = {
            name: value
            for name, value in slurm_environment(os.environ, argv[0]).items()
            if name not in self._hidden
        }
        try:
            return subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                encoding="utf-8", env=own | added, errors="surrogateescape",
            )  # fmt: skip
        except OSError as error:
            raise SubmitError(
                f"{argv[0]} cannot be run: {error.strerror}",
                "Slurm's client commands have to be on PATH",
            ) from error

    def run(
        self, argv: Sequence[str], more: Mapping[str, str] | None = None, patience: float = PATIENCE
    ) -> Answer:
        """Run a command of Slurm's to its end, or until patience (seconds) ends.

        Raises:
            SubmitError: it is not installed here.
        """
        process = self.start(argv, more)
        try:
            out, err = process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return Answer(-9, "", err=f"{argv[0]}: timed out after {patience:g} s")
        except BaseException:
            process.kill()
            process.communicate()
            raise
        return Answer(process.returncode, out, err=err)


def hint(words: str) -> str:
    """Return what to do about Slurm's words, as far as they are known."""
    return next((text for pattern, text in _HINTS if re.search(pattern, words, re.IGNORECASE)), "")
