"""Remember for a day the hosts that jobs blamed for failures, so that later jobs avoid them.

One small file for each cluster in the state directory: a job's events, which hosts have written,
name the host and the kind of the failure.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from clusterjob.core.records import Record
from clusterjob.core.spec import JobSpec
from clusterjob.core.state_home import home
from clusterjob.core.times import parse_recorded, show_duration
from clusterjob.errors import RecordError
from clusterjob.node.logs.events import read_job_events
from clusterjob.node.system import files, private_dirs
from clusterjob.node.system.sanitize import sanitize

SECONDS = 86400.0  # for which a host is avoided
_FOLDER = "bad_hosts"
_MOST = 200  # hosts of one cluster
_MAX_TEXT = 300  # characters of a reason
_HOST = re.compile(r"[\w.@:\[\]-]{1,255}", re.ASCII)
_KIND = re.compile(r"[a-z_]{1,40}", re.ASCII)


@dataclass(frozen=True)
class BadHost:
    """A host that a job blamed.

    Attributes:
        host: as the cluster or the user names it.
        kind: the kind of the failure.
        job: the id of the job.
        at: when the job blamed it, in seconds since the epoch.
        why: the failure in one line.
    """

    host: str
    kind: str
    job: str
    at: float
    why: str

    @property
    def age(self) -> str:
        """The time since then, as text."""
        return show_duration(max(0.0, time.time() - self.at))

    def __str__(self) -> str:
        return f"{self.host} ({self.kind} in job {self.job}, {self.age} ago)"


class BadHosts:
    """The hosts of one cluster that jobs blamed in the last day.

    Args:
        cluster: the cluster's name.
    """

    def __init__(self, cluster: str) -> None:
        self.cluster = cluster
        digest = hashlib.sha256(cluster.encode(errors="surrogatepass")).hexdigest()
        self._path = home() / _FOLDER / f"{digest[:32]}.json"

    def listed(self) -> list[BadHost]:
        """Return the hosts, the latest last."""
        now = time.time()
        found = [each for each in self._read()[0].values() if now - SECONDS < each.at]
        return sorted(found, key=lambda each: each.at)

    def note(self, record: Record) -> None:
        """Add the hosts that a job blamed; an error such as a full disk loses them."""
        hosts, cleared = self._read()
        before = dict(hosts)
        for each in blamed(record):
            if each.at > max(cleared.get(each.host, 0.0), cleared.get("", 0.0)) and (
                each.host not in hosts or hosts[each.host].at < each.at
            ):
                hosts[each.host] = each
        if hosts != before:
            self._write(hosts, cleared)

    def clear(self, host: str | None) -> int:
        """Forget a host, or all; return how many were avoided."""
        hosts, cleared = self._read()
        gone = [one for one in hosts if host in (None, one)]
        for one in gone:
            del hosts[one]
        cleared[host or ""] = time.time()
        self._write(hosts, cleared)
        return len(gone)

    def _read(self) -> tuple[dict[str, BadHost], dict[str, float]]:
        """Return the hosts, and when a host, or all, were cleared."""
        try:
            data = files.read_json(self._path)
        except OSError:
            data = None
        if not isinstance(data, Mapping) or data.get("cluster") != self.cluster:
            return {}, {}
        hosts: dict[str, BadHost] = {}
        for each in data.get("hosts") or ():
            with contextlib.suppress(TypeError, ValueError):
                one = BadHost(**each)
                hosts[one.host] = replace(one, at=float(one.at))
        cleared = data.get("cleared")
        if not isinstance(cleared, Mapping):
            return hosts, {}
        return hosts, {str(name): float(at) for name, at in cleared.items()}

    def _write(self, hosts: Mapping[str, BadHost], cleared: Mapping[str, float]) -> None:
        oldest = time.time() - SECONDS
        kept = sorted((each for each in hosts.values() if each.at > oldest), key=lambda b: b.at)
        value = {
            "cluster": self.cluster,
            "hosts": [asdict(each) for each in kept[-_MOST:]],
            "cleared": dict([item for item in cleared.items() if item[1] > oldest][-_MOST:]),
        }
        with contextlib.suppress(OSError):
            private_dirs.make(self._path.parent)
            files.write_json(self._path, value)


def clusters() -> Iterator[BadHosts]:
    """Yield each cluster with a file."""
    with contextlib.suppress(OSError):
        for path in sorted((home() / _FOLDER).glob("*.json")):
            with contextlib.suppress(OSError, ValueError):
                data: Any = files.read_json(path)
                if isinstance(data, Mapping) and isinstance(data.get("cluster"), str):
                    yield BadHosts(data["cluster"])


def blamed(record: Record) -> Iterator[BadHost]:
    """Yield the hosts that a job blamed in the last day; its hosts have written the events."""
    now = time.time()
    try:
        known = {str(host) for host in record.job.hosts}
    except RecordError:
        return  # damaged
    for event in read_job_events(record.job_dir):
        if event.get("event") != "avoid":
            continue
        host, kind = str(event.get("host")), str(event.get("kind"))
        moment = parse_recorded(str(event.get("time")))
        at = 0.0 if moment is None else min(now, moment.timestamp())
        if now - SECONDS < at and _HOST.fullmatch(host) and _KIND.fullmatch(kind):
            if known and host not in known:
                continue  # a host of the job must not blame a host of other jobs
            why = sanitize(str(event.get("why", ""))).partition("\n")[0][:_MAX_TEXT]
            yield BadHost(host, kind, job=record.job_id, at=at, why=why)


def hosts_last(spec: JobSpec, cluster: str) -> tuple[JobSpec, list[BadHost]]:
    """Return the job with avoided hosts at the end of its list, and those that it does not use.

    The job keeps all hosts: if the others are too few, or one of them cannot be used, it still
    runs. The last hosts of its nodes are spare ones.
    """
    bad = {each.host: each for each in BadHosts(cluster).listed()}
    if not bad or len(spec.hosts) <= spec.working_nodes:
        return spec, []
    hosts = sorted(spec.hosts, key=lambda host: str(host) in bad)
    last = [bad[str(host)] for host in hosts[spec.working_nodes :] if str(host) in bad]
    return replace(spec, hosts=tuple(hosts)), last


def text(avoided: Sequence[BadHost]) -> str:
    """Return one line that says which hosts a job does not use, and why."""
    shown = ", ".join(map(str, avoided[-5:]))
    more = f" and {len(avoided) - 5} more" if len(avoided) > 5 else ""
    return f"avoids {shown}{more} (`clusterjob hosts bad --clear` forgets them)"
