"""What ``--set`` says of hosts that are reached over SSH, whichever backend reaches them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterjob.core import snapshot
from clusterjob.core.hosts import Host
from clusterjob.core.units import parse_size
from clusterjob.errors import SpecError
from clusterjob.remote import sessions
from clusterjob.remote.connect import DEFAULT_TIMEOUT

NAMES = ("ssh_config", "connect_timeout", "sync_limit", "remote_home")


@dataclass(frozen=True)
class Options:
    """How hosts are reached, and what they get.

    Attributes:
        ssh_config: a configuration in the place of the user's; None for that.
        connect_timeout: seconds for each phase of a connection.
        sync_limit: bytes that a snapshot of the code may have.
        remote_home: where all of ours lies on each host.
    """

    ssh_config: Path | None
    connect_timeout: float
    sync_limit: int
    remote_home: str

    @classmethod
    def of(cls, options: Mapping[str, str], *, must_exist: bool = True) -> Options:
        """Return what a job's options say.

        Args:
            options: the values of ``--set``.
            must_exist: whether the files that they name have to be there.

        Raises:
            SpecError: a value makes no sense, or a file does not exist.
        """
        config = Path(options["ssh_config"]).expanduser() if "ssh_config" in options else None
        if must_exist and config is not None and not config.is_file():
            raise SpecError(f"ssh_config: {config} is not there")
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
                f"remote_home: {remote_home!r} is no absolute path, or holds a colon",
                "write it as /scratch/me or ~/jobs",
            )
        limit = parse_size(options["sync_limit"]) if "sync_limit" in options else snapshot.LIMIT
        return cls(config.absolute() if config else None, timeout, limit, remote_home)

    def place(self, hosts: tuple[Host, ...], python: str, setup: Sequence[str]) -> sessions.Place:
        """Return hosts with how they are reached.

        Args:
            hosts: one per node, in the order of their ranks.
            python: the job's interpreter, as the hosts find it.
            setup: shell lines that may be needed to find it.
        """
        return sessions.Place(
            hosts,
            python,
            setup=tuple(setup),
            home=self.remote_home,
            ssh_config=self.ssh_config,
            timeout=self.connect_timeout,
        )
