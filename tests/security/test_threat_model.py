"""Each promise of docs/security.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
PAGE = TESTS.parent / "docs" / "security.md"


def test_every_promise_names_tests_that_exist() -> None:
    rows = [
        line
        for line in PAGE.read_text(encoding="utf-8")
        .partition("## Promises and their tests")[2]
        .splitlines()
        if line.startswith("| ")
    ]
    promises = [row for row in rows if "::" in row]
    assert len(promises) == len(rows) - 2 > 15, "a row without a test"
    missing = [
        f"{file}::{name}"
        for file, name in re.findall(r"`(test_\w+\.py)::(test_\w+)`", "\n".join(promises))
        if not any(
            re.search(rf"^(async )?def {name}\(", path.read_text(encoding="utf-8"), re.MULTILINE)
            for path in TESTS.glob(f"*/{file}")
        )
    ]
    assert missing == []
