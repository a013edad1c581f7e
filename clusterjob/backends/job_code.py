"""The code of a job: a snapshot on a shared disk, or a copy that is sent to the hosts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterjob.core.plans import Plan
from clusterjob.core.spec import JobSpec
from clusterjob.core.units import parse_size
from clusterjob.errors import SubmitError
from clusterjob.node.logs.job_dir import CODE, CODE_GIT

if TYPE_CHECKING:
    from clusterjob.core.snapshot import Snapshot
    from clusterjob.core.snapshot.source import CodeSource


def source_of(spec: JobSpec) -> CodeSource | None:
    """Return the code of which a job runs a snapshot; None if it runs the current files.

    Raises:
        SpecError: the option sync_limit is not a size.
    """
    if not (spec.snapshot and spec.sync):
        return None
    from clusterjob.core import snapshot
    from clusterjob.core.snapshot.source import CodeSource

    if spec.earlier_code is not None and "root" in spec.earlier_code.facts:
        return CodeSource.again(spec.earlier_code)
    limit = spec.options.get("sync_limit")
    return CodeSource.of(
        spec.workdir, spec.program, snapshot.LIMIT if limit is None else parse_size(limit)
    )


def notes(spec: JobSpec, *, sent: bool) -> tuple[str, ...]:
    """Return a note if a job runs another version of the code than the user may expect.

    Args:
        spec: the job.
        sent: whether the hosts run a copy that is sent to them.
    """
    if sent and spec.sync and not spec.snapshot:
        return ("--no-snapshot: the hosts run a copy of the code; --no-sync uses their own files",)
    if not sent and spec.sync and spec.snapshot and source_of(spec) is None:
        from clusterjob.core.snapshot.source import is_own

        if not is_own(spec.program):
            why = "which is or holds the home directory"
            return (f"no snapshot of {spec.workdir}, {why}: current files are used",)
    return ()


def template_values(code: CodeSource | None, job_dir: Path) -> dict[str, str]:
    """Return the variables of a template for the code of a job; empty texts without a snapshot."""
    if code is None:
        return {"code_dir": "", "code_tree": "", "code_origin": ""}
    return {
        "code_dir": str(code.directory(job_dir)),
        "code_tree": str(job_dir / CODE),
        "code_origin": str(code.top),
    }


def to_send(plan: Plan, limit: int) -> tuple[Snapshot, dict[str, Any]]:
    """Return the code that a job sends to its hosts, and its data for the job's handle.

    It is the content of the working directory, or the code of an earlier job that runs again.

    Args:
        plan: the job.
        limit: maximum bytes.

    Raises:
        SubmitError: the directory is too large or cannot be read, the earlier code is not known, or
            the job's directory cannot be written.
    """
    from clusterjob.core import snapshot
    from clusterjob.core.snapshot.git_revision import Git, write_diff

    spec = plan.spec
    if (earlier := spec.earlier_code) is not None:
        code = snapshot.sent(earlier.job_dir, spec.workdir)
        if code is None:
            raise SubmitError(
                f"{earlier.job_dir} does not list the code of the job any more",
                "submit the program again to run its current code",
            )
        facts, diff = dict(earlier.facts), b""
    else:
        git = Git(spec.workdir)
        code = snapshot.take(spec.workdir, limit, include_secrets=spec.include_secrets, git=git)
        state, diff = git.state()
        facts = {"digest": code.digest, "files": code.files, "bytes": code.size, "git": state}
        code = git.with_repository(code, plan.job_dir / CODE_GIT, state, shared=False)
    try:
        code.keep(plan.job_dir)
        write_diff(diff, plan.job_dir)
    except OSError as error:
        raise SubmitError(f"{plan.job_dir} cannot be written: {error.strerror}") from error
    return code, facts
