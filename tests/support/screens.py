"""A terminal emulator with a screen: tmux, with a server of its own for each terminal."""

from __future__ import annotations

import re
import secrets
import shlex
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from procs import TEST_TIMEOUT, below, missing_programs, wait_until

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def require_tmux() -> None:
    if why := missing_programs("tmux"):
        pytest.skip(why)


class Tmux:
    """A shell on a screen of tmux; a context manager that ends the server."""

    def __init__(self, cwd: Path, columns: int = 80, rows: int = 24) -> None:
        require_tmux()
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


class Screen(Tmux):
    """A terminal with a command that takes the whole screen.

    When the command ends, the shell prints its exit code.
    """

    def __init__(self, command: str, *, columns: int, rows: int, directory: Path) -> None:
        super().__init__(directory, columns, rows)
        self.columns, self.rows = columns, rows
        # A shell that has read a readline library may have got another size.
        self.press(f"unset COLUMNS LINES; {command}; echo exit code $?", "Enter")

    @property
    def lines(self) -> list[str]:
        """The lines of the screen."""
        return self._run("capture-pane", "-p").split("\n")[: self.rows]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def colours(self) -> set[str]:
        """The attributes that set a colour, of all cells of the screen."""
        found = _COLOUR.findall(self._run("capture-pane", "-p", "-e"))
        codes = {code for text in found for code in text[2:-1].split(";")}
        return {code for code in codes if re.fullmatch(r"3[0-8]|4[0-8]|9\d|10\d", code)}

    def click(self, column: int, row: int) -> None:
        """Press and release the left mouse button, as a terminal reports it."""
        at = f"{column + 1};{row + 1}"
        for text in (f"\x1b[<0;{at}M", f"\x1b[<0;{at}m"):
            self.press("-l", text)

    def resize(self, columns: int, rows: int = 24) -> None:
        self.columns, self.rows = columns, rows
        super().resize(columns, rows)

    def wait_for_all(self, *texts: str, timeout: float = TEST_TIMEOUT) -> str:
        """Wait until the screen has all texts; return it."""
        end = time.monotonic() + timeout
        while not all(text in (seen := self.text) for text in texts):
            lacking = [text for text in texts if text not in seen]
            assert time.monotonic() < end, f"the screen lacks {lacking}:\n{seen}"
            time.sleep(0.05)
        return seen

    def press_for(self, key: str, *texts: str) -> str:
        """Press a key; wait until the screen has all texts, and return it."""
        self.press(key)
        return self.wait_for_all(*texts)

    def wait_without(self, text: str) -> str:
        wait_until(lambda: text not in self.text, TEST_TIMEOUT, f"a screen without {text!r}")
        return self.text

    def value(self, name: str) -> str:
        """Return a value of tmux's formats, such as ``alternate_on``."""
        return self._run("display-message", "-p", f"#{{{name}}}").strip()

    def command_pid(self) -> int:
        """Return the pid of the command below the shell."""
        return below(int(self.value("pane_pid")))[0]

    def assert_clean(self) -> None:
        """Check that the terminal is as before the command: no screen, no mouse, a cursor, echo."""
        wait_until(lambda: self.value("alternate_on") == "0", TEST_TIMEOUT)
        assert self.value("mouse_any_flag") == "0"
        assert self.value("cursor_flag") == "1"
        self.press("stty -a | tr ' ;' '\\n\\n' | grep -xE -- '-?(echo|icanon|isig)'", "Enter")
        self.wait_for_all("\necho\n", "\nicanon\n", "\nisig\n")
