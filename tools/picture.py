"""Draw docs/images/failure-{light,dark}.svg: a terminal session in which one rank fails.

Run it from the root of the source tree: `.venv/bin/python tools/picture.py`.
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI, SVG_EXPORT_THEME, TerminalTheme
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = 108
COMMAND = "clusterjob run --nodes 2 --nproc-per-node 2 train.py 3 --break"
THEMES: dict[str, TerminalTheme] = {
    "dark": MONOKAI,
    "light": TerminalTheme(
        (255, 255, 255),
        (36, 41, 47),
        SVG_EXPORT_THEME.ansi_colors._colors[:8],  # type: ignore[arg-type]
    ),
}


def script() -> str:
    """Return the script of the session: the first Python block of the README."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    match = re.search(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert match is not None
    return match[1]


def session() -> str:
    """Run the command in a terminal; return its output."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "train.py").write_text(script(), encoding="utf-8")
        environ = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "COLUMNS": str(COLUMNS),
            "TERM": "xterm-256color",
            "CLUSTERJOB_HOME": f"{directory}/state",
        }
        master, slave = pty.openpty()
        process = subprocess.Popen(
            COMMAND.split(), cwd=directory, stdin=slave, stdout=slave, stderr=slave, env=environ
        )
        os.close(slave)
        output = b""
        while True:
            try:
                data = os.read(master, 65536)
            except OSError:  # EIO: the last process has closed the terminal
                break
            if not data:
                break
            output += data
        process.wait()
        os.close(master)
    text = re.sub(r"\x1b\[\?25[lh]", "", output.decode()).replace("\r\n", "\n")
    # Remove progress lines that the command erased from the same line or from the line below.
    text = re.sub(r"[^\n]*\n\r\x1b\[1A\x1b\[2K", "", text)
    text = re.sub(r"[^\n]*\r\x1b\[2K", "", text)
    for path, name in ((directory, "/home/ada/tour"), (str(ROOT), "/home/ada/tour")):
        text = text.replace(path, name)
    return text


def main() -> None:
    """Write both pictures."""
    output = session()
    for name, theme in THEMES.items():
        console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
        console.print(Text("$ " + COMMAND, style="bold"))
        console.print(Text.from_ansi(output.rstrip()))
        svg = console.export_svg(title="clusterjob", theme=theme, unique_id=f"failure-{name}")
        # The picture must not load fonts from the network; the browser's monospace font is used.
        svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
        (ROOT / "docs" / "images" / f"failure-{name}.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
