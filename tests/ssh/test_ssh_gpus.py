"""Jobs on GPUs of SSH hosts, with a fake nvidia-smi command on each host and real locks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

import pytest
from nvidia import FakeSmi
from procs import TEST_TIMEOUT, wait_until
from sshsite import Site
from verdicts import wait_for_verdict

from clusterjob.core import jobs, polling
from clusterjob.errors import SubmitError
from clusterjob.node.system import devices
from clusterjob.node.verdict import JobState

# The GPUs of the hosts are those of a fake nvidia-smi.
MORE = {"nproc_per_node": 1, "require_gpus": "false"}
DEVICES_SCRIPT = """
    import os, time
    print("devices", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
    while not os.path.exists("leave"):
        time.sleep(0.05)
"""


@pytest.fixture
def gpu_hosts(site: Site) -> Iterator[dict[str, FakeSmi]]:
    """Two hosts with a fake nvidia-smi in PATH.

    All hosts share /tmp, which holds the locks of GPUs. So each host has its own UUIDs.
    """
    found = {}
    for name in ("gpu1", "gpu2"):
        host = site.ssh_network.hosts[name]
        directory = host.directory / f"smi{time.monotonic_ns()}"
        found[name] = FakeSmi(directory, prefix=f"GPU-{secrets.token_hex(4)}-")
        host.stop()
        host.start(SetEnv=f"HOME={host.home} PATH={directory}:/usr/local/bin:/usr/bin:/bin")
    yield found
    for name in found:
        site.ssh_network.hosts[name].stop()
        site.ssh_network.hosts[name].start()
    for smi in found.values():
        for directory in devices.lock_directories():
            for path in directory.glob(f"{smi.prefix}*"):
                path.unlink()


def test_jobs_get_different_idle_gpus_on_each_host(
    site: Site, gpu_hosts: dict[str, FakeSmi]
) -> None:
    gpu_hosts["gpu1"].set_gpus([9000, 3, 3, 3], {0: [(1, "trainer")]})
    one, two = gpu_hosts["gpu1"].prefix, gpu_hosts["gpu2"].prefix
    first_devices = f"devices {one}1,{one}2", f"devices {two}0,{two}1"
    first = site.submit(DEVICES_SCRIPT, gpus="auto", gpus_per_node=2, **MORE, until=first_devices)
    error = submit_error(site, gpus="auto", gpus_per_node=2, **MORE)
    assert (
        "gpu1: 1 idle GPUs where 2 are asked for: 0 NVIDIA H100, 80GB:"
        f" root's trainer (pid 1), 9.4 of 86 GB used; 1 job {first.job_id}" in error
    )
    assert "gpu2" not in error.splitlines()[0]
    for host in ("gpu1", "gpu2"):
        (site.remote_dir(first, host) / "code" / "leave").touch()
    assert wait_for_verdict(first).state is JobState.SUCCEEDED
    # The verdict is written before the agents exit and release their GPUs.
    wait_until(lambda: not site.running(), TEST_TIMEOUT, "the end of the agents")
    third = site.submit(DEVICES_SCRIPT, gpus="auto", gpus_per_node=2, **MORE, until=first_devices)
    jobs.cancel([third])


def submit_error(site: Site, **flags: object) -> str:
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
        require_gpus="false",
    )
    wait_until(lambda: polling.status(record).verdict, TEST_TIMEOUT, "its end")
    polling.collect(record)
    assert (record.job_dir / "logs" / "node0" / "rank0.out").read_text() == "''\n"
    assert "gpu1: 0 GPUs where 2 are asked for: a rehearsal" in caplog.text
    error = submit_error(site, gpus_per_node=2)
    assert "gpu1: 0 GPUs where 2 are asked for" in error
    assert "gpu2: 0 GPUs where 2 are asked for" in error
