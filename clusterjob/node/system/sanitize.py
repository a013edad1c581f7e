"""Make names, messages and output of other programs safe to show on a terminal."""

from __future__ import annotations

import re

# ECMA-48: a control sequence is CSI, parameters, intermediates and one final byte. SGR (final byte
# m) only sets colours.
_SGR = re.compile(r"\x1b\[[0-9;:]*m")
_RESET = "\x1b[0m"
# C0 and C1 controls except the tab, marks that reverse the reading order (CVE-2021-42574), other
# line breaks, lone surrogates.
_CHARACTERS = (
    r"\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
)
UNSAFE = re.compile(f"[{_CHARACTERS}]")
_PART = re.compile(rf"\x1b\[[0-?]*[ -/]*[@-~]|{UNSAFE.pattern}")
_SHORT = {"\n": "\\n", "\r": "\\r"}


def sanitize(text: str, *, lines: bool = False, colours: bool = False) -> str:
    r"""Return text without control sequences that a terminal would execute.

    Control characters, and marks that reverse the reading order, appear as escapes:
    ``\x1b]0;title\x07``. Colours are removed.

    Args:
        text: text from another program or user.
        lines: keep line breaks. Otherwise they appear as ``\n``, so that a text cannot forge a
            second line.
        colours: keep colours and reset them at the end of the text; remove sequences that move the
            cursor or erase. For workers' output.
    """
    if text.isprintable():
        return text
    if lines:
        return "\n".join(sanitize(line, colours=colours) for line in text.split("\n"))
    if not colours:
        return UNSAFE.sub(_escape, _SGR.sub("", text))
    shown = _PART.sub(_colour, text)
    last = shown.rfind("\x1b")
    return shown if last < 0 or shown.startswith((_RESET, "\x1b[m"), last) else shown + _RESET


def _colour(match: re.Match[str]) -> str:
    """Return a sequence that sets colours, nothing for another one, and other parts as escapes."""
    if len(match[0]) == 1:
        return _escape(match)
    return match[0] if _SGR.fullmatch(match[0]) else ""


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return _SHORT.get(match[0]) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")
