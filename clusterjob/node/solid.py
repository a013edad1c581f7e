"""The package's sources inside the node zip: one compressed block, unpacked at the first import of any of them.

The zip shadows an installed package of another version, so it holds all of the package. Packed module by module, as a zip does, it
would be almost twice as long, and an agent would start 30 ms later: each module would be looked up and unpacked by itself.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec

# Not typing's: this is loaded at every start from the zip.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType, ModuleType

NAME = "sources.json.bz2"  # beside the package's own __init__.py: {"clusterjob/cli/__init__.py": source, ...}


class Solid:
    """Finds and loads the modules of the block.

    Args:
        package_file: the path of the package's ``__init__.py`` inside the zip.
    """

    def __init__(self, package_file: str) -> None:
        self._directory = package_file.rpartition("/")[0]
        self._archive = self._directory.rpartition("/")[0]
        self._sources: dict[str, str] | None = None

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG002
        """Return where a module is, if it is one of ours; the protocol of sys.meta_path."""
        if not name.startswith("clusterjob."):
            return None
        file = self._file_of(name)
        if file is None:
            return None
        is_package = file.endswith("/__init__.py")
        spec = ModuleSpec(name, self, origin=f"{self._archive}/{file}", is_package=is_package)  # type: ignore[arg-type]
        if is_package:
            spec.submodule_search_locations = [f"{self._archive}/{file.rpartition('/')[0]}"]
        spec.has_location = True
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        """Have the module made as always."""

    def exec_module(self, module: ModuleType) -> None:
        """Run a module's code."""
        code = self.get_code(module.__name__)
        exec(code, module.__dict__)

    def get_code(self, name: str) -> CodeType:
        """Return a module's code: for this class itself, and for runpy."""
        file = self._file_of(name)
        if file is None:
            raise ImportError(f"there is no module {name}", name=name)
        return compile(self._all()[file], f"{self._archive}/{file}", "exec", dont_inherit=True)

    def get_source(self, name: str) -> str | None:
        """Return a module's source, for tracebacks."""
        file = self._file_of(name)
        return None if file is None else self._all()[file]

    def is_package(self, name: str) -> bool:
        """Return whether a module is a package, for runpy."""
        file = self._file_of(name)
        return file is not None and file.endswith("/__init__.py")

    def _file_of(self, name: str) -> str | None:
        stem = name.replace(".", "/")
        return next((file for file in (f"{stem}.py", f"{stem}/__init__.py") if file in self._all()), None)

    def _all(self) -> dict[str, str]:
        if self._sources is None:
            import bz2
            import json

            package = sys.modules["clusterjob"]
            data = package.__loader__.get_data(f"{self._directory}/{NAME}")  # type: ignore[union-attr]
            self._sources = json.loads(bz2.decompress(data))
        assert self._sources is not None
        return self._sources


def install(package_file: str) -> None:
    """Let this process import the package from the zip that holds it."""
    sys.meta_path.append(Solid(package_file))
