"""A session with a host: start its host server over SSH and call its functions.

`clusterjob.node.host_server` is the server. It runs from the node zip. The host stores the zip
under the zip's digest, so the zip is sent only once.
"""

from __future__ import annotations

import contextlib
import hashlib
import shlex
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clusterjob.errors import HostError
from clusterjob.node import inside
from clusterjob.node.system.sanitize import sanitize
from clusterjob.remote.answer_schemas import MAX_ERROR, SchemaError
from clusterjob.remote.protocol import Deadline, Exchange
from clusterjob.remote.transport import Channel, Connection

if TYPE_CHECKING:
    from clusterjob.remote.openssh_transport import OpenSshConnection

_MARKER = "clusterjob-session "
_MAX_LOGIN_OUTPUT = 1 << 16  # bytes that a login may print before the host server starts
# Time limit for a login that prints, as a multiple of the timeout.
_LOGIN_TIMEOUTS = 6
_CANDIDATES = ("python3", "python3.13", "python3.12", "python3.11", "python3.10", "python")

# The first code that the host's interpreter runs. It must run in any Python, to report one that is
# too old.
_BOOT = """
import sys
sys.path[:] = [entry for entry in sys.path if entry]
marker = "clusterjob-session "
def report(text):
    sys.stdout.write(marker + text + "\\n")
    sys.stdout.flush()
if sys.version_info < (3, 10):
    report("old %d.%d %s" % (sys.version_info[0], sys.version_info[1], sys.executable))
    sys.exit(0)
import hashlib, os, tempfile
digest, size, home = sys.stdin.buffer.readline().decode().rstrip("\\n").split(" ", 2)
home = os.path.abspath(os.path.expanduser(home))
path = os.path.join(home, "node", digest + ".pyz")
def check():
    from clusterjob.node.system.private_dirs import Path, exposed
    why = exposed(Path(home), "node", "jobs", "store")
    if why:
        report("broken " + why)
        sys.exit(0)
try:
    data = open(path, "rb").read() if os.path.exists(path) else b""
    new = hashlib.sha256(data).hexdigest() != digest
    if new:
        report("need")
        data = sys.stdin.buffer.read(int(size))
    # Import from these bytes: until the check below, other users may replace the file.
    memory = os.memfd_create("clusterjob")
    os.write(memory, data)
    sys.path.insert(0, "/proc/self/fd/%d" % memory)
    check()
    if new:
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
    report("broken %s: %s" % (error.strerror, error.filename or path))
    sys.exit(0)
check()
from clusterjob.node.host_server.server import main
report("ready %s\t%s" % (sys.executable, path))
main(home, path)
"""


def _script(python: str, setup: Sequence[str]) -> str:
    """Return the bash script that finds an interpreter and replaces bash with it.

    Output of the setup lines goes to stderr.
    """
    lines = [
        # One compound command: bash reads it whole and leaves the rest of stdin to Python.
        "{ exec 3>&1 1>&2",
        "cd",
        f"report() {{ printf '{_MARKER}%s\\n' \"$1\" >&3; exit 0; }}",
        f'start() {{ exec "$1" -c {shlex.quote(_BOOT)} >&3 3>&-; }}',
        'exists() { command -v -- "$1" > /dev/null; }',
        f"python={shlex.quote(python)}",
    ]
    if setup:
        # The job's interpreter may exist only after the setup lines, and these may need the code,
        # which is not sent yet: use any new enough Python first.
        new_enough = (
            '{ exists "$p" && "$p" -c "import sys; sys.exit(sys.version_info < (3, 10))"'
            " < /dev/null 2> /dev/null; }"
        )
        lines.append(
            f'for p in "$python" {" ".join(_CANDIDATES)}; do {new_enough} && start "$p"; done'
        )
        lines += [
            f"{{ :\n{line}\n}} < /dev/null || report 'setup {index}'"
            for index, line in enumerate(setup)
        ]
    lines += ['exists "$python" || report no-python', 'start "$python"', "report no-python; }"]
    return "\n".join(lines) + "\n"


@dataclass(eq=False)
class Session:
    """A session with a host; the first request starts the host server. One request at a time.

    Attributes:
        connection: the connection to the host.
        python: the job's interpreter: a path, or a name in the host's PATH.
        setup: shell lines that may be needed to find it.
        home: clusterjob's directory on the host; ``~`` is the user's home directory there.
        node_zip: content of the node zip.
        timeout: seconds without progress after which a request fails.
        program: the interpreter that runs the host server, and the node zip there.
    """

    connection: Connection
    python: str
    setup: Sequence[str]
    home: str
    node_zip: bytes
    timeout: float
    program: Sequence[str] = ()
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _channel: Channel | None = None
    _exchange: Exchange | None = None

    @property
    def label(self) -> str:
        """The host as the user wrote it."""
        return self.connection.target.label

    @property
    def alive(self) -> bool:
        """Whether the session can take requests, as far as known; true before the first request."""
        return self.connection.alive and (self._channel is None or not self._channel.closed)

    def ask(
        self,
        call: str,
        *,
        body: bytes | Iterable[bytes] = b"",
        size: int = 0,
        timeout: float | None = None,
        max_bytes: int | None = None,
        bulk: bool = False,
        **arguments: Any,
    ) -> tuple[dict[str, Any], bytes]:
        """Call a function of the host server and return its answer.

        Args:
            call: the function; see `clusterjob.node.host_server.server`.
            body: bytes that follow the call, or an iterable of pieces.
            size: number of bytes, if `body` is an iterable.
            timeout: seconds until the answer begins. After that, each
                `clusterjob.remote.protocol.PROGRESS_BYTES` bytes arrive within the session's
                timeout.
            max_bytes: limit of the bytes after the answer, if it depends on the call.
            bulk: whether the answer has no total time limit while its bytes keep coming.
            arguments: the function's arguments.

        Returns:
            The answer's JSON object, checked by `clusterjob.remote.answer_schemas`, and its bytes.

        Raises:
            HostError: no answer came in time, it is malformed, the connection broke, or the request
                failed on the host.
        """
        with self._lock:
            exchange = self._exchange or self._begin()
            return exchange.ask(
                call,
                body=body,
                size=size,
                timeout=timeout,
                max_bytes=max_bytes,
                bulk=bulk,
                **arguments,
            )

    def command(self, code: str, request: Mapping[str, Any], *, terminal: bool) -> dict[str, Any]:
        """Return the request to run `clusterjob.node.inside` on the host with ssh.

        The connection must be one of OpenSSH.

        Args:
            code: Python code on one line; sys.argv[1] is the path of the node zip.
            request: its request.
            terminal: whether it gets a terminal.

        Raises:
            HostError: as in `ask`.
        """
        with self._lock:
            self._exchange = self._exchange or self._begin()
        python, *path = self.program
        variable = f"{inside.REQUEST}={inside.encoded(request)}"
        # One line without quotes in quotes, which csh and fish understand too.
        remote = f"exec env {shlex.join([variable, python, '-I', '-S', '-c', code, *path])}"
        options = ("-t", "-e", "none") if terminal else ()
        words = [*self._openssh().client(*options), remote]
        return {"run": words, "socket": str(self._openssh().path), "host": self.label}

    def tunnel(self, port: int) -> list[str]:
        """Return a command line of ssh that connects its streams to a port of the host."""
        return self._openssh().client("-W", f"localhost:{port}")

    def _openssh(self) -> OpenSshConnection:
        from clusterjob.remote.openssh_transport import OpenSshConnection

        assert isinstance(self.connection, OpenSshConnection)
        return self.connection

    def close(self) -> None:
        """End the session; processes that it started continue."""
        if self._channel is not None:
            self._channel.close()

    def _begin(self) -> Exchange:
        self._channel = channel = self.connection.execute("exec bash -s")
        exchange = Exchange(
            self.label, channel, timeout=self.timeout, last_stderr_line=self._last_stderr_line
        )
        with exchange.closed_on_error():
            self._introduce(exchange)
        self._exchange = exchange
        return exchange

    def _introduce(self, exchange: Exchange) -> None:
        """Start the host server from the node zip, which is sent if the host does not have it."""
        digest = hashlib.sha256(self.node_zip).hexdigest()
        exchange.send(
            _script(self.python, self.setup).encode(errors="surrogateescape"),
            Deadline(self.timeout),
        )
        # If the script has ended, stdin is closed; the reason is read below.
        with contextlib.suppress(OSError, EOFError):
            exchange.send(
                f"{digest} {len(self.node_zip)} {self.home}\n".encode(), Deadline(self.timeout)
            )
        noise, sent = 0, False
        begin = time.monotonic()
        while True:
            left = _LOGIN_TIMEOUTS * self.timeout - (time.monotonic() - begin)
            try:
                line = exchange.line(_MAX_LOGIN_OUTPUT, Deadline(self.timeout, total=left)).decode(
                    errors="replace"
                )
            except SchemaError as error:
                raise self._noisy_login() from error
            except EOFError as error:
                raise HostError(
                    self.label,
                    f"it does not start bash or {self.python}: "
                    f"{self._last_stderr_line() or 'no reason given'}",
                ) from error
            if not line.startswith(_MARKER):
                noise += len(line) + 1
                if noise > _MAX_LOGIN_OUTPUT:
                    raise self._noisy_login()
                continue
            word, _, rest = line.removeprefix(_MARKER).partition(" ")
            if word == "need" and not sent:
                sent = True
                exchange.send(self.node_zip, Deadline(self.timeout))
            elif word == "ready":
                self.program = rest.split("\t")
                return
            else:
                raise self._refusal(word, rest)

    def _noisy_login(self) -> HostError:
        return HostError(
            self.label, "its login does not stop printing", hint="check .bashrc on the host"
        )

    def _refusal(self, word: str, rest: str) -> HostError:
        if word == "old":
            version, _, path = rest.partition(" ")
            why = f"Python too old: {path or self.python} is {version}, 3.10 or newer is needed"
            return HostError(self.label, why, hint="--python names another interpreter there")
        if word == "no-python":
            return HostError(
                self.label,
                f"no Python: there is no interpreter {self.python}",
                hint="--python names another interpreter there",
            )
        if word == "setup":
            stderr = self._last_stderr_line()
            line = (
                self.setup[int(rest)]
                if rest.isascii() and rest.isdigit() and int(rest) < len(self.setup)
                else "?"
            )
            return HostError(
                self.label, f"a setup line failed: {line}{f' ({stderr})' if stderr else ''}"
            )
        return HostError(self.label, (rest or word)[:MAX_ERROR])

    def _last_stderr_line(self) -> str:
        """Return the last line that the host wrote on stderr, safe to show."""
        if self._channel is None:
            return ""
        lines = self._channel.read_stderr().decode(errors="replace").strip().splitlines()
        return sanitize(lines[-1][:300]) if lines else ""
