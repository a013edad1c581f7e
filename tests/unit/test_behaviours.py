"""The table of behaviours names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| .* \| `(?P<file>tests/[\w/]+\.py)::(?P<test>test_\w+)` \|$")


def test_each_behaviour_has_a_test() -> None:
    lines = (ROOT / "tests/behaviours.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ") and "tests/" in line]
    assert len(rows) > 80
    for row in rows:
        found = ROW.match(row)
        assert found is not None, row
        text = (ROOT / found["file"]).read_text()
        assert re.search(rf"^def {found['test']}\(", text, re.MULTILINE), row
