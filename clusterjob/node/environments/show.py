"""Implement ``clusterjob env``: show the detected environment.

It uses only the standard library, so it works inside any job.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence

from clusterjob.node import environments
from clusterjob.node.environments.describe import describe, text

SCHEMA = 1


def main(argv: Sequence[str]) -> int:
    """Print the detected environment.

    Args:
        argv: the arguments after ``env`` on the command line.

    Returns:
        The exit code: 1 if the variables are incomplete or contradict each other, else 0.
    """
    parser = argparse.ArgumentParser(
        prog="clusterjob env",
        description="Show the detected environment: the variable that gave each field, ignored "
        "variables and conflicts.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", dest="as_json", help="print JSON")
    return show(as_json=parser.parse_args(argv).as_json)


def show(*, as_json: bool) -> int:
    """Print the detected environment and return the exit code, 1 with a conflict."""
    found = describe(environments.detect(environments.look_up(os.environ)))
    if as_json:
        # ASCII only, so that any encoding of stdout can represent it.
        print(json.dumps({"schema": SCHEMA, **found}, indent=1))
    else:
        print(text(found))
    return 1 if found["conflicts"] else 0
