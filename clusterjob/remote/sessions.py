"""All sessions of this process: one per host, started on first use, replaced if broken."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clusterjob.core.hosts import Host
from clusterjob.remote.pool import Pool
from clusterjob.remote.session import Session
from clusterjob.remote.transport import AUTO, DEFAULT_TIMEOUT, OPENSSH, ConnectOptions

HOME = "~/.clusterjob"


@dataclass(frozen=True)
class Place:
    """The hosts of a job, with their connection settings.

    Attributes:
        hosts: one per node, in the order of node ranks.
        python: the job's interpreter: a path, or a name in the hosts' PATH.
        setup: shell lines that may be needed to find it.
        home: clusterjob's directory on each host.
        ssh_config: a configuration file that replaces the user's.
        timeout: seconds for each phase of a connection, and for an answer.
        transport: one of `clusterjob.remote.transport.TRANSPORTS`.
    """

    hosts: tuple[Host, ...]
    python: str
    setup: tuple[str, ...] = ()
    home: str = HOME
    ssh_config: Path | None = None
    timeout: float = DEFAULT_TIMEOUT
    transport: str = AUTO

    def connect_options(self, warn: Callable[[str], None]) -> ConnectOptions:
        """Return the options of connections to these hosts."""
        return ConnectOptions(
            self.timeout, warn, ssh_config=self.ssh_config, transport=self.transport
        )

    def to_json(self) -> dict[str, Any]:
        """Return the hosts as JSON data."""
        return {
            "hosts": [vars(host) for host in self.hosts],
            "python": self.python,
            "setup": list(self.setup),
            "home": self.home,
            "ssh_config": str(self.ssh_config) if self.ssh_config else None,
            "timeout": self.timeout,
            "transport": self.transport,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Place:
        """Return the hosts from the data of `to_json`."""
        hosts = tuple(Host(**host) for host in data["hosts"])
        config = Path(data["ssh_config"]) if data.get("ssh_config") else None
        return cls(
            hosts,
            data["python"],
            tuple(data["setup"]),
            data["home"],
            config,
            data["timeout"],
            data.get("transport", AUTO),  # absent in records of older versions
        )


class Sessions:
    """Sessions with hosts, and the connections that they use.

    Args:
        warn: called with each line that the user should see.
        node_zip: returns the content of the node zip.
    """

    def __init__(self, warn: Callable[[str], None], node_zip: Callable[[], bytes]) -> None:
        self._warn = warn
        self._make_zip = node_zip
        self._zip = b""
        self._lock = threading.Lock()
        self._pools: dict[ConnectOptions, Pool] = {}
        self._sessions: dict[tuple[Pool, Host, str], Session] = {}

    def session(self, place: Place, node: int) -> Session:
        """Return the session with a node's host.

        Raises:
            HostError: the host cannot be used.
        """
        pool, host = self.pool(place), place.hosts[node]
        connection = pool.connection(host)
        with self._lock:
            held = self._sessions.get((pool, host, place.home))
            if held is not None and held.alive and held.connection is connection:
                return held
            if held is not None:
                held.close()
            self._zip = self._zip or self._make_zip()
            made = self._sessions[pool, host, place.home] = Session(
                connection,
                place.python,
                setup=place.setup,
                home=place.home,
                node_zip=self._zip,
                timeout=place.timeout,
            )
        return made

    def openssh(self, place: Place, node: int) -> Session:
        """Return the session with a node's host over OpenSSH, whose connection others can use.

        Raises:
            HostError: the host cannot be used, or this machine has no ssh.
        """
        return self.session(replace(place, transport=OPENSSH), node)

    def pool(self, place: Place) -> Pool:
        """Return the connections with these settings."""
        options = place.connect_options(self._warn)
        with self._lock:
            if options not in self._pools:
                self._pools[options] = Pool(options)
            return self._pools[options]

    def close(self) -> None:
        """Close all sessions and connections; jobs continue."""
        with self._lock:
            sessions, pools = list(self._sessions.values()), list(self._pools.values())
            self._sessions.clear()
            self._pools.clear()
        for session in sessions:
            session.close()
        for pool in pools:
            pool.close()
