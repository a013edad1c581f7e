"""Suggest an option for a mistyped one, or for one of torchrun, sbatch, mpirun, accelerate."""

from __future__ import annotations

from collections.abc import Iterable

from clusterjob.errors import did_you_mean

# Options of other launchers, with the equivalent option of clusterjob.
_OURS = {
    "--num-nodes": "--nodes", "--num-machines": "--nodes",
    "--nproc": "--nproc-per-node", "-n": "--nproc-per-node", "--np": "--nproc-per-node",
    "--ntasks": "--nproc-per-node", "--ntasks-per-node": "--nproc-per-node",
    "--num-processes": "--nproc-per-node", "--num-gpus": "--gpus", "-G": "--gpus",
    "--gres": "--gpus", "--gpus-per-task": "--gpus", "--accelerators": "--gpus",
    "--timeout": "--time", "--job-name": "--name", "-D": "--workdir", "--chdir": "--workdir",
    "-w": "--nodelist", "-x": "--exclude", "-a": "--array", "-d": "--after",
    "--dependency": "--after", "-H": "--hosts", "--host": "--hosts", "--export": "--env",
    "-q": "--qos", "--signal": "--signal-before",
    "-r": "--max-restarts", "-l": "--login", "-e": "--env",
    "--start-method": "--start", "--module": "-m MODULE", "--no-python": "-- COMMAND",
}  # fmt: skip
# Commands of other programs, with the equivalent command of clusterjob.
COMMANDS = {
    "kill": "cancel", "stop": "cancel", "delete": "cancel", "scancel": "cancel", "ps": "status",
    "queue": "status", "squeue": "status", "jobs": "list", "ls": "list", "sbatch": "submit",
    "srun": "run", "log": "logs", "tail": "logs", "attach": "shell", "ssh": "shell",
    "torchrun": "launch", "remove": "clean", "rm": "clean", "dashboard": "top",
}  # fmt: skip
_SBATCH_LETTERS = {
    "-C": "constraint",
    "-L": "licenses",
    "-M": "clusters",
    "-b": "begin",
    "-m": "distribution",
}
# Options of torchrun that place one node.
_FOUND_OUT = ("--node-rank", "--master-addr", "--master-port", "--rdzv-endpoint")
# Options of torchrun for the output of each rank, with what clusterjob has instead.
_OUTPUT = ("--log-dir", "--redirects", "--tee", "--local-ranks-filter")


def suggest(word: str, known: Iterable[str]) -> str:
    """Return a hint for an option that a command does not have, or an empty string.

    Args:
        word: the option as the user wrote it, without its value.
        known: the options that the command has.
    """
    options = set(known)
    spelled = word.replace("_", "-") if word.startswith("--") else word
    ours = spelled if spelled in options else _OURS.get(spelled, "")
    if ours in options or (ours.endswith(("MODULE", "COMMAND")) and "--set" in options):
        return f"did you mean {ours}?"
    if "--set" in options:
        if spelled in _FOUND_OUT:
            return (
                "leave it out: the nodes of a job find each other; "
                "`clusterjob launch` starts one node manually and takes it"
            )
        if spelled in _OUTPUT:
            return "leave it out: `clusterjob logs` has a file for each rank"
        from clusterjob.backends.slurm import flags

        name = _SBATCH_LETTERS.get(spelled, spelled[2:] if spelled.startswith("--") else "")
        if name in flags.KNOWN:
            return f"it is an sbatch option: --set {name}=VALUE"
    return did_you_mean(spelled, sorted(options), cutoff=0.7)
