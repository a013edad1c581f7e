"""Render templates into scripts and YAML; refuse a template that writes an unquoted value.

The filters of this module quote every value. Templates are in ``templates/`` at the top of the
source tree; a wheel contains them as ``clusterjob/templates``. A template may be part of a cloned
repository, and a dry run renders it. Therefore it runs in jinja2's sandbox. The lengths of the
script and of the results of the operators ``*``, ``**`` and ``%`` are limited. Methods and filters
such as ``ljust`` and ``center`` are not limited: a hostile template can use much memory and time,
but it cannot run commands.
"""

from __future__ import annotations

import functools
import math
import re
import shlex
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterjob.errors import TemplateError
from clusterjob.node import zip_importer

if TYPE_CHECKING:
    import jinja2
    from yaml import ScalarNode

_MAX_TEXT = 4 << 20  # maximum characters of a rendered text; Slurm accepts scripts of up to 4 MiB


class Quoted(str):
    """Text that a script or YAML may contain unchanged: a filter of this module returned it."""

    __slots__ = ()


def sh(value: object) -> Quoted:
    """Quote one value as one bash word.

    A value that is quoted already, such as a path below a shell variable, stays unchanged.
    """
    if isinstance(value, Quoted):
        return value
    # shlex.quote does not escape a carriage return, which sbatch refuses before a line break.
    return Quoted(shlex.quote(str(value)).replace("\r", "'$'\\r''"))


def sh_words(values: Iterable[object]) -> Quoted:
    """Quote each value as one bash word."""
    return Quoted(" ".join(map(sh, values)))


def sh_line(values: Iterable[object]) -> Quoted:
    """Quote values as bash words on one line, even if a value contains a line break."""
    # In the result of sh_words, every line break is between single quotes.
    return Quoted(sh_words(values).replace("\n", "'$'\\n''"))


def yaml(value: object) -> Quoted:
    """Write plain data as YAML on one line, with every text in double quotes.

    Without quotes, YAML could read a text as another type.

    Raises:
        TemplateError: the value is not valid UTF-8, which YAML requires, or it is not plain data.
    """
    from yaml import YAMLError, dump

    try:
        text = dump(
            value,
            Dumper=_line_dumper(),
            allow_unicode=True,
            default_flow_style=True,
            width=math.inf,
            sort_keys=False,
        )
        text.encode()
    except UnicodeEncodeError as error:
        raise TemplateError(
            f"{str(value)[:60]!r} is not valid UTF-8, which YAML requires"
        ) from error
    except YAMLError as error:
        raise TemplateError(f"{str(value)[:60]!r} cannot be written as YAML: {error}") from error
    return Quoted(text.removesuffix("\n").removesuffix("\n..."))  # PyYAML adds "..." after a scalar


@functools.cache
def _line_dumper() -> Any:
    from yaml import SafeDumper

    class LineDumper(SafeDumper):
        def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
            return True  # write a repeated list in full each time, not as a YAML alias

    def text(dumper: LineDumper, value: str) -> ScalarNode:
        if any("\ud800" <= character <= "\udfff" for character in value):
            value.encode()  # raises UnicodeEncodeError
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"')

    LineDumper.add_representer(str, text)
    LineDumper.add_representer(Quoted, text)
    return LineDumper


def verbatim(value: object) -> Quoted:
    """Mark shell code, such as setup lines, as quoted; the text stays unchanged."""
    return Quoted(value)


def in_shell(value: Any, path: str, variable: str) -> Any:
    """Replace a placeholder path in a template's values with a shell variable of the node.

    Args:
        value: a text, or a list or tuple of texts; any other value is returned unchanged.
        path: placeholder for the path that is not known on this machine.
        variable: shell code of the variable, such as ``"$SLURM_SUBMIT_DIR"`` with its quotes.
    """
    if isinstance(value, (list, tuple)):
        return [in_shell(item, path, variable=variable) for item in value]
    if not isinstance(value, str) or path not in value:
        return value
    return Quoted(variable.join(sh(part) if part else "" for part in value.split(path)))


def template_directory() -> Path:
    """Return the directory of the templates.

    In a wheel it is inside the package; in a source tree it is in the same directory as the
    package. Inside a job it belongs to the installed package: the node zip has no templates.

    Raises:
        TemplateError: this process runs inside a job, and no package of its version is installed.
    """
    package = Path(__file__).resolve().parent.parent
    if zip_importer.archive() is not None:
        try:
            installed = zip_importer.installed()
        except ImportError as error:
            raise TemplateError(str(error)) from error
        if installed is None:
            raise TemplateError(
                "clusterjob is not installed here, and a job's node zip has no templates"
            )
        package = Path(installed).resolve()
    inside = package / "templates"
    return inside if inside.is_dir() else package.parent / "templates"


def render(template: str | Path, values: Mapping[str, Any]) -> str:
    """Render a template and return the text.

    Args:
        template: the name of a template of clusterjob, or the path of the user's template.
        values: variables for the template; docs/backends.md lists them.

    Raises:
        TemplateError: the template cannot be read, has a syntax error, uses an undefined variable,
            or writes a value without quoting it.
    """
    import jinja2

    path = template if isinstance(template, Path) else template_directory() / template
    try:
        return _bounded(_environment(path.parent).get_template(path.name).generate(values))
    except jinja2.TemplateNotFound as error:
        raise TemplateError(f"the template {error.name!r} does not exist") from error
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(
            f"the template {path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    except Exception as error:  # an expression of the template may raise anything
        what = f"{type(error).__name__}: {error}"
        if isinstance(error, jinja2.TemplateError):
            what = str(error.message)
        # jinja2 adds frames to a traceback that point into templates.
        lines = [
            line
            for frame, line in traceback.walk_tb(error.__traceback__)
            if frame.f_code.co_filename == str(path)
        ]
        if isinstance(error, jinja2.TemplateSyntaxError):
            lines.append(error.lineno)
        where = f", line {lines[-1]}" if lines else ""
        raise TemplateError(f"the template {path}{where}: {what}") from error


def _bounded(pieces: Iterable[str]) -> str:
    """Join the pieces of a text.

    Raises:
        TemplateRuntimeError: the text is longer than the limit for a script.
    """
    import jinja2

    found, size = [], 0
    for piece in pieces:
        size += len(piece) + 1  # + 1 limits the number of empty pieces too
        if size > _MAX_TEXT:
            raise jinja2.TemplateRuntimeError(f"it writes more than {_MAX_TEXT:,} characters")
        found.append(piece)
    return "".join(found)


@functools.lru_cache(maxsize=2)  # an array renders one template many times, but compiles it once
def _environment(directory: Path) -> jinja2.Environment:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        """Refuse access to Python's internal objects, and an operator whose result is huge."""

        intercepted_binops = frozenset(["*", "**", "%"])

        def call_binop(
            self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
        ) -> Any:
            if not _is_small(operator, left, right=right):
                raise jinja2.TemplateRuntimeError(
                    f"the result of {operator} may be longer than {_MAX_TEXT:,} characters"
                )
            return super().call_binop(context, operator, left, right)

    environment = Sandbox(
        loader=jinja2.FileSystemLoader([directory, template_directory()]),
        undefined=jinja2.StrictUndefined,
        # The text is shell or YAML, not HTML: `finalize` below enforces its quoting.
        autoescape=False,
        finalize=_quoted_only,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(sh=sh, sh_words=sh_words, yaml=yaml, verbatim=verbatim)
    return environment


def _is_small(operator: str, left: Any, right: Any) -> bool:
    """Return False if an operation of a template may make a huge number, text or list."""
    if operator == "%":
        # A large width, as in %99999999d.
        return not (isinstance(left, str) and re.search(r"[0-9]{5}|\*", left))
    lengths = [len(value) for value in (left, right) if hasattr(value, "__len__")]
    numbers = [abs(value) for value in (left, right) if isinstance(value, (int, float))]
    if lengths:
        return math.prod(lengths) * math.prod(numbers) <= _MAX_TEXT
    return all(number <= 2**64 for number in numbers) and (operator == "*" or numbers[-1] <= 64)


def _quoted_only(value: object) -> object:
    if isinstance(value, (Quoted, int)):
        return value
    import jinja2

    if isinstance(value, jinja2.Undefined):
        return value  # jinja2 raises an error that names the variable
    raise jinja2.TemplateRuntimeError(
        f"the value {str(value)[:40]!r} is written without quoting: "
        "pipe it through the filter sh, or yaml"
    )
