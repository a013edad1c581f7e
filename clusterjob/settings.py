"""The one table of a job's settings: what may stand in a configuration file, in a CLUSTERJOB_* variable and on the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterjob.errors import ConfigError, SpecError
from clusterjob.units import parse_duration, parse_size


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        key: its name in a file; the flag is --key with dashes, the variable CLUSTERJOB_KEY.
        read: from the text of a flag or a variable, or a value of a TOML file, to the value that the job takes.
        merge: whether a table or a list adds to what was set before instead of replacing it.
    """

    key: str
    read: Callable[[Any], Any]
    merge: bool = False


def _whole_number(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    text = str(value).strip()
    if not (text.isascii() and text.lstrip("-").isdigit()):
        raise SpecError(f"{value!r} is not a whole number")
    return int(text)


def _seconds(value: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise SpecError(f"{value!r} is not a number of seconds") from None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise SpecError(f"{value!r} is not a text")
    return value


def _path(value: Any) -> Path:
    return Path(_text(value)).expanduser()


def _switch(value: Any) -> bool:
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    answer = value if isinstance(value, bool) else known.get(str(value).lower())
    if answer is None:
        raise SpecError(f"{value!r} is neither true nor false")
    return answer


def _duration(value: Any) -> int:
    return parse_duration(str(value))


def _size(value: Any) -> int:
    return parse_size(str(value))


def _lines(value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)):
        raise SpecError(f"{value!r} is not a list of lines")
    return tuple(_text(item) for item in values)


def _table(value: Any) -> dict[str, str]:
    if isinstance(value, dict):
        return {str(key): _cell(item) for key, item in value.items()}
    pairs = {}
    for item in value:
        key, equals, text = str(item).partition("=")
        if not equals:
            raise SpecError(f"{item!r} is not KEY=VALUE")
        pairs[key] = text
    return pairs


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, float)):
        return str(value)
    raise SpecError(f"{value!r} is not a text or a number")


SETTINGS: dict[str, Setting] = {
    setting.key: setting
    for setting in (
        Setting("nodes", _whole_number),
        Setting("gpus_per_node", _whole_number),
        Setting("nproc_per_node", _whole_number),
        Setting("cpus_per_task", _whole_number),
        Setting("mem", _size),
        Setting("time", _duration),
        Setting("name", _text),
        Setting("env", _table, merge=True),
        Setting("workdir", _path),
        Setting("python", _text),
        Setting("setup", _lines, merge=True),
        Setting("max_restarts", _whole_number),
        Setting("start", _text),
        Setting("launcher", _text),
        Setting("require_gpus", _switch),
        Setting("template", _path),
        Setting("set", _table, merge=True),
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
