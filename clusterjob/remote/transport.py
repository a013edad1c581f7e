"""paramiko's transport, which hangs up on a host that sends more than it was allowed to.

paramiko keeps all data of a channel that nobody has read, also what exceeds the window of RFC 4254,
section 5.2: a host that ignores the window fills the memory.
"""

from __future__ import annotations

from typing import Any, ClassVar

import paramiko
from paramiko.common import DEFAULT_WINDOW_SIZE, MSG_CHANNEL_DATA, MSG_CHANNEL_EXTENDED_DATA

_MOST_UNREAD = 2 * DEFAULT_WINDOW_SIZE  # bytes of one channel


def _checked(name: str) -> Any:
    feed = getattr(paramiko.Channel, name)

    def check(channel: Any, message: Any) -> None:
        if len(channel.in_buffer) + len(channel.in_stderr_buffer) > _MOST_UNREAD:
            raise paramiko.SSHException("the host sends more than the window allows")
        feed(channel, message)

    return check


class Transport(paramiko.Transport):
    """A transport that ends when a channel holds more unread data than its window."""

    _channel_handler_table: ClassVar[dict[int, Any]] = {
        **paramiko.Transport._channel_handler_table,  # type: ignore[attr-defined]
        MSG_CHANNEL_DATA: _checked("_feed"),
        MSG_CHANNEL_EXTENDED_DATA: _checked("_feed_extended"),
    }
