"""What is left when no family applies: a count of several, without the variable that says which of
them this is.

A process that went on there would train alone, beside others that do the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from clusterjob.node.environments import placing
from clusterjob.node.environments.reading import Finding, Reading, whole_number

# (family, count, what would say which one this is). A batch script may export a count for the steps
# that it starts; their own families then apply, and this is not asked.
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
    """Return a finding without a place, and why; None where nothing counts more than one. To be
    asked after all families.
    """
    for source, count, index in _COUNTS:
        reading = Reading(environ, source, quoted=True)
        if (whole_number(reading.value(count)) or 0) > 1 and not reading.is_set(index):
            reading.conflicts.append(
                f"{index} is not set, and {count}={reading.value(count)}: this is one of several"
            )
            return reading.finding(None)
    reading = Reading(environ, "volcano", quoted=True)
    for name in sorted(filter(_HOSTS.match, environ)):
        found = placing.hosts(reading, name)
        if len(found) > 1:
            reading.conflicts.append(
                f"VC_TASK_INDEX is not set, and {name} lists {len(found)}: this is one of several (Volcano's env plugin)"
            )
            return reading.finding(None)
    return None
