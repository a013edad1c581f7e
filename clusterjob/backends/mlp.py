"""A platform that sets MLP_* variables, such as Volcengine's: renders the entry command that every worker runs. It submits nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from clusterjob import pack
from clusterjob.backends import Status, directory
from clusterjob.errors import SpecError, SubmitError
from clusterjob.plans import Plan
from clusterjob.records import Handle, Record
from clusterjob.render import render
from clusterjob.spec import JobSpec

NAME = "mlp"
_SCRIPT = "mlp.sh"


class MlpBackend:
    """Plans jobs for a platform whose nodes find their place in MLP_* variables."""

    def plan(self, spec: JobSpec) -> Plan:
        """Return the entry script, with what it takes along where the nodes see the submitter's files.

        Raises:
            SpecError: an option that the entry command cannot carry out.
            TemplateError: the user's template cannot be rendered.
        """
        directory.refuse_hosts(spec, NAME)
        unknown = [name for name in spec.options if name != "workdir"]
        if unknown:
            raise SpecError(f"the mlp cluster knows no option {unknown[0]!r}", "it knows workdir; the platform's own task has others")
        directory.refuse_queue(spec, NAME, "the platform's own task decides that")
        job_id, job_dir = directory.new_directory(spec.name)
        options = spec.launch_options()
        if spec.nproc_open:
            options = replace(options, nproc_per_node=None)  # the platform says how many GPUs a worker has
        values = directory.common_values(spec, job_id, job_dir) | {
            "workdir": spec.options.get("workdir", str(spec.workdir)),
            "node_zip": str(job_dir / pack.NAME),
            "launch_arguments": options.arguments(),
        }
        script = directory.script_file(job_dir / _SCRIPT, render(spec.template or f"{_SCRIPT}.j2", values))
        return Plan(
            job_id=job_id,
            backend=NAME,
            job_dir=job_dir,
            spec=spec,
            files=(*directory.common_files(spec, job_dir), script),
            commands=(),
            notes=("the platform decides the number of nodes: MLP_WORKER_NUM",),
        )

    def submit(self, plan: Plan) -> NoReturn:  # noqa: ARG002 - the protocol's own signature
        """Refuse: only the platform's own tools submit to it.

        Raises:
            SubmitError: always.
        """
        raise SubmitError(
            f"clusterjob does not submit to the {NAME} cluster",
            f"`clusterjob render --cluster {NAME} ...` prints {_SCRIPT}: make it the entry command of a task, which every worker runs",
        )

    def detach(self, handle: Handle) -> None:
        """There is no job to let go."""

    def status(self, records: Sequence[Record]) -> dict[str, Status]:  # noqa: ARG002
        """Return nothing: no job was ever submitted."""
        return {}

    def collect(self, record: Record) -> None:
        """There are no logs."""

    def cancel(self, records: Sequence[Record]) -> None:
        """There is nothing to cancel."""
