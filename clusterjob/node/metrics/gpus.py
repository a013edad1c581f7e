"""Find the GPUs of a job on a node, of NVIDIA or of AMD, and read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from clusterjob.node.metrics.samples import Gpu, GpuSample

if TYPE_CHECKING:
    from clusterjob.node.metrics.amd import Amd
    from clusterjob.node.metrics.nvml import Nvml


class Gpus:
    """The GPUs that a job may use; the first `read` loads the driver's library.

    Args:
        environ: the variables that select the GPUs.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._source: Nvml | Amd | None = None

    def read(self) -> tuple[tuple[Gpu, ...], tuple[GpuSample, ...]]:
        """Return the GPUs and their states.

        Raises:
            OSError: there is no GPU.
        """
        if self._source is None:
            self._source = self._open()
        return self._source.gpus, self._source.sample()

    def _open(self) -> Nvml | Amd:
        from clusterjob.node.metrics.amd import Amd
        from clusterjob.node.metrics.nvml import Nvml

        try:
            return Nvml(self._environ)
        except OSError:
            return Amd(self._environ)
