"""Detection of each platform's documented variables, complete and incomplete."""

from __future__ import annotations

import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import is_job_variable

from clusterjob.errors import PlacementError
from clusterjob.node.environments import families, this_node
from clusterjob.node.environments.families import FAMILIES
from clusterjob.node.environments.this_node import detect
from clusterjob.node.environments.topology import Topology, Worker

MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def process(
    source: str,
    rank: int,
    local_rank: int,
    world: int,
    local: int,
    node: int,
    nnodes: int,
    addr: str,
    port: int,
) -> Worker:
    return Worker(
        Topology(
            nnodes, node, nproc_per_node=local, master_addr=addr, master_port=port, source=source
        ),
        rank,
        local_rank=local_rank,
        world_size=world,
        local_world_size=local,
    )


# -- processes; each family's module links the platform's page -------------------------------------

# Recorded from Open MPI 4.1.4. OMPI_COMM_WORLD_NODE_RANK is not the index of a node.
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "422772736.0;tcp://192.0.2.2,172.17.0.1:45803;tcp6://[fd00::2]:34697",
    "OMPI_MCA_ess_base_jobid": "422772737", "PMIX_RANK": "5",
}  # fmt: skip
# Recorded from MPICH 4.0.2.
HYDRA = {
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "PMI_FD": "8",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "4",
    **MASTER,
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "5", "MV2_COMM_WORLD_SIZE": "8", "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "4", "PMI_RANK": "5", "PMI_SIZE": "8", **MASTER,
}  # fmt: skip
PALS = {
    "PALS_RANKID": "5", "PMI_RANK": "5", "PMI_SIZE": "8", "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "4", "PALS_NODEID": "1", "PBS_NODEFILE": "/var/spool/pbs/aux/7",
    "PBS_JOBID": "7.pbs", "PALS_APID": "a-b", families.PALS_FIRST_NODE: "x3001c0s1",
}  # fmt: skip
FLUX = {
    "FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "2",
    "FLUX_JOB_ID": "f2fZQs", "PMI_RANK": "5", "PMI_SIZE": "8", families.FLUX_HOSTS: "corona[82,81]",
}  # fmt: skip
AZURE = OPENMPI | {
    "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000",
    "AZ_BATCHAI_MPI_MASTER_NODE": "10.9.9.9",
}
SAGEMAKER_MPI = OPENMPI | {
    "SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_HOST_COUNT": "2",
    "SM_NUM_GPUS": "4", "MASTER_PORT": "7777",
}  # fmt: skip

PROCESSES: dict[str, tuple[dict[str, str], Worker, tuple[str, ...]]] = {
    "openmpi": (
        OPENMPI | MASTER,
        process("openmpi", 5, 1, 8, 4, 1, 2, "10.0.0.1", 29500),
        (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
    ),
    "azure": (AZURE, process("openmpi", 5, 1, 8, 4, 1, 2, "10.0.0.4", 6000), ()),
    "azure, no port": (
        OPENMPI | {"AZ_BATCHAI_MPI_MASTER_NODE": "10.9.9.9", "MASTER_PORT": "6105"},
        process("openmpi", 5, 1, 8, 4, 1, 2, "10.9.9.9", 6105),
        (),
    ),
    "sagemaker": (
        SAGEMAKER_MPI,
        process("openmpi", 5, 1, 8, 4, 1, 2, "algo-1", 7777),
        ("SM_CURRENT_HOST", "SM_HOSTS"),
    ),
    "hydra": (
        HYDRA,
        process("hydra", 5, 1, 8, 4, 1, 2, "10.0.0.1", 29500),
        (
            "PMI_RANK",
            "PMI_SIZE",
            "MPI_LOCALRANKID",
            "MPI_LOCALNRANKS",
            "MASTER_ADDR",
            "MASTER_PORT",
        ),
    ),
    "mvapich2": (
        MVAPICH,
        process("mvapich2", 5, 1, 8, 4, 1, 2, "10.0.0.1", 29500),
        (
            "MV2_COMM_WORLD_RANK",
            "MV2_COMM_WORLD_SIZE",
            "MV2_COMM_WORLD_LOCAL_RANK",
            "MV2_COMM_WORLD_LOCAL_SIZE",
            "MASTER_ADDR",
        ),
    ),
    "pals": (
        PALS | {"MASTER_PORT": "29500"},
        process("pals", 5, 1, 8, 4, 1, 2, "x3001c0s1", 29500),
        ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ),
    "flux": (
        FLUX | {"MASTER_PORT": "29500"},
        process("flux", 5, 1, 8, 4, 1, 2, "corona82", 29500),
        ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES"),
    ),
}

# -- nodes -----------------------------------------------------------------------------------------

MLP = {
    "MLP_ROLE": "WORKER", "MLP_ROLE_INDEX": "1", "MLP_WORKER_NUM": "2", "MLP_WORKER_GPU": "8",
    "MLP_WORKER_0_HOST": "10.0.0.1", "MLP_WORKER_0_PORT": "2222", "MLP_WORKER_1_HOST": "10.0.0.2",
    "MLP_WORKER_ALL_HOSTS": "10.0.0.1,10.0.0.2", "MLP_HOST": "10.0.0.2",
}  # fmt: skip
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "8",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
}
RANKS = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
MODELARTS = {
    "VC_TASK_INDEX": "1",
    "MA_NUM_HOSTS": "2",
    "MA_NUM_GPUS": "8",
    "VC_WORKER_HOSTS": "w-0.job,w-1.job",
    "VC_WORKER_NUM": "2",
}
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
}
VOLCANO = {
    "VC_TASK_INDEX": "1",
    "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job",
    "VC_WORKER_NUM": "2",
    "HOSTNAME": "job-worker-1",
}
SAGEMAKER = {
    "SM_HOSTS": '["algo-1", "algo-2"]',
    "SM_CURRENT_HOST": "algo-2",
    "SM_HOST_COUNT": "2",
    "SM_NUM_GPUS": "8",
}

SLURM_NODE = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1",
    "SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "n0",
    "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1",
}  # fmt: skip

NODES: dict[str, tuple[dict[str, str], Topology, tuple[str, ...]]] = {
    "mlp": (
        MLP,
        Topology(2, 1, nproc_per_node=8, master_addr="10.0.0.1", master_port=2222, source="mlp"),
        ("MLP_ROLE_INDEX", "MLP_WORKER_NUM", "MLP_WORKER_0_HOST"),
    ),
    "kubeflow": (
        KUBEFLOW,
        Topology(
            2,
            1,
            nproc_per_node=8,
            master_addr="job-node-0-0.job",
            master_port=29500,
            source="kubeflow",
        ),
        ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR"),
    ),
    "kubeflow, other names": (
        {
            "PET_NNODES": "2:2",
            "PET_NODE_RANK": "1",
            "PET_N_PROC_PER_NODE": "8",
            "PET_RDZV_ENDPOINT": "job-node-0-0.job:29400",
        },
        Topology(
            2,
            1,
            nproc_per_node=8,
            master_addr="job-node-0-0.job",
            master_port=29400,
            source="kubeflow",
        ),
        (),
    ),
    "pytorchjob v1": (
        RANKS,
        Topology(
            2, 1, nproc_per_node=None, master_addr="job-master-0", master_port=23456, source="nodes"
        ),
        ("WORLD_SIZE", "MASTER_ADDR"),
    ),
    "pytorchjob v1 with PET": (
        RANKS
        | {
            "WORLD_SIZE": "16",
            "PET_NNODES": "2",
            "PET_NODE_RANK": "1",
            "PET_NPROC_PER_NODE": "8",
            "PET_MASTER_ADDR": "job-master-0",
        },
        Topology(
            2, 1, nproc_per_node=8, master_addr="job-master-0", master_port=None, source="kubeflow"
        ),
        (),
    ),
    "pai": (
        RANKS | {"NPROC_PER_NODE": "8", "DLC_JOB_ID": "dlc1"},
        Topology(
            2, 1, nproc_per_node=8, master_addr="job-master-0", master_port=23456, source="nodes"
        ),
        ("WORLD_SIZE",),
    ),
    "volcano's pytorch plugin": (
        RANKS | VOLCANO | {"VC_MASTER_HOSTS": "job-master-0.job", "VC_TASK_INDEX": "0"},
        Topology(
            2,
            1,
            nproc_per_node=None,
            master_addr="job-master-0",
            master_port=23456,
            source="nodes",
        ),
        (),
    ),
    "volcano": (
        VOLCANO,
        Topology(
            2,
            1,
            nproc_per_node=None,
            master_addr="job-worker-0.job",
            master_port=None,
            source="volcano",
        ),
        ("VC_WORKER_HOSTS",),
    ),
    "volcano, old names": (
        {"VK_TASK_INDEX": "1", "VC_TRAINER_HOSTS": "t-0.job\nt-1.job", "MASTER_PORT": "1234"},
        Topology(
            2, 1, nproc_per_node=None, master_addr="t-0.job", master_port=1234, source="volcano"
        ),
        (),
    ),
    "modelarts": (
        MODELARTS,
        Topology(
            2, 1, nproc_per_node=8, master_addr="w-0.job", master_port=None, source="modelarts"
        ),
        ("VC_TASK_INDEX", "VC_WORKER_HOSTS"),
    ),
    "skypilot": (
        SKYPILOT,
        Topology(
            2, 1, nproc_per_node=8, master_addr="10.0.0.1", master_port=None, source="skypilot"
        ),
        ("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS"),
    ),
    "sagemaker": (
        SAGEMAKER,
        Topology(
            2, 1, nproc_per_node=8, master_addr="algo-1", master_port=None, source="sagemaker"
        ),
        ("SM_HOSTS", "SM_CURRENT_HOST"),
    ),
}
TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
OURS = {
    "CLUSTERJOB_NNODES": "3", "CLUSTERJOB_NODE_RANK": "2", "CLUSTERJOB_NPROC_PER_NODE": "8",
    "CLUSTERJOB_MASTER_ADDR": "n0", "CLUSTERJOB_MASTER_PORT": "2222",
}  # fmt: skip
PLATFORMS: dict[str, tuple[dict[str, str], Any, tuple[str, ...]]] = {**PROCESSES, **NODES}
EVERY = PLATFORMS | {
    "torchrun": (
        TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"},
        process("torchrun", 5, 1, 8, 4, 1, 2, "10.0.0.1", 29500),
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    ),
    "clusterjob": (
        OURS,
        Topology(3, 2, nproc_per_node=8, master_addr="n0", master_port=2222, source="clusterjob"),
        ("CLUSTERJOB_NNODES", "CLUSTERJOB_NODE_RANK", "CLUSTERJOB_MASTER_ADDR"),
    ),
}


@pytest.mark.parametrize("name", EVERY)
def test_documented_variables_give_expected_placement(name: str) -> None:
    environ, place, _ = EVERY[name]
    finding = detect(types.MappingProxyType(environ))
    assert finding.conflicts == []
    assert finding.placement == place
    assert finding.source == topology_of(environ).source
    assert all(environ[variable] for variable in finding.evidence.values() if variable != "PMI_FD")
    assert not set(finding.evidence.values()) & finding.ignored.keys()


@pytest.mark.parametrize(
    ("name", "missing"),
    [(name, missing) for name, (_, _, needed) in EVERY.items() for missing in needed],
)
def test_incomplete_platform_variables_are_refused_with_missing_name(
    name: str, missing: str
) -> None:
    environ, _, _ = EVERY[name]
    without = {variable: value for variable, value in environ.items() if variable != missing}
    finding = detect(without)
    assert finding.placement is None
    assert f"{missing} is not set" in "; ".join(finding.conflicts)
    with pytest.raises(PlacementError, match=f"{missing} is not set"):
        finding.check()


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("value", ["x", "-1", "1.5", "0x1", "1_0", "²", "٣", "4 4", "+1"])
def test_non_numeric_value_is_refused_with_variable_name(name: str, value: str) -> None:
    environ, _, _ = EVERY[name]
    numbers = [
        variable
        for field, variable in detect(environ).evidence.items()
        if field != "master_addr" and environ.get(variable, "").isdigit()
    ]
    assert numbers
    for variable in numbers:
        finding = detect(environ | {variable: value})
        assert finding.source == detect(environ).source
        assert finding.placement is None
        assert f"{variable}={value!r} is not a whole number" in "; ".join(finding.conflicts)


@pytest.mark.parametrize("name", PROCESSES)
def test_rank_outside_world_size_is_refused(name: str) -> None:
    environ, _, _ = PROCESSES[name]
    changed = dict(environ)
    for variable in {
        detect(environ).evidence["rank"],
        *(["PMI_RANK"] if "PMI_RANK" in environ else []),
    }:
        changed[variable] = "8"
    assert "rank is 8, outside 0..7" in "; ".join(detect(changed).conflicts)


@pytest.mark.parametrize("name", PLATFORMS)
def test_loopback_master_address_is_refused(name: str) -> None:
    environ, _, _ = EVERY[name]
    variable = detect(environ).evidence["master_addr"]
    hidden = families.PALS_FIRST_NODE if variable == "PBS_NODEFILE" else variable
    old = topology_of(environ).master_addr
    if name == "flux":
        environ = environ | {hidden: f"{old},corona81"}
    # In Flux's list of hosts, brackets contain numbers.
    for address in ("localhost", "127.0.1.1", *(["[::1]"] if name != "flux" else [])):
        assert old in environ[hidden]
        changed = environ | {hidden: environ[hidden].replace(old, address)}
        assert "a loopback address" in "; ".join(detect(changed).conflicts)


@pytest.mark.parametrize("name", EVERY)
def test_undocumented_variables_do_not_change_result(name: str) -> None:
    environ, _, _ = EVERY[name]
    assert detect(environ | {"HOME": "/", "MY_RANK": "7", "PATH": "/bin"}) == detect(environ)
    padded = {variable: f" {value}\n" for variable, value in environ.items()}
    assert detect(padded).placement == detect(environ).placement


# -- special cases of single platforms -------------------------------------------------------------


def topology_of(environ: dict[str, str]) -> Topology:
    placement = detect(environ).placement
    return placement.topology if isinstance(placement, Worker) else placement


@pytest.mark.parametrize(
    ("environ", "nnodes", "address"),
    [
        (OPENMPI, 2, "192.0.2.2"),
        (OPENMPI | {"OMPI_MCA_orte_hnp_uri": "7.0;tcp6://[fd00::2]:34697"}, 2, "fd00::2"),
        (
            OPENMPI | {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"},
            1,
            "127.0.0.1",
        ),
        (
            {name: value for name, value in HYDRA.items() if name not in MASTER}
            | {families.HYDRA_PROXY: "77", "PMI_SIZE": "4", "PMI_RANK": "1"},
            1,
            "127.0.0.1",
        ),
    ],
)
def test_mpi_without_master_variables_uses_address_of_mpirun_or_of_its_only_node(
    environ: dict[str, str], nnodes: int, address: str
) -> None:
    topology = topology_of(environ)
    assert (topology.nnodes, topology.master_addr) == (nnodes, address)


def test_jobs_of_open_mpi_have_different_ports() -> None:
    jobs = [OPENMPI | {"OMPI_MCA_ess_base_jobid": job} for job in "12"]
    assert len({topology_of(environ).master_port for environ in jobs}) == 2


def test_pmi_variables_of_srun_are_detected_as_slurm() -> None:
    step = {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1",
        "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "n1", "PMI_RANK": "1",
        "PMI_SIZE": "2",
    }  # fmt: skip
    assert detect(step).source == "slurm"
    # mpiexec's proxies are the tasks of the step; mpiexec starts the worker processes.
    inside = detect(
        step
        | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0"}
        | HYDRA
    )
    assert (inside.source, inside.placement) == ("hydra", PROCESSES["hydra"][1])
    assert "SLURM_NODEID" in inside.ignored


@pytest.mark.parametrize("nproc", ["auto", "gpu", "cpu"])
def test_kubeflow_nproc_keyword_leaves_worker_count_open(nproc: str) -> None:
    environ = KUBEFLOW | {"PET_NPROC_PER_NODE": nproc}
    assert topology_of(environ).nproc_per_node is None
    assert "PET_NPROC_PER_NODE" in detect(environ).ignored


@pytest.mark.parametrize(
    ("environ", "conflict"),
    [
        (KUBEFLOW | {"PET_NNODES": "1:3"}, "PET_NNODES='1:3' is elastic"),
        (FLUX | {"FLUX_JOB_NNODES": "0"}, "FLUX_JOB_NNODES: nnodes is 0"),
        (FLUX | {"FLUX_JOB_SIZE": "7"}, "not a multiple of FLUX_JOB_NNODES=2"),
        (
            SKYPILOT | {"SKYPILOT_NODE_IPS": "10.0.0.1", "MASTER_ADDR": "10.0.0.1"},
            "SKYPILOT_NODE_IPS lists 1 nodes, SKYPILOT_NUM_NODES is 2",
        ),
        (VOLCANO | {"VC_MASTER_HOSTS": "job-master-0.job"}, "list several tasks, and no variable"),
        (VOLCANO | {"VC_WORKER_NUM": "3"}, "VC_WORKER_HOSTS lists 2 nodes, VC_WORKER_NUM is 3"),
        (SAGEMAKER | {"SM_CURRENT_HOST": "algo-3"}, "is not in SM_HOSTS"),
        (SAGEMAKER | {"SM_HOSTS": "algo-1"}, "is not a JSON list of hosts"),
        (SAGEMAKER | {"SM_HOSTS": "[" * 5000}, "is not a JSON list of hosts"),
        (SAGEMAKER | {"SM_HOSTS": '["a", 1]'}, "is not a JSON list of hosts"),
        (MODELARTS | {"VC_WORKER_HOSTS": "w-0.job"}, "VC_WORKER_HOSTS lists 1 nodes"),
        (EVERY["mlp"][0] | {"MLP_ROLE_INDEX": "7"}, "MLP_ROLE_INDEX: node_rank is 7, outside 0..1"),
        (
            {"MLP_WORKER_0_HOST": "10.0.0.1", "MLP_WORKER_GPU": "8"},
            "MLP_WORKER_NUM is not set",
        ),
        ({"MLP_WORKER_0_PRIMARY_HOST": "10.0.0.1"}, "MLP_ROLE_INDEX is not set"),
        ({"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}, "SKYPILOT_NUM_NODES is not set"),
        ({"WORLD_SIZE": "2"}, "RANK is not set, but WORLD_SIZE=2"),
        (
            {"WORLD_SIZE": "'2'", "MASTER_ADDR": "h", "MASTER_PORT": "23456"},
            "RANK is not set, but WORLD_SIZE=2",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "8"}, "OMPI_COMM_WORLD_RANK is not set"),
        ({"PMI_SIZE": "8"}, "PMI_RANK is not set"),
        ({"PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ID": "1"}, "RANK is not set"),
        (
            {"VC_WORKER_HOSTS": "a.job,b.job"},
            "VC_TASK_INDEX is not set (node_rank)",
        ),
        (
            RANKS | {"RANK": "2", "LOCAL_RANK": "0"},
            "RANK: rank is 2, outside 0..1 (WORLD_SIZE=2)",
        ),
    ],
)
def test_unusable_or_missing_variable_is_named(environ: dict[str, str], conflict: str) -> None:
    finding = detect(environ)
    assert finding.placement is None
    assert conflict in "; ".join(finding.conflicts)


@pytest.mark.parametrize(
    "alone",
    [
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"PET_NNODES": "1"},
        {"MLP_WORKER_NUM": "1", "MLP_ROLE_INDEX": "0"},
        {"MA_NUM_HOSTS": "1"},
        {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0"},
        {"SM_HOSTS": '["localhost"]', "SM_CURRENT_HOST": "localhost"},
    ],
)
def test_single_node_needs_no_address(alone: dict[str, str]) -> None:
    found = topology_of(alone)
    assert (found.nnodes, found.node_rank, found.nproc_per_node) == (1, 0, None)


# -- several platforms at once ---------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_torchrun_inside_any_platform_takes_precedence(name: str) -> None:
    environ, _, _ = EVERY[name]
    finding = detect(environ | TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"})
    assert finding.source == "torchrun"
    assert finding.placement == process("torchrun", 5, 1, 8, 4, 1, 2, "10.0.0.1", 29500)
    assert all(finding.ignored.values())


@pytest.mark.parametrize(
    ("environ", "gpus"),
    [
        (MLP, 8),
        (MLP | {"MLP_WORKER_GPU": "0"}, 0),
        (MODELARTS, 8),
        (SKYPILOT, 8),
        (SAGEMAKER, 8),
        (KUBEFLOW, 0),  # a number of workers
        (SLURM_NODE | {"SLURM_GPUS_ON_NODE": "4"}, 4),
        (SLURM_NODE, 0),
        (MLP | {"CLUSTERJOB_NNODES": "1", "CLUSTERJOB_NODE_RANK": "0"}, 0),
    ],
)
def test_platform_promises_the_gpus_that_its_variables_count(
    environ: dict[str, str], gpus: int
) -> None:
    assert this_node.gpus(detect(environ), environ) == gpus


@pytest.mark.parametrize("name", NODES)
def test_clusterjob_variables_take_precedence_over_any_platform(name: str) -> None:
    own = {"CLUSTERJOB_NNODES": "3", "CLUSTERJOB_NODE_RANK": "2", "CLUSTERJOB_MASTER_ADDR": "n0"}
    finding = detect(NODES[name][0] | own)
    assert finding.placement == Topology(
        3, 2, nproc_per_node=None, master_addr="n0", master_port=None, source="clusterjob"
    )
    assert finding.ignored


@pytest.mark.parametrize(
    ("environ", "conflict"),
    [
        (
            MLP | KUBEFLOW | {"PET_NODE_RANK": "0"},
            "MLP_ROLE_INDEX=1 of 2 and PET_NODE_RANK=0 of 2 disagree",
        ),
        (MLP | SKYPILOT | {"SKYPILOT_NODE_RANK": "0"}, "disagree (mlp, skypilot)"),
        (KUBEFLOW | RANKS | {"RANK": "0"}, "PET_NODE_RANK=1 of 2 and RANK=0 of 2 disagree"),
        (
            OPENMPI | TORCHRUN | {"RANK": "4", "LOCAL_RANK": "0"},
            "RANK=4 of 8 and OMPI_COMM_WORLD_RANK=5 of 8 disagree",
        ),
        (
            OPENMPI
            | {
                "RANK": "0",
                "WORLD_SIZE": "1",
                "LOCAL_RANK": "0",
                "MASTER_ADDR": "10.0.0.1",
                "MASTER_PORT": "1",
            },
            "RANK=0 of 1 and OMPI_COMM_WORLD_RANK=5 of 8 disagree",
        ),
    ],
)
def test_disagreeing_sources_give_one_conflict(environ: dict[str, str], conflict: str) -> None:
    finding = detect(environ)
    assert finding.placement is None
    assert len(finding.conflicts) == 1
    assert conflict in finding.conflicts[0]


def test_variables_without_rank_are_listed_as_ignored() -> None:
    finding = detect({"SLURM_JOB_ID": "3", "WORLD_SIZE": "2"})
    assert [*finding.ignored] == ["SLURM_JOB_ID"]
    assert [*detect({"MASTER_ADDR": "h"}).ignored] == ["MASTER_ADDR"]


@pytest.mark.parametrize(
    ("environ", "placement"),
    [
        (KUBEFLOW | RANKS, NODES["kubeflow"][1]),
        (MLP | RANKS | {"MASTER_ADDR": "10.0.0.1"}, NODES["mlp"][1]),
        *(
            (EVERY[name][0] | {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "1"}, EVERY[name][1])
            for name in ("mlp", "kubeflow")
        ),
        (OPENMPI | TORCHRUN, process("env", 5, 1, 8, 4, 1, 2, "10.0.0.1", 29500)),
        (
            {"CLUSTERJOB_NNODES": "1", "CLUSTERJOB_NODE_RANK": "0", "WORLD_SIZE": "16"},
            Topology(1, 0, None, "127.0.0.1", None, "clusterjob"),
        ),
    ],
)
def test_agreeing_sources_give_no_conflict(
    environ: dict[str, str], placement: Topology | Worker
) -> None:
    assert detect(environ).placement == placement


names = sorted(
    {name for environ, _, _ in EVERY.values() for name in environ}
    | {"SLURM_STEP_ID", "HOSTNAME", "CLUSTERJOB_JOB_ID", "CLUSTERJOB_REPORT_FD"}
)
values = (
    st.integers(-1, 9).map(str)
    | st.sampled_from(
        [
            "",
            " ",
            "h",
            "65536",
            "1:2",
            "h:1",
            "[::1]:5",
            "a,b",
            '["a"]',
            '"2"',
            "a b",
            "h[1-",
            "1" * 30,
        ]
    )
    | st.text(max_size=5)
)


def is_consistent(place: Topology | Worker) -> bool:
    """Return whether ranks, sizes and port are in range."""
    node = place.topology if isinstance(place, Worker) else place
    port = node.master_port is None or 0 < node.master_port < 65536
    fits = 0 <= node.node_rank < node.nnodes and port and bool(node.master_addr)
    if isinstance(place, Worker):
        fits &= 0 <= place.rank < place.world_size
        fits &= 0 <= place.local_rank < place.local_world_size <= place.world_size
    return fits


@given(st.dictionaries(st.sampled_from(names), values, max_size=12))
def test_any_mapping_gives_consistent_placement_or_conflicts(environ: dict[str, str]) -> None:
    finding = detect(types.MappingProxyType(environ))
    place = finding.placement
    assert finding == detect(dict(environ))
    assert place is None or (is_consistent(place) and not finding.conflicts)
    assert (finding.source == "none") == (place is None and not finding.conflicts)
    # A value that was looked up may be there without its variable.
    assert all(environ.get(variable, "x").strip() for variable in finding.evidence.values())


@given(st.sampled_from(sorted(EVERY)), st.sampled_from(names), values)
def test_platform_with_any_changed_value_gives_placement_or_conflicts(
    name: str, variable: str, value: str
) -> None:
    environ, _, _ = EVERY[name]
    finding = detect(environ | {variable: value})
    assert (finding.placement is None) == bool(finding.conflicts)


def test_every_family_has_a_fixture() -> None:
    found = {
        family.source
        for family in FAMILIES
        for environ, _, _ in EVERY.values()
        if family.detect(environ).source != "none"
    }
    assert found | {"slurm"} == {family.source for family in FAMILIES}


def test_every_family_of_nodes_is_a_platform() -> None:
    """Two platforms that disagree are a conflict; launchers start tasks inside a platform."""
    for family in FAMILIES:
        found = (family.detect(environ) for environ, _, _ in PLATFORMS.values())
        levels = {each.level for each in found} - {"none"}
        assert family.is_platform == (levels == {"node"}), family.source


def test_every_variable_of_a_family_is_removed_from_test_environment() -> None:
    # Names that are no identifiers are keys of looked-up values.
    names = {name for environ, _, _ in EVERY.values() for name in environ if name.isidentifier()}
    assert {name for name in names if not is_job_variable(name)} == {"HOSTNAME"}


@pytest.mark.parametrize("name", EVERY)
def test_platform_without_one_variable_gives_same_rank_or_conflict(
    name: str,
) -> None:
    """A lost variable never turns a job of several nodes into a job of one."""
    environ = dict(EVERY[name][0])

    def rank_and_size(variables: dict[str, str]) -> object:
        place = detect(variables).placement
        return (
            (place.rank, place.world_size)
            if isinstance(place, Worker)
            else place and (place.node_rank, place.nnodes)
        )

    expected = rank_and_size(environ)
    for lost in environ:
        left = {variable: value for variable, value in environ.items() if variable != lost}
        assert detect(left).conflicts or rank_and_size(left) == expected, lost
