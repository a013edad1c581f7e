"""Check options of a job that exclude or need each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from clusterjob.core import notifications
from clusterjob.core.options import OPTIONS
from clusterjob.errors import SpecError

if TYPE_CHECKING:
    from clusterjob.core.spec import JobSpec

# Options of the nodes that srun follows too, or that only switch a part of the agent off.
_WITHOUT_AGENT = ("nproc_per_node", "cpus_per_task", "launcher", "start", "metrics")
_SRUN_HINTS = {
    "hang_timeout": "use --launcher agent; `clusterjob stacks` works with every launcher",
    "preflight": "use --launcher agent, or measure the nodes first: clusterjob doctor --run",
}
_NEEDS = {
    "env_cache": ("uv", "env_archive"),
    "notify_on": ("notify", "notify_cmd"),
    "require_gpus": ("gpus", "gpus_per_node"),
}


def check(spec: JobSpec) -> None:
    """Check the options of a job.

    Raises:
        SpecError: two options exclude each other, or one has an impossible value.
    """
    _check_notifications(spec)
    _check_metrics(spec)
    _check_environment(spec)
    if spec.grows_memory and not spec.resources.mem:
        raise SpecError(
            "--retry oom_host:N:mem*FACTOR needs --mem", "give the memory per node, such as 64G"
        )
    if spec.program.on_stdin and (spec.launcher in ("srun", "ray") or spec.elements()):
        raise SpecError(
            "a script on standard input needs --launcher agent, and no array",
            "save it as a file, and give its name",
        )
    _check_nodes(spec)
    _check_until_done(spec)
    _check_launcher(spec)


def _check_launcher(spec: JobSpec) -> None:
    if spec.start == "fork" and spec.launcher != "agent":
        raise SpecError(
            f"--start fork: --launcher {spec.launcher} starts the workers",
            "use --launcher agent",
        )
    if spec.launcher != "srun":
        return
    for option in OPTIONS.values():
        own = option.node and option.key not in _WITHOUT_AGENT
        if own and getattr(spec, option.key) != getattr(type(spec), option.key):
            raise SpecError(
                f"{option.flag} needs clusterjob's agent, and --launcher srun starts none",
                _SRUN_HINTS.get(option.key, "use --launcher agent"),
            )


def without_effect(values: Mapping[str, Any], origins: Mapping[str, str]) -> list[str]:
    """Return a line for each option of the command line that does nothing without another one.

    Args:
        values: the job's settings, by key.
        origins: the file, variable or option that sets each of them, by key.
    """
    return [
        f"{OPTIONS[key].flag} has no effect without {' or '.join(OPTIONS[o].flag for o in others)}"
        for key, others in _NEEDS.items()
        if origins.get(key) == OPTIONS[key].flag
        and values[key]
        and not any(values.get(other) for other in others)
    ]


def _check_until_done(spec: JobSpec) -> None:
    if spec.checkpoint_dir and not spec.until_done:
        raise SpecError("--checkpoint-dir belongs to --until-done", "add --until-done")
    if spec.warn_signal and spec.launcher != "agent":
        raise SpecError(
            f"--warn-signal {spec.warn_signal}: --launcher {spec.launcher} starts the workers",
            "use --launcher agent",
        )
    if spec.warn_signal and not (spec.until_done or spec.requeue or spec.signal_before):
        raise SpecError(
            f"--warn-signal {spec.warn_signal}: no warning would be sent",
            "add --until-done, or --requeue and --signal-before",
        )


def _check_notifications(spec: JobSpec) -> None:
    notifications.check_kinds(spec.notify_on)
    if not all(command.strip() for command in spec.notify_cmd):
        raise SpecError("--notify-cmd is empty", "write a shell command, or leave it out")
    if spec.notifies and spec.launcher == "srun":
        raise SpecError(
            "--notify needs clusterjob's agent, and --launcher srun starts none",
            "Slurm's own mail: --set mail-type=END,FAIL --set mail-user=ADDRESS",
        )


def _check_nodes(spec: JobSpec) -> None:
    if not spec.spares and spec.min_nodes is None:
        return
    flag = f"--spares {spec.spares}" if spec.spares else "--nodes MIN:MAX"
    if spec.working_nodes < 1:
        raise SpecError(
            f"{flag}: the job has {spec.resources.nodes} nodes, and none is left for its workers",
            "lower --spares, or add nodes",
        )
    if spec.min_nodes is not None and not 1 <= spec.min_nodes <= spec.working_nodes:
        raise SpecError(
            f"--nodes {spec.min_nodes}:{spec.working_nodes}: MIN must be at least 1, and at most"
            " MAX",
            "write it as 2:4",
        )
    if spec.launcher != "agent":
        raise SpecError(
            f"{flag} needs clusterjob's agent, and --launcher {spec.launcher} starts the workers",
            "use --launcher agent",
        )


def _check_metrics(spec: JobSpec) -> None:
    if not 0 <= spec.metrics_port < 1 << 16:
        raise SpecError(f"--metrics-port {spec.metrics_port}: must be from 1 to 65535")
    if spec.metrics_port and not spec.metrics:
        raise SpecError("--metrics-port and --no-metrics exclude each other")


def _check_environment(spec: JobSpec) -> None:
    if spec.uv and spec.env_archive is not None:
        raise SpecError("--uv and --env-archive exclude each other", "leave one of them out")
    if spec.container and (spec.uv or spec.env_archive is not None):
        flag = "--uv" if spec.uv else "--env-archive"
        raise SpecError(
            f"--container and {flag} exclude each other", "the image has its own interpreter"
        )
    if spec.env_archive is not None and "\0" in str(spec.env_archive):
        raise SpecError("--env-archive contains a NUL byte")
    if spec.env_cache and not spec.env_cache.startswith("/"):
        raise SpecError(
            f"--env-cache {spec.env_cache!r} is not an absolute path",
            "name a directory on the nodes' own disks, such as /scratch",
        )
