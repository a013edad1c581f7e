"""The table of job options: keys of configuration files, variables, and command-line flags."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterjob.core.job_secrets import Secret
from clusterjob.core.units import parse_duration, parse_size
from clusterjob.errors import ConfigError, SpecError

_GPUS_OF_TYPE = re.compile(r"[A-Za-z][\w.-]*:\d{1,9}", re.ASCII)


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        key: its name in a file; the flag is --key with dashes, the variable CLUSTERJOB_KEY.
        read: from the text of a flag or a variable, or a value of a TOML file, to the value that
            the job takes.
        merge: whether a table or a list adds to what was set before instead of replacing it.
    """

    key: str
    read: Callable[[Any], Any]
    merge: bool = False


def _whole_number(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**18:
        return value
    if not isinstance(value, str) or not re.fullmatch(r"\s*[+-]?\d{1,18}\s*", value, re.ASCII):
        raise SpecError(f"{_short(value)} is not a whole number")
    return int(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _seconds(value: Any) -> float:
    try:
        if not isinstance(value, bool):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise SpecError(f"{_short(value)} is not a number of seconds")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise SpecError(f"{value!r} is not a text")
    return value


def _path(value: Any) -> Path:
    try:
        return Path(_text(value)).expanduser()
    except RuntimeError as error:
        raise SpecError(f"{_short(value)}: {error}") from error


def _switch(value: Any) -> bool:
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    answer = value if isinstance(value, bool) else known.get(str(value).lower())
    if answer is None:
        raise SpecError(f"{value!r} is neither true nor false")
    return answer


def _duration(value: Any) -> int:
    clock = (
        value.isoformat() if hasattr(value, "isoformat") else value
    )  # TOML reads 01:30:00 as a time of day
    return parse_duration(_text_or_count(clock))


def _memory(value: Any) -> int:
    """Return a size in bytes; 0 is all memory of a node, as for Slurm."""
    text = _text_or_count(value)
    return 0 if re.fullmatch(r"\s*0+\s*[KMGT]?\s*", text, re.IGNORECASE) else parse_size(text)


def _gpus_per_node(value: Any) -> int | str:
    """Return a number of GPUs; a text where their type stands before it, such as a100:8."""
    typed = isinstance(value, str) and _GPUS_OF_TYPE.fullmatch(value.strip())
    return typed[0] if typed else _whole_number(value)


def _text_or_count(value: Any) -> str:
    return value if isinstance(value, str) else str(_whole_number(value))


def _lines(value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)):
        raise SpecError(f"{value!r} is not a list of lines")
    return tuple(_text(item) for item in values)


def _secrets(value: Any) -> tuple[Secret, ...]:
    return tuple(Secret.parse(item) for item in _lines(value))


def _listed(value: Any) -> str:
    """Return a list, or what stands for one on a command line, as the latter."""
    return value if isinstance(value, str) else ",".join(_lines(value))


class Structure(str):
    """A list or a table of a configuration file, as JSON: a value of a backend's option."""

    __slots__ = ()


def _options(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        return _table(value)
    return {
        str(key): _structure(item) if isinstance(item, (list, dict)) else _cell(item)
        for key, item in value.items()
    }


def _structure(value: list[Any] | dict[str, Any]) -> Structure:
    try:
        return Structure(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise SpecError(
            f"{_short(value)} holds what is neither a text nor a number nor true nor false"
        ) from error


def _table(value: Any) -> dict[str, str]:
    if isinstance(value, dict):
        return {str(key): _cell(item) for key, item in value.items()}
    if not isinstance(value, (list, tuple)):
        raise SpecError(f"{_short(value)} is not a table of names and values")
    pairs = {}
    for item in value:
        key, equals, text = _text(item).partition("=")
        if not equals:
            raise SpecError(f"{_short(item)} is not KEY=VALUE")
        pairs[key] = text
    return pairs


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, float)) or (isinstance(value, int) and abs(value) < 10**18):
        return str(value)
    raise SpecError(f"{_short(value)} is not a text or a number")


SETTINGS: dict[str, Setting] = {
    setting.key: setting
    for setting in (
        Setting("nodes", _whole_number),
        Setting("gpus_per_node", _gpus_per_node),
        Setting("nproc_per_node", _whole_number),
        Setting("cpus_per_task", _whole_number),
        Setting("mem", _memory),
        Setting("time", _duration),
        Setting("name", _text),
        Setting("env", _table, merge=True),
        Setting("secret", _secrets, merge=True),
        Setting("workdir", _path),
        Setting("python", _text),
        Setting("setup", _lines, merge=True),
        Setting("max_restarts", _whole_number),
        Setting("start", _text),
        Setting("launcher", _text),
        Setting("require_gpus", _switch),
        Setting("template", _path),
        Setting("set", _options, merge=True),
        Setting("hosts", _listed),
        Setting("hostfile", _path),
        Setting("login", _text),
        Setting("gpus", _text),
        Setting("sync", _switch),
        Setting("include_secrets", _switch),
        Setting("account", _text),
        Setting("partition", _text),
        Setting("nodelist", _text),
        Setting("exclude", _text),
        Setting("reservation", _text),
        Setting("container", _text),
        Setting("array", _text),
        Setting("sweep", _lines, merge=True),
        Setting("after", _lines, merge=True),
        Setting("requeue", _switch),
        Setting("signal_before", _duration),
        Setting("join_timeout", _seconds),
        Setting("heartbeat", _seconds),
        Setting("lease", _seconds),
        Setting("grace", _seconds),
    )
}


def read_setting(key: str, value: Any, origin: str) -> Any:
    """Return a setting's value as the job takes it.

    Args:
        key: its name in `SETTINGS`.
        value: as the file, the variable or the flag has it.
        origin: where it was written, for the error.

    Raises:
        ConfigError: the value makes no sense there.
    """
    try:
        return SETTINGS[key].read(value)
    except SpecError as error:
        raise ConfigError(f"{origin}: {error.message}", error.hint) from error
