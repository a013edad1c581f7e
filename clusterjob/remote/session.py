"""A visit at a host: one command over one connection, which is asked what the host knows and told
what it is to do.

`clusterjob.node.host_server` is the other end. It runs from the node zip, which a host keeps by its
digest, so that it is sent once.
"""

from __future__ import annotations

import contextlib
import hashlib
import shlex
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import paramiko

from clusterjob.core.schema import SchemaError
from clusterjob.errors import HostError
from clusterjob.remote.answer_schemas import MOST_ERROR
from clusterjob.remote.connect import Connection
from clusterjob.remote.protocol import Deadline, Exchange

_WORD = "clusterjob-visit "
_NOISE = 1 << 16  # bytes that a login may print before the conversation begins
_LONGEST_LOGIN = (
    6  # times the timeout that a login which prints may take until the conversation begins
)
_CANDIDATES = ("python3", "python3.13", "python3.12", "python3.11", "python3.10", "python")

# The first code that a host's interpreter runs: any Python can read it, and says so if it is too
# old.
_BOOT = """
import sys
sys.path[:] = [entry for entry in sys.path if entry]
word = "clusterjob-visit "
def say(text):
    sys.stdout.write(word + text + "\\n")
    sys.stdout.flush()
if sys.version_info < (3, 10):
    say("old %d.%d %s" % (sys.version_info[0], sys.version_info[1], sys.executable))
    sys.exit(0)
import hashlib, os, tempfile
digest, size, home = sys.stdin.buffer.readline().decode().rstrip("\\n").split(" ", 2)
home = os.path.abspath(os.path.expanduser(home))
path = os.path.join(home, "node", digest + ".pyz")
try:
    data = open(path, "rb").read() if os.path.exists(path) else b""
    if hashlib.sha256(data).hexdigest() != digest:
        say("need")
        data = sys.stdin.buffer.read(int(size))
        for directory in (home, os.path.dirname(path)):
            os.makedirs(directory, mode=0o700, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=os.path.dirname(path))
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
            os.replace(part, path)
        except BaseException:
            os.unlink(part)
            raise
except OSError as error:
    say("broken %s: %s" % (error.strerror, error.filename or path))
    sys.exit(0)
sys.path.insert(0, path)
from clusterjob.node.host_server.server import main
say("ready %s" % sys.executable)
main(home)
"""


def _script(python: str, setup: Sequence[str]) -> str:
    """Return what the host's bash does: find an interpreter, and become it. What it prints on the
    way goes to stderr.
    """
    lines = [
        # One compound command: bash reads it whole, and leaves the rest of stdin to the
        # interpreter.
        "{ exec 3>&1 1>&2",
        "cd",
        f"say() {{ printf '{_WORD}%s\\n' \"$1\" >&3; exit 0; }}",
        f'become() {{ exec "$1" -c {shlex.quote(_BOOT)} >&3 3>&-; }}',
        'there() { command -v -- "$1" > /dev/null; }',
        f"python={shlex.quote(python)}",
    ]
    if setup:
        # The job's interpreter may be there after the setup lines alone, and those may need the
        # code, which is not there yet.
        new = '{ there "$p" && "$p" -c "import sys; sys.exit(sys.version_info < (3, 10))" < /dev/null 2> /dev/null; }'
        lines.append(f'for p in "$python" {" ".join(_CANDIDATES)}; do {new} && become "$p"; done')
        lines += [
            f"{{ :\n{line}\n}} < /dev/null || say 'setup {index}'"
            for index, line in enumerate(setup)
        ]
    lines += ['there "$python" || say no-python', 'become "$python"', "say no-python; }"]
    return "\n".join(lines) + "\n"


class Session:
    """A visit at a host; its first request begins it. One request at a time.

    Args:
        connection: to the host.
        python: the job's interpreter, as the host finds it.
        setup: shell lines that may be needed to find it.
        home: where all of ours lies on the host; ``~`` is the user's home directory there.
        node_zip: the package.
        timeout: seconds that the host may be silent when it is asked.
    """

    def __init__(
        self,
        connection: Connection,
        python: str,
        setup: Sequence[str],
        home: str,
        node_zip: bytes,
        timeout: float,
    ) -> None:
        self.connection = connection
        self.label = connection.target.label
        self._python = python
        self._setup = setup
        self._home = home
        self._zip = node_zip
        self._timeout = timeout
        self._lock = threading.Lock()
        self._channel: paramiko.Channel | None = None
        self._exchange: Exchange | None = None
        self.executable = ""

    @property
    def alive(self) -> bool:
        """Whether it can be asked, as far as is known; one that has not begun can."""
        return self.connection.alive and (self._channel is None or not self._channel.closed)

    def ask(
        self,
        op: str,
        *,
        body: bytes | Iterable[bytes] = b"",
        size: int = 0,
        timeout: float | None = None,
        most_bytes: int | None = None,
        bulk: bool = False,
        **fields: Any,
    ) -> tuple[Any, bytes]:
        """Ask the host and return its answer: an object, as `clusterjob.remote.answer_schemas`
        says, and bytes.

        Args:
            op: what is asked; `clusterjob.node.host_server.server` knows the words.
            body: bytes that go with it, or pieces of them.
            size: how many, where they come in pieces.
            timeout: seconds until the answer begins; for each `clusterjob.remote.protocol.STRIDE`
                bytes of it there is the session's timeout.
            most_bytes: that may come with the answer, where it depends on what is asked.
            bulk: whether the answer may take as long as its bytes keep coming; any other is bounded
                in all.
            fields: what else is said.

        Raises:
            HostError: there is no answer in time, it is not as it has to be, the connection broke,
                or what was asked for failed there.
        """
        with self._lock:
            exchange = self._exchange or self._begin()
            try:
                return exchange.ask(
                    op,
                    body=body,
                    size=size,
                    timeout=timeout,
                    most_bytes=most_bytes,
                    bulk=bulk,
                    **fields,
                )
            except paramiko.SSHException as error:
                self.close()
                raise HostError(self.label, f"the connection broke: {error}") from error

    def close(self) -> None:
        """End the visit; what it has started lives on."""
        if self._channel is not None:
            self._channel.close()

    def _begin(self) -> Exchange:
        self._channel = channel = self.connection.execute("exec bash -s")
        exchange = Exchange(self.label, channel, timeout=self._timeout, last_words=self._last_words)
        try:
            self._introduce(exchange)
        except (TimeoutError, SchemaError) as error:
            channel.close()
            if isinstance(error, TimeoutError):
                raise HostError(self.label, str(error)) from error
            raise HostError(
                self.label, "its login prints without an end", hint="look into .bashrc there"
            ) from error
        except (OSError, paramiko.SSHException) as error:
            why = self._last_words()
            channel.close()
            raise HostError(
                self.label, f"the connection broke{f': {why}' if why else ''}"
            ) from error
        except BaseException:
            channel.close()
            raise
        self._exchange = exchange
        return exchange

    def _introduce(self, exchange: Exchange) -> None:
        """Have the host start an interpreter with the node zip, which is sent if it has none."""
        digest = hashlib.sha256(self._zip).hexdigest()
        exchange.send(
            _script(self._python, self._setup).encode(errors="surrogateescape"),
            Deadline(self._timeout),
        )
        with contextlib.suppress(
            OSError, EOFError
        ):  # where it goes no further it has ended, and has said why
            exchange.send(
                f"{digest} {len(self._zip)} {self._home}\n".encode(), Deadline(self._timeout)
            )
        noise, sent = 0, False
        begin = time.monotonic()
        while True:
            left = _LONGEST_LOGIN * self._timeout - (time.monotonic() - begin)
            try:
                line = exchange.line(_NOISE, Deadline(self._timeout, total=left)).decode(
                    errors="replace"
                )
            except EOFError as error:
                raise HostError(
                    self.label,
                    f"it starts no bash or no {self._python}: {self._last_words() or 'no reason given'}",
                ) from error
            if not line.startswith(_WORD):
                noise += len(line) + 1
                if noise > _NOISE:
                    raise SchemaError("noise")
                continue
            word, _, rest = line.removeprefix(_WORD).partition(" ")
            if word == "need" and not sent:
                sent = True
                exchange.send(self._zip, Deadline(self._timeout))
            elif word == "ready":
                self.executable = rest
                return
            else:
                raise self._refusal(word, rest)

    def _refusal(self, word: str, rest: str) -> HostError:
        if word == "old":
            version, _, path = rest.partition(" ")
            why = f"Python too old: {path or self._python} is {version}, 3.10 or newer is needed"
            return HostError(self.label, why, hint="--python names another interpreter there")
        if word == "no-python":
            return HostError(
                self.label,
                f"no Python: there is no interpreter {self._python}",
                hint="--python names another interpreter there",
            )
        if word == "setup":
            said = self._last_words()
            line = (
                self._setup[int(rest)]
                if rest.isascii() and rest.isdigit() and int(rest) < len(self._setup)
                else "?"
            )
            return HostError(
                self.label, f"a setup line failed: {line}{f' ({said})' if said else ''}"
            )
        return HostError(self.label, (rest or word)[:MOST_ERROR])

    def _last_words(self) -> str:
        """Return the last line that the host's command wrote on stderr."""
        if self._channel is None or not self._channel.recv_stderr_ready():
            return ""
        try:
            lines = self._channel.recv_stderr(1 << 16).decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1][:300] if lines else ""
