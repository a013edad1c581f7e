"""The profile of bare hosts, for `clusterjob init`."""

from __future__ import annotations

import os
from collections.abc import Iterator

from clusterjob.core import hosts
from clusterjob.core.proposals import Proposal, Question
from clusterjob.errors import SpecError
from clusterjob.remote.ssh_host_names import configured_hosts

_SHOWN = 8  # maximum number of hosts in a comment


def propose() -> Iterator[Proposal]:
    """Yield the profile of the platform's hosts, or of hosts that the user names."""
    try:
        listed = hosts.of_platform(os.environ)
    except SpecError:
        listed = ()
    if listed:
        yield Proposal(
            "ssh",
            "ssh",
            found=f"{hosts.PLATFORM_FILE} lists {len(listed)} hosts, which jobs use over SSH",
            ready=True,
        )
        return
    names = configured_hosts()
    shown = ", ".join(names[:_SHOWN])
    yield Proposal(
        "ssh",
        "ssh",
        found=f"hosts of the SSH configuration: {shown}" if names else "",
        examples=(
            ("hosts", ",".join(names[:_SHOWN]) or "gpu1,gpu[2-4]", "hosts that run the jobs"),
            ("gpus", 8, "GPUs on each host, one worker on each"),
        ),
        questions=(
            Question("hosts", "Hosts, such as gpu1,gpu[2-4]", required=True),
            Question("gpus", "GPUs on each host of a job (empty for none)"),
        ),
    )
