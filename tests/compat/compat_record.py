"""Record the results of the cases under torchrun in expected.json.

Use: ``.venv/bin/python tests/compat/compat_record.py [ID...]``
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import uuid
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]  # pytest puts the same folders on sys.path

from compat_cases import CASES  # noqa: E402
from compat_runs import EXPECTED, HUNG, Case, expected, under_torchrun  # noqa: E402
from procs import MARKER  # noqa: E402


def record(cases: Iterable[Case]) -> None:
    """Run cases under torchrun and write each outcome as soon as it is known."""
    os.environ[MARKER] = uuid.uuid4().hex
    known = expected() if EXPECTED.exists() else {}
    for case in cases:
        with tempfile.TemporaryDirectory() as directory:
            outcome = under_torchrun(
                case, Path(directory), HUNG if "code" in case.differs else None
            )
        print(f"{case.id}: {outcome.seconds:.1f} s, {outcome.recorded()}", flush=True)
        known[case.id] = outcome.recorded()
        EXPECTED.write_text(
            json.dumps(dict(sorted(known.items())), indent=1, ensure_ascii=False) + "\n"
        )


if __name__ == "__main__":
    record(case for case in CASES if not sys.argv[1:] or case.id in sys.argv[1:])
