"""Checks of a task's YAML and the upload of its code, in the simulated platform.

Facts without another source are from the platform's documentation page "命令行工具" (command line
tool).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pathspec
import yaml

# The fields of the page's sample file, and CacheType, which exported tasks have, with their types.
# The simulation ignores DelayExitTimeSeconds and some other fields.
FIELDS: dict[str, type] = {
    "TaskName": str, "Description": str, "Entrypoint": str, "Args": str, "Tags": list,
    "UserCodePath": str, "RemoteMountCodePath": str, "Envs": list, "ImageUrl": str,
    "ImageCredential": object, "ResourceGroupID": object, "ResourceQueueID": str,
    "ResourceQueueName": str, "Framework": str, "TaskRoleSpecs": list,
    "ActiveDeadlineSeconds": int, "DelayExitTimeSeconds": int, "AccessType": str,
    "AccessUsers": object, "Preemptible": bool, "Priority": int, "RetryOptions": dict,
    "DiagOptions": object, "PrivateNetwork": object, "CustomServices": object,
    "EnableTensorBoard": object, "TensorBoardStorage": object, "SidecarMemoryRatio": object,
    "Storages": list, "CacheType": str,
}  # fmt: skip
ROLE_FIELDS: dict[str, type] = {
    "RoleName": str, "RoleReplicas": int, "Flavor": str, "GpuRate": object,
}  # fmt: skip
ENV_FIELDS: dict[str, type] = {"Name": str, "Value": str, "IsPrivate": bool}
RETRY_FIELDS: dict[str, type] = {
    "EnableRetry": bool, "EnableReserveResourceOnRetry": bool, "MaxRetryTimes": int,
    "IntervalSeconds": int, "PolicySets": list,
}  # fmt: skip
FRAMEWORKS = ("TensorFlowPS", "PyTorchDDP", "MXNet", "BytePS", "MPI", "Custom")
ACCESS = ("Public", "Queue", "Private")
STORAGES = ("Tos", "Sfcs", "Vepfs", "VepfsAP", "Nas")
POLICIES = ("Failed", "InstanceReclaimed", "MachineFailure")  # the last is from users' conf files


class Refused(Exception):
    """The service refuses the request; the text is the service's error message."""


def load(text: str) -> dict[str, Any]:
    """Return the conf file's fields."""
    try:
        conf = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise Refused(f"load config file failed: yaml: {' '.join(str(error).split())}") from None
    _check_types("TaskConfig", conf, FIELDS)
    return conf


def check(conf: dict[str, Any], settings: dict[str, Any]) -> None:
    """Raise Refused if the service would refuse the task.

    Args:
        conf: the task.
        settings: those of the service: queues (id to name), flavors (name to GPUs), priorities.
    """
    for name in ("TaskName", "Entrypoint", "ImageUrl", "TaskRoleSpecs"):
        if not conf.get(name):
            raise Refused(f"InvalidParameter: {name} is required")
    if conf.get("UserCodePath") and not conf.get("RemoteMountCodePath", "").startswith("/"):
        raise Refused("InvalidParameter: RemoteMountCodePath must be an absolute path")
    _check_choice("Framework", conf.get("Framework"), FRAMEWORKS)
    _check_choice("AccessType", conf.get("AccessType", "Queue"), ACCESS)
    queue_of(conf, settings["queues"])
    for role in conf["TaskRoleSpecs"]:
        _check_types("TaskRoleSpec", role, ROLE_FIELDS)
        _check_choice("RoleName", role.get("RoleName"), ("worker",))
        if role.get("RoleReplicas", 0) < 1:
            raise Refused("InvalidParameter: RoleReplicas must be at least 1")
        if role.get("Flavor") not in settings["flavors"]:
            raise Refused(f"ResourceNotFound.Flavor: flavor {role.get('Flavor')} not found")
    for env in conf.get("Envs", []):
        _check_types("Env", env, ENV_FIELDS)
        if not env.get("Name") or "\0" in env["Value"]:
            raise Refused("InvalidParameter: Envs")
    if "Priority" in conf:
        # "only some may be chosen (2, 4, 6 unless set otherwise)"; the queue's administrators use
        # the others.
        _check_choice("Priority", conf["Priority"], settings["priorities"])
    retry = conf.get("RetryOptions", {})
    _check_types("RetryOptions", retry, RETRY_FIELDS)
    for policy in retry.get("PolicySets", []):
        _check_choice("PolicySets", policy, POLICIES)
    for storage in conf.get("Storages", []):
        _check_choice("Storages Type", storage.get("Type"), STORAGES)
        if not str(storage.get("MountPath", "")).startswith("/"):
            raise Refused("InvalidParameter: Storages MountPath must be an absolute path")


def _check_types(what: str, value: Any, fields: dict[str, type]) -> None:
    if not isinstance(value, dict):
        raise Refused(f"load config file failed: yaml: cannot unmarshal {value!r} into {what}")
    for name, entry in value.items():
        if name not in fields:
            raise Refused(f"load config file failed: field {name} not found in type {what}")
        if fields[name] not in (object, type(entry)):
            raise Refused(f"load config file failed: cannot unmarshal {name} {entry!r}")


def _check_choice(name: str, value: Any, known: Iterable[Any]) -> None:
    if value not in known:
        raise Refused(f"InvalidParameter: {name} {value!r} is not one of {[*known]}")


def queue_of(conf: dict[str, Any], queues: dict[str, str]) -> str:
    """Return the queue's id; ResourceQueueName overrides ResourceQueueID."""
    if name := conf.get("ResourceQueueName"):
        found = [queue_id for queue_id, queue_name in queues.items() if queue_name == name]
    else:
        name = conf.get("ResourceQueueID")
        found = [queue_id for queue_id in queues if queue_id == name]
    if not name:
        raise Refused(
            "InvalidParameter: ResourceQueueID is required, there is no public queue in this region"
        )
    if not found:
        raise Refused(f"ResourceNotFound.ResourceQueue: resource queue {name} not found")
    return found[0]


# -- upload of code --------------------------------------------------------------------------------


def upload(code_path: str, cwd: Path, target: Path) -> None:
    """Copy the files at UserCodePath like the command's upload.

    "dir/" uploads the contents of the directory, "dir" the directory itself. Symbolic links, and
    files that a .gitignore names, are left out.
    """
    source = cwd / code_path
    if not source.exists():
        raise Refused(f"upload code failed: stat {code_path}: no such file or directory")
    target.mkdir(parents=True)
    if source.is_file():
        shutil.copy2(source, target / source.name)
    else:
        inside = target if code_path.endswith("/") else target / source.resolve().name
        inside.mkdir(exist_ok=True)
        _copy(source, inside, [])


def _copy(source: Path, target: Path, rules: list[tuple[Path, pathspec.GitIgnoreSpec]]) -> None:
    ignore = source / ".gitignore"
    if ignore.is_file():
        spec = pathspec.GitIgnoreSpec.from_lines(ignore.read_text(errors="replace").splitlines())
        rules = [*rules, (source, spec)]
    for path in source.iterdir():
        if path.is_symlink() or _ignored(path, rules, folder=path.is_dir()):
            continue
        if path.is_dir():
            (target / path.name).mkdir()
            _copy(path, target / path.name, rules)
        elif path.is_file():
            shutil.copy2(path, target / path.name)


def _ignored(path: Path, rules: list[tuple[Path, pathspec.GitIgnoreSpec]], *, folder: bool) -> bool:
    ignored = False
    for base, spec in rules:  # the .gitignore in the deepest folder decides
        match = spec.check_file(
            f"{path.relative_to(base).as_posix()}{'/' if folder else ''}"
        ).include
        ignored = ignored if match is None else match
    return ignored
