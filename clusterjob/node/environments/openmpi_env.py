"""Detect a process of Open MPI's mpirun.

Azure ML and SageMaker also start mpirun; they add variables with the master's address.
OMPI_COMM_WORLD_NODE_RANK is the index of the process on its node, not of the node. Source: Open
MPI's FAQ, "Running MPI jobs",
https://www.open-mpi.org/faq/?category=running#mpi-environmental-variables, and dumps of Open MPI
4.1.4. For Azure ML:
https://learn.microsoft.com/azure/machine-learning/how-to-train-distributed-gpu#mpi. For SageMaker:
https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from clusterjob.node.environments import placing, sagemaker_env
from clusterjob.node.environments.reading import Finding, Reading

LAUNCHER = "OMPI_MCA_orte_hnp_uri"


def detect(environ: Mapping[str, str]) -> Finding | None:
    """Return this process's rank assignment from Open MPI's variables; None if they are not set."""
    reading = Reading(environ, "openmpi")
    if not reading.is_set("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):
        return None
    ranks = placing.Ranks.read(
        reading,
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    )
    nodes = sagemaker_env.nodes(reading)
    fallback, port = _other_master(reading, alone=ranks.alone, hosts=nodes.hosts)
    key_variable = reading.first_set("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", LAUNCHER)
    key = (
        f"openmpi {reading.value(LAUNCHER)} {reading.value(key_variable)}"
        if reading.is_set(key_variable)
        else ""
    )
    master = placing.process_master(
        reading,
        alone=ranks.alone,
        fallback=fallback,
        fallback_port=port,
        key=key,
        key_variable=key_variable,
    )
    return placing.worker(
        reading, ranks, master=master, node_rank=nodes.node_rank, nnodes=nodes.nnodes
    )


def _other_master(
    reading: Reading, *, alone: bool, hosts: list[str]
) -> tuple[str | None, int | None]:
    """Return rank 0's host and port from variables of Azure ML, SageMaker or mpirun, or None."""
    if not reading.is_set("MASTER_ADDR"):
        for variable in ("AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE"):
            if reading.is_set(variable):
                batch = placing.endpoint(reading, variable)
                return batch.addr, batch.port
        if hosts:
            reading.evidence["master_addr"] = "SM_HOSTS"
            return hosts[0], None
        if not alone:
            return _launcher(reading), None
    return None, None


def _launcher(reading: Reading) -> str | None:
    """Return the address of mpirun, on whose host rank 0 runs by default.

    The variable contains text such as ``1234.0;tcp://10.0.0.1,172.17.0.1:41234``.
    """
    found = re.search(r"tcp6?://\[?([^,;\]/]+?)\]?(?:,[^;]*)?:\d+(?:;|$)", reading.value(LAUNCHER))
    return reading.as_host("master_addr", LAUNCHER, found[1]) if found else None
