"""A host's GPUs. No machine of the tests has any: a command of nvidia-smi's name says what there
is, all else is real.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from procs import PATIENCE, wait_until
from sshsite import Site, end_of, wait_for_lines

from clusterjob.core import jobs
from clusterjob.errors import SpecError
from clusterjob.node.host_server import gpus
from clusterjob.node.program import Program
from clusterjob.node.verdict import JobState

GIB = 1 << 30
SMI = """#!/bin/sh
case "$1" in
  --query-gpu=*) cat "$(dirname "$0")/gpus" ;;
  --query-compute-apps=*) cat "$(dirname "$0")/apps" ;;
esac
"""


class Smi:
    """What nvidia-smi says on a host."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True)
        (directory / "nvidia-smi").write_text(SMI)
        (directory / "nvidia-smi").chmod(0o755)
        self.say([3, 3, 3, 3])

    def say(self, used: list[int], apps: dict[int, list[tuple[int, str]]] | None = None) -> None:
        """Set the memory in use of each card (MiB), and who computes on which."""
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
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Smi]:
    smi = Smi(tmp_path / "smi")
    monkeypatch.setenv("PATH", f"{smi.directory}:{os.environ['PATH']}")
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an interpreter without nvidia-ml-py
    monkeypatch.setattr(gpus, "lock_directories", lambda: [smi.directory])
    return smi


def names(reservation: gpus.Reservation) -> list[str]:
    try:
        return [card.uuid for card in reservation.gpus]
    finally:
        reservation.release()


def test_cards_are_read(smi: Smi) -> None:
    smi.say([3, 70000], {1: [(os.getpid(), "python, with a comma"), (10**7, "/opt/x/other")]})
    first, second = gpus.read_gpus()
    assert (first.index, first.uuid, first.name, first.used, first.idle) == (
        0,
        "GPU-0000",
        "NVIDIA H100, 80GB",
        3 << 20,
        True,
    )
    assert second.processes == ((os.getpid(), "python, with a comma"), (10**7, "/opt/x/other"))
    assert second.describe() == (
        f"1 NVIDIA H100, 80GB: root's python, with a comma (pid {os.getpid()}), another user's other (pid 10000000), 73.4 of 86 GB used"
        if os.getuid() == 0
        else second.describe()
    )


def test_no_driver_no_cards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpus.read_gpus() == []


def test_a_library_without_a_driver_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("pynvml")
    monkeypatch.setenv("PATH", str(tmp_path))
    if not Path("/proc/driver/nvidia").exists():
        assert gpus.read_gpus() == []


def test_a_command_that_fails_is_said(smi: Smi) -> None:
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
def test_what_a_login_may_use(smi: Smi, listed: str | None, wanted: list[int]) -> None:
    assert [card.index for card in gpus.visible(gpus.read_gpus(), listed)] == wanted


def test_idle_ones_are_picked(smi: Smi) -> None:
    smi.say([3, 2000, 3, 3], {2: [(1, "init")]})
    assert names(gpus.pick("a", "auto", count=2, environ={})) == ["GPU-0000", "GPU-0003"]
    assert names(gpus.pick("a", "auto", count=1, environ={"CUDA_VISIBLE_DEVICES": "3,0"})) == [
        "GPU-0003"
    ]


def test_too_few_say_who_holds_which(smi: Smi) -> None:
    smi.say([3, 2000, 3], {2: [(1, "trainer")]})
    held = gpus.pick("other-job", "auto", count=1, environ={})
    with pytest.raises(gpus.TooFewGpusError) as caught:
        gpus.pick("mine", "auto", count=2, environ={})
    held.release()
    text = str(caught.value)
    assert text.startswith(
        "0 idle GPUs where 2 are asked for: 0 job other-job; 1 NVIDIA H100, 80GB: 2.1 of 86 GB used; 2 NVIDIA"
    )
    assert "trainer (pid 1)" in text
    assert names(gpus.pick("mine", "auto", count=1, environ={})) == ["GPU-0000"], (
        "the attempt that failed holds nothing"
    )


def test_a_list_is_taken_as_it_is_but_from_no_other_job(smi: Smi) -> None:
    smi.say([3, 2000, 3], {2: [(1, "trainer")]})
    held = gpus.pick("a", "2,1", count=2, environ={})
    assert [card.uuid for card in held.gpus] == ["GPU-0002", "GPU-0001"]
    with pytest.raises(gpus.TooFewGpusError, match="GPU 1 is held by job a"):
        gpus.pick("b", "0,1", count=2, environ={})
    held.release()
    with pytest.raises(gpus.TooFewGpusError, match="there is no GPU 7; there is 0, 1, 2"):
        gpus.pick("b", "7", count=1, environ={})


def test_jobs_that_pick_at_once_never_pick_the_same(smi: Smi) -> None:
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
    said = [process.stdout.readline().strip() for process in started if process.stdout is not None]
    for process in started:
        process.communicate("", timeout=PATIENCE)
    assert sorted(said) == ["GPU-0000", "GPU-0001", "GPU-0002", "GPU-0003", "none", "none"]


def test_a_hold_lasts_as_long_as_a_process_that_inherited_it(smi: Smi) -> None:
    held = gpus.pick("a", "auto", count=4, environ={})
    heir = subprocess.Popen(["sleep", "1000"], pass_fds=held.descriptors)
    held.release()
    try:
        with pytest.raises(gpus.TooFewGpusError, match="0 job a; 1 job a"):
            gpus.pick("b", "auto", count=1, environ={})
    finally:
        heir.kill()
        heir.wait()
    assert names(gpus.pick("b", "auto", count=4, environ={})) == [
        "GPU-0000",
        "GPU-0001",
        "GPU-0002",
        "GPU-0003",
    ]


def test_locks_lie_in_directories_of_ones_own() -> None:
    for path in gpus.lock_directories():
        assert path.stat().st_mode & 0o777 == 0o700
        assert path.stat().st_uid == os.getuid()


# -- on hosts --------------------------------------------------------------------------------------------------------------

SHOW = """
    import os, time
    print("devices", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
    while not os.path.exists("leave"):
        time.sleep(0.05)
"""


@pytest.fixture
def gpu_hosts(site: Site) -> Iterator[dict[str, Smi]]:
    """Two hosts whose logins find an nvidia-smi."""
    found = {}
    for name in ("gpu1", "gpu2"):
        host = site.world.hosts[name]
        directory = host.directory / f"smi{time.monotonic_ns()}"
        found[name] = Smi(directory)
        host.stop()
        host.start(SetEnv=f"HOME={host.home} PATH={directory}:/usr/local/bin:/usr/bin:/bin")
    yield found
    for name in found:
        site.world.hosts[name].stop()
        site.world.hosts[name].start()
    for directory in gpus.lock_directories():
        for path in directory.glob("GPU-[09]00?"):
            path.unlink()


def test_each_host_gives_idle_ones_and_the_next_job_gets_others(
    site: Site, gpu_hosts: dict[str, Smi]
) -> None:
    # The hosts of the tests share /tmp, where the locks lie: their cards have to have different
    # names.
    gpu_hosts["gpu1"].say([9000, 3, 3, 3], {0: [(1, "trainer")]})
    rows = (gpu_hosts["gpu2"].directory / "gpus").read_text().replace("GPU-0", "GPU-9")
    (gpu_hosts["gpu2"].directory / "gpus").write_text(rows)
    first = site.submit(SHOW, gpus="auto", gpus_per_node=2, nproc_per_node=1)
    wait_for_lines(first, "devices GPU-0001,GPU-0002", "devices GPU-9000,GPU-9001")
    error = site_refusal(site, gpus="auto", gpus_per_node=2, nproc_per_node=1)
    assert (
        f"gpu1: 1 idle GPUs where 2 are asked for: 0 NVIDIA H100, 80GB: root's trainer (pid 1), 9.4 of 86 GB used; 1 job {first.job_id}"
        in error
    )
    assert "gpu2" not in error.splitlines()[0]
    second = site.submit(SHOW, gpus="auto", gpus_per_node=1)
    wait_for_lines(second, "devices GPU-0003", "devices GPU-9002")
    for record in (first, second):
        for host in ("gpu1", "gpu2"):
            (site.remote_dir(record, host) / "code" / "leave").touch()
        assert end_of(record).state is JobState.SUCCEEDED
    # The verdict is written before the agents, which hold the cards, are gone.
    wait_until(lambda: not site.running(), PATIENCE, "the end of the agents")
    third = site.submit(SHOW, gpus="auto", gpus_per_node=2, nproc_per_node=1)
    wait_for_lines(third, "devices GPU-0001,GPU-0002", "devices GPU-9000,GPU-9001")
    jobs.cancel([third])


def site_refusal(site: Site, **flags: object) -> str:
    from clusterjob.errors import SubmitError

    with pytest.raises(SubmitError) as caught:
        site.submit(SHOW, **flags)
    return caught.value.message


def test_fewer_than_asked_for_are_a_rehearsal_unless_they_are_required(
    site: Site,
    caplog: pytest.LogCaptureFixture,
) -> None:
    record = site.submit(
        'import os; print(repr(os.environ["CUDA_VISIBLE_DEVICES"]))',
        gpus_per_node=2,
        nproc_per_node=1,
    )
    wait_until(lambda: jobs.status(record).verdict, PATIENCE, "its end")
    jobs.collect(record)
    assert (record.job_dir / "logs" / "node0" / "rank0.out").read_text() == "''\n"
    assert "gpu1: 0 GPUs where 2 are asked for: a rehearsal" in caplog.text
    error = site_refusal(site, gpus_per_node=2, require_gpus="true")
    assert "gpu1: 0 GPUs where 2 are asked for" in error
    assert "gpu2: 0 GPUs where 2 are asked for" in error


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"gpus": "auto"}, "does not say how many"),
        ({"gpus": "0,1", "gpus_per_node": 3}, "are 2 on each host"),
        ({"gpus": "0,0"}, "no list of GPUs"),
        ({"gpus": "all"}, "no list of GPUs"),
        ({"gpus": "0;rm"}, "no list of GPUs"),
    ],
)
def test_what_makes_no_sense(site: Site, flags: dict[str, object], why: str) -> None:
    site.script("")
    with pytest.raises(SpecError, match=why):
        site.plan(Program("script", "script.py"), **flags)


def test_a_list_says_how_many_workers(site: Site) -> None:
    plan = site.plan(Program("script", site.script("")), gpus="0,2,3")
    assert (plan.spec.resources.gpus_per_node, plan.spec.nproc_per_node) == (3, 3)
    assert json.dumps(plan.spec.to_json())
