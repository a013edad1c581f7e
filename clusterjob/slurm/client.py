"""Slurm's commands, run as a client runs them: with an environment that names no other job, and never for ever."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clusterjob.errors import SubmitError
from clusterjob.node.contract import LAUNCH_VARIABLES

PATIENCE = 60.0  # seconds for one command; a client of Slurm gives up by itself after 10 to 30

# Inside a job all of Slurm's variables are that job's, but for those that say where the cluster is. In a login shell they are
# the user's own defaults, such as SBATCH_ACCOUNT.
_KEEP = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
_OF_A_JOB = ("SLURM", "SBATCH_", "SRUN_", "SALLOC_", "PMI_", "PMIX_")
_NAMES_OF_A_JOB = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")

# Defaults of the user's that would make an answer another than what was asked for: squeue's of one partition alone, say; or a job
# another than its record says: an array, or a command that waits for the job's end.
_DEFAULTS_OF_ANSWERS = ("SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_")
_DEFAULTS_OF_SHAPE = frozenset(
    f"SBATCH_{name}" for name in (
        "ARRAY_INX", "ERROR", "EXPORT", "GPUS_PER_TASK", "INPUT", "JOB_NAME", "NO_REQUEUE", "OPEN_MODE", "OUTPUT", "QUIET", "REQUEUE",
        "SIGNAL", "TEST_ONLY", "VERBOSE", "WAIT",
    )
)  # fmt: skip

# After these words nobody knows whether the controller has taken the job: it may run once it is back.
_IN_DOUBT = re.compile(r"timed out|Zero Bytes were transmitted|Unexpected message|Insane message|communication failure", re.IGNORECASE)

_SILENT = re.compile(r"Unable to contact slurm controller|configuration source|slurm\.conf", re.IGNORECASE)

_HINTS = (
    (r"DNS SRV|configuration source|slurm.conf", "this machine has no configuration of Slurm's: SLURM_CONF names one"),
    (r"Unable to contact slurm controller", "`scontrol ping` shows whether the controller answers"),
    (r"invalid partition", "`sinfo -s` lists the partitions; --partition names one"),
    (r"generic resource|gres", "`sinfo -o '%P %D %G'` shows the GPUs of each partition"),
    (r"invalid account|account/partition", "`sacctmgr show assoc user=$USER` lists your accounts; --account names one"),
    (r"invalid qos|QOS", "`sacctmgr show qos` lists them; --set qos=NAME names one"),
    (r"time limit", "`sinfo -o '%P %l'` shows the limit of each partition; --time sets the job's"),
    (r"invalid feature", "`sinfo -o '%P %f'` lists the features; --set constraint=NAME asks for one"),
    (r"node count|more processors|node configuration|nodes required|CPU count", "`sinfo -o '%P %D %c %m %G'` shows what the nodes have"),
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
        """Its complaint as one line, without the command's name before each."""
        lines = [re.sub(r"^(?:\w+: (?:error: )?)?(?:allocation failure: )?", "", line).strip() for line in self.err.splitlines()]
        return "; ".join(dict.fromkeys(line for line in lines if line)) or f"exit code {self.code}"

    @property
    def silent(self) -> bool:
        """Whether there was nobody who could have answered, or who did."""
        return self.in_doubt or _SILENT.search(self.err) is not None

    @property
    def in_doubt(self) -> bool:
        """Whether the controller may have done what it was asked to do."""
        return self.code != 0 and (self.code < 0 or _IN_DOUBT.search(self.err) is not None)


class Client:
    """Runs Slurm's commands on this machine.

    Args:
        conf: the configuration that the job was submitted with (SLURM_CONF); None for this environment's.
        cluster: name of the cluster in a federation, as ``sbatch --parsable`` told it; None for the only one.
    """

    def __init__(self, conf: str | None = None, cluster: str | None = None) -> None:
        self.conf = conf
        self.cluster = cluster

    @staticmethod
    def is_here() -> bool:
        """Return whether this machine can submit to a Slurm: sbatch is there, and something says where the controller is."""
        if shutil.which("sbatch") is None:
            return False
        configured = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf/slurm.conf", "/etc/default/sackd")
        return any(map(os.environ.get, _KEEP[:2])) or any(map(os.path.exists, configured))

    def environment(self) -> dict[str, str]:
        """Return this process's environment without what belongs to the job in which it may run (submitit#1814)."""
        inside = bool(os.environ.get("SLURM_JOB_ID"))
        kept = {name: value for name, value in os.environ.items() if name in _KEEP or not _of_a_job(name, inside=inside)}
        return kept | ({"SLURM_CONF": self.conf} if self.conf else {})

    def start(self, argv: Sequence[str], more: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a command of Slurm's.

        Raises:
            SubmitError: it is not installed here.
        """
        environ = self.environment() | dict(more or {})
        if argv[0] != "sbatch":
            environ = {name: value for name, value in environ.items() if not name.startswith(_DEFAULTS_OF_ANSWERS)}
        words = [argv[0], *([f"--clusters={self.cluster}"] if self.cluster else []), *argv[1:]]
        try:
            return subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ, encoding="utf-8",
                errors="surrogateescape",
            )  # fmt: skip
        except OSError as error:
            raise SubmitError(f"{argv[0]} cannot be run: {error.strerror}", "Slurm's client commands have to be on PATH") from error

    def run(self, argv: Sequence[str], more: Mapping[str, str] | None = None, patience: float = PATIENCE) -> Answer:
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
            return Answer(-9, "", f"{argv[0]}: timed out after {patience:g} s")
        except BaseException:
            process.kill()
            process.communicate()
            raise
        return Answer(process.returncode, out, err)


def _of_a_job(name: str, *, inside: bool) -> bool:
    if name.startswith("CLUSTERJOB_") or name in LAUNCH_VARIABLES or name in _DEFAULTS_OF_SHAPE:
        return True
    return inside and (name.startswith(_OF_A_JOB) or name in _NAMES_OF_A_JOB)


def hint(words: str) -> str:
    """Return what to do about Slurm's words, as far as they are known."""
    return next((text for pattern, text in _HINTS if re.search(pattern, words, re.IGNORECASE)), "")
