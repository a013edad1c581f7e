"""Let Hydra's sweeper compose configurations that differ only in numbers once.

The sweeper composes each job's configuration to find errors, for 30 ms each, and drops it. Hydra
does not import a module whose name begins with an underscore when it looks for plug-ins.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from omegaconf import DictConfig

_NUMBER = re.compile(
    r"(?P<whole>[+-]?\d+)|[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?", re.ASCII
)


class ShapeLoader:
    """A loader that composes one job of a sweep for all jobs that differ only in numbers.

    Args:
        loader: Hydra's loader, which does all other work.
    """

    def __init__(self, loader: ConfigLoader) -> None:
        self._loader = loader
        self._found: dict[tuple[str, ...], DictConfig] = {}
        self._groups: dict[str, bool] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def load_sweep_config(
        self, master_config: DictConfig, sweep_overrides: Sequence[str]
    ) -> DictConfig:
        """Compose the configuration of a job, or return one that differs only in numbers."""
        shape = tuple(self._shape(override) for override in sweep_overrides)
        if shape not in self._found:
            self._found[shape] = self._loader.load_sweep_config(
                master_config, list(sweep_overrides)
            )
        return self._found[shape]

    def _shape(self, override: str) -> str:
        """Return the override with a number replaced by its type, except the option of a group."""
        key, _, value = override.partition("=")
        match = _NUMBER.fullmatch(value)
        if match is None or self._is_group(key):
            return override
        return f"{key}={'int' if match['whole'] else 'float'}"

    def _is_group(self, key: str) -> bool:
        name = key.lstrip("+").partition("@")[0].replace(".", "/")
        if name not in self._groups:
            self._groups[name] = bool(self._loader.get_group_options(name))
        return self._groups[name]
