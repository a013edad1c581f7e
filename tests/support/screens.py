"""Run a command in a window of a tmux server of its own, type keys, and read the screen."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest
from procs import TEST_TIMEOUT, wait_until

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def require_tmux() -> None:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed: `make shells` installs it")


class Tmux:
    """A terminal of tmux; a context manager.

    The command is followed by a shell, so that a test sees what it has left behind.
    """

    def __init__(
        self, command: str, *, columns: int, rows: int, directory: Path, env: Sequence[str] = ()
    ) -> None:
        require_tmux()
        self.columns, self.rows = columns, rows
        self._name = f"test-{uuid.uuid4().hex[:12]}"
        self._tmux(
            *("-f", os.devnull, "new-session", "-d", "-s", "main"),
            *("-x", str(columns), "-y", str(rows), "-c", str(directory)),
            *(word for value in env for word in ("-e", value)),
            f"{command}; echo exit code $?; exec sh -i",
        )

    def _tmux(self, *words: str) -> str:
        command = ["tmux", "-L", self._name, *words]
        return subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            timeout=TEST_TIMEOUT,
            env=dict(os.environ),  # without the size that readline adds to the C environment
        ).stdout

    def __enter__(self) -> Tmux:
        return self

    def __exit__(self, *exception: object) -> None:
        self._tmux("kill-server")

    @property
    def screen(self) -> str:
        """The text on the screen."""
        return self._tmux("capture-pane", "-p", "-t", "main")

    @property
    def lines(self) -> list[str]:
        return self.screen.split("\n")[: self.rows]

    @property
    def colours(self) -> set[str]:
        """The attributes that set a colour, of all cells of the screen."""
        found = _COLOUR.findall(self._tmux("capture-pane", "-p", "-e", "-t", "main"))
        codes = {code for text in found for code in text[2:-1].split(";")}
        return {code for code in codes if re.fullmatch(r"3[0-8]|4[0-8]|9\d|10\d", code)}

    def type(self, *keys: str) -> None:
        """Type keys by their tmux names."""
        self._tmux("send-keys", "-t", "main", *keys)

    def click(self, column: int, row: int) -> None:
        """Press and release the left mouse button, as a terminal reports it."""
        at = f"{column + 1};{row + 1}"
        for text in (f"\x1b[<0;{at}M", f"\x1b[<0;{at}m"):
            self._tmux("send-keys", "-t", "main", "-l", text)

    def resize(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self._tmux("resize-window", "-t", "main", "-x", str(columns), "-y", str(rows))

    def wait_for(self, *texts: str, timeout: float = TEST_TIMEOUT) -> str:
        """Wait until the screen has all texts; return it."""
        seen = ""

        def there() -> bool:
            nonlocal seen
            seen = self.screen
            return all(text in seen for text in texts)

        try:
            wait_until(there, timeout)
        except AssertionError:
            raise AssertionError(f"the screen lacks one of {texts}:\n{seen}") from None
        return seen

    def wait_without(self, text: str, timeout: float = TEST_TIMEOUT) -> str:
        wait_until(lambda: text not in self.screen, timeout, f"a screen without {text!r}")
        return self.screen

    def value(self, name: str) -> str:
        """Return a value of tmux's formats, such as ``alternate_on``."""
        return self._tmux("display-message", "-p", "-t", "main", f"#{{{name}}}").strip()

    def command_pid(self) -> int:
        """Return the pid of the command below the pane's shell."""
        from procs import below

        return below(int(self.value("pane_pid")))[0]

    def assert_clean(self) -> None:
        """Check that the terminal is as before the command: no screen, no mouse, a cursor, echo."""
        wait_until(lambda: self.value("alternate_on") == "0", TEST_TIMEOUT)
        assert self.value("mouse_any_flag") == "0"
        assert self.value("cursor_flag") == "1"
        self.type("stty -a | tr ' ;' '\\n\\n' | grep -xE -- '-?(echo|icanon|isig)'", "Enter")
        self.wait_for("\necho\n", "\nicanon\n", "\nisig\n")
