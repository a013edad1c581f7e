"""Parse the SSH options of ``--set``, for all backends that use hosts behind SSH."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterjob.core import snapshot
from clusterjob.core.hosts import Host
from clusterjob.core.units import parse_size
from clusterjob.errors import SpecError
from clusterjob.remote import sessions
from clusterjob.remote.transport import AUTO, DEFAULT_TIMEOUT, TRANSPORTS

NAMES = ("ssh_config", "connect_timeout", "sync_limit", "remote_home", "transport")


@dataclass(frozen=True)
class ConnectionSettings:
    """Parsed SSH options of ``--set``.

    Attributes:
        ssh_config: a configuration file that replaces the user's; None for the user's.
        connect_timeout: seconds for each phase of a connection.
        sync_limit: maximum bytes of a snapshot of the code.
        remote_home: clusterjob's directory on each host.
        transport: one of `clusterjob.remote.transport.TRANSPORTS`.
    """

    ssh_config: Path | None
    connect_timeout: float
    sync_limit: int
    remote_home: str
    transport: str

    @classmethod
    def of(cls, options: Mapping[str, str], *, must_exist: bool = True) -> ConnectionSettings:
        """Parse the options of a job.

        Args:
            options: the values of ``--set``.
            must_exist: whether the files that they name must exist.

        Raises:
            SpecError: a value is not valid, or a file does not exist.
        """
        config = Path(options["ssh_config"]).expanduser() if "ssh_config" in options else None
        if must_exist and config is not None and not config.is_file():
            raise SpecError(f"ssh_config: {config} does not exist")
        try:
            timeout = float(options.get("connect_timeout", DEFAULT_TIMEOUT))
        except ValueError:
            timeout = 0.0
        if not 0 < timeout < 1e6:
            raise SpecError(
                f"connect_timeout: {options['connect_timeout']!r} is not a number of seconds"
            )
        remote_home = options.get("remote_home", sessions.HOME)
        if (
            not remote_home.startswith(("/", "~/"))
            or not remote_home.isprintable()
            or ":" in remote_home
        ):
            raise SpecError(
                f"remote_home: {remote_home!r} is not an absolute path, or contains a colon",
                "write it as /scratch/me or ~/jobs",
            )
        limit = parse_size(options["sync_limit"]) if "sync_limit" in options else snapshot.LIMIT
        transport = options.get("transport", AUTO)
        if transport not in TRANSPORTS:
            raise SpecError(
                f"transport: {transport!r} is unknown", f"it is one of {', '.join(TRANSPORTS)}"
            )
        return cls(config.absolute() if config else None, timeout, limit, remote_home, transport)

    def place(self, hosts: tuple[Host, ...], python: str, setup: Sequence[str]) -> sessions.Place:
        """Return hosts with these options.

        Args:
            hosts: one per node, in the order of node ranks.
            python: the job's interpreter: a path, or a name in the hosts' PATH.
            setup: shell lines that may be needed to find it.
        """
        return sessions.Place(
            hosts,
            python,
            setup=tuple(setup),
            home=self.remote_home,
            ssh_config=self.ssh_config,
            timeout=self.connect_timeout,
            transport=self.transport,
        )
