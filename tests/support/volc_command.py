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
# The flags that clusterjob uses, each with a value; the real command has more. --limit and --offset
# are from users' notes of `list --help`.
FLAGS = {
    "submit": ["conf", "output"],
    "list": ["status", "name", "limit", "offset", "output"],
    "instance_list": ["id", "output"],
    "cancel": ["id"],
    "logs": ["task", "instance", "lines"],
}
# "with --output the answer is no longer interactive"
REQUIRED = {
    "submit": ["conf", "output"], "list": ["output"], "instance_list": ["id", "output"],
    "cancel": ["id"], "logs": ["task", "instance"],
}  # fmt: skip


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
    missing = [name for name in REQUIRED[operation] if name not in flags]
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
        **_identity(),
    }
    if operation == "submit":
        try:
            request["conf"] = Path(flags["conf"]).read_text()
        except OSError as error:
            raise Usage(
                f"load config file failed: open {flags['conf']}: {error.strerror.lower()}"
            ) from None
    return _ask(directory, request)


def _help(operation: str) -> int:
    """List the flags in the format of Go's command line library, which `volc` uses."""
    print(f"NAME:\n   volc ml_task {operation.replace('_', ' ')}\n\nOPTIONS:")
    for name in FLAGS[operation]:
        print(f"   --{name} value")
    print("   --help, -h  show help")
    return 0


def _parse(known: list, args: list[str]) -> dict:
    """Return the values of the flags by their names."""
    flags: dict = {}
    args = list(args)
    while args:
        name = args.pop(0).removeprefix("--")
        if name not in known:
            raise Usage(f"Incorrect Usage: flag provided but not defined: -{name}")
        if not args:
            raise Usage(f"Incorrect Usage: flag needs an argument: -{name}")
        flags[name] = args.pop(0)
    return flags


def _identity() -> dict[str, str]:
    """Return keys and region.

    The sources are VOLC_AK, VOLC_SK and VOLC_REGION, then a section of ~/.volc/credentials and
    ~/.volc/config.
    """
    section = os.environ.get("VOLC_PROFILE") or "default"
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
