"""Turn options and configuration into the settings and the spec of a job."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterjob.backends import base
from clusterjob.core import config, gpu_request, hosts, node_count
from clusterjob.core.option import Target
from clusterjob.core.options import OPTIONS
from clusterjob.core.records import home, secure_home
from clusterjob.core.resources import MOST_NODES, Resources, at_least
from clusterjob.core.spec import JobSpec
from clusterjob.errors import OTHER_HOME, PlacementError, RecordError, SpecError
from clusterjob.node.environments import this_node
from clusterjob.node.program import Program
from clusterjob.node.system import files, private_dirs

_PREPARE_TIMEOUT = 1800.0  # default of --join-timeout if nodes prepare an environment


def resolve(
    flags: Mapping[str, Any], cluster: str | None, directory: Path, *, executes: bool = False
) -> config.Settings:
    """Return the settings of a job that is submitted from a directory.

    Args:
        flags: options of the command line.
        cluster: value of --cluster, or None.
        directory: the working directory.
        executes: whether the caller will execute anything or contact a host.

    Raises:
        PlacementError: this process runs inside a job, and no cluster was named.
        Untrusted: a project's file would execute something, and the user has not trusted it.
    """
    if isinstance(flags.get("env"), list):
        flags = {**flags, "env": [_with_value(item) for item in flags["env"]]}
    given = {
        key
        for key in ("hosts", "hostfile", "login")
        if key in flags or os.environ.get(OPTIONS[key].variable)
    }
    has_login = "login" in given
    has_hosts = bool(given - {"login"} or hosts.of_platform(os.environ))
    if cluster is None and not has_hosts and not has_login:
        _refuse_inside_a_job()
    preferred = (lambda: "slurm") if has_login else (lambda: "ssh") if has_hosts else base.preferred
    settings = config.resolve(
        flags,
        cluster,
        environ=os.environ,
        directory=directory,
        backends=base.names(),
        fallback=preferred,
        executes=executes,
    )
    return _with_kept_ssh_config(settings) if executes else settings


def _with_kept_ssh_config(settings: config.Settings) -> config.Settings:
    """Return the settings with the project's ssh configuration replaced by a private copy.

    `status` and other commands read the configuration later. Until then, somebody may add lines to
    the project's file that the user has not trusted. Other settings stay unchanged.
    """
    options = settings.values.get("set", {})
    named = options.get("ssh_config")
    if not isinstance(named, config.ProjectSshConfig):
        return settings
    try:
        content = Path(named).expanduser().read_bytes()
    except (OSError, RuntimeError):  # the backend reports the unreadable file
        return settings
    secure_home()
    kept = home() / "ssh_configs" / hashlib.sha256(content).hexdigest()[:32]
    try:
        private_dirs.make(kept.parent)
        files.write_atomic(kept, content)
    except OSError as error:
        raise RecordError(f"{kept} cannot be written: {error.strerror}", OTHER_HOME) from error
    return replace(
        settings, values={**settings.values, "set": {**options, "ssh_config": str(kept)}}
    )


def _with_value(item: str) -> str:
    """Return an item of ``--env`` as NAME=VALUE; a bare NAME gets this process's value."""
    if "=" in item:
        return item
    if item not in os.environ:
        raise SpecError(f"--env {item}: it is not set here", f"--env {item}=VALUE sets it")
    return f"{item}={os.environ[item]}"


def _refuse_inside_a_job() -> None:
    """Refuse to submit from inside a job: the new job might use that job's nodes by mistake.

    Raises:
        PlacementError: the environment is that of a job's node.
    """
    finding = this_node.detect(os.environ)
    if finding.source == "none":
        return
    variables = ", ".join(sorted(set(finding.evidence.values()))) or "its variables"
    raise PlacementError(
        f"this process already runs inside a job ({finding.source}: {variables})",
        "`clusterjob launch` starts this node's part of it; "
        "--cluster NAME submits to another cluster",
    )


def make_spec(program: Program, settings: config.Settings, directory: Path) -> JobSpec:
    """Return the job spec for a program and its settings.

    Args:
        program: the program to run.
        settings: the job's settings.
        directory: the default working directory, and the base of relative paths.

    Raises:
        SpecError: a field is invalid.
    """
    values = dict(settings.values)
    asked = gpu_request.merge(values.get("gpus"), values.get("gpus_per_node"))
    workers = values.pop("nproc_per_node", asked.count or None)
    if workers in ("gpu", "auto") and asked.count:
        workers = asked.count
    word = workers if isinstance(workers, str) else ""
    options = values.pop("set", {}) | _pop(values, Target.BACKEND)
    sized = workers is not None or asked.count is not None
    chosen = _hosts(values, settings.backend, directory=directory, sized=sized)
    slots = max((host.slots or 1 for host in chosen), default=1)
    wanted, spares = values.pop("nodes", None), values.get("spares", 0)
    at_least("--spares", spares, least=0, most=MOST_NODES)
    at_least("--nodes", wanted if isinstance(wanted, int) else None, least=1, most=MOST_NODES)
    nodes, min_nodes = node_count.machines(wanted, spares, hosts=len(chosen))
    resources = Resources(
        nodes=nodes,
        **_pop(values, Target.RESOURCES),
        gpus_per_node=asked.count,
        time_limit=values.pop("time", None),
        gpu_type=asked.type,
    )
    values.pop("gpus_per_node", None)
    # A job on this machine may be a rehearsal.
    values.setdefault("require_gpus", settings.backend != "local")
    values["gpus"] = asked.chosen
    for key in ("template", "env_archive"):
        if key in values:
            values[key] = directory / values[key]
    packed = values.get("uv") or "env_archive" in values
    if packed and values.get("launcher") != "srun":
        # Another node may need minutes to prepare the environment.
        values.setdefault("join_timeout", _PREPARE_TIMEOUT)
    if "env_archive" in values:
        values.pop("python", None)  # such as that of a profile: the archive has its own
    return JobSpec(
        program=program,
        resources=resources,
        workdir=directory / values.pop("workdir", ""),
        nproc_is_default=bool(word) or not sized,
        nproc_per_node=1 if word else slots if workers is None else workers,
        nproc_word=word,
        min_nodes=min_nodes,
        python=values.pop("python", None)
        or (
            "python3"
            if chosen or packed or values.get("container") or values.get("login")
            else default_python(os.environ)
        ),
        hosts=chosen,
        options=options,
        **values,
    )


def _pop(values: dict[str, Any], target: Target) -> dict[str, Any]:
    """Remove the options with this target from the values, and return them by key."""
    return {key: values.pop(key) for key in list(values) if OPTIONS[key].target is target}


def _hosts(
    values: dict[str, Any], backend: str, directory: Path, *, sized: bool
) -> tuple[hosts.Host, ...]:
    """Remove the hosts from the settings and return them.

    The hosts are those of --hosts or --hostfile. If neither is set, the ssh backend reads the hosts
    from the platform's variables.

    Args:
        values: the settings.
        backend: name of the cluster's backend.
        directory: base of relative paths.
        sized: whether an option gives the number of workers or GPUs of a node.
    """
    text, file = values.pop("hosts", None), values.pop("hostfile", None)
    found = hosts.named_hosts(text, file, directory=directory)
    if not found:
        return hosts.of_platform(os.environ) if backend == "ssh" else ()
    if sized:
        # An explicit number of workers or GPUs overrides the slots of the host file.
        return tuple(replace(host, slots=None) for host in found)
    return found


def default_python(environ: Mapping[str, str]) -> str:
    """Return the default Python interpreter of a job.

    The default is the interpreter of the active virtual or conda environment, else the interpreter
    that runs clusterjob. An isolated installation (pipx, uv tool) usually has no torch: its default
    is python3 from PATH.
    """
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if folder := environ.get(variable):
            candidate = Path(folder) / "bin" / "python"
            if candidate.is_file():
                return str(candidate)
    marks = ("pipx_metadata.json", "uv-receipt.toml")
    isolated = any((Path(sys.prefix) / mark).is_file() for mark in marks)
    return (shutil.which("python3") if isolated else None) or sys.executable
