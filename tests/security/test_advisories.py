"""No dependency has a known vulnerability.

The tests compare tools/advisories.toml with pyproject.toml and with the installed packages.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest
from launching import ROOT
from packaging.requirements import Requirement
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


pytestmark = pytest.mark.skipif(
    not (ROOT / "tools" / "advisories.toml").is_file(), reason="not run from a source tree"
)


def read(name: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / name).read_text())


def advisories() -> dict[str, dict[str, Any]]:
    return (
        read("tools/advisories.toml")["packages"]
        if (ROOT / "tools" / "advisories.toml").is_file()
        else {}
    )


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("package", advisories())
def test_installed_version_has_no_known_vulnerability(package: str) -> None:
    try:
        installed = version(package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    row = advisories()[package]
    assert Version(installed) >= Version(row["fixed"]), (
        f"{package} {installed}: {', '.join(row['ids'])}, fixed in {row['fixed']}"
    )


def test_lower_bounds_exclude_known_vulnerabilities() -> None:
    bounds = {
        normal(r.name): r.specifier
        for r in map(Requirement, read("pyproject.toml")["project"]["dependencies"])
    }
    rows = {package: row for package, row in advisories().items() if package in bounds}
    assert {"jinja2", "paramiko", "pyyaml"} <= rows.keys()
    for package, row in rows.items():
        lowest = [Version(s.version) for s in bounds[package] if s.operator == ">="]
        assert lowest, f"{package} has no lower bound"
        assert max(lowest) >= Version(row["fixed"]), (
            f"{package}{bounds[package]} admits {', '.join(row['ids'])}"
        )


def test_advisories_have_ids() -> None:
    """CI refuses a row of a package that is not installed: no package needs it any more."""
    names = [name for row in advisories().values() for name in row["ids"]]
    assert all(re.fullmatch(r"(CVE|GHSA|PYSEC)-[\w-]+", name) for name in names)
