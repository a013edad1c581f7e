"""Main loop of the host server: read calls from stdin, write answers to stdout.

A call is one line of JSON: ``call``, the name of a function; ``arguments``, by name; and ``size``,
the number of bytes that follow. Its sender is the user, and runs the same version.
"""

from __future__ import annotations

import functools
import json
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clusterjob.errors import os_error_text
from clusterjob.node.host_server import code_store, commands, host_check, jobs

_IDLE_TIMEOUT = 600  # seconds without a call after which the session ends
# Functions that take clusterjob's directory on this host and the arguments of the call. They return
# a JSON object, or one and the bytes that follow it.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        host_check.check,
        jobs.put,
        jobs.reserve,
        jobs.start,
        jobs.up,
        jobs.poll,
        jobs.cancel,
        jobs.request_stop,
        jobs.remove,
        jobs.clean,
        jobs.tree,
        jobs.get,
        code_store.install,
        code_store.has_file,
        code_store.receive,
        commands.run_command,
        commands.reap_command,
        commands.take_over,
    )
}
_WITH_BODY = ("put", "install", "receive")  # bytes follow these calls


def main(home: str, node_zip: str) -> None:
    """Answer calls until stdin ends, or a call takes the streams over.

    Args:
        home: clusterjob's directory on this host.
        node_zip: path of the node zip.
    """
    functions = FUNCTIONS | {"interpreter": functools.partial(host_check.interpreter, node_zip)}
    while True:
        # After a network failure stdin never ends: SIGALRM, which has no handler, ends the process.
        signal.alarm(_IDLE_TIMEOUT)
        line = sys.stdin.buffer.readline()
        signal.alarm(0)
        if not line:
            return
        received = json.loads(line)
        name, arguments = received["call"], received["arguments"]
        body = code_store.Part(sys.stdin.buffer.read, received["size"])
        if name in _WITH_BODY:
            arguments["read"] = body.read
        data, then = b"", None
        try:
            answer = functions[name](Path(home), **arguments)
            if isinstance(answer, tuple):
                answer, data = answer
            then = answer.pop("then", None)
        except EOFError:
            return
        except OSError as error:
            answer = {"error": os_error_text(error)}
        except Exception:
            trace = traceback.format_exc().strip().replace("\n", " | ")
            answer = {"error": f"internal error of clusterjob: {trace}"}
        while body.read(1 << 20):
            pass
        sys.stdout.buffer.write(json.dumps({**answer, "size": len(data)}).encode() + b"\n" + data)
        sys.stdout.buffer.flush()
        if then is not None:
            then()
            return
