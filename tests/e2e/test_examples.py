"""The examples of docs/scripts.md train as the page shows, alone and under launchers.

The tests recompute the results that the examples print.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, launch, run

EXAMPLES = ROOT / "examples"
DIGITS = "train_digits.py"
RECIPES = "train_recipes.py"
IMAGES = "classify_images/train.py"
Numbers = Mapping[str, Callable[[float], bool]]


def slow(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def example(directory: Path, processes: int, name: str, *args: object) -> str:
    """Run an example on so many processes; return its output."""
    argv = (EXAMPLES / name, *args)
    one = processes == 1
    ran = (
        run([sys.executable, *argv], directory)
        if one
        else launch("fork", processes, argv, directory)
    )
    assert ran.code == 0, ran.err
    assert "arning" not in ran.err
    return ran.out


def check(out: str, numbers: Numbers) -> None:
    """Check that each pattern matches once, and that its number fits."""
    for pattern, fits in numbers.items():
        [found] = re.findall(pattern, out)
        assert fits(float(found)), pattern


def digits(processes: int) -> Numbers:
    return {
        r"held-out accuracy (\d\.\d+) on 359 digits": lambda accuracy: accuracy >= 0.95,
        rf"(\d+) samples per second on {processes} x cpu": lambda speed: speed > 0,
        r"epoch (10)/10: loss \S+": lambda _: True,  # only the main process prints
    }


PIPELINE: Numbers = {
    r"differ from those of one process by at most (\S+)": lambda difference: difference < 1e-6,
    r"loss \S+ before training, (\S+) after": lambda loss: loss < 0.1,
    r"loss (\S+) before training": lambda loss: loss > 1,
}
IMAGE_NUMBERS: Numbers = {
    r"epoch 2/2: loss (\S+)": lambda loss: loss < 0.8,  # it begins above 1
    r"accuracy (\S+) on": lambda accuracy: accuracy > 0.5,  # random guessing gives 1/3
}
SMALL = ("--size", 32, "--epochs", 2, "--workers", 0)


@pytest.mark.parametrize(
    ("processes", "name", "args", "numbers"),
    [
        (1, DIGITS, (), digits(1)),
        slow(2, DIGITS, (), digits(2)),
        slow(4, DIGITS, (), digits(4)),
        slow(
            1,
            "spawn_function.py",
            (2, "4,5"),
            {r"loss (\S+) after training on 2 processes": lambda loss: loss < 1e-4},
        ),
        *(
            slow(
                1,
                "torch_spawn.py",
                ("--nprocs", 2, *plain),
                {r"loss (\S+) over 512 points of 2 processes": lambda loss: loss < 1e-4},
            )
            for plain in ((), ("--plain",))
        ),
        slow(1, "data_parallel.py", (), {r"accuracy (\S+) on 1 x cpu": lambda part: part > 0.97}),
        slow(2, "pipeline.py", ("--schedule", "gpipe"), PIPELINE),
        slow(3, "pipeline.py", ("--schedule", "1f1b"), PIPELINE),
        slow(1, IMAGES, (*SMALL, "--batch-size", 16), IMAGE_NUMBERS),
        slow(2, IMAGES, (*SMALL, "--batch-size", 8), IMAGE_NUMBERS),
    ],
)
def test_example_trains_as_its_numbers_show(
    tmp_path: Path, processes: int, name: str, args: tuple[object, ...], numbers: Numbers
) -> None:
    check(example(tmp_path, processes, name, *args), numbers)


@pytest.mark.slow
def test_digits_example_below_target_accuracy_fails_job(tmp_path: Path) -> None:
    ran = launch("fork", 1, [EXAMPLES / DIGITS, "--epochs", 1, "--target", 0.999], tmp_path, code=1)
    assert re.search(
        r"FAILED: rank 0 .*: held-out accuracy 0\.\d+ is below the target of 0\.999", ran.err
    )


@pytest.mark.parametrize("launcher", ["fork", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_plain_torch_example_runs_under_each_launcher(launcher: str, tmp_path: Path) -> None:
    plain = EXAMPLES / "plain_env.py"
    assert "clusterjob" not in plain.read_text().replace("clusterjob launch", "")
    ran = launch(launcher, 2, [plain], tmp_path, code=0)
    numbers: Numbers = {
        r"all-reduce over 2 ranks: (\d)\n": lambda total: total == 3,
        r"fitted y = (\S+) x \+ \S+,": lambda slope: abs(slope - 3) < 0.02,
        r"fitted y = \S+ x \+ (\S+),": lambda intercept: abs(intercept + 1) < 0.02,
    }
    check(ran.out, numbers)


# -- the same training in other ways ---------------------------------------------------------------


def weights(path: Path) -> dict[str, Any]:
    import torch

    return torch.load(path, weights_only=True)


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train on two processes with chosen GPUs; return the final weights."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    directory = tmp_path_factory.mktemp("base")
    options = ("--backend", "gloo", "--tensorboard", "runs", "--save", "model.pt")
    launcher = [sys.executable, "-m", "clusterjob", "launch", "--gpus", "0,1"]
    ran = run([*launcher, EXAMPLES / RECIPES, *options], directory)
    check(ran.out, {r"learning rate (\S+)": lambda rate: rate == 0.2, **RECIPE_NUMBERS})
    printed = re.findall(r": loss (\S+), accuracy (\S+),", ran.out)
    assert len(set(re.findall(r"first sample (\d+)", ran.out))) > 1  # each epoch has its own order
    [_] = (directory / "runs").iterdir()  # only the main process has written
    events = EventAccumulator(str(directory / "runs")).Reload()
    for tag, column in (("loss/train", 0), ("accuracy/held-out", 1)):
        shown = [float(row[column]) for row in printed]
        assert [each.value for each in events.Scalars(tag)] == pytest.approx(shown, abs=1e-4)
    return weights(directory / "model.pt")


RECIPE_NUMBERS: Numbers = {
    r"held-out accuracy (\S+): \d+ of 509 on": lambda part: part > 0.9,
    r"initial weights: the same on (\d) processes": lambda _: True,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "options", "least", "most"),
    [
        (1, ("--batch-size", 128, "--lr", 0.2), 0, 1e-5),
        (2, ("--batch-size", 16, "--accumulate", 4), 0, 1e-5),
        (2, ("--amp",), 1e-5, 0.05),
    ],
    ids=["one process", "accumulated", "mixed precision"],
)
def test_same_training_gets_the_same_weights(
    base: dict[str, Any],
    tmp_path: Path,
    processes: int,
    options: tuple[object, ...],
    least: float,
    most: float,
) -> None:
    out = example(tmp_path, processes, RECIPES, *options, "--save", "other.pt")
    check(out, RECIPE_NUMBERS)
    assert least <= distance(base, weights(tmp_path / "other.pt")) < most


@pytest.mark.slow
def test_sync_batchnorm_on_cpu_is_ignored_with_warning(tmp_path: Path) -> None:
    ran = launch("fork", 2, [EXAMPLES / RECIPES, "--sync-batchnorm"], tmp_path, code=0)
    assert ran.err.count("sync_batchnorm has no effect on CPU") == 1
    check(ran.out, RECIPE_NUMBERS)


@pytest.mark.slow
def test_image_folder_has_stable_train_test_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str((EXAMPLES / IMAGES).parent))
    images = importlib.import_module("images")
    images.make_images(tmp_path, per_class=10, size=16)
    train, test = (images.ImageFolder(tmp_path, 8, held_out=flag) for flag in (False, True))
    assert train.classes == test.classes == ["circles", "squares", "triangles"]
    assert (len(train), len(test)) == (24, 6)
    assert not {path for path, _ in train.samples} & {path for path, _ in test.samples}
    tensor, label = test[0]
    assert (tuple(tensor.shape), label) == ((3, 8, 8), 0)


def test_scripts_page_lists_exactly_the_examples() -> None:
    named = set(re.findall(r"\.\./examples/([\w/]+\.py)", (ROOT / "docs/scripts.md").read_text()))
    # Modules of an example that the page lists; docs/backends.md lists those of `backend`.
    other = {"classify_images/resnet.py", "classify_images/images.py"}
    files = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py")}
    assert named == {name for name in files - other if not name.startswith("backend/")}
