"""The command `volc` of the simulated platform: its flags and credentials, as documented.

The first argument is the service's directory; the user's arguments follow. Only the standard
library is imported, because tests start this program often. Facts without another source are from
the documentation page "命令行工具" (command line tool).
"""

from __future__ import annotations

import configparser
import json
import os
import socket
import sys
import time
from pathlib import Path

VERSION = "volc/1.2.57"
ON, TEXT, LIST = "a switch", "takes a value", "may be given several times"
_OUTPUT = {"output": (TEXT,), "format": (TEXT,), "helpformat": (ON,), "profile": (TEXT, "p")}
# Long names with their kinds and short forms. Go's flag library accepts one hyphen or two.
FLAGS = {
    "submit": {
        "conf": (TEXT, "c"),
        "task_name": (TEXT, "n"),
        "description": (TEXT, "d"),
        "user_code_path": (TEXT, "cp"),
        "entrypoint": (TEXT, "e"),
        "args": (LIST, "a"),
        "image": (TEXT, "i"),
        "resource_group_id": (TEXT, "g"),
        "resource_queue_id": (TEXT, "q"),
        "resource_queue_name": (TEXT, "queue_name"),
        "framework": (TEXT, "f"),
        "local_diff": (TEXT,),
        "copy-links": (ON, "L"),
        "links": (ON,),
        "access_type": (TEXT,),
        "access_users": (LIST,),
        "preemptible": (ON,),
        "priority": (TEXT,),
        "output": (TEXT,),
        "set": (LIST,),
    },
    # --limit and --offset are from users' notes of `list --help`. Without them, --output json
    # prints 10 rows.
    "list": {
        "status": (TEXT, "s"),
        "name": (TEXT, "n"),
        "limit": (TEXT,),
        "offset": (TEXT,),
        **_OUTPUT,
    },
    "get": {"id": (TEXT, "i"), **_OUTPUT},
    "instance_list": {"id": (TEXT, "i"), **_OUTPUT},
    "cancel": {"id": (TEXT, "i")},
    "logs": {
        "task": (TEXT, "t"),
        "instance": (TEXT, "i"),
        "content": (TEXT, "c"),
        "reverse": (ON, "r"),
        "lines": (TEXT, "l"),
        "f": (ON,),
        "profile": (TEXT, "p"),
    },
    "export": {"task": (TEXT, "t"), "config": (ON,), "code": (ON,)},
}
REQUIRED = {
    "submit": ["conf"], "get": ["id"], "instance_list": ["id"], "cancel": ["id"],
    "logs": ["task", "instance"], "export": ["task"],
}  # fmt: skip
# "with --output the answer is no longer interactive"
WITH_TERMINAL = ("list", "get", "instance_list")


class Usage(Exception):
    """The command line is invalid, or the command cannot reach the service."""


def main(directory: Path, args: list[str]) -> int:
    _record_call(directory, args)
    try:
        return _run(directory, args)
    except Usage as error:
        print(error, file=sys.stderr)
        return 1


def _run(directory: Path, args: list[str]) -> int:
    if args == ["version"]:
        print(VERSION)
        return 0
    if args == ["configure"]:
        return _configure()
    if not args or args[0] != "ml_task":
        raise Usage(f"No help topic for '{args[0] if args else ''}'")
    operation, rest = (args[1] if len(args) > 1 else ""), args[2:]
    if operation == "instance":
        operation, rest = f"instance_{rest[0] if rest else ''}", rest[1:]
    if operation not in FLAGS:
        raise Usage(f"No help topic for '{operation}'")
    if rest[:1] in (["--help"], ["-h"]):
        return _help(operation)
    flags = _parse(FLAGS[operation], rest)
    missing = [name for name in REQUIRED.get(operation, []) if name not in flags]
    if missing:
        raise Usage(f'Required flags "{", ".join(missing)}" not set')
    if flags.get("output", "json") != "json":
        raise Usage(f"invalid value {flags['output']!r} for flag output: only json is supported")
    for name in ("limit", "offset", "lines"):
        if not flags.get(name, "0").isdigit():
            raise Usage(f"invalid value {flags[name]!r} for flag -{name}: parse error")
    request = {
        "operation": operation,
        "flags": flags,
        "cwd": os.getcwd(),
        **_identity(flags.get("profile")),
    }
    if operation == "submit":
        if flags.get("local_diff", "on") not in ("on", "off"):
            raise Usage("invalid value for flag local_diff: on or off")
        try:
            request["conf"] = Path(flags["conf"]).read_text()
        except OSError as error:
            raise Usage(
                f"load config file failed: open {flags['conf']}: {error.strerror.lower()}"
            ) from None
    if operation in WITH_TERMINAL and "output" not in flags:
        print("open /dev/tty: no such device or address", file=sys.stderr)
        return 255  # the exit code without a terminal, from users' notes
    return _ask(directory, request)


def _help(operation: str) -> int:
    """List the flags in the format of Go's command line library, which `volc` uses."""
    print(f"NAME:\n   volc ml_task {operation.replace('_', ' ')}\n\nOPTIONS:")
    for name, (kind, *shorts) in FLAGS[operation].items():
        flags = ", ".join(f"-{flag}" if len(flag) == 1 else f"--{flag}" for flag in (name, *shorts))
        print(f"   {flags}{'' if kind == ON else ' value'}")
    print("   --help, -h  show help")
    return 0


def _parse(known: dict, args: list[str]) -> dict:
    """Return the values of the flags by their long names."""
    names = {short: name for name, (_, *shorts) in known.items() for short in shorts} | {
        name: name for name in known
    }
    flags: dict = {}
    args = list(args)
    while args:
        arg = args.pop(0)
        if not arg.startswith("-") or arg in ("-", "--"):
            raise Usage(f"unexpected argument {arg!r}")
        name, equals, value = arg.removeprefix("-").removeprefix("-").partition("=")
        if name not in names:
            raise Usage(f"Incorrect Usage: flag provided but not defined: -{name}")
        kind = known[names[name]][0]
        if kind == ON:
            if value not in ("", "true", "false"):
                raise Usage(f"invalid boolean value {value!r} for -{name}: parse error")
            flags[names[name]] = value != "false"
            continue
        if not equals:
            if not args:
                raise Usage(f"Incorrect Usage: flag needs an argument: -{name}")
            value = args.pop(0)
        if kind == LIST:
            flags.setdefault(names[name], []).append(value)
        else:
            flags[names[name]] = value
    return flags


def _identity(profile: str | None) -> dict[str, str]:
    """Return keys and region.

    The sources are VOLC_AK, VOLC_SK and VOLC_REGION, then a section of ~/.volc/credentials and
    ~/.volc/config.
    """
    section = profile or os.environ.get("VOLC_PROFILE") or "default"
    home = Path(os.environ.get("HOME", "/")) / ".volc"
    found = configparser.ConfigParser(interpolation=None)
    found.read([home / "credentials", home / "config"])
    own = found[section] if found.has_section(section) else {}
    ak = os.environ.get("VOLC_AK") or own.get("access_key_id", "")
    sk = os.environ.get("VOLC_SK") or own.get("secret_access_key", "")
    region = os.environ.get("VOLC_REGION") or own.get("region", "")
    if not ak or not sk:
        raise Usage("AccessKeyId or SecretAccessKey is empty, please run `volc configure` first")
    if not region:
        raise Usage("Region is empty, please run `volc configure` first")
    return {"ak": ak, "sk": sk, "region": region}


def _configure() -> int:
    """Ask for keys and region, and write them to ~/.volc."""
    answers = []
    for prompt in (
        "volc access key []: ",
        "volc secret access key []: ",
        "volc region [cn-beijing]: ",
    ):
        print(prompt, end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            raise Usage("\nEOF")
        answers.append(line.strip())
    home = Path(os.environ["HOME"]) / ".volc"
    home.mkdir(exist_ok=True)
    texts = {
        "credentials": f"[default]\naccess_key_id = {answers[0]}\n"
        f"secret_access_key = {answers[1]}\n",
        "config": f"[default]\nregion = {answers[2] or 'cn-beijing'}\n",
    }
    for name, text in texts.items():
        (home / name).write_text(text)
        (home / name).chmod(0o600)
    return 0


def _ask(directory: Path, request: dict) -> int:
    # By a descriptor: the socket's absolute path can exceed the kernel's limit.
    folder = os.open(directory, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(f"/proc/self/fd/{folder}/socket")
        except OSError:
            raise Usage("dial tcp: lookup open.volcengineapi.com: no such host") from None
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile("r") as answers:
            for line in answers:
                answer = json.loads(line)
                if "code" in answer:
                    return answer["code"]
                print(answer.get("out", ""), end="", flush=True)
                print(answer.get("err", ""), end="", flush=True, file=sys.stderr)
    raise Usage("unexpected EOF")


def _record_call(directory: Path, args: list[str]) -> None:
    """Append the arguments to calls.jsonl, which tests read."""
    line = json.dumps({"argv": args, "at": time.time()}) + "\n"
    file = os.open(directory / "calls.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(file, line.encode())
    os.close(file)


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(130)
