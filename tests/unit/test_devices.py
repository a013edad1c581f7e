"""GPUs that are counted without torch, and what a process is told of its cores and interfaces."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clusterjob.errors import UsageError
from clusterjob.node import contract
from clusterjob.node.system import devices

CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a machine's device files, and of its kernel's GPU nodes, as both kinds
    of driver leave them.
    """
    monkeypatch.setattr(devices, "_DEVICES", str(tmp_path / "dev"))
    monkeypatch.setattr(devices, "_AMD_NODES", str(tmp_path / "nodes"))
    (tmp_path / "dev").mkdir()
    return tmp_path


def test_a_machine_without_gpus_has_none(machine: Path) -> None:
    (machine / "dev" / "nvidiactl").touch()  # a driver without a device
    assert devices.visible_gpus({}) == 0
    assert devices.visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}) == 0


@pytest.mark.parametrize(
    ("listed", "count"),
    [(None, 8), ("", 0), ("3", 1), ("0,1,2", 3), ("GPU-aa,GPU-bb", 2), ("0,9,1", 1)],
)
def test_nvidia_s_are_device_files_as_far_as_they_are_listed(
    machine: Path, listed: str | None, count: int
) -> None:
    for name in [
        "nvidiactl",
        "nvidia-uvm",
        "nvidia-modeset",
        *(f"nvidia{index}" for index in range(8)),
    ]:
        (machine / "dev" / name).touch()
    assert devices.visible_gpus({} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}) == count


@pytest.mark.parametrize(
    ("limit", "wanted", "refused"),
    [
        (None, ["0", "7"], ""),
        (None, ["GPU-aa"], ""),
        (None, ["7", "8"], "GPU 8 is not to be had here: this machine has 8"),
        ("4,5", ["5", " 4"], ""),
        ("4,5", ["0"], "GPU 0 is not to be had here: CUDA_VISIBLE_DEVICES=4,5"),
        ("4,9,5", ["5"], "GPU 5 is not"),  # the list ends at what is no device
        ("GPU-aa,GPU-bb", ["GPU-bb"], ""),
        ("GPU-aa", ["GPU-bb"], "GPU GPU-bb is not"),
        ("", ["0"], "GPU 0 is not"),
        (None, ["-1"], "GPU -1 is not"),
        (None, ["1", "1"], "double entry"),
        (None, [""], "empty or a double entry"),
    ],
)
def test_gpus_are_chosen_among_the_visible_ones(
    machine: Path, limit: str | None, wanted: list[str], refused: str
) -> None:
    for index in range(8):
        (machine / "dev" / f"nvidia{index}").touch()
    environ = {} if limit is None else {"CUDA_VISIBLE_DEVICES": limit}
    if not refused:
        assert devices.choose_gpus(wanted, environ) == [name.strip() for name in wanted]
        return
    with pytest.raises(UsageError, match=refused) as caught:
        devices.choose_gpus(wanted, environ)
    assert "\n" not in caught.value.message


def test_gpus_of_a_machine_without_any_are_rehearsed_within_the_variable(machine: Path) -> None:
    assert devices.choose_gpus(["0", "12"], {}) == ["0", "12"]
    assert devices.choose_gpus(["5"], {"CUDA_VISIBLE_DEVICES": "4, 5"}) == ["5"]
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES=4"):
        devices.choose_gpus(["0"], {"CUDA_VISIBLE_DEVICES": "4"})


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 2),
        ({"ROCR_VISIBLE_DEVICES": "0"}, 1),
        ({"HIP_VISIBLE_DEVICES": "1"}, 1),
        ({"HIP_VISIBLE_DEVICES": ""}, 0),
    ],
)
def test_amd_s_are_nodes_of_the_kernel_with_simd_units(
    machine: Path, environ: dict[str, str], count: int
) -> None:
    for index, units in enumerate([0, 304, 304]):  # the first is the processor
        (machine / "nodes" / str(index)).mkdir(parents=True)
        (machine / "nodes" / str(index) / "properties").write_text(
            f"cpu_cores_count {0 if units else 96}\nsimd_count {units}\nmem_banks_count 1\n"
        )
    assert devices.visible_gpus(environ) == count


@pytest.mark.parametrize(
    ("environ", "nproc", "share"),
    [
        ({}, 1, CORES),
        ({}, CORES, 1),
        ({}, 10 * CORES, 1),
        (
            {"SLURM_CPUS_PER_TASK": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "1"},
            4,
            3,
        ),
        # One task a node is an agent's, whose workers share what it has.
        (
            {"SLURM_CPUS_PER_TASK": "8", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"},
            CORES,
            1,
        ),
        # mpirun has bound each process to cores of its own.
        ({"OMPI_MCA_orte_bound_at_launch": "1"}, 8, CORES),
    ],
)
def test_each_process_gets_its_share_of_the_cores(
    environ: dict[str, str], nproc: int, share: int
) -> None:
    assert contract.thread_defaults(environ, nproc, cpus_per_task=None) == {
        "OMP_NUM_THREADS": str(share)
    }
    assert (
        contract.thread_defaults(environ | {"OMP_NUM_THREADS": ""}, nproc, cpus_per_task=None) == {}
    )
    assert contract.thread_defaults(environ, nproc, cpus_per_task=5) == {"OMP_NUM_THREADS": "5"}


def test_interfaces_are_named_only_where_the_user_has_not() -> None:
    found = contract.quiet_defaults({}, "127.0.0.1", nnodes=2)
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    assert "GLOO_SOCKET_IFNAME" not in contract.quiet_defaults(
        {"GLOO_SOCKET_IFNAME": "ib0"}, "127.0.0.1", nnodes=2
    )
    assert (
        contract.quiet_defaults({"GLOO_SOCKET_IFNAME": "ib0"}, "127.0.0.1", nnodes=2)[
            "NCCL_SOCKET_IFNAME"
        ]
        == "=lo"
    )
    assert (
        contract.quiet_defaults({"MLP_IFNAME": "'lo'"}, "198.51.100.1", nnodes=2)[
            "GLOO_SOCKET_IFNAME"
        ]
        == "lo"
    )
    assert "GLOO_SOCKET_IFNAME" not in contract.quiet_defaults({}, "no-such-host.invalid", nnodes=2)
