"""Containers under Slurm: Pyxis (options of srun) or apptainer (runs the node's script)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from clusterjob.core.spec import JobSpec
from clusterjob.errors import SpecError

_ENGINES = ("pyxis", "apptainer")
_APPTAINER_SOURCES = (
    "docker://",
    "docker-archive://",
    "docker-daemon://",
    "library://",
    "oci://",
    "oci-archive://",
    "oras://",
    "shub://",
    "http://",
    "https://",
)


@dataclass(frozen=True)
class Container:
    """The options and arguments that run a node's part of a job in a container.

    Attributes:
        srun_options: the options of srun, for Pyxis.
        prefix: the arguments before the command that runs inside, for apptainer.
    """

    srun_options: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()


def choose(spec: JobSpec, job_dir: Path, workdir: Path | None = None) -> Container:
    """Return the options that run the nodes in a container; empty without ``--container``.

    ``pyxis:IMAGE`` and ``apptainer:IMAGE`` name the engine. Otherwise apptainer runs a .sif file, a
    directory and a source such as ``docker://``, and Pyxis runs any other image. The container
    mounts the job's directory and the working directory.

    Args:
        spec: the job.
        job_dir: path of the job's directory on the nodes.
        workdir: path of the working directory on the nodes; None for the one in the spec.

    Raises:
        SpecError: ``--container`` names no image, or a directory cannot be mounted.
    """
    if not spec.container:
        return Container()
    workdir = workdir or spec.workdir
    engine, _, image = spec.container.partition(":")
    if engine not in _ENGINES:
        image = spec.container
        is_file = image.endswith(".sif") or (spec.workdir / image).exists()
        engine = "apptainer" if is_file or image.startswith(_APPTAINER_SOURCES) else "pyxis"
    if not image or "\n" in image:
        raise SpecError(
            f"--container {spec.container!r} names no image",
            "write it as pyxis:IMAGE, apptainer:IMAGE or FILE.sif",
        )
    mounts = list(dict.fromkeys((str(job_dir), str(workdir))))
    for path in mounts:
        if "," in path or ":" in path or '"' in path:
            raise SpecError(
                f"{path} contains a comma, a colon or a quote:"
                " it cannot be mounted into a container"
            )
    if engine == "apptainer":
        image = str(workdir / image) if (spec.workdir / image).exists() else image
        gpus = ("--nv",) if spec.resources.gpus_per_node else ()
        binds = tuple(word for path in mounts for word in ("--bind", f"{path}:{path}"))
        return Container(prefix=("apptainer", "exec", *gpus, *binds, "--pwd", str(workdir), image))
    return Container(
        srun_options=(
            f"--container-image={image}",
            f"--container-mounts={','.join(f'{path}:{path}' for path in mounts)}",
            f"--container-workdir={workdir}",
        )
    )
