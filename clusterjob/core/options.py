"""The table of job options: keys of configuration files, variables, and command-line flags."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from clusterjob.core.gpu_request import TYPED, read_gpus
from clusterjob.core.job_secrets import Secret
from clusterjob.core.node_count import read_nodes
from clusterjob.core.notifications import NotifyPlace
from clusterjob.core.option import Option, Target
from clusterjob.core.units import (
    exact_duration,
    exact_size,
    parse_duration,
    parse_signal,
    parse_size,
)
from clusterjob.errors import ConfigError, SpecError
from clusterjob.node.program import WORKER_WORDS


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
    if hasattr(value, "isoformat"):  # TOML reads 01:30:00 as a time of day
        value = value.isoformat()
    return parse_duration(_text_or_count(value))


def _memory(value: Any) -> int:
    """Return a size in bytes; 0 means all memory of a node, as in Slurm."""
    text = _text_or_count(value)
    return 0 if re.fullmatch(r"\s*0+\s*[KMGT]?\s*", text, re.IGNORECASE) else parse_size(text)


def _gpus_per_node(value: Any) -> int | str:
    """Return a number of GPUs, or a text with type and number, such as a100:8."""
    typed = isinstance(value, str) and TYPED.fullmatch(value.strip())
    return typed[0] if typed else _whole_number(value)


def _workers(value: Any) -> int | str:
    """Return a number of workers, or torchrun's word for what each node counts."""
    return value if value in WORKER_WORDS else _whole_number(value)


def _after(value: Any) -> tuple[str, ...]:
    """Return one KIND:ID or ID for each job; sbatch also writes afterok:1:2,afterany:3."""
    found: list[str] = []
    for text in (part.strip() for line in _lines(value) for part in line.split(",")):
        kind, *ids = text.split(":")
        found += [f"{kind}:{job.strip()}" for job in ids] or [text]
    return tuple(found)


def _text_or_count(value: Any) -> str:
    return value if isinstance(value, str) else str(_whole_number(value))


def _lines(value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)):
        raise SpecError(f"{value!r} is not a list of lines")
    return tuple(_text(item) for item in values)


def _retries(value: Any) -> tuple[str, ...]:
    from clusterjob.node.options import retries

    return tuple(word for line in _lines(value) for word in retries(line))


def _secrets(value: Any) -> tuple[Secret, ...]:
    return tuple(Secret.parse(item) for item in _lines(value))


def _notify(value: Any) -> tuple[NotifyPlace, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)) or not all(isinstance(one, str) for one in values):
        raise SpecError("notify is not a text or a list of texts")  # does not show a URL
    return tuple(NotifyPlace.parse(one) for one in values)


def _words(value: Any) -> tuple[str, ...]:
    """Return the words of a comma-separated text, or of a list."""
    words = value.split(",") if isinstance(value, str) else _lines(value)
    return tuple(word.strip().lower() for word in words if word.strip())


def _listed(value: Any) -> str:
    """Return a list as comma-separated text; a text stays unchanged."""
    return value if isinstance(value, str) else ",".join(_lines(value))


class Structure(str):
    """JSON text of a list or table that a configuration file gives to a backend's option."""

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
            f"{_short(value)} contains a value that is not a text, a number, true or false"
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


_ROWS = (
    Option("nodes", read_nodes, metavar="N", target=Target.OTHER,
        short="-N", aliases=("--nnodes",), group="resources",
        help="Number of nodes, or MIN:MAX for a job that may shrink and grow (default: 1)."),
    Option("spares", _whole_number, metavar="N", node="spares", group="restart",
        help="More nodes, without workers until one takes the place of a lost node "
        "(default: 0)."),
    Option("gpus", read_gpus, metavar="N", target=Target.OTHER, group="resources",
        excludes="gpus_per_node",
        help="GPUs on each node: a number, a100:8, those to use as 0,1 or device=5, auto for "
        "all idle ones, or auto:4 for four of them (default: none requested)."),
    Option("gpus_per_node", _gpus_per_node, metavar="N", target=Target.OTHER, group="resources",
        excludes="gpus",
        help="The same as --gpus with a number or a100:8 (default: none requested)."),
    Option("nproc_per_node", _workers, metavar="N", node="nproc_per_node", group="resources",
        help="Workers per node: a number, or gpu, cpu or auto to count those of the node "
        "(default: its GPUs, else 1)."),
    Option("cpus_per_task", _whole_number, metavar="N", target=Target.RESOURCES,
        short="-c", group="resources",
        node="cpus_per_task",
        help="CPU cores per worker (default: an even share of the node)."),
    Option("mem", _memory, metavar="SIZE", target=Target.RESOURCES, group="resources",
        help="Memory per node, such as 64G (default: the cluster's)."),
    Option("time", _duration, metavar="LIMIT", target=Target.OTHER, short="-t", group="resources",
        help="Time limit: 90s, 30m, 2h, HH:MM:SS, or minutes (default: the cluster's)."),
    Option("name", _text, metavar="NAME", short="-J",
        help="Job name (default: the script's)."),
    Option("env", _table, metavar="K=V", merge=True, group="environment",
        help="Public variable for the workers; K alone copies the current value; repeatable "
        "(default: none)."),
    Option("secret", _secrets, metavar="K[=FILE]", merge=True, group="environment",
        help="Secret variable: its current value, or FILE's content; never shown; repeatable "
        "(default: none)."),
    Option("workdir", _path, metavar="DIR", target=Target.OTHER, group="code",
        help="Working directory of the workers (default: the current directory)."),
    Option("python", _text, metavar="PATH", group="environment",
        help="Python interpreter (default: the active environment's)."),
    Option("uv", _switch, group="environment",
        help="Environment of the uv project (pyproject.toml, uv.lock), made once on each node by "
        "`uv sync --frozen` (default: no)."),
    Option("env_archive", _path, metavar="FILE", group="environment",
        help="Environment packed by conda-pack or venv-pack, or a squashfs image; unpacked or "
        "mounted once on each node (default: none)."),
    Option("env_cache", _text, metavar="DIR", group="environment",
        help="Local directory of the nodes for --uv and --env-archive (default: TMPDIR, else "
        "/tmp)."),
    Option("setup", _lines, metavar="CMD", merge=True, group="environment",
        help="Shell line to run first on each node; repeatable (default: none)."),
    Option("max_restarts", _whole_number, metavar="N", node="max_restarts", group="restart",
        help="Maximum number of restarts of the workers after a failure (default: 0)."),
    Option("retry", _retries, metavar="KIND[:N]", merge=True, node="retry", group="restart",
        help="Restarts after one kind of failure, such as device:5 or code:0; repeatable "
        "(default: none)."),
    Option("start", _text, metavar="MODE", node="start",
        help="Start method of the workers: fork (one torch import per node), exec, or auto "
        "(default: auto)."),
    Option("launcher", _text, metavar="WHO", node="launcher",
        help="Process that starts the workers: agent, ray, or srun on Slurm (default: agent)."),
    Option("require_gpus", _switch, group="resources",
        help="Error instead of a rehearsal on the CPU if GPUs are missing (default: yes, but no "
        "on this machine)."),
    Option("template", _path, metavar="FILE",
        help="Script template file (default: the backend's)."),
    Option("set", _options, metavar="KEY=VALUE", merge=True, target=Target.OTHER, group="cluster",
        help="Option of the backend; repeatable (default: none)."),
    Option("hosts", _listed, metavar="LIST", target=Target.OTHER, group="cluster",
        help="SSH hosts to run on: a,b[1-4],user@c:2222 (default: none)."),
    Option("hostfile", _path, metavar="FILE", target=Target.OTHER, group="cluster",
        help="File with one host per line, and optional slots=8 (default: none)."),
    Option("login", _text, metavar="HOST", group="cluster",
        help="Slurm login host to submit on: user@login1 (default: this machine)."),
    Option("transport", _text, metavar="WHO", target=Target.BACKEND, group="cluster",
        help="SSH implementation: paramiko, openssh, or auto for what each host needs "
        "(default: auto)."),
    Option("sync", _switch, group="code",
        help="Copy of the working directory to the hosts; --no-sync for a shared disk "
        "(default: yes)."),
    Option("snapshot", _switch, group="code",
        help="Code as it is at the submission; --no-snapshot for the current files at the start "
        "(default: yes)."),
    Option("include_secrets", _switch, group="code",
        help="Copy of files that look like secrets, such as .env (default: no)."),
    Option("account", _text, metavar="NAME", target=Target.BACKEND, short="-A", group="cluster",
        help="Account to charge (default: the cluster's)."),
    Option("partition", _text, metavar="NAME", target=Target.BACKEND, short="-p", group="cluster",
        help="Slurm partition (default: the cluster's)."),
    Option("qos", _text, metavar="NAME", target=Target.BACKEND, group="cluster",
        help="Slurm quality of service (default: the cluster's)."),
    Option("nodelist", _text, metavar="NODES", target=Target.BACKEND, group="cluster",
        help="Nodes to use, such as gpu[1-4] (default: any)."),
    Option("exclude", _text, metavar="NODES", target=Target.BACKEND, group="cluster",
        help="Nodes to avoid (default: none)."),
    Option("reservation", _text, metavar="NAME", target=Target.BACKEND, group="cluster",
        help="Slurm reservation (default: none)."),
    Option("container", _text, metavar="IMAGE", group="environment",
        help="Container to run in: pyxis:IMAGE, apptainer:IMAGE, or a .sif file (default: none)."),
    Option("array", _text, metavar="0-99%8",
        help="Indices of a job array; %8 limits how many run at a time; with --sweep, %8 alone "
        "(default: none)."),
    Option("sweep", _lines, metavar="K=A,B", merge=True,
        help="Values of a sweep, one job each: as argument --K=A, or for {K} in the arguments; "
        "repeatable (default: none)."),
    Option("after", _after, metavar="ID", merge=True,
        help="Job to wait for, in sbatch's words: afterok:ID, afterany:ID, afternotok:ID or "
        "after:ID; ID alone means afterok; repeatable (default: none)."),
    Option("requeue", _switch, group="restart",
        help="Requeue after a preemption or the time limit (default: no)."),
    Option("signal_before", _duration, metavar="TIME", group="restart",
        help="Time before the limit to warn the workers, such as 90s (default: none)."),
    Option("warn_signal", parse_signal, metavar="NAME", node="warn_signal", group="restart",
        help="Signal for the workers at the warning, such as SIGUSR1 (default: none)."),
    Option("until_done", _switch, node="until_done", group="restart",
        help="Queue again after each time limit until the script is done (default: no)."),
    Option("checkpoint_dir", _text, metavar="DIR", node="checkpoint_dir", group="restart",
        help="Checkpoints of --until-done; two attempts without a newer file end the job."),
    Option("notify", _notify, metavar="URL", merge=True, group="output",
        help="Where the job sends notifications: a URL of apprise, or VARIABLE or @FILE that holds "
        "it; never shown; repeatable (default: none)."),
    Option("notify_cmd", _lines, metavar="CMD", merge=True, group="output",
        help="Shell command that the job runs for each notification, with CLUSTERJOB_NOTIFY_* "
        "variables; repeatable (default: none)."),
    Option("notify_on", _words, metavar="EVENTS", group="output",
        help="Events to notify about: start, end, failure, requeue, array_tasks "
        "(default: end,failure,requeue)."),
    Option("preflight", _text, metavar="[=warn]", bare="refuse", node="preflight",
        group="restart",
        help="Measure of all hosts before the workers start, at most 20 s; a slow host is refused, "
        "or with =warn only named (default: off)."),
    Option("hang_timeout", _duration, metavar="TIME", node="hang_timeout", group="restart",
        help="Time without output, heartbeat or change of a stack after which the job hangs, such "
        "as 10m (default: no detection)."),
    Option("metrics", _switch, node="metrics", group="output",
        help="Samples of CPU, memory and GPUs, for clusterjob metrics (default: yes)."),
    Option("metrics_port", _whole_number, metavar="PORT", node="metrics_port", group="output",
        help="Port on each node's 127.0.0.1 for Prometheus (default: none)."),
    Option("join_timeout", _seconds, metavar="S", node="join_timeout", group="restart",
        help="Seconds that nodes wait for each other (default: 300)."),
    Option("lease", _seconds, node="lease", group="restart"),
    Option("grace", _seconds, metavar="S", node="grace", group="restart",
        help="Seconds between SIGTERM and SIGKILL (default: 3; after a failure 30)."),
)  # fmt: skip
OPTIONS: dict[str, Option] = {option.key: option for option in _ROWS}


def flags_of_backend_option(key: str) -> str:
    """Return the flags that set an option of the backend, for errors: ``--partition or --set``."""
    option = OPTIONS.get(key)
    own = option is not None and option.target is Target.BACKEND
    return f"{option.flag} or --set" if option and own else "--set"


def as_in_file(key: str, value: Any) -> tuple[Any, str]:
    """Return a value as a configuration file takes it, and the unit of the value, if it has one."""
    read = OPTIONS[key].read
    if read is _duration:
        return exact_duration(value), "seconds"
    return (exact_size(value), "bytes") if read is _memory and value else (value, "")


def check_unit(key: str, value: Any, origin: str) -> None:
    """Refuse a duration without a unit in a file: a reader takes it for seconds.

    Raises:
        ConfigError: the value is a bare number.
    """
    if OPTIONS[key].read is _duration and re.fullmatch(r"\s*\d+\s*", str(value), re.ASCII):
        text = str(value).strip()
        raise ConfigError(
            f"{origin}: {text} has no unit: minutes, as in sbatch, or seconds?",
            f'write {key} = "{text}m" or {key} = "{text}s"',
        )


def read_setting(key: str, value: Any, origin: str) -> Any:
    """Convert the value of an option to the type that the job needs.

    Args:
        key: its name in `OPTIONS`.
        value: the value from a file, a variable or a flag.
        origin: the file, variable or flag, for the error.

    Raises:
        ConfigError: the value is not valid for this option.
    """
    try:
        return OPTIONS[key].read(value)
    except SpecError as error:
        raise ConfigError(f"{origin}: {error.message}", error.hint) from error
