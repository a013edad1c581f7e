"""paramiko transport that closes the connection if a host exceeds the channel window.

paramiko buffers all unread data of a channel, even beyond the window of RFC 4254, section 5.2: a
host that ignores the window would fill the memory.
"""

from __future__ import annotations

from typing import Any, ClassVar

import paramiko
from paramiko.common import DEFAULT_WINDOW_SIZE, MSG_CHANNEL_DATA, MSG_CHANNEL_EXTENDED_DATA

_MAX_UNREAD = 2 * DEFAULT_WINDOW_SIZE  # bytes of one channel


def _checked(name: str) -> Any:
    feed = getattr(paramiko.Channel, name)

    def check(channel: Any, message: Any) -> None:
        if len(channel.in_buffer) + len(channel.in_stderr_buffer) > _MAX_UNREAD:
            raise paramiko.SSHException("the host sends more than the window allows")
        feed(channel, message)

    return check


class Transport(paramiko.Transport):
    """Transport that ends if a channel has more unread data than its window allows."""

    _channel_handler_table: ClassVar[dict[int, Any]] = {
        **paramiko.Transport._channel_handler_table,  # type: ignore[attr-defined]
        MSG_CHANNEL_DATA: _checked("_feed"),
        MSG_CHANNEL_EXTENDED_DATA: _checked("_feed_extended"),
    }
