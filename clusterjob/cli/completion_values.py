"""Values that a shell completes: job ids, clusters, partitions, hosts.

A value comes from records, configuration files or Slurm, and stands on the user's command line
after a TAB. Only values of `_PLAIN` characters are offered, so that none can run code in the shell.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

_PLAIN = re.compile(r"[\w@%+./][\w@%+:./,\[\]-]{0,254}", re.ASCII)
_OFFERED = 100  # job ids
_SORT_TIME = 0.03  # seconds; a slow file system must not delay the shell
_SINFO_WAIT = 0.08  # seconds; after that, sinfo fills the cache for the next TAB
_SINFO_AGE = 300.0  # seconds
# Argument 1 is the cache: a slow sinfo writes it after the completion has ended.
_SINFO = 'timeout 10 sinfo -h -o %R > "$1.$$" && mv "$1.$$" "$1" || rm -f "$1.$$"'


def plain(values: Iterable[str]) -> list[str]:
    """Return the values that a shell reads as they are, without duplicates."""
    return [value for value in dict.fromkeys(values) if _PLAIN.fullmatch(value)]


def job_ids(prefix: str, *, ended: bool = True) -> list[str]:
    """Return the latest ids that begin with a prefix, newest first; perhaps without ended jobs."""
    from clusterjob.core.state_home import home  # importing core.records would take 20 ms

    try:
        with os.scandir(home() / "records") as entries:
            found = [each for each in entries if each.name.startswith(prefix) and _is_job(each)]
    except FileNotFoundError:
        return []
    # A new file mostly has a high inode, so the newest files are looked at in any case.
    found.sort(key=lambda entry: -entry.inode())
    end = time.monotonic() + _SORT_TIME
    changed: dict[str, int] = {}
    for entry in found:
        if time.monotonic() > end:
            break
        with contextlib.suppress(OSError):
            changed[entry.name] = entry.stat(follow_symlinks=False).st_mtime_ns
    found.sort(key=lambda entry: changed.get(entry.name, 0), reverse=True)
    found = [entry for entry in found[:_OFFERED] if ended or not _has_ended(entry.path)]
    return plain(entry.name.removesuffix(".json") for entry in found)


def _has_ended(path: str) -> bool:
    """Return whether a job has an end in its record or in its directory here."""
    try:
        with open(path, "rb") as stream:
            record = json.load(stream)
        return bool(record.get("end")) or os.path.exists(f"{record['job_dir']}/result.json")
    except (OSError, ValueError, KeyError, AttributeError):
        return False


def _is_job(entry: os.DirEntry[str]) -> bool:
    """Return whether a file is the record of a job, not of an element of an array."""
    return entry.name.endswith(".json") and "_" not in entry.name and entry.name[0] != "."


def clusters() -> list[str]:
    """Return the names of the profiles and of the backends."""
    from clusterjob.backends import base
    from clusterjob.core.config_files import find_files

    files = find_files(Path.cwd())
    return plain([*(name for file in reversed(files) for name in file.clusters), *base.names()])


def partitions() -> list[str]:
    """Return Slurm's partitions; sinfo runs at most once in five minutes."""
    import subprocess

    from clusterjob.core.node_zip import cache_directory
    from clusterjob.node.system import private_dirs
    from clusterjob.remote.ssh_host_names import read_lines

    cache = cache_directory()
    if shutil.which("sinfo") is None or cache is None:
        return []
    place = cache / "partitions"
    private_dirs.make(place.parent)
    try:
        is_old = time.time() - place.stat().st_mtime > _SINFO_AGE
    except OSError:
        is_old = True
    if is_old:
        asked = subprocess.Popen(
            ["/bin/sh", "-c", _SINFO, "sh", str(place)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            asked.wait(_SINFO_WAIT)
        except subprocess.TimeoutExpired:
            asked.returncode = 0  # it continues without this process
    return plain(read_lines(place))


def hosts() -> list[str]:
    """Return the host names of the ssh configuration and of the profiles."""
    from clusterjob.core.config_files import find_files
    from clusterjob.remote.ssh_host_names import configured_hosts

    found = configured_hosts()
    for file in find_files(Path.cwd()):
        for profile in (file.data.get("defaults", {}), *file.clusters.values()):
            for key in ("hosts", "login"):
                value = profile.get(key, "")
                found += value if isinstance(value, list) else str(value).split(",")
    return plain(map(str, found))
