"""A terminal emulator with a screen: tmux, with a server of its own."""

from __future__ import annotations

import secrets
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from procs import TEST_TIMEOUT, wait_until


def missing() -> bool:
    return shutil.which("tmux") is None


class Tmux:
    """A shell on a screen of tmux; a context manager that ends the server."""

    def __init__(self, cwd: Path, columns: int = 80, rows: int = 24) -> None:
        self._name = f"clusterjob-{secrets.token_hex(4)}"
        size = ["-x", str(columns), "-y", str(rows)]
        self._run("new-session", "-d", *size, "-c", str(cwd), "env PS1='$ ' sh")
        wait_until(lambda: "$" in self.screen(), TEST_TIMEOUT, "the shell")

    def _run(self, *words: str) -> str:
        argv = ["tmux", "-L", self._name, "-f", "/dev/null", *words]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout

    def start(self, argv: Sequence[str]) -> None:
        """Type a command line into the shell."""
        self.press(shlex.join(argv), "Enter")

    def press(self, *keys: str) -> None:
        self._run("send-keys", *keys)

    def resize(self, columns: int, rows: int = 24) -> None:
        self._run("resize-window", "-x", str(columns), "-y", str(rows))

    def screen(self) -> str:
        """Return the text on the screen, with earlier lines; wrapped lines are joined."""
        return self._run("capture-pane", "-p", "-J", "-S", "-1000").rstrip()

    def cursor(self) -> tuple[bool, int]:
        """Return whether the cursor is visible, and its row."""
        flag, row = self._run("display-message", "-p", "#{cursor_flag} #{cursor_y}").split()
        return flag == "1", int(row)

    def wait_for(self, text: str) -> str:
        """Return the screen once it contains a text."""
        wait_until(lambda: text in self.screen(), TEST_TIMEOUT, text)
        return self.screen()

    def __enter__(self) -> Tmux:
        return self

    def __exit__(self, *exception: object) -> None:
        self._run("kill-server")
