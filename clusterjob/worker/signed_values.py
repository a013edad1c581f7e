"""Sign the values that ranks write to torch's store, with the job's key.

torch's store lets any client write any value. Processes that clusterjob's agents start have a key
(CLUSTERJOB_STORE_KEY). Under other launchers there is no key, and values are not signed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from clusterjob.errors import RendezvousError
from clusterjob.node import contract

_LENGTH = 64  # characters of a signature


class SignedStore:
    """A prefix of torch's store in which each value carries a signature.

    A signature covers the value, its key and the index of its group.

    Args:
        store: the prefix store.
        number: index of the group among the groups over this store, from 0. The next group does
            not accept the values of this group.
    """

    def __init__(self, store: Any, number: int) -> None:
        self._store = store
        self._number = number
        self._key = os.environ.get(contract.STORE_KEY, "").encode()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)  # add, check and wait need no signature

    def set(self, name: str, value: str) -> None:
        """Write a signed value."""
        self._store.set(name, self._sign(name, value))

    def get(self, name: str) -> bytes:
        """Return a value.

        Raises:
            RendezvousError: the signature is wrong: no process of this job has written the value.
        """
        return self._check(name, self._store.get(name))

    def multi_get(self, names: Sequence[str]) -> list[bytes]:
        """Return several values; see `get` for errors."""
        return [
            self._check(name, value)
            for name, value in zip(names, self._store.multi_get(list(names)), strict=True)
        ]

    def compare_set(self, name: str, expected: str, value: str) -> bytes:
        """Write a value if there is none; return the stored value; see `get` for errors."""
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
            raise RendezvousError(
                f"{name!r} in torch's store was written by no process of this job",
                "another program writes to MASTER_ADDR:MASTER_PORT; "
                "`ss -tnp` shows who is connected there",
            )
        return value[_LENGTH:]
