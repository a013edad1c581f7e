"""Import the package's modules from one compressed block in the node zip.

`clusterjob.core.node_zip` puts this module and the block into the package's ``__init__.py``. The
first import of another module unpacks the block. If each module were a member of the zip, the zip
would be almost twice as large, and an agent would start 30 ms later: Python would find and unpack
each module separately.

The zip shadows an installed package. It does not contain the modules that only submit jobs
(`clusterjob.core.node_zip.LEFT_OUT`). A process inside a job that submits another job takes these
modules, and the templates, from the installed package, which must have the same version.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, SourceFileLoader

# typing is not imported: it would slow every start from the zip.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType


class _Loader(SourceFileLoader):
    """Load one module, whose source is known."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self._source = source

    def get_data(self, path: str) -> bytes:
        return self._source if path == self.path else super().get_data(path)


class ZipImporter:
    """Find the modules of the block.

    Args:
        package_file: the path of the package's ``__init__.py`` inside the zip.
        block: the file and the source of each module, separated by zero bytes, compressed, in
            base64.
    """

    def __init__(self, package_file: str, block: str) -> None:
        self.archive = package_file.removesuffix("/clusterjob/__init__.py")
        self._block = block
        self._modules: dict[str, tuple[str, bytes]] | None = None  # file and source by name

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Return a module's spec if the block contains it; a method of sys.meta_path finders."""
        if not name.startswith("clusterjob."):
            return None
        file, source = self._find(name)
        if not file:
            # Let the interpreter's own finder search the installed package.
            package = installed()
            if package is not None and isinstance(path, list):
                path.append("/".join((package, *name.split(".")[1:-1])))
            return None
        loader = _Loader(name, f"{self.archive}/{file}", source)
        spec = ModuleSpec(name, loader, origin=loader.path)
        if loader.is_package(name):
            spec.submodule_search_locations = [loader.path.removesuffix("/__init__.py")]
        spec.has_location = True
        return spec

    def _find(self, name: str) -> tuple[str, bytes]:
        """Return the file and the source of a module; empty if the block does not contain it."""
        if self._modules is None:
            import zlib
            from binascii import a2b_base64

            parts = zlib.decompress(a2b_base64(self._block)).split(b"\0")
            self._modules, self._block = {}, ""
            for file, source in zip(map(bytes.decode, parts[::2]), parts[1::2], strict=True):
                stem = file.removesuffix(".py").removesuffix("/__init__")
                self._modules[stem.replace("/", ".")] = file, source
        return self._modules.get(name, ("", b""))


def install(package_file: str, block: str) -> None:
    """Let this process import the package from the zip that has this file; see `ZipImporter`."""
    # before the finder of the installed package
    sys.meta_path.insert(0, ZipImporter(package_file, block))


def archive() -> str | None:
    """Return the zip that the package was imported from; None if it was not imported from a zip."""
    return next(
        (finder.archive for finder in sys.meta_path if isinstance(finder, ZipImporter)), None
    )


def installed() -> str | None:
    """Return the directory of the installed package; None if no package is installed.

    Raises:
        ImportError: the installed package has another version than the zip.
    """
    places = [entry for entry in sys.path if not entry.endswith(".pyz")]
    specs = (
        finder.find_spec("clusterjob", places)  # an editable installation may have its own finder
        for finder in sys.meta_path
        if not isinstance(finder, ZipImporter)
    )
    spec = next(filter(None, specs), None)
    if spec is None or not spec.origin or not spec.origin.endswith("/__init__.py"):
        return None
    with open(spec.origin, encoding="utf-8") as stream:
        line = next((line for line in stream if line.startswith("__version__ = ")), "")
    own, its = sys.modules["clusterjob"].__version__, line.partition("=")[2].strip().strip('"')
    if own != its:
        raise ImportError(
            f"this job uses clusterjob {own}, but {spec.origin} is {its}: "
            "`env -u PYTHONPATH clusterjob` runs the installed version"
        )
    return spec.origin.removesuffix("/__init__.py")
