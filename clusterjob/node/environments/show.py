"""``clusterjob env``: which place in a job is found here and why. The standard library suffices, so
it works inside any job.
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
    """Print the place that is found here; returns 1 where the variables are half-set or in
    conflict.

    Args:
        argv: what follows ``env`` on the command line.
    """
    parser = argparse.ArgumentParser(
        prog="clusterjob env",
        description="Show the place in a job that is found here: which variable gave each field, what was ignored, what conflicts.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", dest="as_json", help="print JSON")
    return show(as_json=parser.parse_args(argv).as_json)


def show(*, as_json: bool) -> int:
    """Print the place that is found here; returns the exit code."""
    found = describe(environments.detect(environments.look(os.environ)))
    if as_json:
        # ASCII alone: whatever a variable holds, this can be written anywhere.
        print(json.dumps({"schema": SCHEMA, **found}, indent=1))
    else:
        print(text(found))
    return 1 if found["conflicts"] else 0
