"""Examples of docs/scripts.md train as the page shows.

The tests recompute the results that the examples print.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, launch, run

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"
RECIPES = EXAMPLES / "train_recipes.py"
IMAGES = EXAMPLES / "classify_images"


def number(pattern: str, text: str) -> float:
    found = re.findall(pattern, text)
    assert len(found) == 1, f"{pattern} in {text}"
    return float(found[0])


def python(directory: Path, *args: object, **extra: str) -> str:
    ran = run([sys.executable, *args], directory, extra)
    assert ran.code == 0, ran.err
    assert "arning" not in ran.err
    return ran.out


def on_two(directory: Path, *args: object) -> str:
    ran = launch("fork", 2, args, directory)
    assert ran.code == 0, ran.err
    assert "arning" not in ran.err
    return ran.out


# -- starting --------------------------------------------------------------------------------------


def test_spawned_function_trains_on_two_processes(tmp_path: Path) -> None:
    out = python(tmp_path, EXAMPLES / "spawn_function.py", 2, "4,5")
    assert {line for line in out.splitlines() if "rank" in line} == {
        f"[{rank}] rank {rank} of 2 on cpu" for rank in (0, 1)
    }
    assert number(r"loss (\S+) after training on 2 processes", out) < 1e-4


@pytest.mark.parametrize("options", [(), ("--plain",)])
def test_torch_spawn_example_trains_on_two_processes(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    out = python(tmp_path, EXAMPLES / "torch_spawn.py", "--nprocs", 2, *options)
    assert number(r"loss (\S+) over 512 points of 2 processes", out) < 1e-4


def test_data_parallel_example_trains_in_one_process(tmp_path: Path) -> None:
    out = python(tmp_path, EXAMPLES / "data_parallel.py")
    assert number(r"accuracy (\S+) on 1 x cpu", out) > 0.97


# -- training --------------------------------------------------------------------------------------


def weights(path: Path) -> dict[str, Any]:
    import torch

    return torch.load(path, weights_only=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Train on two processes with chosen GPUs; return their output and final weights."""
    directory = tmp_path_factory.mktemp("base")
    options = ("--backend", "gloo", "--tensorboard", "runs", "--save", "model.pt")
    out = python(directory, "-m", "clusterjob", "launch", "--gpus", "0,1", RECIPES, *options)
    check_curves(directory / "runs", re.findall(r": loss (\S+), accuracy (\S+),", out))
    return out, weights(directory / "model.pt")


def check_recipes(out: str, processes: int, backend: str) -> None:
    found = re.search(r"held-out accuracy (\S+): (\d+) of (\d+) on (\d) x cpu by (\w+)", out)
    assert found is not None
    assert float(found[1]) > 0.9
    assert float(found[1]) == pytest.approx(int(found[2]) / 509, abs=1e-4)
    assert found.groups()[2:] == ("509", str(processes), backend)
    assert f"initial weights: the same on {processes} processes" in out
    firsts = re.findall(r"first sample (\d+)", out)
    assert len(firsts) == 5  # only one process prints
    assert len(set(firsts)) > 1  # each epoch has its own order


def test_recipes_example_trains_on_two_processes(base: tuple[str, dict[str, Any]]) -> None:
    check_recipes(base[0], 2, "gloo")
    assert number(r"learning rate (\S+)", base[0]) == 0.2


def test_one_process_with_same_batch_size_gets_same_weights(
    base: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    out = python(tmp_path, RECIPES, "--batch-size", 128, "--lr", 0.2, "--save", "one.pt")
    check_recipes(out, 1, "None")
    assert distance(base[1], weights(tmp_path / "one.pt")) < 1e-5


def check_curves(folder: Path, printed: list[tuple[str, str]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [_] = folder.iterdir()  # only the main process has written
    events = EventAccumulator(str(folder)).Reload()
    for tag, column in (("loss/train", 0), ("accuracy/held-out", 1)):
        assert [event.value for event in events.Scalars(tag)] == pytest.approx(
            [float(row[column]) for row in printed], abs=1e-4
        )


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_gradient_accumulation_gets_weights_of_large_batch(
    base: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    on_two(tmp_path, RECIPES, "--batch-size", 16, "--accumulate", 4, "--save", "accumulated.pt")
    assert distance(base[1], weights(tmp_path / "accumulated.pt")) < 1e-5


def test_mixed_precision_gets_similar_weights(
    base: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    out = on_two(tmp_path, RECIPES, "--amp", "--save", "half.pt")
    half = weights(tmp_path / "half.pt")
    assert 1e-5 < distance(base[1], half) < 0.05
    assert {str(value.dtype) for value in half.values()} == {"torch.float32"}
    assert number(r"held-out accuracy (\S+):", out) > 0.9


def test_sync_batchnorm_on_cpu_is_ignored_with_warning(tmp_path: Path) -> None:
    ran = launch("fork", 2, [RECIPES, "--sync-batchnorm"], tmp_path)
    assert ran.code == 0, ran.err
    assert ran.err.count("sync_batchnorm has no effect on CPU") == 1
    assert number(r"held-out accuracy (\S+):", ran.out) > 0.9


@pytest.mark.parametrize(("processes", "schedule"), [(2, "gpipe"), (3, "1f1b")])
def test_pipeline_example_has_gradients_of_one_process(
    processes: int, schedule: str, tmp_path: Path
) -> None:
    ran = launch("fork", processes, [EXAMPLES / "pipeline.py", "--schedule", schedule], tmp_path)
    assert (ran.code, "arning" in ran.err) == (0, False), ran.err
    assert number(r"differ from those of one process by at most (\S+)", ran.out) < 1e-6
    before, after = map(float, re.findall(r"loss (\S+) before training, (\S+) after", ran.out)[0])
    assert after < 0.1 < 1 < before
    assert f"over {processes} sub-networks" in ran.out


# -- images ----------------------------------------------------------------------------------------


def test_image_folder_has_stable_train_test_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(IMAGES))
    images = importlib.import_module("images")
    images.make_images(tmp_path, per_class=10, size=16)
    train, test = (images.ImageFolder(tmp_path, 8, held_out=flag) for flag in (False, True))
    assert train.classes == test.classes == ["circles", "squares", "triangles"]
    assert (len(train), len(test)) == (24, 6)
    assert not {path for path, _ in train.samples} & {path for path, _ in test.samples}
    tensor, label = test[0]
    assert (tuple(tensor.shape), label) == ((3, 8, 8), 0)


@pytest.mark.parametrize("processes", [1, 2])
def test_resnet_example_trains_on_image_folder(processes: int, tmp_path: Path) -> None:
    args = (IMAGES / "train.py", "--size", 32, "--epochs", 2, "--workers", 0, "--save", "model.pt")
    args += ("--batch-size", 16 // processes)
    out = on_two(tmp_path, *args) if processes == 2 else python(tmp_path, *args)
    # the images are made once, and no other files
    assert len(list((tmp_path / "made_up_images").rglob("*"))) == 3 + 180
    first, last = map(float, re.findall(r"epoch \d/2: loss (\S+)", out))
    assert last < 0.7 * first
    assert number(r"accuracy (\S+) on", out) > 0.5  # random guessing gives 1/3
    assert f"on {processes} x cpu" in out
    assert weights(tmp_path / "model.pt")["classes"] == ["circles", "squares", "triangles"]


def test_scripts_page_lists_exactly_the_examples() -> None:
    named = set(re.findall(r"\.\./examples/([\w/]+\.py)", (ROOT / "docs/scripts.md").read_text()))
    # Modules of an example that the page lists; docs/backends.md lists those of `backend`.
    other = {"classify_images/resnet.py", "classify_images/images.py"}
    files = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py")}
    assert named == {name for name in files - other if not name.startswith("backend/")}
