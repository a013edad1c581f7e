"""What ranks leave in torch's store for each other, signed with the job's key: the store itself
lets anybody write anything.

Processes that our agents start have a key (CLUSTERJOB_STORE_KEY). Under other launchers there is
none, and values stay as they are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from clusterjob.errors import GangError
from clusterjob.node import contract

_LENGTH = 64  # of a signature


class SignedStore:
    """A corner of torch's store in which each value carries a signature of itself, its key and its
    group.

    Args:
        store: the corner.
        number: which of the groups over this store it is for, from 0: what one group has left is
            none of the next.
    """

    def __init__(self, store: Any, number: int) -> None:
        self._store = store
        self._number = number
        self._key = os.environ.get(contract.STORE_KEY, "").encode()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)  # add, check, wait: numbers and whether a key is there

    def set(self, name: str, value: str) -> None:
        """Leave a value."""
        self._store.set(name, self._sign(name, value))

    def get(self, name: str) -> bytes:
        """Return a value.

        Raises:
            GangError: no process of this job has written it.
        """
        return self._check(name, self._store.get(name))

    def multi_get(self, names: Sequence[str]) -> list[bytes]:
        """Return values; raises as `get` does."""
        return [
            self._check(name, value)
            for name, value in zip(names, self._store.multi_get(list(names)), strict=True)
        ]

    def compare_set(self, name: str, expected: str, value: str) -> bytes:
        """Leave a value if there is none; return the one that is there. Raises as `get` does."""
        assert not expected
        return self._check(name, self._store.compare_set(name, "", self._sign(name, value)))

    def _signature(self, name: str, value: bytes) -> bytes:
        import hashlib
        import hmac

        signed = b"\0".join((str(self._number).encode(), name.encode(), value))
        return hmac.new(self._key, signed, hashlib.sha256).hexdigest().encode()

    def _sign(self, name: str, value: str) -> str:
        return self._signature(name, value.encode()).decode() + value if self._key else value

    def _check(self, name: str, value: bytes) -> bytes:
        if not self._key:
            return value
        import hmac

        if not hmac.compare_digest(value[:_LENGTH], self._signature(name, value[_LENGTH:])):
            raise GangError(
                f"{name!r} in torch's store was written by no process of this job",
                "another program writes to MASTER_ADDR:MASTER_PORT; see who is connected there: ss -tnp",
            )
        return value[_LENGTH:]
