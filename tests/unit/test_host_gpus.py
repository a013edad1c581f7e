"""GPU selection on a host, with a fake nvidia-smi command and real locks."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from nvidia import installed_gpus
from procs import TEST_TIMEOUT, wait_until
from sshsite import Site, wait_for_lines
from verdicts import wait_for_verdict

from clusterjob.core import jobs, polling
from clusterjob.errors import SpecError
from clusterjob.node.host_server import gpus
from clusterjob.node.program import Program
from clusterjob.node.verdict import JobState

GIB = 1 << 30
SMI_SCRIPT = """#!/bin/sh
case "$1" in
  --query-gpu=*) cat "$(dirname "$0")/gpus" ;;
  --query-compute-apps=*) cat "$(dirname "$0")/apps" ;;
esac
"""


class FakeSmi:
    """A fake nvidia-smi command on a host."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True)
        (directory / "nvidia-smi").write_text(SMI_SCRIPT)
        (directory / "nvidia-smi").chmod(0o755)
        self.set_gpus([3, 3, 3, 3])

    def set_gpus(
        self, used: list[int], apps: dict[int, list[tuple[int, str]]] | None = None
    ) -> None:
        """Set the used memory of each GPU (MiB) and the processes on each GPU."""
        rows = [
            f"{index}, GPU-{index:04d}, {mib}, 81559, NVIDIA H100, 80GB\n"
            for index, mib in enumerate(used)
        ]
        (self.directory / "gpus").write_text("".join(rows))
        lines = [
            f"GPU-{index:04d}, {pid}, {name}\n"
            for index, users in (apps or {}).items()
            for pid, name in users
        ]
        (self.directory / "apps").write_text("".join(lines))


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSmi]:
    smi = FakeSmi(tmp_path / "smi")
    monkeypatch.setenv("PATH", f"{smi.directory}:{os.environ['PATH']}")
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an interpreter without nvidia-ml-py
    monkeypatch.setattr(gpus, "lock_directories", lambda: [smi.directory])
    return smi


def uuids_of(reservation: gpus.Reservation) -> list[str]:
    try:
        return [gpu.uuid for gpu in reservation.gpus]
    finally:
        reservation.release()


def test_read_gpus_parses_memory_and_processes(smi: FakeSmi) -> None:
    smi.set_gpus([3, 70000], {1: [(os.getpid(), "python, with a comma"), (10**7, "/opt/x/other")]})
    first, second = gpus.read_gpus()
    assert (first.index, first.uuid, first.name, first.used, first.idle) == (
        0,
        "GPU-0000",
        "NVIDIA H100, 80GB",
        3 << 20,
        True,
    )
    assert second.processes == ((os.getpid(), "python, with a comma"), (10**7, "/opt/x/other"))
    user = pwd.getpwuid(os.getuid()).pw_name
    assert second.describe() == (
        f"1 NVIDIA H100, 80GB: {user}'s python, with a comma (pid {os.getpid()}),"
        " another user's other (pid 10000000), 73.4 of 86 GB used"
    )


def test_host_without_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpus.read_gpus() == []


def test_pynvml_finds_gpus_of_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert find_spec("pynvml")
    installed = installed_gpus()
    monkeypatch.setenv("PATH", str(tmp_path))  # without nvidia-smi
    assert [gpu.index for gpu in gpus.read_gpus()] == list(range(installed))


def test_failing_nvidia_smi_raises_its_output(smi: FakeSmi) -> None:
    (smi.directory / "nvidia-smi").write_text(
        "#!/bin/sh\necho 'Unable to determine the device handle'\nexit 15\n"
    )
    with pytest.raises(OSError, match="nvidia-smi fails: Unable to determine"):
        gpus.read_gpus()


@pytest.mark.parametrize(
    ("listed", "wanted"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2,0", [2, 0]),
        ("0,9,1", [0]),
        ("1,1", [1]),
        ("GPU-0003, 1", [3, 1]),
        ("-1", []),
        ("x", []),
    ],
)
def test_visible_gpus_follow_cuda_visible_devices(
    smi: FakeSmi, listed: str | None, wanted: list[int]
) -> None:
    assert [gpu.index for gpu in gpus.visible(gpus.read_gpus(), listed)] == wanted


def test_pick_auto_returns_idle_visible_gpus(smi: FakeSmi) -> None:
    smi.set_gpus([3, 2000, 3, 3], {2: [(1, "init")]})
    assert uuids_of(gpus.pick("a", "auto", count=2, environ={})) == ["GPU-0000", "GPU-0003"]
    assert uuids_of(gpus.pick("a", "auto", count=1, environ={"CUDA_VISIBLE_DEVICES": "3,0"})) == [
        "GPU-0003"
    ]


def test_pick_with_too_few_idle_gpus_names_holders(smi: FakeSmi) -> None:
    smi.set_gpus([3, 2000, 3], {2: [(1, "trainer")]})
    held = gpus.pick("other-job", "auto", count=1, environ={})
    with pytest.raises(gpus.TooFewGpusError) as caught:
        gpus.pick("mine", "auto", count=2, environ={})
    held.release()
    text = str(caught.value)
    assert text.startswith(
        "0 idle GPUs where 2 are asked for: 0 job other-job;"
        " 1 NVIDIA H100, 80GB: 2.1 of 86 GB used; 2 NVIDIA"
    )
    assert "trainer (pid 1)" in text
    assert uuids_of(gpus.pick("mine", "auto", count=1, environ={})) == ["GPU-0000"], (
        "the failed attempt must hold no GPU"
    )


def test_pick_of_listed_gpus_refuses_held_and_missing_gpus(smi: FakeSmi) -> None:
    smi.set_gpus([3, 2000, 3], {2: [(1, "trainer")]})
    held = gpus.pick("a", "2,1", count=2, environ={})
    assert [gpu.uuid for gpu in held.gpus] == ["GPU-0002", "GPU-0001"]
    with pytest.raises(gpus.TooFewGpusError, match="GPU 1 is held by job a"):
        gpus.pick("b", "0,1", count=2, environ={})
    held.release()
    with pytest.raises(gpus.TooFewGpusError, match="GPU 7 does not exist; existing GPUs: 0, 1, 2"):
        gpus.pick("b", "7", count=1, environ={})


def test_concurrent_picks_return_different_gpus(smi: FakeSmi) -> None:
    code = """
import os, sys
from clusterjob.node.host_server import gpus
from pathlib import Path
sys.modules["pynvml"] = None
gpus.lock_directories = lambda: [Path(sys.argv[1])]
try:
    held = gpus.pick(str(os.getpid()), "auto", 1, {})
    print(held.gpus[0].uuid, flush=True)
except gpus.TooFewGpusError:
    print("none", flush=True)
sys.stdin.read()
"""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, smi.directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(6)
    ]
    output_lines = [
        process.stdout.readline().strip() for process in started if process.stdout is not None
    ]
    for process in started:
        process.communicate("", timeout=TEST_TIMEOUT)
    assert sorted(output_lines) == ["GPU-0000", "GPU-0001", "GPU-0002", "GPU-0003", "none", "none"]


def test_reservation_lasts_until_inheriting_process_exits(smi: FakeSmi) -> None:
    held = gpus.pick("a", "auto", count=4, environ={})
    child = subprocess.Popen(["sleep", "1000"], pass_fds=held.descriptors)
    held.release()
    try:
        with pytest.raises(gpus.TooFewGpusError, match="0 job a; 1 job a"):
            gpus.pick("b", "auto", count=1, environ={})
    finally:
        child.kill()
        child.wait()
    assert uuids_of(gpus.pick("b", "auto", count=4, environ={})) == [
        "GPU-0000",
        "GPU-0001",
        "GPU-0002",
        "GPU-0003",
    ]


def test_lock_directories_are_private_to_user() -> None:
    directories = gpus.lock_directories()
    assert directories
    for path in directories:
        assert path.stat().st_mode & 0o777 == 0o700
        assert path.stat().st_uid == os.getuid()


# -- on hosts --------------------------------------------------------------------------------------

DEVICES_SCRIPT = """
    import os, time
    print("devices", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
    while not os.path.exists("leave"):
        time.sleep(0.05)
"""


@pytest.fixture
def gpu_hosts(site: Site) -> Iterator[dict[str, FakeSmi]]:
    """Two hosts with a fake nvidia-smi in PATH."""
    found = {}
    for name in ("gpu1", "gpu2"):
        host = site.ssh_network.hosts[name]
        directory = host.directory / f"smi{time.monotonic_ns()}"
        found[name] = FakeSmi(directory)
        host.stop()
        host.start(SetEnv=f"HOME={host.home} PATH={directory}:/usr/local/bin:/usr/bin:/bin")
    yield found
    for name in found:
        site.ssh_network.hosts[name].stop()
        site.ssh_network.hosts[name].start()
    for directory in gpus.lock_directories():
        for path in directory.glob("GPU-[09]00?"):
            path.unlink()


def test_jobs_get_different_idle_gpus_on_each_host(
    site: Site, gpu_hosts: dict[str, FakeSmi]
) -> None:
    # All test hosts share /tmp, which holds the locks: their GPUs need different UUIDs.
    gpu_hosts["gpu1"].set_gpus([9000, 3, 3, 3], {0: [(1, "trainer")]})
    rows = (gpu_hosts["gpu2"].directory / "gpus").read_text().replace("GPU-0", "GPU-9")
    (gpu_hosts["gpu2"].directory / "gpus").write_text(rows)
    first = site.submit(DEVICES_SCRIPT, gpus="auto", gpus_per_node=2, nproc_per_node=1)
    wait_for_lines(first, "devices GPU-0001,GPU-0002", "devices GPU-9000,GPU-9001")
    error = submit_error(site, gpus="auto", gpus_per_node=2, nproc_per_node=1)
    assert (
        "gpu1: 1 idle GPUs where 2 are asked for: 0 NVIDIA H100, 80GB:"
        f" root's trainer (pid 1), 9.4 of 86 GB used; 1 job {first.job_id}" in error
    )
    assert "gpu2" not in error.splitlines()[0]
    second = site.submit(DEVICES_SCRIPT, gpus="auto", gpus_per_node=1)
    wait_for_lines(second, "devices GPU-0003", "devices GPU-9002")
    for record in (first, second):
        for host in ("gpu1", "gpu2"):
            (site.remote_dir(record, host) / "code" / "leave").touch()
        assert wait_for_verdict(record).state is JobState.SUCCEEDED
    # The verdict is written before the agents exit and release their GPUs.
    wait_until(lambda: not site.running(), TEST_TIMEOUT, "the end of the agents")
    third = site.submit(DEVICES_SCRIPT, gpus="auto", gpus_per_node=2, nproc_per_node=1)
    wait_for_lines(third, "devices GPU-0001,GPU-0002", "devices GPU-9000,GPU-9001")
    jobs.cancel([third])


def submit_error(site: Site, **flags: object) -> str:
    from clusterjob.errors import SubmitError

    with pytest.raises(SubmitError) as caught:
        site.submit(DEVICES_SCRIPT, **flags)
    return caught.value.message


def test_too_few_gpus_give_cpu_rehearsal_unless_required(
    site: Site,
    caplog: pytest.LogCaptureFixture,
) -> None:
    record = site.submit(
        'import os; print(repr(os.environ["CUDA_VISIBLE_DEVICES"]))',
        gpus_per_node=2,
        nproc_per_node=1,
    )
    wait_until(lambda: polling.status(record).verdict, TEST_TIMEOUT, "its end")
    polling.collect(record)
    assert (record.job_dir / "logs" / "node0" / "rank0.out").read_text() == "''\n"
    assert "gpu1: 0 GPUs where 2 are asked for: a rehearsal" in caplog.text
    error = submit_error(site, gpus_per_node=2, require_gpus="true")
    assert "gpu1: 0 GPUs where 2 are asked for" in error
    assert "gpu2: 0 GPUs where 2 are asked for" in error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"gpus": "auto"}, "the number of GPUs is missing"),
        ({"gpus": "0,1", "gpus_per_node": 3}, "names 2 GPUs, but"),
        ({"gpus": "0,0"}, "not a list of GPUs"),
        ({"gpus": "all"}, "not a list of GPUs"),
        ({"gpus": "0;rm"}, "not a list of GPUs"),
    ],
)
def test_wrong_gpu_options_are_refused(site: Site, flags: dict[str, object], message: str) -> None:
    site.script("")
    with pytest.raises(SpecError, match=message):
        site.plan(Program("script", "script.py"), **flags)


def test_gpu_list_sets_number_of_workers(site: Site) -> None:
    plan = site.plan(Program("script", site.script("")), gpus="0,2,3")
    assert (plan.spec.resources.gpus_per_node, plan.spec.nproc_per_node) == (3, 3)
    assert json.dumps(plan.spec.to_json())
