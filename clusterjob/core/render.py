"""Templates into scripts and YAML. Every value is quoted once, here, and a template that forgets to
quote one is refused.

Templates lie at the top of the source tree, in ``templates/``; a wheel carries them as
``clusterjob/templates``. A template may come from a cloned repository, and a dry run renders it: it
runs in jinja2's sandbox, and the script is bounded, as are the operators ``*``, ``**`` and ``%``.
Methods and filters are not, such as ``ljust`` and ``center``: a hostile template can take much
memory and time, and no more.
"""

from __future__ import annotations

import functools
import math
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterjob.errors import TemplateError
from clusterjob.node.zip import importer

if TYPE_CHECKING:
    import jinja2
    from yaml import ScalarNode

_MOST_TEXT = 4 << 20  # characters that a template may write; Slurm takes scripts of up to 4 MiB


class Quoted(str):
    """Text that may stand in a script, or in YAML, as it is: it went through a filter of this
    module.
    """

    __slots__ = ()


def sh(value: object) -> Quoted:
    """Quote one value as one word of bash's; one that is shell already, such as a path below a
    variable, stays as it is.
    """
    if isinstance(value, Quoted):
        return value
    # A carriage return stands between single quotes then, and sbatch takes no script that holds one
    # before a line break.
    return Quoted(shlex.quote(str(value)).replace("\r", "'$'\\r''"))


def sh_words(values: Iterable[object]) -> Quoted:
    """Quote several values as several words of bash's."""
    return Quoted(" ".join(map(sh, values)))


def sh_line(values: Iterable[object]) -> Quoted:
    """Quote several values as several words of bash's on one line: a line break within one would
    begin another line.
    """
    return Quoted(
        sh_words(values).replace("\n", "'$'\\n''")
    )  # which quotes it in single quotes, and nowhere else


def yaml(value: object) -> Quoted:
    """Write a value, plain data, as YAML on one line: texts in double quotes, so that none is read
    as anything else.

    Raises:
        TemplateError: it holds bytes that are no UTF-8, which YAML cannot carry, or it is no plain
            data.
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
            f"{str(value)[:60]!r} holds bytes that are no UTF-8, which YAML cannot carry"
        ) from error
    except YAMLError as error:
        raise TemplateError(f"{str(value)[:60]!r} cannot be written as YAML: {error}") from error
    return Quoted(text.removesuffix("\n").removesuffix("\n..."))  # which ends a bare scalar


@functools.cache
def _line_dumper() -> Any:
    from yaml import SafeDumper

    class LineDumper(SafeDumper):
        def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - the same list twice is written twice
            return True

    def text(dumper: LineDumper, value: str) -> ScalarNode:
        if any("\ud800" <= character <= "\udfff" for character in value):
            value.encode()  # which raises
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"')

    LineDumper.add_representer(str, text)
    LineDumper.add_representer(Quoted, text)
    return LineDumper


def verbatim(value: object) -> Quoted:
    """Let a value stand as it is: for setup lines, which are shell code that the user wrote as
    such.
    """
    return Quoted(value)


def in_shell(value: Any, path: str, variable: str) -> Any:
    """Return a template's values with a path, wherever it stands in a text of theirs, as what a
    shell variable holds on the node.

    Args:
        value: a text, or a list or tuple of texts; anything else is returned as it is.
        path: stands for what is not known here.
        variable: as the shell takes it, such as ``"$SLURM_SUBMIT_DIR"`` with its quotes.
    """
    if isinstance(value, (list, tuple)):
        return [in_shell(item, path, variable=variable) for item in value]
    if not isinstance(value, str) or path not in value:
        return value
    return Quoted(variable.join(sh(part) if part else "" for part in value.split(path)))


def template_directory() -> Path:
    """Return where the templates lie: in the package of a wheel, beside it in a source tree; inside
    a job those of the installed one.

    Raises:
        TemplateError: this is the inside of a job, and there is no installed package of its
            version.
    """
    package = Path(__file__).resolve().parent.parent
    if importer.archive() is not None:
        try:
            installed = importer.installed()
        except ImportError as error:
            raise TemplateError(str(error)) from error
        if installed is None:
            raise TemplateError(
                "no clusterjob is installed here: a job brings no templates with it"
            )
        package = Path(installed).resolve()
    inside = package / "templates"
    return inside if inside.is_dir() else package.parent / "templates"


def render(template: str | Path, values: Mapping[str, Any]) -> str:
    """Return the text of a template.

    Args:
        template: the name of one of ours, or the path of the user's own.
        values: what the template may name; docs/backends.md lists them.

    Raises:
        TemplateError: it cannot be read, is broken, names something undefined, or writes a value
            without quoting it.
    """
    import jinja2

    path = template if isinstance(template, Path) else template_directory() / template
    try:
        return _bounded(_environment(path.parent).get_template(path.name).generate(values))
    except jinja2.TemplateError as error:
        raise TemplateError(_describe(path, error)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(
            f"the template {path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    except Exception as error:  # an expression of the template may raise anything
        line = _line_in(path, error)
        raise TemplateError(
            f"the template {path}{f', line {line}' if line else ''}: {type(error).__name__}: {error}"
        ) from error


def _bounded(pieces: Iterable[str]) -> str:
    """Return the pieces of a text as one.

    Raises:
        TemplateRuntimeError: it is longer than any script.
    """
    import jinja2

    found, size = [], 0
    for piece in pieces:
        size += len(piece) + 1  # an empty piece costs time too
        if size > _MOST_TEXT:
            raise jinja2.TemplateRuntimeError(f"it writes more than {_MOST_TEXT:,} characters")
        found.append(piece)
    return "".join(found)


@functools.lru_cache(
    maxsize=2
)  # an array renders one template a thousand times, which is then compiled once
def _environment(directory: Path) -> jinja2.Environment:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        """Refuse what reaches Python's own objects, and an operator whose result would be huge."""

        intercepted_binops = frozenset(["*", "**", "%"])

        def call_binop(
            self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
        ) -> Any:
            if not _is_small(operator, left, right=right):
                raise jinja2.TemplateRuntimeError(
                    f"the result of {operator} may be longer than {_MOST_TEXT:,} characters"
                )
            return super().call_binop(context, operator, left, right)

    environment = Sandbox(
        loader=jinja2.FileSystemLoader([directory, template_directory()]),
        undefined=jinja2.StrictUndefined,
        # It is shell or YAML, not HTML: `finalize` below enforces their own quoting.
        autoescape=False,
        finalize=_quoted_only,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(sh=sh, sh_words=sh_words, yaml=yaml, verbatim=verbatim)
    return environment


def _is_small(operator: str, left: Any, right: Any) -> bool:
    """Return whether an operation of a template makes no huge number, text or list."""
    if operator == "%":
        return not (
            isinstance(left, str) and re.search(r"[0-9]{5}|\*", left)
        )  # a width, as in %99999999d
    lengths = [len(value) for value in (left, right) if hasattr(value, "__len__")]
    numbers = [abs(value) for value in (left, right) if isinstance(value, (int, float))]
    if lengths:
        return math.prod(lengths) * math.prod(numbers) <= _MOST_TEXT
    return all(number <= 2**64 for number in numbers) and (operator == "*" or numbers[-1] <= 64)


def _quoted_only(value: object) -> object:
    if isinstance(value, (Quoted, int)):
        return value
    import jinja2

    if isinstance(value, jinja2.Undefined):
        return value  # which raises by itself, naming the variable
    raise jinja2.TemplateRuntimeError(
        f"the value {str(value)[:40]!r} is written without quoting: pipe it through the filter sh, or yaml"
    )


def _describe(path: Path, error: jinja2.TemplateError) -> str:
    import jinja2

    if isinstance(error, jinja2.TemplateNotFound):
        return f"the template {error.name!r} is not there"
    line = getattr(error, "lineno", None) or _line_in(path, error)
    return f"the template {path}{f', line {line}' if line else ''}: {error.message}"


def _line_in(path: Path, error: BaseException) -> int | None:
    """Return the template's line in the traceback, which jinja2 rewrites to point into the
    template.
    """
    frames = error.__traceback__
    found = None
    while frames is not None:
        if frames.tb_frame.f_code.co_filename == str(path):
            found = frames.tb_lineno
        frames = frames.tb_next
    return found
