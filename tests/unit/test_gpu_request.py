"""Parse --gpus and --nproc-per-node: numbers, types, chosen and idle GPUs, words."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterjob.backends import base
from clusterjob.backends.local import gpu_assignment
from clusterjob.core import capabilities, gpu_request, gpus, job_settings
from clusterjob.core.gpu_request import GpuRequest, parse, read_gpus
from clusterjob.core.spec import JobSpec
from clusterjob.errors import SpecError, SubmitError, UsageError
from clusterjob.node import launch
from clusterjob.node.environments.topology import Topology
from clusterjob.node.options import parse as parse_launch
from clusterjob.node.program import Program
from clusterjob.node.system import devices


def spec_of(directory: Path, cluster: str = "local", **flags: Any) -> JobSpec:
    settings = job_settings.resolve(flags, cluster, directory)
    return job_settings.make_spec(Program("command", "true"), settings, directory=directory)


# -- one value -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "canonical", "request_"),
    [
        (8, 8, GpuRequest(8)),
        ("8", 8, GpuRequest(8)),
        ("0", 0, GpuRequest(0)),
        ("a100:4", "a100:4", GpuRequest(4, "a100")),
        ("0,1", "0,1", GpuRequest(2, chosen="0,1")),
        ("0, 1", "0,1", GpuRequest(2, chosen="0,1")),
        ("device=5", "device=5", GpuRequest(1, chosen="5")),
        ("device=0,2", "0,2", GpuRequest(2, chosen="0,2")),
        ('"device=0,2"', "0,2", GpuRequest(2, chosen="0,2")),
        ("GPU-3a,GPU-7b", "GPU-3a,GPU-7b", GpuRequest(2, chosen="GPU-3a,GPU-7b")),
        ("GPU-3a", "device=GPU-3a", GpuRequest(1, chosen="GPU-3a")),
        ([5], "device=5", GpuRequest(1, chosen="5")),
        ([0, 1], "0,1", GpuRequest(2, chosen="0,1")),
        ("auto", "auto", GpuRequest(chosen="auto")),
        ("auto:4", "auto:4", GpuRequest(4, chosen="auto")),
    ],
)
def test_value_of_gpus_is_a_number_a_type_or_a_choice(
    value: Any, canonical: int | str, request_: GpuRequest
) -> None:
    assert read_gpus(value) == canonical
    assert parse(read_gpus(canonical)) == request_


@pytest.mark.parametrize("value", ["", "all", "0,0", "device=", "0;1", "a b:2", True, 1.5, {}, []])
def test_value_of_gpus_that_means_nothing_is_refused_with_the_forms(value: Any) -> None:
    with pytest.raises(SpecError) as refused:
        read_gpus(value)
    assert "device=5" in refused.value.hint


@given(st.text() | st.lists(st.text() | st.integers()) | st.integers() | st.floats())
def test_any_value_of_gpus_is_read_the_same_twice_or_refused(value: Any) -> None:
    try:
        canonical = read_gpus(value)
    except SpecError:
        return
    assert read_gpus(canonical) == canonical
    assert parse(canonical) is not None


@pytest.mark.parametrize(
    ("value", "per_node", "request_"),
    [
        (None, None, GpuRequest()),
        ("auto", 4, GpuRequest(4, chosen="auto")),
        ("0,1", 2, GpuRequest(2, chosen="0,1")),
    ],
)
def test_gpus_and_gpus_per_node_that_agree_are_one_request(
    value: str | None, per_node: int | None, request_: GpuRequest
) -> None:
    assert gpu_request.merge(value, per_node) == request_


@pytest.mark.parametrize(
    ("value", "per_node", "message"),
    [
        ("0,1", 8, "--gpus 0,1 and --gpus-per-node 8 ask for different GPUs"),
        ("a100:2", 2, "different GPUs"),
        ("auto:0", None, "--gpus auto with 0 GPUs"),
        ("auto", 0, "--gpus auto with 0 GPUs"),
    ],
)
def test_gpus_and_gpus_per_node_that_differ_are_refused(
    value: str, per_node: int | None, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        gpu_request.merge(value, per_node)


# -- flags and profiles ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "flags", "expected"),
    [
        ("gpus_per_node = 8", {"gpus": "2"}, (2, "", "")),
        ("gpus_per_node = 8", {"gpus": "0,1"}, (2, "0,1", "")),
        ("gpus = [0, 1]", {"gpus_per_node": "4"}, (4, "", "")),
        ('gpus = "0,1"', {"gpus": "4"}, (4, "", "")),
        ("gpus = 8", {}, (8, "", "")),
        ('gpus = "a100:8"', {}, (8, "", "a100")),
        ('gpus = "auto"', {"gpus_per_node": "4"}, (4, "auto", "")),
        ("gpus_per_node = 4", {"gpus": "auto"}, (4, "auto", "")),
        ("gpus_per_node = 4", {"gpus": "auto:2"}, (2, "auto", "")),
    ],
)
def test_flag_for_gpus_overrides_either_setting_of_a_profile(
    tmp_path: Path, profile: str, flags: dict[str, str], expected: tuple[int, str, str]
) -> None:
    (tmp_path / "clusterjob.toml").write_text(f"[defaults]\n{profile}\n")
    spec = spec_of(tmp_path, **flags)
    found = (spec.resources.gpus_per_node, spec.gpus, spec.resources.gpu_type)
    assert found == expected
    assert spec.nproc_per_node == expected[0], "one worker per GPU"


@pytest.mark.parametrize(
    ("cluster", "flags", "promised"),
    [
        ("slurm", {"gpus": "8"}, 8),
        ("mlp", {"gpus": "8"}, 8),
        ("ssh", {"gpus": "8", "hosts": "a"}, 8),
        ("slurm", {"gpus": "8", "require_gpus": "no"}, 0),
        ("local", {"gpus": "8"}, 0),
        ("local", {"gpus": "8", "require_gpus": True}, 8),
        ("mlp", {}, None),  # the platform's variables promise some
        ("mlp", {"require_gpus": "no"}, 0),
    ],
)
def test_gpus_are_promised_on_other_machines(
    tmp_path: Path, cluster: str, flags: dict[str, Any], promised: int | None
) -> None:
    spec = spec_of(tmp_path, cluster, **flags)
    assert spec.launch_options().require_gpus == promised


@pytest.mark.parametrize(
    ("cluster", "value", "message"),
    [
        ("slurm", "0,1", "--gpus 0,1: the slurm cluster cannot choose GPUs"),
        ("slurm", "device=5", "--gpus device=5: the slurm cluster cannot choose GPUs"),
        ("slurm", "auto:2", "--gpus auto: the slurm cluster cannot choose GPUs"),
        ("slurm", "auto", "--gpus auto: the slurm cluster cannot choose GPUs"),
        ("mlp", "0,1", "--gpus 0,1: the mlp cluster cannot choose GPUs"),
        ("local", "a100:2", "--gpus a100:2: the local cluster cannot choose GPUs by their type"),
        ("ssh", "a100:2", "--gpus a100:2: the ssh cluster cannot choose GPUs by their type"),
    ],
)
def test_backend_refuses_the_choice_of_gpus_that_it_cannot_make(
    tmp_path: Path, cluster: str, value: str, message: str
) -> None:
    more = {"hosts": "a"} if cluster == "ssh" else {}
    spec = spec_of(tmp_path, cluster, gpus=value, **more)
    with pytest.raises(SpecError) as refused:
        capabilities.check(spec, cluster, base.load(cluster))
    assert refused.value.message == message
    assert refused.value.hint


# -- this machine ----------------------------------------------------------------------------------


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_installed", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("word", "nodes", "workers", "per_node"),
    [("gpu", 1, 4, 4), ("gpu", 2, 2, 2), ("auto", 1, 4, 4), ("cpu", 1, None, None)],
)
def test_local_job_counts_its_workers(
    tmp_path: Path, word: str, nodes: int, workers: int | None, per_node: int | None
) -> None:
    spec = gpu_assignment.counted(spec_of(tmp_path, nproc_per_node=word, nodes=nodes))
    assert spec.nproc_per_node == (workers or len(os.sched_getaffinity(0)))
    assert (spec.nproc_word, spec.resources.gpus_per_node) == ("", per_node)


def test_local_job_without_gpus_refuses_one_worker_per_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cores = len(os.sched_getaffinity(0))
    assert gpu_assignment.counted(spec_of(tmp_path, nproc_per_node="auto")).nproc_per_node == cores
    with pytest.raises(SpecError, match="--nproc-per-node gpu: this machine has 0 GPUs") as refused:
        gpu_assignment.counted(spec_of(tmp_path, nproc_per_node="gpu"))
    assert "--nproc-per-node cpu" in refused.value.hint


@pytest.mark.usefixtures("four_gpus")
def test_local_nodes_cannot_share_chosen_gpus(tmp_path: Path) -> None:
    assert gpu_assignment.of_nodes(spec_of(tmp_path, gpus="1,3"))[0] == [
        {"CUDA_VISIBLE_DEVICES": "1,3"}
    ]
    with pytest.raises(SpecError, match="2 nodes on this machine cannot share these GPUs"):
        gpu_assignment.of_nodes(spec_of(tmp_path, gpus="1,3", nodes="2"))


def test_local_job_with_auto_counts_the_idle_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "pick", lambda *_, **__: dict.fromkeys("abcde", -1))
    monkeypatch.setattr(devices, "release", lambda _locks: None)

    def counted(**flags: Any) -> tuple[int | None, int]:
        spec = gpu_assignment.counted(spec_of(tmp_path, gpus="auto", **flags))
        return spec.resources.gpus_per_node, spec.nproc_per_node

    assert counted() == (5, 5)
    assert counted(nodes=2) == (2, 2)
    assert counted(nproc_per_node="gpu") == (5, 5)
    assert counted(nproc_per_node="2") == (5, 2)
    assert counted(nproc_per_node="cpu") == (5, len(os.sched_getaffinity(0)))
    with pytest.raises(SubmitError, match="--gpus auto: 5 idle GPUs for 6 nodes"):
        counted(nodes=6)


@pytest.mark.parametrize("word", ["gpu", "auto"])
def test_word_with_a_number_of_gpus_is_that_number(tmp_path: Path, word: str) -> None:
    spec = spec_of(tmp_path, "slurm", gpus="8", nproc_per_node=word)
    assert (spec.nproc_per_node, spec.nproc_word) == (8, "")
    without = spec_of(tmp_path, "slurm", nproc_per_node=word)
    with pytest.raises(SpecError, match=f"--nproc-per-node {word}: the number of workers"):
        capabilities.check(without, "slurm", base.load("slurm"))


@pytest.mark.parametrize("flags", [{"nproc_per_node": "gpu"}, {"gpus": "auto"}])
def test_hosts_count_their_workers_themselves(tmp_path: Path, flags: dict[str, str]) -> None:
    plan = base.load("ssh").plan(spec_of(tmp_path, "ssh", hosts="a,b", **flags))
    script = next(file for file in plan.files if file.path.name == "ssh-node.sh")
    assert b"--nproc-per-node=gpu" in script.data
    assert plan.spec.nproc_is_default, "the world size is not known before the start"


# -- a node ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "limit", "installed", "expected"),
    [
        ("2", None, 4, ["0", "1"]),
        ("2", "3,1,0", 4, ["3", "1"]),
        ("0", None, 4, []),
        ("device=3", None, 4, ["3"]),
        ("2", None, 0, ["0", "1"]),
        ("0,3", None, 4, ["0", "3"]),
    ],
)
def test_node_uses_a_number_of_gpus_or_the_chosen_ones(
    monkeypatch: pytest.MonkeyPatch, text: str, limit: str | None, installed: int, expected: Any
) -> None:
    monkeypatch.setattr(devices, "_nvidia", lambda: installed)
    environ = {} if limit is None else {"CUDA_VISIBLE_DEVICES": limit}
    assert devices.requested_gpus(text, environ) == expected


def test_node_with_fewer_gpus_refuses_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_nvidia", lambda: 4)
    with pytest.raises(UsageError, match="--gpus 5: 4 GPUs are visible here") as refused:
        devices.requested_gpus("5", {})
    assert refused.value.hint == "--gpus device=5 chooses GPU 5"


@pytest.mark.parametrize(
    ("word", "visible", "count"),
    [
        (3, 8, 3),
        ("gpu", 8, 8),
        ("auto", 8, 8),
        ("cpu", 8, len(os.sched_getaffinity(0))),
        ("auto", 0, len(os.sched_getaffinity(0))),
    ],
)
def test_node_counts_its_workers_as_torchrun_does(
    monkeypatch: pytest.MonkeyPatch, word: int | str, visible: int, count: int
) -> None:
    monkeypatch.setattr(devices, "_nvidia", lambda: visible)
    assert workers_of(str(word)) == count


def test_node_without_gpus_refuses_one_worker_per_gpu() -> None:
    with pytest.raises(UsageError, match="no GPU is visible here"):
        workers_of("gpu")


def workers_of(word: str) -> int:
    """Return the number of workers of a node without variables of a platform."""
    options = parse_launch(["--nproc-per-node", word, "x.py"])
    topology = Topology(1, 0, None, "", None, source="test")
    return launch._choose_workers(options, topology, {})
