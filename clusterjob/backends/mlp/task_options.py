"""Parse the options of a task: profile keys and ``--set``.

An option whose name begins with a capital letter sets the platform's field of that name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clusterjob.backends import shared
from clusterjob.core.options import flags_of_backend_option
from clusterjob.errors import SpecError
from clusterjob.node.environments import worker_variables

_KEYS = (
    "queue", "image", "flavor", "flavors", "storages", "priority", "preemptible", "retries",
    "retry_interval", "access", "code_path", "workdir", "secrets", "kill_grace", "submit_rate",
    "submit_timeout", "sync_limit", "poll", "profile", "region",
)  # fmt: skip
_OWN_FIELDS = (
    "TaskName",
    "Entrypoint",
    "Args",
    "UserCodePath",
    "RemoteMountCodePath",
    "Description",
)
_SECRET_FIELDS = ("ImageCredential.RegistryToken",)  # fields that hold passwords
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_FIELD = re.compile(r"[A-Z][A-Za-z0-9]*(?:\.[A-Za-z][A-Za-z0-9]*)*", re.ASCII)


@dataclass(frozen=True)
class MlpOptions:
    """The options of a profile and ``--set``.

    Attributes:
        values: clusterjob's keys, as text.
        fields: the platform's fields by dotted path, as parsed data.
    """

    values: Mapping[str, str]
    fields: Mapping[str, Any]

    @classmethod
    def of(cls, options: Mapping[str, str]) -> MlpOptions:
        """Parse a job's options.

        Raises:
            SpecError: an option is unknown, or its value cannot be parsed.
        """
        fields = {}
        for key, value in options.items():
            if key[:1].isupper():
                fields[key] = _field(key, value)
            elif key not in _KEYS:
                near = difflib.get_close_matches(key, _KEYS, 1)
                raise SpecError(
                    f"unknown option {key!r} for the mlp cluster ({flags_of_backend_option(key)})",
                    f"did you mean {near[0]}?"
                    if near
                    else f"the options are {', '.join(_KEYS)}, and the fields of a task, such as "
                    "Priority",
                )
        return cls({key: value for key, value in options.items() if key in _KEYS}, fields)

    def number(self, key: str, default: float, least: float = 0.0) -> float:
        """Return an option as a number.

        Raises:
            SpecError: the value is not a number, or is below `least`.
        """
        try:
            value = float(self.values.get(key, default))
        except ValueError:
            value = -1.0
        if not least <= value < 1e9:
            raise SpecError(f"{key}: {self.values[key]!r} is not a number of at least {least:g}")
        return value

    def whole(self, key: str, default: int, least: int = 0) -> int:
        """Return an option as an integer.

        Raises:
            SpecError: the value is not an integer, or is below `least`.
        """
        value = self.number(key, default, least)
        if value != int(value):
            raise SpecError(f"{key}: {self.values[key]!r} is not an integer")
        return int(value)

    @property
    def preemptible(self) -> bool:
        """Whether the platform may reclaim the machines.

        Raises:
            SpecError: the value is neither true nor false.
        """
        named = shared.switch(self.values, "preemptible", default=False)
        return named or self.fields.get("Preemptible") is True

    @property
    def flavors(self) -> dict[str, int]:
        """The number of GPUs of each flavor.

        Raises:
            SpecError: the value is not a table of names and numbers.
        """
        table = read_yaml("flavors", self.values.get("flavors", "{}"))
        if not isinstance(table, dict) or not all(
            isinstance(count, int) and count >= 0 for count in table.values()
        ):
            raise SpecError(
                f"flavors: {self.values['flavors']!r} is not a table of flavors and their GPUs",
                'write it as flavors = {"ml.hpcpni2l" = 8}',
            )
        return {str(name): int(count) for name, count in table.items()}

    @property
    def secrets(self) -> dict[str, str]:
        """Map each secret's target to the variable of this machine that holds its value.

        A target is a variable of the task or the dotted path of a field.

        Raises:
            SpecError: the value is not a list of variables.
        """
        text = self.values.get("secrets", "")
        items = (
            read_yaml("secrets", text)
            if text.lstrip().startswith("[")
            else [part for part in re.split(r"[,\s]+", text) if part]
        )
        found = {}
        for item in items:
            target, equals, source = str(item).partition("=")
            source = source if equals else target
            if not _VARIABLE.fullmatch(source) or not (
                _VARIABLE.fullmatch(target) or _FIELD.fullmatch(target)
            ):
                raise SpecError(
                    f"secrets: {target!r} is not a variable",
                    "list variables of this machine, or FIELD=VARIABLE, such as "
                    "ImageCredential.RegistryToken=REGISTRY_TOKEN",
                )
            if target.startswith("CLUSTERJOB_") or target in worker_variables.LAUNCH_VARIABLES:
                raise SpecError(f"secrets: {target} is set by the launcher", "remove it")
            found[target] = source
        return found


def read_yaml(key: str, text: str) -> Any:
    """Parse an option's value as YAML.

    Raises:
        SpecError: the value is not valid YAML.
    """
    from yaml import YAMLError, safe_load

    try:
        return safe_load(text)
    except (YAMLError, ValueError, RecursionError) as error:
        raise SpecError(
            f"{key}: {text[:80]!r} is not YAML: {' '.join(str(error).split())[:120]}"
        ) from error


def _field(key: str, text: str) -> Any:
    if not _FIELD.fullmatch(key):
        raise SpecError(
            f"--set {key!r} is not a field of a task",
            "write it as Priority or RetryOptions.IntervalSeconds",
        )
    if key.partition(".")[0] in _OWN_FIELDS:
        raise SpecError(
            f"{key} is set by clusterjob, to find the task or to start its program",
            "remove it",
        )
    value = read_yaml(key, text)
    secret = next(
        (path for path in _SECRET_FIELDS if path == key or _at({key: value}, path) is not None),
        None,
    )
    if secret is not None:
        raise SpecError(
            f"{secret} is a secret, and this value would be kept in the job's record",
            f'read it from a variable: secrets = ["{secret}=VARIABLE"]',
        )
    if key == "Envs":
        _check_envs(value)
    return value


def _check_envs(value: Any) -> None:
    if not isinstance(value, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("Name"), str) for entry in value
    ):
        raise SpecError(
            "Envs is not a list of {Name, Value}", "set variables with --env NAME=VALUE"
        )
    private = next((entry["Name"] for entry in value if entry.get("IsPrivate")), None)
    if private is not None:
        raise SpecError(
            f"the private variable {private} would be kept in the job's record",
            f'read it from a variable of this machine: secrets = ["{private}"]',
        )


def _at(task: Mapping[str, Any], path: str) -> Any:
    value: Any = task
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value
