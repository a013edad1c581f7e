"""A template of a cloned repository executes no Python and writes no endless script."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterjob.core.render import render
from clusterjob.errors import TemplateError

ESCAPES = [
    "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
    "{{ cycler.__init__.__globals__['os'].popen('touch MARK').read()|sh }}",
    "{{ ''.__class__.__mro__[1].__subclasses__()|sh_words }}",
    "{{ joiner.__init__.__globals__.__builtins__.open('MARK', 'w') }}",
    "{{ self.__init__.__globals__ }}",
    "{{ (setup|attr('append')).__self__.__class__ }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(cycler)|sh }}",
    "{% set f = range.__init__.__globals__ %}{{ f|sh }}",
]
HUGE = [
    "{{ ('a' * 10**10)|sh }}",
    "{{ ('%99999999999d' % 1)|sh }}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ ([1] * 10**10)|sh_words }}",
    "{% for a in range(90000) %}{% for b in range(90000) %}{{ 1 }}{% endfor %}{% endfor %}",
]
HARMLESS = [
    ("{{ ('=' * 20)|verbatim }}", "=" * 20),
    ("{{ ('%s-%03d' % ('a', 7))|sh }}", "a-007"),
    ("{{ 64 * 1024 * 1024 * 1024 }} {{ 2 ** 40 }} {{ 7 % 4 }}", f"{64 << 30} {2**40} 3"),
    ("{{ setup|map('upper')|join(';')|verbatim }}", "ONE;TWO"),
]
VALUES = {"setup": ["one", "two"]}


def template(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.sh.j2"
    path.write_text(text.replace("MARK", str(tmp_path / "executed")))
    return path


@pytest.mark.parametrize("text", ESCAPES)
def test_template_that_accesses_python_objects_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(TemplateError):
        render(template(tmp_path, text), VALUES)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("text", HUGE)
def test_template_that_writes_huge_script_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(TemplateError, match=r"more than|longer than"):
        render(template(tmp_path, text), VALUES)


@pytest.mark.parametrize(("text", "written"), HARMLESS)
def test_harmless_template_is_rendered(tmp_path: Path, text: str, written: str) -> None:
    assert render(template(tmp_path, text), VALUES) == written
