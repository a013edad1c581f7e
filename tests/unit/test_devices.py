"""GPU counting without torch, and defaults for threads and network interfaces."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clusterjob.errors import UsageError
from clusterjob.node.environments import worker_variables
from clusterjob.node.system import devices, files

CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def device_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory for fake NVIDIA device files (dev) and AMD kernel nodes (nodes)."""
    monkeypatch.setattr(devices, "_DEVICES", str(tmp_path / "dev"))
    monkeypatch.setattr(devices, "_AMD_NODES", str(tmp_path / "nodes"))
    (tmp_path / "dev").mkdir()
    return tmp_path


def test_machine_without_device_files_has_no_gpus(device_root: Path) -> None:
    (device_root / "dev" / "nvidiactl").touch()  # a driver without a device
    assert devices.visible_gpus({}) == 0
    assert devices.visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}) == 0


@pytest.mark.parametrize(
    ("listed", "count"),
    [(None, 8), ("", 0), ("3", 1), ("0,1,2", 3), ("GPU-aa,GPU-bb", 2), ("0,9,1", 1)],
)
def test_nvidia_gpus_are_counted_by_device_files_and_variable(
    device_root: Path, listed: str | None, count: int
) -> None:
    for name in [
        "nvidiactl",
        "nvidia-uvm",
        "nvidia-modeset",
        *(f"nvidia{index}" for index in range(8)),
    ]:
        (device_root / "dev" / name).touch()
    assert devices.visible_gpus({} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}) == count


@pytest.mark.parametrize(
    ("limit", "wanted", "error"),
    [
        (None, ["0", "7"], ""),
        (None, ["GPU-aa"], ""),
        (None, ["7", "8"], "GPU 8 is not available here: this machine has 8"),
        ("4,5", ["5", " 4"], ""),
        ("4,5", ["0"], "GPU 0 is not available here: CUDA_VISIBLE_DEVICES=4,5"),
        ("4,9,5", ["5"], "GPU 5 is not"),  # CUDA ignores all entries after the first unknown device
        ("GPU-aa,GPU-bb", ["GPU-bb"], ""),
        ("GPU-aa", ["GPU-bb"], "GPU GPU-bb is not"),
        ("", ["0"], "GPU 0 is not"),
        ("0,-1,2", ["2"], "GPU 2 is not available here"),
        (None, ["-1"], "GPU -1 is not"),
        (None, ["1", "1"], "occurs twice"),
        (None, [""], "an entry is empty or occurs twice"),
    ],
)
def test_chosen_gpus_must_be_visible_and_unique(
    device_root: Path, limit: str | None, wanted: list[str], error: str
) -> None:
    for index in range(8):
        (device_root / "dev" / f"nvidia{index}").touch()
    environ = {} if limit is None else {"CUDA_VISIBLE_DEVICES": limit}
    if not error:
        assert devices.choose_gpus(wanted, environ) == [name.strip() for name in wanted]
        return
    with pytest.raises(UsageError, match=error) as caught:
        devices.choose_gpus(wanted, environ)
    assert "\n" not in caught.value.message


def test_chosen_gpus_without_hardware_are_checked_against_variable(device_root: Path) -> None:
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
def test_amd_gpus_are_counted_by_kernel_nodes_with_simd_units(
    device_root: Path, environ: dict[str, str], count: int
) -> None:
    for index, simd_count in enumerate([0, 304, 304]):  # the first is the CPU
        (device_root / "nodes" / str(index)).mkdir(parents=True)
        (device_root / "nodes" / str(index) / "properties").write_text(
            f"cpu_cores_count {0 if simd_count else 96}\n"
            f"simd_count {simd_count}\nmem_banks_count 1\n"
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
        # One task per node is the agent; its workers share its cores.
        (
            {"SLURM_CPUS_PER_TASK": "8", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"},
            CORES,
            1,
        ),
        # mpirun has bound each process to its own cores.
        ({"OMPI_MCA_orte_bound_at_launch": "1"}, 8, CORES),
    ],
)
def test_thread_default_is_share_of_cores_per_process(
    environ: dict[str, str], nproc: int, share: int
) -> None:
    assert worker_variables.thread_defaults(environ, nproc, cpus_per_task=None) == {
        "OMP_NUM_THREADS": str(share)
    }
    assert (
        worker_variables.thread_defaults(
            environ | {"OMP_NUM_THREADS": ""}, nproc, cpus_per_task=None
        )
        == {}
    )
    assert worker_variables.thread_defaults(environ, nproc, cpus_per_task=5) == {
        "OMP_NUM_THREADS": "5"
    }


@pytest.mark.parametrize(
    ("environ", "address", "name", "value"),
    [
        ({}, "127.0.0.1", "GLOO_SOCKET_IFNAME", "lo"),
        ({}, "127.0.0.1", "NCCL_SOCKET_IFNAME", "=lo"),
        ({"GLOO_SOCKET_IFNAME": "ib0"}, "127.0.0.1", "GLOO_SOCKET_IFNAME", None),
        ({"GLOO_SOCKET_IFNAME": "ib0"}, "127.0.0.1", "NCCL_SOCKET_IFNAME", "=lo"),
        ({"MLP_IFNAME": "'lo'"}, "198.51.100.1", "GLOO_SOCKET_IFNAME", "lo"),
        ({}, "no-such-host.invalid", "GLOO_SOCKET_IFNAME", None),
    ],
)
def test_interface_defaults_do_not_override_user_variables(
    environ: dict[str, str], address: str, name: str, value: str | None
) -> None:
    assert worker_variables.quiet_defaults(environ, address, nnodes=2).get(name) == value


PLAIN = ("null", "tty1", "shm")
GLOO = {"PADDLE_DISTRI_BACKEND": "gloo"}


@pytest.mark.parametrize(
    ("names", "environ", "gpus", "found"),
    [
        (PLAIN, {}, 0, {"ACCELERATE_USE_CPU": "true"} | GLOO),
        (PLAIN, {"PADDLE_DISTRI_BACKEND": "auto"}, 0, {"ACCELERATE_USE_CPU": "true"}),
        (PLAIN, {}, 2, {}),
        (PLAIN, {"ACCELERATE_USE_CPU": "false"}, 0, GLOO),
        (PLAIN, {"ACCELERATE_TORCH_DEVICE": "false"}, 0, GLOO),
        # Another device may be used instead of the CPU.
        (("null", "davinci0"), {}, 0, {}),
        (("null", "accel"), {}, 0, {}),
        (("null", "accel0"), {}, 0, {}),
        (("null", "hl0"), {}, 0, {}),
        (("null", "neuron0"), {}, 0, {}),
        (("null", "cambricon_dev0"), {}, 0, {}),
        (("null", "mtgpu.0"), {}, 0, {}),
    ],
)
def test_cpu_workers_are_one_world_for_accelerate_and_use_gloo_in_paddle(
    monkeypatch: pytest.MonkeyPatch,
    names: tuple[str, ...],
    environ: dict[str, str],
    gpus: int,
    found: dict[str, str],
) -> None:
    monkeypatch.setattr(files, "listed", lambda folder: names if folder == "/dev" else ())
    assert worker_variables.cpu_defaults(environ, gpus) == found
