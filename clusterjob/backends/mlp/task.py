"""Build the fields of a task from a job and its options."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from clusterjob.backends.mlp.task_options import MlpOptions, read_yaml
from clusterjob.core.render import sh
from clusterjob.core.spec import JobSpec
from clusterjob.errors import SpecError, SubmitError
from clusterjob.node import contract

CODE_PATH = "/root/code"  # the default directory of the code in a task
_ACCESS = ("Public", "Queue", "Private")
_RETRIES = 5  # default retries of a task whose machines were reclaimed
_RETRY_INTERVAL = 60  # default seconds between two retries
# Seconds added to --time for the platform's limit: the agents end the job at --time and report it.
_SLACK = 60


def fields(
    spec: JobSpec, job_id: str, upload: str, entry: str, index: int | None = None
) -> dict[str, Any]:
    """Return a task's fields; the fields of secrets have no value.

    Args:
        spec: the job.
        job_id: the job's id.
        upload: the directory to upload.
        entry: the entry script's path in that directory.
        index: the index of an array element; None for a job without an array.

    Raises:
        SpecError: an option is not valid.
    """
    options = MlpOptions.of(spec.options)
    values = options.values
    code_path = values.get("code_path", CODE_PATH)
    if not code_path.startswith("/"):
        raise SpecError(
            f"code_path: {code_path!r} is not an absolute path", f"the default is {CODE_PATH}"
        )
    role = {"RoleName": "worker", "RoleReplicas": spec.resources.nodes}
    if flavor := flavor_of(spec):
        role["Flavor"] = flavor
    task: dict[str, Any] = {
        "TaskName": job_id if index is None else f"{job_id}_{index}",
        "Description": spec.name,
        "Tags": ["clusterjob"],
        "Framework": "PyTorchDDP",
        "Entrypoint": "bash " + sh(f"{code_path.rstrip('/')}/{entry}"),
        "UserCodePath": f"{upload}/",  # the slash uploads the content only
        "RemoteMountCodePath": code_path,
        **({"ImageUrl": values["image"]} if values.get("image") else {}),
        **_queue(values.get("queue", "")),
        "TaskRoleSpecs": [role],
        **_limits(spec, options),
        "Envs": _environment(spec, options, index=index),
    }
    retry = retry_options(spec.options, spec.max_restarts, requeue=spec.requeue)
    for path, value in options.fields.items():
        if path == "Envs":
            task["Envs"] += value
        elif path.partition(".")[0] != "RetryOptions":
            _set(task, path, value=value)
    for path in options.secrets:
        if "." in path:
            _set(task, path, value=None)
    if retry:
        task["RetryOptions"] = retry
    if task["Framework"] not in ("PyTorchDDP", "Custom"):
        raise SpecError(
            f"Framework {task['Framework']!r}: "
            "its tasks do not run the entry command on every worker",
            "remove the option; the default is PyTorchDDP",
        )
    return task


def _queue(queue: str) -> dict[str, str]:
    if not queue:
        return {}
    return {"ResourceQueueID" if re.fullmatch(r"q-[\w-]+", queue) else "ResourceQueueName": queue}


def _limits(spec: JobSpec, options: MlpOptions) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if spec.resources.time_limit is not None:
        found["ActiveDeadlineSeconds"] = spec.resources.time_limit + _SLACK
    if options.preemptible:
        found["Preemptible"] = True
    if "priority" in options.values:
        found["Priority"] = options.whole("priority", 0, 1)
    if "access" in options.values:
        access = next(
            (known for known in _ACCESS if known.lower() == options.values["access"].lower()), None
        )
        if access is None:
            raise SpecError(
                f"access: {options.values['access']!r} is not one of {', '.join(_ACCESS)}"
            )
        found["AccessType"] = access
    if "storages" in options.values:
        storages = read_yaml("storages", options.values["storages"])
        if not isinstance(storages, list) or not all(isinstance(item, dict) for item in storages):
            raise SpecError(
                "storages is not a list of tables",
                'write it as storages = [{Type = "Vepfs", MountPath = "/data"}]',
            )
        found["Storages"] = storages
    return found


def _environment(spec: JobSpec, options: MlpOptions, index: int | None) -> list[dict[str, Any]]:
    """Return the secrets' variables, without values, and the variable of the array index."""
    variables = [
        name for name in options.secrets if "." not in name
    ]  # a name with a dot is the path of a field
    names = dict.fromkeys([contract.TOKEN, *variables, *spec.private_names])
    if (both := next((name for name in names if name in spec.env), None)) is not None:
        raise SpecError(f"{both} is a secret and has a value in --env too", "remove one of the two")
    found: list[dict[str, Any]] = [{"Name": name, "IsPrivate": True} for name in names]
    return found if index is None else [*found, {"Name": contract.ARRAY_INDEX, "Value": str(index)}]


def flavor_of(spec: JobSpec) -> str:
    """Return the flavor of a job's machines; empty if no option and no table selects a flavor.

    Raises:
        SpecError: the flavor has fewer GPUs than the job requests; or the option ``flavor`` is not
            set, and no flavor or several flavors of the table have the requested number of GPUs.
    """
    options = MlpOptions.of(spec.options)
    flavors, flavor = options.flavors, options.values.get("flavor", "")
    wanted = spec.resources.gpus_per_node
    listed = ", ".join(f"{name} ({count})" for name, count in flavors.items())
    if flavor:
        if wanted is not None and flavors.get(flavor, wanted) < wanted:
            raise SpecError(
                f"the flavor {flavor} has {flavors[flavor]} GPUs, "
                f"and --gpus-per-node asks for {wanted}",
                f"the flavors are {listed}",
            )
        return flavor
    if wanted is None or not flavors:
        return ""
    fitting = [name for name, count in flavors.items() if count == wanted]
    if len(fitting) != 1:
        raise SpecError(
            f"several flavors have {wanted} GPUs: {', '.join(fitting)}"
            if fitting
            else f"no flavor has {wanted} GPUs",
            f"select one with --set flavor=NAME; the flavors are {listed}",
        )
    return fitting[0]


def gpus_of(spec: JobSpec) -> int | None:
    """Return the GPUs of the job's flavor; None if the table of flavors lacks that flavor."""
    return MlpOptions.of(spec.options).flavors.get(flavor_of(spec))


def retry_options(
    options: Mapping[str, str], max_restarts: int, *, requeue: bool
) -> dict[str, Any]:
    """Return a task's RetryOptions; empty if the platform should not retry the task.

    Args:
        options: the job's options.
        max_restarts: number of retries after a failure.
        requeue: whether to retry after the machines are reclaimed.

    Raises:
        SpecError: an option is not valid.
    """
    read = MlpOptions.of(options)
    policies = ["Failed"] * (max_restarts > 0) + ["InstanceReclaimed"] * (
        requeue or read.preemptible
    )
    if read.values.get("retries") and not policies:
        policies = ["Failed", "InstanceReclaimed"]
    times = read.whole("retries", max_restarts or _RETRIES)
    task: dict[str, Any] = {"RetryOptions": {}}
    if policies and times:
        task["RetryOptions"] = {
            "EnableRetry": True,
            "MaxRetryTimes": times,
            "IntervalSeconds": read.whole("retry_interval", _RETRY_INTERVAL),
            "PolicySets": policies,
        }
    for path, value in read.fields.items():
        if path.partition(".")[0] == "RetryOptions":
            _set(task, path, value=value)
    return dict(task["RetryOptions"])


def missing(task: Mapping[str, Any]) -> list[str]:
    """Return the required keys that a task lacks."""
    role = (task.get("TaskRoleSpecs") or [{}])[0]
    present = {
        "image": task.get("ImageUrl"), "flavor": isinstance(role, dict) and role.get("Flavor"),
        "queue": task.get("ResourceQueueID") or task.get("ResourceQueueName"),
    }  # fmt: skip
    return [key for key, value in present.items() if not value]


def hint_for_missing(missing: Sequence[str], options: Mapping[str, str]) -> str:
    """Return a hint that shows how to set the `missing` keys."""
    settings = ", ".join(f'{key} = "..."' for key in missing)
    hint = f"--set {missing[0]}=..., or in a profile: set = {{{settings}}}"
    if "flavor" in missing and MlpOptions.of(options).flavors:
        hint = f"--gpus-per-node selects a flavor from the profile's table flavors; {hint}"
    return hint


def with_secrets(
    planned: str,
    options: Mapping[str, str],
    token: str,
    environ: Mapping[str, str],
    more: Mapping[str, bytes] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return a planned task with the values of its secrets.

    Args:
        planned: the task as YAML.
        options: the job's options.
        token: the job's own token.
        environ: the variables for the option ``secrets``.
        more: the values of ``--secret``, by name.

    Raises:
        SubmitError: a secret's variable is not set, or its value is not UTF-8 text.
    """
    from yaml import safe_load

    task: dict[str, Any] = safe_load(planned)
    encoded = dict(more)
    sources = MlpOptions.of(options).secrets
    for target, source in sources.items():
        if not environ.get(source):
            raise SubmitError(
                f"the secret {target} is missing: {source} is not set", f"export {source}=..."
            )
        encoded.setdefault(target, os.fsencode(environ[source]))
    values = {contract.TOKEN: token}
    for target, secret in encoded.items():
        try:
            values[target] = secret.decode()
        except UnicodeDecodeError:  # an error of the YAML writer would show the value
            raise SubmitError(
                f"the secret {target} is not valid UTF-8, which YAML requires",
                f"check the value of {sources.get(target, target)}",
            ) from None
    for entry in task["Envs"]:
        if entry.get("IsPrivate"):
            entry["Value"] = values[entry["Name"]]
    for target, value in values.items():
        if "." in target:
            _set(task, target, value=value)
    return task


def _set(task: dict[str, Any], path: str, value: Any) -> None:
    """Set a field by its dotted path; merge a table into an existing table."""
    *parents, last = path.split(".")
    table = task
    for name in parents:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise SpecError(
                f"--set {path}: {name} is not a table",
                f"set the whole field with --set {parents[0]}=VALUE",
            )
    if isinstance(value, dict) and isinstance(table.get(last), dict):
        for name, item in value.items():
            _set(table[last], str(name), value=item)
    else:
        table[last] = value
