"""Parse sizes, durations and names of signals, and format sizes."""

from __future__ import annotations

import re
import signal

from clusterjob.errors import SpecError

_NUMBER = r"\d{1,15}(?:\.\d{1,15})?"
_SIZE = re.compile(rf"({_NUMBER})\s*([KMGT]?)(?:i?B)?", re.IGNORECASE | re.ASCII)
_SIZE_FACTORS = {"": 1024**2, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
_EXACT = [(unit, factor) for unit, factor in reversed(_SIZE_FACTORS.items()) if unit]
_CLOCK = re.compile(r"(?:(\d{1,9})-)?(\d{1,9}):(\d{1,2}):(\d{1,2})", re.ASCII)
_PARTS = re.compile(rf"({_NUMBER})\s*([dhms])", re.IGNORECASE | re.ASCII)
_DURATIONS = "write 90s, 30m, 2h, 1d12h or HH:MM:SS; a bare number is minutes"
_PART_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def parse_size(text: str) -> int:
    """Return a memory size in bytes, from a text such as 64G, 512M or 1.5T.

    A bare number is mebibytes, as in Slurm.

    Raises:
        SpecError: the text is not a size, or the size is 0.
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _SIZE_FACTORS[match[2].upper()]) if match else 0
    if size < 1:
        raise SpecError(
            f"{text!r} is not a memory size", "write a number with K, M, G or T, such as --mem 64G"
        )
    return size


def parse_duration(text: str) -> int:
    """Return a duration in seconds, from 90s, 30m, 2h, 1d12h, 01:30:00 or 1-12:00:00.

    A bare number is minutes, as in Slurm.

    Raises:
        SpecError: the text is not a duration, or the duration is 0.
    """
    stripped = text.strip()
    clock = _CLOCK.fullmatch(stripped)
    if re.fullmatch(r"\d{1,9}", stripped, re.ASCII):
        seconds = int(stripped) * 60.0
    elif clock and int(clock[3]) < 60 and int(clock[4]) < 60:
        seconds = (
            int(clock[1] or 0) * 86400 + int(clock[2]) * 3600 + int(clock[3]) * 60 + int(clock[4])
        )
    elif re.fullmatch(rf"(?:{_PARTS.pattern}\s*)+", stripped, re.IGNORECASE | re.ASCII):
        seconds = sum(
            float(number) * _PART_SECONDS[unit.lower()] for number, unit in _PARTS.findall(stripped)
        )
    else:
        raise SpecError(f"{text!r} is not a duration", _DURATIONS)
    if seconds < 1:
        raise SpecError(f"{text!r}: a duration must be positive, at least 1 s", _DURATIONS)
    return int(seconds)


def exact_duration(seconds: int) -> str:
    """Format seconds as a text that `parse_duration` reads back: 2h, 1d12h."""
    words = []
    for unit, size in _PART_SECONDS.items():
        count, seconds = divmod(seconds, size)
        words += [f"{count}{unit}"] if count else []
    return "".join(words)


def exact_size(size: int) -> str:
    """Format bytes as a text that `parse_size` reads back: 64G, 1.5K."""
    for unit, factor in _EXACT:
        if size % factor == 0:
            return f"{size // factor}{unit}"
    return f"{size / 1024}K"


def show_size(size: int) -> str:
    """Format a size in bytes as text: 512 MB, 1.5 GB."""
    value, unit = float(size), "bytes"
    for larger in ("KB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if value >= 100 or unit == "bytes" else f"{value:.1f} {unit}"


def parse_signal(text: str) -> str:
    """Return the name of a signal that a script can handle, from SIGUSR1 or usr1.

    Raises:
        SpecError: there is no such signal.
    """
    from clusterjob.node.system import processes  # only for --warn-signal

    try:
        return signal.Signals(processes.signal_number(str(text))).name
    except ValueError as error:
        raise SpecError(str(error), "name one, such as SIGUSR1 or SIGTERM") from error
