"""Hydra's check of a sweep composes configurations that differ only in numbers once."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from procs import TEST_TIMEOUT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("hydra") is None, reason="Hydra is missing: pip install hydra-core"
)


class Loader:
    """Records the jobs that it composes; `db` and `model/head` are groups with numbered options."""

    config_dir = "conf"

    def __init__(self) -> None:
        self.composed: list[list[str]] = []

    def get_group_options(self, name: str) -> list[str]:
        return ["1", "2"] if name in ("db", "model/head") else []

    def load_sweep_config(self, master_config: Any, sweep_overrides: list[str]) -> Any:
        self.composed.append(sweep_overrides)
        if "lr=bad" in sweep_overrides:
            raise ValueError("lr=bad")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["lr=1", "lr=2", "lr=-30", "lr=0.1", "lr=1e-3", "lr=.5", "lr=2."], ["lr=1", "lr=0.1"]),
        *(
            ([f"x={one}", f"x={other}"], [f"x={one}", f"x={other}"])
            for one, other in (("a", "b"), ("1", "${x}"), ("[1]", "[2]"), ("1", "1x"), ("", "1"))
        ),
        *(
            ([f"{key}=1", f"{key}=2"], [f"{key}=1", f"{key}=2"])
            for key in ("db", "+db", "model/head", "db@second", "+model/head@x.y")
        ),
    ],
)
def test_numbers_of_one_type_are_composed_once_and_other_values_each(
    values: list[str], expected: list[str]
) -> None:
    found = composed(*([value, "text=a"] for value in values))
    assert found == [[value, "text=a"] for value in expected]


def composed(*jobs: list[str]) -> list[list[str]]:
    from hydra_plugins.clusterjob_launcher._validation import ShapeLoader

    loader = Loader()
    shapes: Any = ShapeLoader(loader)  # type: ignore[arg-type]
    assert shapes.config_dir == "conf", "other attributes are Hydra's"
    for job in jobs:
        shapes.load_sweep_config(None, job)
    return loader.composed


def test_error_of_any_shape_is_raised() -> None:
    with pytest.raises(ValueError, match="lr=bad"):
        composed(["lr=1"], ["lr=2"], ["lr=bad"])


def test_real_sweep_is_refused_for_its_last_value(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "import dataclasses, hydra\n"
        "from hydra.core.config_store import ConfigStore\n"
        "@dataclasses.dataclass\n"
        "class Config:\n    lr: float = 0.1\n"
        "ConfigStore.instance().store(name='config', node=Config)\n"
        "@hydra.main(version_base=None, config_name='config')\n"
        "def main(cfg): raise SystemExit('it runs')\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "app.py", "-m", "hydra/launcher=clusterjob", "lr=1,2,3,high"],
        cwd=tmp_path, capture_output=True, text=True, timeout=TEST_TIMEOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Value 'high' of type 'str' could not be converted to Float" in done.stderr
