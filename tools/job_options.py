"""Write `clusterjob/api/job_options.py` from the table of options."""

from __future__ import annotations

from pathlib import Path

from clusterjob.core import options

# The Python types that a caller may give, by the function of the table that reads the value.
TYPES = {
    "_whole_number": "int",
    "_text": "str",
    "_path": "str | os.PathLike[str]",
    "_switch": "bool",
    "_duration": "int | str",
    "_memory": "int | str",
    "_gpus_per_node": "int | str",
    "_seconds": "float",
    "read_nodes": "int | str",
    "_workers": "int | str",
    "read_gpus": "int | str",
    "parse_signal": "str",
    "_after": "str | Sequence[str]",
    "_words": "str | Sequence[str]",
    "_notify": "str | Sequence[str]",
    "_lines": "str | Sequence[str]",
    "_listed": "str | Sequence[str]",
    "_retries": "str | Sequence[str]",
    "_secrets": "str | Sequence[str]",
    "_table": "Mapping[str, str | int | float]",
    "_options": "Mapping[str, Any]",
}
LEFT_OUT = ("sweep",)  # a function's arguments are its sweep
_HEAD = '''"""The types of a job's settings in Python; `tools/job_options.py` writes this file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class JobOptions(TypedDict, total=False):
    """Settings of a job by their keys in a configuration file; all are optional."""

    cluster: str | None  # Profile or backend (default: the configuration's).
'''
FILE = Path(__file__).parent.parent / "clusterjob" / "api" / "job_options.py"


def text() -> str:
    """Return the content of the file.

    Raises:
        KeyError: a new reader of the table has no type in `TYPES`.
    """
    rows = []
    for key, option in options.OPTIONS.items():
        if key not in LEFT_OUT:
            rows.append(f"    {key}: {TYPES[option.read.__name__]} | None\n")
    return _HEAD + "".join(rows)


if __name__ == "__main__":
    FILE.write_text(text())
