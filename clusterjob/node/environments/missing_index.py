"""Refuse an environment that counts several processes or nodes but gives no index.

Without this check each process would train its own copy of the model alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from clusterjob.node.environments import placing
from clusterjob.node.environments.reading import Finding, Reading, whole_number

# (family, count, index). A batch script may export a count for its steps. In a step another family
# applies, and this check does not run.
_COUNTS = (
    ("env", "WORLD_SIZE", "RANK"),
    ("openmpi", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mvapich2", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("lsf", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    ("hydra", "PMI_SIZE", "PMI_RANK"),
    ("paddle", "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ID"),
    ("sagemaker", "SM_HOST_COUNT", "SM_CURRENT_HOST"),
)
_HOSTS = re.compile(r"VC_\w+_HOSTS\Z")


def detect(environ: Mapping[str, str]) -> Finding | None:
    """Return a conflict if a count is above 1 and its index is not set, or None.

    Call it only if no family applies.
    """
    for source, count, index in _COUNTS:
        reading = Reading(environ, source, quoted=True)
        if (whole_number(reading.value(count)) or 0) > 1 and not reading.is_set(index):
            reading.conflicts.append(
                f"{index} is not set, but {count}={reading.value(count)}: the launcher sets both"
            )
            return reading.finding(None)
    reading = Reading(environ, "volcano", quoted=True)
    for name in sorted(filter(_HOSTS.match, environ)):
        found = placing.hosts(reading, name)
        if len(found) > 1:
            reading.conflicts.append(
                f"VC_TASK_INDEX is not set, but {name} lists {len(found)} hosts: "
                "Volcano's env plugin sets it"
            )
            return reading.finding(None)
    return None
