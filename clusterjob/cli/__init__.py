"""The command line: parse options, call one function of `clusterjob.core`, print the result."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from clusterjob import __version__
from clusterjob.cli import (
    clean,
    completion,
    hosts,
    init,
    inside,
    inspect,
    list_jobs,
    login,
    logs,
    manage,
    metrics,
    report,
    stacks,
    start,
    top,
)
from clusterjob.cli.help import App, Group, dashes
from clusterjob.cli.inside import CommandAfterId
from clusterjob.cli.job_options import (
    JobOptionsCommand,
    LaunchCommand,
    ProgramCommand,
    with_job_options,
)
from clusterjob.errors import AmbiguousId, ClusterJobError, Untrusted, UsageError, os_error_text

app = App(
    name="clusterjob",
    cls=Group,
    help="Write a distributed training script once; one command runs it locally, over SSH, "
    "under Slurm or on a platform.",
    add_completion=False,
    rich_markup_mode=None,  # rich would double the time of --help
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": dashes,  # any option may be written with underscores
    },
)
app.command(cls=ProgramCommand)(with_job_options(start.submit))
app.command(cls=ProgramCommand)(with_job_options(start.run))
app.command(cls=ProgramCommand)(with_job_options(start.render))
app.command(
    cls=LaunchCommand,
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    },
)(start.launch)
app.command()(manage.status)
app.command("list")(list_jobs.list_jobs)
app.command()(top.top)
app.command()(manage.wait)
app.command()(manage.cancel)
app.command()(logs.logs)
app.command()(metrics.metrics)
app.command("exec", cls=CommandAfterId)(inside.execute)
app.command()(inside.shell)
app.command()(inside.forward)
app.command()(stacks.stacks)
app.command()(report.report)
app.command()(start.rerun)
app.command("open")(manage.open_job)
app.command()(clean.clean)
app.command()(inspect.env)
app.command()(inspect.config)
app.command()(inspect.trust)
app.command(cls=JobOptionsCommand)(with_job_options(inspect.doctor))
app.command()(hosts.fetch)
app.command()(login.login)
app.command()(login.logout)
app.command()(completion.completion)
app.command()(init.init)
app.add_typer(hosts.app)

_verbose = False


@app.callback(invoke_without_command=True)
def _global_options(
    ctx: typer.Context,
    version: Annotated[  # noqa: FBT002
        bool,
        typer.Option("--version", help="Print the version and exit."),
    ] = False,
    verbose: Annotated[  # noqa: FBT002
        bool,
        typer.Option("--verbose", "-v", help="Show the cause of an error, with its traceback."),
    ] = False,
) -> None:
    global _verbose  # noqa: PLW0603 - a process runs one command
    _verbose = verbose
    if version:
        print(f"clusterjob {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        print(ctx.get_help(), file=sys.stderr)
        raise typer.Exit(UsageError.exit_code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    A command that follows a job has the job's exit code; any other has 0, 1, 2 or 130.
    """
    _reopen_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        # Characters that the terminal cannot encode must not end the command.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        code = _run(argv)
    finally:
        if "clusterjob.core.live" in sys.modules:
            sys.modules["clusterjob.core.live"].live.clear()
    try:
        sys.stdout.flush()
    except OSError as error:
        return _nowhere_to_write(error)
    return code


def _reopen_closed_streams() -> None:
    """Occupy the descriptors of closed standard streams, so that no other file gets them.

    stdin is at its end, writing to stdout fails, and messages are lost.
    """
    for name, flags in (("stdin", os.O_RDONLY), ("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, flags)
            os.set_inheritable(descriptor, True)
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115


def _run(argv: Sequence[str] | None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == [completion.REQUEST]:
        from clusterjob.cli import completion_answers

        return completion_answers.answer(app, words[1:])
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    try:
        code = app(args=words, standalone_mode=False)
    except AmbiguousId as error:
        from clusterjob.core import polling

        return _complain(polling.with_states(error))
    except Untrusted as error:
        return _run(words) if _is_trusted_now(error) else error.exit_code
    except ClusterJobError as error:
        return _complain(error)
    except typer.Abort:
        return 130
    except typer.TyperException as error:  # raised by the option parser
        return _complain(_refusal(error))
    except BrokenPipeError as error:
        return _nowhere_to_write(error)
    except OSError as error:
        return _complain(ClusterJobError(os_error_text(error)))
    return code if isinstance(code, int) else 0


def _is_trusted_now(error: Untrusted) -> bool:
    """Show the lines of a project's file; on a terminal, ask whether to trust it."""
    from clusterjob.core import trust

    _complain(error)
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    with contextlib.suppress(typer.Abort):
        if typer.confirm("Trust it?", err=True):
            trust.record(error.path, error.data)
            return True
    return False


def _refusal(error: typer.TyperException) -> UsageError:
    """Return a parser error as a `UsageError`; the hint suggests the option that was meant."""
    unknown, context = getattr(error, "option_name", ""), getattr(error, "ctx", None)
    if type(error).__name__ == "NoSuchOption" and context is not None:
        from clusterjob.cli.suggestions import suggest

        params = context.command.params
        known = [word for param in params for word in (*param.opts, *param.secondary_opts)]
        return UsageError(f"there is no option {unknown}", suggest(unknown, known))
    text = str(error.format_message()) if hasattr(error, "format_message") else str(error)
    return UsageError(text.rstrip(".") or "no command given")


def _nowhere_to_write(error: OSError) -> int:
    """Report that stdout cannot be written; print nothing if its reader has closed the pipe."""
    with open(os.devnull, "wb") as nowhere:
        # Without this, the flush of the buffer at exit raises the error again.
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return 1
    return _complain(ClusterJobError(f"{error.strerror}: standard output"))


def _complain(error: ClusterJobError) -> int:
    from clusterjob.core.live import live
    from clusterjob.node.system.sanitize import sanitize

    live.clear()
    print(f"clusterjob: error: {sanitize(error.message)}", file=sys.stderr)
    for line in error.lines if isinstance(error, Untrusted) else ():
        print(f"  {sanitize(line)}", file=sys.stderr)
    if error.hint:
        print(f"  hint: {sanitize(error.hint)}", file=sys.stderr)
    if _verbose and error.__cause__ is not None:
        import traceback

        print(
            sanitize("".join(traceback.format_exception(error.__cause__)), lines=True),
            end="",
            file=sys.stderr,
        )
    return error.exit_code
