"""Submit the jobs of a Hydra sweep: one array where the cluster has arrays.

Each job runs the application's own script again, with its overrides and in its own directory, so
the application needs no change and nothing is pickled. Hydra imports this module at each start of
an application: other modules are imported where they are needed.
"""

# ruff: noqa: UP045 - OmegaConf knows Optional in every Python version

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, make_dataclass
from typing import TYPE_CHECKING, Any, Optional, cast

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher

from clusterjob.core.options import OPTIONS

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

_TYPES = {"_whole_number": int, "_nodes": int, "_text": str, "_switch": bool, "_seconds": float}
_OWN: list[tuple[str, Any, Any]] = [
    ("_target_", str, f"{__name__}.ClusterjobLauncher"),
    ("cluster", Optional[str], None),  # profile or backend
    ("wait", Optional[bool], None),  # by default only where something needs the results
    ("max_running", Optional[int], None),  # jobs that run at a time
]
ClusterjobLauncherConf = make_dataclass(
    "ClusterjobLauncherConf",
    [(name, kind, field(default=default)) for name, kind, default in _OWN]
    + [
        (key, Optional[_TYPES.get(option.read.__name__, Any)], field(default=None))
        for key, option in OPTIONS.items()
        if key not in ("array", "sweep")
    ],
)
ConfigStore.instance().store(
    group="hydra/launcher",
    name="clusterjob",
    node=ClusterjobLauncherConf,
    provider="clusterjob",
)


class ClusterjobLauncher(Launcher):
    """Launch the jobs of a sweep with clusterjob.

    Args:
        cluster: the profile or backend, as with ``--cluster``.
        wait: whether to wait for the jobs; None to wait if the sweeper needs the return values
            (all but Hydra's basic sweeper), or if the cluster has no queue.
        max_running: number of jobs that run at a time; None for the cluster's limit, or 1 without a
            queue.
        settings: settings of each job by their keys in a configuration file.
    """

    def __init__(
        self,
        cluster: str | None = None,
        *,
        wait: bool | None = None,
        max_running: int | None = None,
        **settings: Any,
    ) -> None:
        self._cluster = cluster
        self._wait = wait
        self._max_running = max_running
        self._settings = settings
        self._config: DictConfig | None = None

    def setup(
        self,
        *,
        hydra_context: HydraContext,
        task_function: TaskFunction,  # noqa: ARG002 - the jobs import it again
        config: DictConfig,
    ) -> None:
        """Take the sweep's configuration, and have Hydra's basic sweeper check it faster."""
        self._config = config
        if self._is_basic():
            from hydra_plugins.clusterjob_launcher._validation import ShapeLoader

            hydra_context.config_loader = cast(
                "ConfigLoader", ShapeLoader(hydra_context.config_loader)
            )

    def _is_basic(self) -> bool:
        """Return whether Hydra's basic sweeper sweeps, which needs no return values."""
        assert self._config is not None
        return str(self._config.hydra.sweeper._target_).endswith(".BasicSweeper")

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Submit one job for each list of overrides.

        Returns:
            The jobs' return values if it waits for them; else None for each.
        """
        from hydra_plugins.clusterjob_launcher import _sweep

        assert self._config is not None
        jobs = _sweep.Sweep(
            self._config,
            self._cluster,
            max_running=self._max_running,
            settings={key: value for key, value in self._settings.items() if value is not None},
        )
        needed = not self._is_basic() or not jobs.has_queue
        wait = needed if self._wait is None else self._wait
        found = jobs.run(job_overrides, initial_job_idx, wait=wait)
        return [
            JobReturn(
                overrides=list(overrides),
                task_name=str(self._config.hydra.job.name),
                status=JobStatus.FAILED if isinstance(value, Exception) else JobStatus.COMPLETED,
                _return_value=value,
            )
            for overrides, value in zip(job_overrides, found, strict=True)
        ]
