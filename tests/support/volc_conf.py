"""Checks of a task's YAML and the upload of its code, in the simulated platform.

Facts without another source are from the platform's documentation page "命令行工具" (command line
tool).
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pathspec
import yaml

# The fields of the page's sample file, and CacheType, which exported tasks have. The simulation
# ignores DelayExitTimeSeconds and some other fields.
FIELDS = {
    "TaskName", "Description", "Entrypoint", "Args", "Tags", "UserCodePath", "RemoteMountCodePath",
    "Envs", "ImageUrl", "ImageCredential", "ResourceGroupID", "ResourceQueueID",
    "ResourceQueueName", "Framework", "TaskRoleSpecs", "ActiveDeadlineSeconds",
    "DelayExitTimeSeconds", "AccessType", "AccessUsers", "Preemptible", "Priority", "RetryOptions",
    "DiagOptions", "PrivateNetwork", "CustomServices", "EnableTensorBoard", "TensorBoardStorage",
    "SidecarMemoryRatio", "Storages", "CacheType",
}  # fmt: skip
TEXTS = (
    "TaskName", "Description", "Entrypoint", "Args", "UserCodePath", "RemoteMountCodePath",
    "ImageUrl", "ResourceQueueID", "ResourceQueueName", "CacheType",
)  # fmt: skip
FRAMEWORKS = ("TensorFlowPS", "PyTorchDDP", "MXNet", "BytePS", "MPI", "Custom")
ACCESS = ("Public", "Queue", "Private")
STORAGES = ("Tos", "Sfcs", "Vepfs", "VepfsAP", "Nas")
ROLE_FIELDS = {"RoleName", "RoleReplicas", "Flavor", "GpuRate"}
RETRY_FIELDS = {
    "EnableRetry",
    "EnableReserveResourceOnRetry",
    "MaxRetryTimes",
    "IntervalSeconds",
    "PolicySets",
}
POLICIES = ("Failed", "InstanceReclaimed", "MachineFailure")  # the last is from users' conf files
# A flag overrides the field in the file and in --set.
FLAGS = {
    "task_name": "TaskName", "description": "Description", "user_code_path": "UserCodePath",
    "entrypoint": "Entrypoint", "args": "Args", "image": "ImageUrl",
    "resource_queue_id": "ResourceQueueID", "resource_queue_name": "ResourceQueueName",
    "framework": "Framework", "access_type": "AccessType", "access_users": "AccessUsers",
    "preemptible": "Preemptible", "priority": "Priority",
}  # fmt: skip


class Refused(Exception):
    """The service refuses the request; the text is the service's error message."""


@dataclass(frozen=True)
class Site:
    """Resources of the platform.

    Attributes:
        queues: id to name.
        flavors: name to number of GPUs.
        priorities: the allowed priorities.
        refuse_args: refuse tasks with Args, like one build of the command.
    """

    queues: dict[str, str]
    flavors: dict[str, int]
    priorities: list[int]
    refuse_args: bool = False


def load(text: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Return the conf file's fields, with the changes by flags."""
    try:
        conf = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise Refused(f"load config file failed: yaml: {' '.join(str(error).split())}") from None
    if not isinstance(conf, dict):
        raise Refused(
            "load config file failed: yaml: cannot unmarshal the document into a task config"
        )
    for pair in flags.get("set", []):
        _override(conf, pair)
    for flag, field in FLAGS.items():
        if flag in flags:
            value = flags[flag]
            if flag == "args":
                value = " ".join(value)  # "several values are joined into one, with spaces"
            elif flag == "priority":
                value = _whole("--priority", value)
            conf[field] = value
    if "resource_queue_id" in flags and "resource_queue_name" not in flags:
        conf.pop("ResourceQueueName", None)
    return conf


def _override(conf: dict[str, Any], pair: str) -> None:
    path, equals, value = pair.partition("=")
    if not equals:
        raise Refused(f"--set {pair}: not of the form key=value")
    *parents, last = path.split(".")
    section = conf
    for parent in parents:
        section = section.get(parent) if isinstance(section, dict) else None
    # "--set only overrides config items already defined in the config file". Users report that it
    # does not work for elements of lists.
    if not isinstance(section, dict) or last not in section:
        raise Refused(f"--set {path}: no such item in the config file")
    section[last] = yaml.safe_load(value)


def check(conf: dict[str, Any], site: Site) -> None:
    """Raise Refused if the service would refuse the task."""
    for name in conf:
        if name not in FIELDS:
            raise Refused(f"load config file failed: field {name} not found in type TaskConfig")
    for name in TEXTS:
        if not isinstance(conf.get(name) or "", str):
            raise Refused(f"load config file failed: cannot unmarshal {name} into string")
    for name in ("TaskName", "Entrypoint", "ImageUrl"):
        if not conf.get(name):
            raise Refused(f"InvalidParameter: {name} is required")
    if site.refuse_args and "Args" in conf:  # seen in one build of the command
        raise Refused("please remove Args from config and write it into Entrypoint")
    if conf.get("UserCodePath") and not str(conf.get("RemoteMountCodePath", "")).startswith("/"):
        raise Refused(
            "InvalidParameter: RemoteMountCodePath must be an absolute path"
            " when UserCodePath is set"
        )
    if conf.get("Framework") not in FRAMEWORKS:
        raise Refused(
            f"InvalidParameter: Framework {conf.get('Framework')!r} is not supported,"
            f" expected one of {'/'.join(FRAMEWORKS)}"
        )
    if conf.get("AccessType", "Queue") not in ACCESS:
        raise Refused(f"InvalidParameter: AccessType must be one of {'/'.join(ACCESS)}")
    queue_of(conf, site)
    _check_roles(conf.get("TaskRoleSpecs"), site)
    _check_envs(conf.get("Envs") or [])
    _check_numbers(conf, site)
    _check_retry(conf.get("RetryOptions") or {})
    for storage in conf.get("Storages") or []:
        if not isinstance(storage, dict) or storage.get("Type") not in STORAGES:
            raise Refused(f"InvalidParameter: Storages Type must be one of {'/'.join(STORAGES)}")
        if not str(storage.get("MountPath", "")).startswith("/"):
            raise Refused("InvalidParameter: Storages MountPath must be an absolute path")


def queue_of(conf: dict[str, Any], site: Site) -> str:
    """Return the queue's id; ResourceQueueName overrides ResourceQueueID."""
    name, queue = conf.get("ResourceQueueName"), conf.get("ResourceQueueID")
    if name:
        for queue_id, queue_name in site.queues.items():
            if queue_name == name:
                return queue_id
        raise Refused(f"ResourceNotFound.ResourceQueue: resource queue {name} not found")
    if not queue:
        raise Refused(
            "InvalidParameter: ResourceQueueID is required, there is no public queue in this region"
        )
    if queue not in site.queues:
        raise Refused(f"ResourceNotFound.ResourceQueue: resource queue {queue} not found")
    return str(queue)


def _check_roles(roles: Any, site: Site) -> None:
    if not isinstance(roles, list) or not roles:
        raise Refused("InvalidParameter: TaskRoleSpecs is required")
    for role in roles:
        if not isinstance(role, dict) or set(role) - ROLE_FIELDS:
            raise Refused(f"load config file failed: field not found in type TaskRoleSpec: {role}")
        if role.get("RoleName") != "worker":
            raise Refused(
                f"InvalidParameter: RoleName {role.get('RoleName')!r}"
                " is not a role of this framework"
            )
        if _whole("RoleReplicas", role.get("RoleReplicas")) < 1:
            raise Refused("InvalidParameter: RoleReplicas must be at least 1")
        if role.get("Flavor") not in site.flavors:
            raise Refused(f"ResourceNotFound.Flavor: flavor {role.get('Flavor')} not found")


def _check_envs(envs: Any) -> None:
    if not isinstance(envs, list):
        raise Refused("load config file failed: cannot unmarshal Envs into []Env")
    for env in envs:
        if not isinstance(env, dict) or set(env) - {"Name", "Value", "IsPrivate"}:
            raise Refused("load config file failed: field not found in type Env")
        if not isinstance(env.get("Name"), str) or not env["Name"]:
            raise Refused("InvalidParameter: Envs Name is required")
        if not isinstance(env.get("Value"), str) or "\0" in env["Value"]:
            raise Refused(
                f"load config file failed: cannot unmarshal the Value of Envs {env['Name']}"
                " into string"
            )
        if not isinstance(env.get("IsPrivate", False), bool):
            raise Refused(
                f"load config file failed: cannot unmarshal the IsPrivate of Envs {env['Name']}"
                " into bool"
            )


def _check_numbers(conf: dict[str, Any], site: Site) -> None:
    for name in ("ActiveDeadlineSeconds", "DelayExitTimeSeconds"):
        if name in conf and _whole(name, conf[name]) < 0:
            raise Refused(f"InvalidParameter: {name} must not be negative")
    if "Priority" in conf:
        priority = _whole("Priority", conf["Priority"])
        if not 1 <= priority <= 9:
            raise Refused(f"InvalidParameter: Priority {priority} is out of range [1, 9]")
        # "only some may be chosen (2, 4, 6 unless set otherwise)"; the queue's administrators use
        # the others.
        if priority not in site.priorities:
            raise Refused(
                f"InvalidParameter: Priority {priority} is not allowed in this queue,"
                f" expected one of {site.priorities}"
            )
    if not isinstance(conf.get("Preemptible", False), bool):
        raise Refused("load config file failed: cannot unmarshal Preemptible into bool")
    tags = conf.get("Tags") or []
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise Refused("load config file failed: cannot unmarshal Tags into []string")


def _check_retry(retry: Any) -> None:
    if not isinstance(retry, dict) or set(retry) - RETRY_FIELDS:
        raise Refused(f"load config file failed: field not found in type RetryOptions: {retry}")
    for name in ("MaxRetryTimes", "IntervalSeconds"):
        if name in retry and _whole(f"RetryOptions.{name}", retry[name]) < 0:
            raise Refused(f"InvalidParameter: RetryOptions.{name} must not be negative")
    for policy in retry.get("PolicySets") or []:
        if policy not in POLICIES:
            raise Refused(f"InvalidParameter: RetryOptions.PolicySets {policy!r} is not supported")


def _whole(name: str, value: Any) -> int:
    if isinstance(value, str) and name.startswith("--") and value.isdigit():
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise Refused(f"load config file failed: cannot unmarshal {name} {value!r} into int")
    return value


# -- upload of code --------------------------------------------------------------------------------


def upload(code_path: str, cwd: Path, target: Path, *, links: str, keep_modes: bool) -> None:
    """Copy the files at UserCodePath like the command's upload.

    "dir/" uploads the contents of the directory, "dir" the directory itself. Symbolic links are
    left out; --copy-links (``copy``) uploads their targets, --links (``keep``) uploads the links.
    Files that a .gitignore names are left out.
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
        _copy(source, inside, [], links)
    if not keep_modes:  # an object store has no modes
        for folder, _, names in os.walk(target):
            for name in names:
                if not os.path.islink(os.path.join(folder, name)):
                    os.chmod(os.path.join(folder, name), 0o644)


def _copy(
    source: Path, target: Path, rules: list[tuple[Path, pathspec.GitIgnoreSpec]], links: str
) -> None:
    ignore = source / ".gitignore"
    if ignore.is_file():
        spec = pathspec.GitIgnoreSpec.from_lines(ignore.read_text(errors="replace").splitlines())
        rules = [*rules, (source, spec)]
    for entry in sorted(os.scandir(source), key=lambda each: each.name):
        path, copy = Path(entry.path), target / entry.name
        link = entry.is_symlink() and links != "copy"
        folder = entry.is_dir(follow_symlinks=links == "copy")
        if _ignored(path, rules, folder=folder) or (link and links != "keep"):
            continue
        if link:
            copy.symlink_to(os.readlink(path))
        elif folder:
            copy.mkdir()
            _copy(path, copy, rules, links)
        elif entry.is_file():
            shutil.copy2(path, copy)


def _ignored(path: Path, rules: list[tuple[Path, pathspec.GitIgnoreSpec]], *, folder: bool) -> bool:
    ignored = False
    for base, spec in rules:  # the .gitignore in the deepest folder decides
        match = spec.check_file(
            f"{path.relative_to(base).as_posix()}{'/' if folder else ''}"
        ).include
        ignored = ignored if match is None else match
    return ignored
