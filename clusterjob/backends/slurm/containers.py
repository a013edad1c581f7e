"""Containers under Slurm: through Pyxis, whose options srun takes, or through apptainer, which runs
the node's script.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from clusterjob.core.spec import JobSpec
from clusterjob.errors import SpecError

_ENGINES = ("pyxis", "apptainer")
_APPTAINER_SOURCES = (
    "docker",
    "docker-archive",
    "docker-daemon",
    "library",
    "oci",
    "oci-archive",
    "oras",
    "shub",
    "http",
    "https",
)


@dataclass(frozen=True)
class Container:
    """How the node's part of a job gets into its container.

    Attributes:
        srun_options: for Pyxis, srun's.
        prefix: for apptainer, the words before the command that runs inside.
    """

    srun_options: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()


def choose(spec: JobSpec, job_dir: Path, workdir: Path | None = None) -> Container:
    """Return how a job's container is entered; without ``--container`` there is none.

    ``pyxis:IMAGE`` and ``apptainer:IMAGE`` say which engine; else a .sif file, a directory, or a
    source of apptainer's such as ``docker://`` is apptainer's, and any other image is Pyxis'. The
    job's directory and its working directory are mounted.

    Args:
        spec: the job.
        job_dir: its directory, as the nodes have it.
        workdir: its working directory, as the nodes have it; None for the one that was asked for.

    Raises:
        SpecError: the image is none, or a directory cannot be mounted.
    """
    if not spec.container:
        return Container()
    workdir = workdir or spec.workdir
    engine, _, image = spec.container.partition(":")
    if engine not in _ENGINES:
        image = spec.container
        source = image.partition("://")
        is_file = image.endswith(".sif") or (spec.workdir / image).exists()
        engine = (
            "apptainer" if is_file or (source[1] and source[0] in _APPTAINER_SOURCES) else "pyxis"
        )
    if not image or "\n" in image:
        raise SpecError(
            f"--container {spec.container!r} names no image",
            "write it as pyxis:IMAGE, apptainer:IMAGE or FILE.sif",
        )
    mounts = list(dict.fromkeys((str(job_dir), str(workdir))))
    for path in mounts:
        if "," in path or ":" in path or '"' in path:
            raise SpecError(
                f"{path} holds a comma, a colon or a quote, and cannot be mounted into a container"
            )
    if engine == "apptainer":
        image = str(workdir / image) if (spec.workdir / image).exists() else image
        gpus = ("--nv",) if spec.resources.gpus_per_node else ()
        binds = tuple(word for path in mounts for word in ("--bind", f"{path}:{path}"))
        return Container(prefix=("apptainer", "exec", *gpus, *binds, "--pwd", str(workdir), image))
    options = (
        f"--container-image={image}",
        f"--container-mounts={','.join(f'{path}:{path}' for path in mounts)}",
        f"--container-workdir={workdir}",
    )  # fmt: skip
    return Container(srun_options=options)
