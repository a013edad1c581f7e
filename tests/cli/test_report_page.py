"""The report in a browser: no error or request, accessible, usable by keyboard, printable."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_jobs import WrittenJob, page_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.browser


@contextlib.contextmanager
def browser_page(path: Path, problems: list[str], **options: Any) -> Iterator[Any]:
    """Open a file in Chromium; add console messages, errors and requests to `problems`."""
    if CHROMIUM is None:
        pytest.skip("Chromium is missing: `make packages` installs it")
    from playwright.sync_api import sync_playwright

    sandbox = [] if os.geteuid() else ["--no-sandbox"]  # Chromium's sandbox refuses root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        page = browser.new_page(**options)
        page.on("console", lambda message: problems.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on(
            "request",
            lambda request: (
                problems.append(f"request: {request.url}")
                if not request.url.startswith(("file:", "data:"))
                else None
            ),
        )
        page.goto(path.as_uri())
        try:
            yield page
        finally:
            browser.close()


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Return the report of a job that failed after a restart, with all sections."""
    path = tmp_path / "report.html"
    path.write_text(page_of(WrittenJob(tmp_path, nodes=3, per_node=2, restarts=1)))
    return path


def test_report_in_chromium_has_no_error_no_request_and_no_axe_violation(written: Path) -> None:
    from axe_playwright_python.sync_playwright import Axe

    problems: list[str] = []
    with browser_page(written, problems, viewport={"width": 1280, "height": 900}) as page:
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            for opened in (False, True):
                page.evaluate(
                    "open => document.querySelectorAll('details').forEach(d => d.open = open)",
                    opened,
                )
                found = Axe().run(page, options={"resultTypes": ["violations"]})
                problems += [
                    f"{scheme}: {violation['id']}: {violation['nodes'][0]['html'][:200]}"
                    for violation in found.response["violations"]
                ]
        backgrounds = []
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            backgrounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert backgrounds[0] != backgrounds[1]
        page.set_viewport_size({"width": 360, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert not problems


def test_report_is_operable_by_keyboard_and_printed_whole(written: Path, tmp_path: Path) -> None:
    problems: list[str] = []
    with browser_page(written, problems, viewport={"width": 1280, "height": 900}) as page:
        reached = set()
        for _ in range(60):
            page.keyboard.press("Tab")
            reached.add(
                page.evaluate(
                    "(() => { const e = document.activeElement;"
                    " return e.tagName + ' ' + (e.id || e.getAttribute('href')"
                    " || e.getAttribute('aria-label') || e.textContent.slice(0, 20)); })()"
                )
            )
        wanted = {"A #main", "A #timeline", "FIGURE Timeline of the ranks"}
        assert wanted <= reached, sorted(reached)
        assert any(each.startswith("SUMMARY") for each in reached)
        # Each focused element has a visible outline.
        page.keyboard.press("Tab")
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
        # Enter opens details.
        closed = page.locator("#timeline details:not([open]) summary").first
        table = page.locator("#timeline details table").first
        assert not table.is_visible()
        closed.focus()
        page.keyboard.press("Enter")
        assert table.is_visible()
        # Paper shows folded parts, and tables that are not cut.
        pdf = page.pdf(path=str(tmp_path / "report.pdf"), format="A4")
        assert pdf.startswith(b"%PDF")
        page.emulate_media(media="print")
        assert page.locator("#code details pre").first.is_visible()
        assert not page.locator("nav").is_visible()
        width = page.evaluate("document.documentElement.clientWidth")
        boxes = [table.bounding_box() for table in page.locator("table").all()]
        assert all(box["x"] + box["width"] <= width + 1 for box in boxes)
    assert not problems


def test_rows_of_many_ranks_are_readable(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(page_of(WrittenJob(tmp_path, nodes=16, per_node=8, failed=77)))
    with browser_page(path, [], viewport={"width": 1280, "height": 900}) as page:
        picture = page.locator("#timeline figure svg")
        labels = picture.locator("text.lab").all()
        tops = sorted(label.bounding_box()["y"] for label in labels)
        assert len(tops) >= 16
        assert all(after - before > 8 for before, after in itertools.pairwise(tops))
        # The name of a row is shown where the pointer is.
        titles = picture.locator("rect.hit title").all_text_contents()
        assert titles[77].startswith("rank 77, node 9 gpu9: setup")
