"""Render a report as one HTML page that loads nothing from the network."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
from markupsafe import Markup

from clusterjob.core.render import template_directory

MARK = '<meta name="generator" content="clusterjob report">'  # identifies a report to overwrite
MAX_BYTES = 2_000_000
_DETAILS = (1.0, 0.4, 0.1, 0.02)  # of texts; the first whose page is small enough is used


def render(values: Callable[[float], Mapping[str, Any]]) -> str:
    """Return a page that has at most `MAX_BYTES`, if shorter texts make that possible.

    Args:
        values: returns the template's values; a smaller number shortens the texts.
    """
    page = ""
    for detail in _DETAILS:
        page = _page(values(detail))
        if len(page.encode()) <= MAX_BYTES:
            break
    return page


def _page(values: Mapping[str, Any]) -> str:
    environment = _environment()
    css, js = (_source(environment, name) for name in ("report.css.j2", "report.js.j2"))
    policy = (
        f"default-src 'none'; style-src '{_hash(css)}'; script-src '{_hash(js)}';"
        " base-uri 'none'; form-action 'none'"
    )
    own = {"css": css, "js": js, "policy": policy}
    template = environment.get_template("report.html.j2")
    text = template.render(values, **{name: Markup(text) for name, text in own.items()})  # noqa: S704 - no foreign text
    # A surrogate cannot be written as UTF-8.
    return text.encode(errors="replace").decode()


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_directory()),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["picture"] = Markup  # the modules that draw escape each text
    return environment


def _source(environment: jinja2.Environment, name: str) -> str:
    """Return the styles or the script, shortened."""
    assert environment.loader is not None
    text = environment.loader.get_source(environment, name)[0]
    return re.sub(r"\n\s+", "\n", text).strip() if name.endswith("css.j2") else text.strip()


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
