"""Submit each task of a job once; cancel the submitted tasks if one cannot be submitted."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from clusterjob.backends.batch_command import upload
from clusterjob.backends.batch_command.platform import Platform, in_parallel
from clusterjob.core.plans import Plan, secrets_file, token_file
from clusterjob.core.records import Record
from clusterjob.errors import ClusterJobError, SubmitError, SubmitInDoubtError
from clusterjob.node.logs import ends
from clusterjob.node.system import files

_PRIVATE = "task.private"  # file with a task and its secrets, for the platform's command
# Number of searches for a task whose submission is in doubt, and seconds between two searches.
_SEARCHES, _PAUSE = 3, 1.0


def submit_all(
    plan: Plan,
    platform: Platform,
    tasks: Sequence[tuple[str, bytes]],
    suffix: str,
    rate: float,
    since: float,
) -> list[str]:
    """Submit tasks one after the other and return their ids.

    See `clusterjob.backends.batch_command.backend.PlatformBackend.submit_tasks`. No task is older
    than `since`, in seconds since the epoch.
    """
    path = plan.job_dir / f"{_PRIVATE}{suffix}"
    ids: list[str] = []
    try:
        for name, data in tasks:
            begin = time.monotonic()
            files.write_atomic(path, data, mode=0o600)
            ids.append(_submit_once(platform, path, name=name, since=since))
            if len(ids) < len(tasks):
                time.sleep(max(0.0, begin + 1 / rate - time.monotonic()))
    except OSError as error:
        _cancel_all(platform, ids)
        raise SubmitError(f"{path} cannot be written: {error.strerror}") from error
    except SubmitInDoubtError:
        if len(tasks) > 1:
            # Cancel the whole array; a later status request cancels the task in doubt.
            ends.cancel(plan.job_dir)
            _cancel_all(platform, ids)
        raise
    except SubmitError:
        _cancel_all(platform, ids)
        raise
    except KeyboardInterrupt:  # the command may have submitted a task before Ctrl-C
        ends.cancel(plan.job_dir)
        with contextlib.suppress(ClusterJobError):
            ids += [
                task.id
                for task in platform.tasks([name for name, _ in tasks], since)
                if not task.state.final and task.id not in ids
            ]
        _cancel_all(platform, ids)
        raise
    finally:
        path.unlink(missing_ok=True)
    # The platform has the token and the secrets; this machine needs no copy.
    token_file(plan.job_dir).unlink(missing_ok=True)
    secrets_file(plan.job_dir).unlink(missing_ok=True)
    return ids


def _submit_once(platform: Platform, path: Path, name: str, since: float) -> str:
    """Submit one task and return its id; after an error, search for the task.

    Raises:
        SubmitError: the platform refuses the task.
        SubmitInDoubtError: the platform's answer is unclear, and it does not list the task yet.
    """
    try:
        return platform.submit(path)
    except SubmitError as error:
        in_doubt = isinstance(error, SubmitInDoubtError)
        for search in range(_SEARCHES if in_doubt else 1):
            time.sleep(_PAUSE if search else 0.0)
            with contextlib.suppress(ClusterJobError):
                if found := platform.tasks([name], since):
                    return found[-1].id
        if not in_doubt:
            raise
        raise SubmitInDoubtError(
            f"it is unknown whether the platform accepted the job: {error.message}"
        ) from error


def _cancel_all(platform: Platform, ids: Sequence[str]) -> None:
    def cancel(task_id: str) -> None:
        with contextlib.suppress(ClusterJobError):
            platform.cancel(task_id)

    in_parallel(cancel, ids)


def remove_leftovers(record: Record) -> None:
    """Remove the upload and the secrets of a job without a handle: its submitter was killed."""
    if record.handle is None:
        # All elements of an array are submitted from the array's directory.
        shutil.rmtree(record.whole_dir / upload.DIRECTORY, ignore_errors=True)
        # The pattern also matches the temporary name of an incomplete file.
        for path in record.whole_dir.glob(f"*{_PRIVATE}*"):
            path.unlink(missing_ok=True)
