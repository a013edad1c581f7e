"""Plan an SSH job: its files, its node script, and the command that starts each node."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterjob.backends import job_code, shared
from clusterjob.core import plans, python_env
from clusterjob.core.gpu_request import IDLE
from clusterjob.core.options import flags_of_backend_option
from clusterjob.core.render import render
from clusterjob.core.spec import JobSpec, launch_arguments
from clusterjob.errors import SpecError
from clusterjob.node.logs.job_dir import CODE

if TYPE_CHECKING:
    from clusterjob.remote import ssh_options
    from clusterjob.remote.sessions import Place

NAME = "ssh"
SCRIPT = "ssh-node.sh"
_KNOWN = (
    "ssh_config",
    "connect_timeout",
    "sync_limit",
    "remote_home",
    "transport",
    "need_torch",
)


@dataclass(frozen=True)
class SshOptions:
    """The ssh backend's values of --set.

    Attributes:
        ssh: connection settings of the hosts.
        need_torch: whether a host without torch is refused.
    """

    ssh: ssh_options.ConnectionSettings
    need_torch: bool

    @classmethod
    def of(cls, options: Mapping[str, str]) -> SshOptions:
        """Return the options of a job or of `clusterjob hosts`.

        Raises:
            SpecError: an option is unknown, or its value is not valid.
        """
        from clusterjob.remote import ssh_options

        if (unknown := next((key for key in options if key not in _KNOWN), None)) is not None:
            flags = flags_of_backend_option(unknown)
            raise SpecError(
                f"unknown option {unknown!r} for the ssh cluster ({flags})",
                f"the options are {', '.join(_KNOWN)}",
            )
        torch = shared.switch(options, "need_torch", default=True)
        return cls(ssh_options.ConnectionSettings.of(options), torch)


def plan(spec: JobSpec) -> plans.Plan:
    """Return the plan of a job without contacting a host.

    Raises:
        SpecError: there are fewer hosts than nodes, no hosts, or an option is not valid.
        TemplateError: the user's template cannot be rendered.
    """
    spec, options = settled(spec), SshOptions.of(spec.options)
    job_id, job_dir = shared.new_directory(spec.name)
    env = python_env.read(spec)
    return plans.Plan(
        job_id=job_id,
        backend=NAME,
        job_dir=job_dir,
        spec=spec,
        files=(
            *shared.common_files(spec, job_dir, env),
            shared.script_file(
                job_dir / SCRIPT,
                render(
                    spec.template or f"{SCRIPT}.j2", _values(spec, job_id, job_dir=job_dir, env=env)
                ),
            ),
        ),
        commands=tuple(
            plans.PlannedCommand(
                ("ssh", str(host), "bash", f"{options.ssh.remote_home}/jobs/{job_id}/{SCRIPT}"),
                _environment(spec, node),
                node_rank=node,
            )
            for node, host in enumerate(spec.hosts[: spec.resources.nodes])
        ),
        notes=(
            *job_code.notes(spec, sent=True),
            *(("--mem is not enforced on bare hosts",) if spec.resources.mem is not None else ()),
            *(env.notes if env is not None else ()),
        ),
        sends_code=spec.sync,
    )


def place_of(spec: JobSpec, settings: ssh_options.ConnectionSettings) -> Place:
    """Return the hosts of a job, one per node.

    If the hosts prepare the job's environment, the host server runs on any new enough Python of
    the host; the setup line ``:`` allows that.
    """
    hosts = spec.hosts[: spec.resources.nodes]
    if python_env.travels(spec):
        return settings.place(hosts, "python3", (":", *spec.setup))
    return settings.place(hosts, spec.python, spec.setup)


def _values(
    spec: JobSpec, job_id: str, job_dir: Path, env: python_env.PythonEnv | None
) -> dict[str, Any]:
    options = spec.launch_options(echo=False)
    if _uneven(spec) and not spec.nproc_word:
        options = replace(options, nproc_per_node=None)
    return {
        **shared.common_values(spec, job_id, job_dir=job_dir),
        **python_env.values(env, spec, '"$CLUSTERJOB_JOB_DIR"', sent=spec.sync),
        "token_file": plans.token_file(Path()).name,
        "workdir": CODE if spec.sync else str(spec.workdir),
        "launch_arguments": launch_arguments(options),
    }


def settled(spec: JobSpec) -> JobSpec:
    """Return the job with its script relative to the sent directory.

    Its first hosts are its nodes. A later one replaces a host that cannot be used at the
    submission.

    Raises:
        SpecError: there are too few hosts, or the job requests a feature that bare hosts lack.
    """
    if not spec.hosts:
        raise SpecError("the ssh cluster needs hosts", "set --hosts a,b[1-4] or --hostfile FILE")
    nodes = spec.resources.nodes
    if nodes > len(spec.hosts):
        raise SpecError(
            f"--nodes {nodes}: there are only {len(spec.hosts)} hosts",
            "add hosts to --hosts, or lower --nodes",
        )
    _check_gpus(spec)
    if spec.gpus == IDLE and spec.resources.gpus_per_node is None and spec.nproc_is_default:
        # Each host starts one worker on each of its idle GPUs.
        spec = replace(spec, nproc_word=spec.nproc_word or "gpu")
    return replace(
        spec,
        program=shared.sent_program(spec),
        nproc_is_default=bool(spec.nproc_word),
    )


def _check_gpus(spec: JobSpec) -> None:
    asked = spec.resources.gpus_per_node
    if spec.gpus and spec.gpus != IDLE:
        listed = spec.gpus.split(",")
        if not all(re.fullmatch(r"\d{1,4}|GPU-[\w-]+", entry, re.ASCII) for entry in listed) or len(
            set(listed)
        ) < len(listed):
            raise SpecError(
                f"--gpus {spec.gpus!r} is not a list of GPUs",
                "write it as 0,1,4 or device=4, or auto:4 for idle GPUs",
            )
        if asked != len(listed):
            raise SpecError(
                f"--gpus {spec.gpus} names {len(listed)} GPUs, but --gpus-per-node is {asked}",
                "leave one of them out",
            )


def _uneven(spec: JobSpec) -> bool:
    return len({host.slots for host in spec.hosts}) > 1


def _environment(spec: JobSpec, node: int) -> dict[str, str]:
    """Return the variables of a node's script; the submission adds CLUSTERJOB_MASTER_ADDR."""
    env = {"CLUSTERJOB_NODE_RANK": str(node), "CLUSTERJOB_HOST": str(spec.hosts[node])}
    if _uneven(spec):
        env["CLUSTERJOB_NPROC_PER_NODE"] = str(spec.hosts[node].slots or 1)
    if spec.resources.gpus_per_node == 0:
        env["CUDA_VISIBLE_DEVICES"] = ""
    return env
