"""Each platform's documented variables, the place that they mean, and what is missing when one is
not there.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterjob.errors import PlaceError
from clusterjob.node.environments import FAMILIES, detect, flux_env, hydra_env, lsf_env, pals_env
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


# -- processes: the page of each is named in the family's own file ---------------------------------------------------------

# Open MPI 4.1.4, a dump: OMPI_COMM_WORLD_NODE_RANK is no node's index.
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "422772736.0;tcp://192.0.2.2,172.17.0.1:45803;tcp6://[fd00::2]:34697",
    "OMPI_MCA_ess_base_jobid": "422772737", "PMIX_RANK": "5",
}  # fmt: skip
# MPICH 4.0.2, a dump.
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
    "PBS_JOBID": "7.pbs", "PALS_APID": "a-b", pals_env.FIRST_NODE: "x3001c0s1",
}  # fmt: skip
LSF = {
    "JSM_NAMESPACE_RANK": "5", "JSM_NAMESPACE_SIZE": "8", "JSM_NAMESPACE_LOCAL_RANK": "1",
    "LSB_JOBID": "123456", "LSB_DJOB_RANKFILE": "/home/me/.lsbatch/7",
    lsf_env.RANKFILE: "batch1\nh36n01\nh36n01\nh36n02\nh36n02\n", lsf_env.OWN_NAME: "h36n02",
    "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}  # fmt: skip
FLUX = {
    "FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "2",
    "FLUX_JOB_ID": "f2fZQs", "PMI_RANK": "5", "PMI_SIZE": "8", flux_env.HOSTLIST: "corona[82,81]",
}  # fmt: skip
PADDLE = {
    "PADDLE_TRAINER_ID": "5", "PADDLE_TRAINERS_NUM": "8", "PADDLE_RANK_IN_NODE": "1",
    "PADDLE_LOCAL_SIZE": "4", "PADDLE_NNODES": "2", "PADDLE_MASTER": "10.0.0.1:38714",
    "PADDLE_CURRENT_ENDPOINT": "10.0.0.2:6171",
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
    "lsf": (
        LSF,
        process("lsf", 5, 1, 8, 4, 1, 2, "h36n01", 10456),
        ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK"),
    ),
    "flux": (
        FLUX | {"MASTER_PORT": "29500"},
        process("flux", 5, 1, 8, 4, 1, 2, "corona82", 29500),
        ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES"),
    ),
    "paddle": (
        PADDLE,
        process("paddle", 5, 1, 8, 4, 1, 2, "10.0.0.1", 38714),
        ("PADDLE_TRAINERS_NUM", "PADDLE_RANK_IN_NODE", "PADDLE_LOCAL_SIZE", "PADDLE_MASTER"),
    ),
}

# -- nodes -----------------------------------------------------------------------------------------------------------------

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
            2, 1, nproc_per_node=8, master_addr="job-master-0", master_port=23456, source="pai"
        ),
        ("WORLD_SIZE",),
    ),
    "aihc": (
        RANKS | {"NPROC_PER_NODE": "8", "AIHC_JOB_NAME": "j"},
        Topology(
            2, 1, nproc_per_node=8, master_addr="job-master-0", master_port=23456, source="aihc"
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
            source="volcano",
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
EVERY: dict[str, tuple[dict[str, str], Any, tuple[str, ...]]] = {**PROCESSES, **NODES}


@pytest.mark.parametrize("name", EVERY)
def test_the_documented_variables_give_the_place_that_they_mean(name: str) -> None:
    environ, place, _ = EVERY[name]
    finding = detect(types.MappingProxyType(environ))
    assert finding.conflicts == ()
    assert finding.place == place
    assert finding.source == place.topology.source if isinstance(place, Worker) else place.source
    assert all(environ[variable] for variable in finding.evidence.values() if variable != "PMI_FD")
    assert not set(finding.evidence.values()) & {item.variable for item in finding.ignored}


@pytest.mark.parametrize(
    ("name", "missing"),
    [(name, missing) for name, (_, _, needed) in EVERY.items() for missing in needed],
)
def test_a_half_set_platform_names_what_is_missing(name: str, missing: str) -> None:
    environ, _, _ = EVERY[name]
    without = {variable: value for variable, value in environ.items() if variable != missing}
    finding = detect(without)
    assert finding.place is None
    assert f"{missing} is not set" in "; ".join(finding.conflicts)
    with pytest.raises(PlaceError, match=f"{missing} is not set"):
        finding.check()


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("value", ["x", "-1", "1.5", "٣"])
def test_what_is_no_number_is_named(name: str, value: str) -> None:
    environ, _, _ = EVERY[name]
    numbers = [
        variable
        for field, variable in detect(environ).evidence.items()
        if field != "master_addr" and environ.get(variable, "").isdigit()
    ]
    changed = {
        variable: value for variable in numbers if variable not in ("OMPI_MCA_ess_base_jobid",)
    }
    assert changed or name.startswith("volcano, old")
    for variable in changed:
        finding = detect(environ | {variable: value})
        if finding.source == detect(environ).source:
            assert finding.place is None
            assert f"{variable}={value!r} is not a whole number" in "; ".join(finding.conflicts)


@pytest.mark.parametrize("name", PROCESSES)
def test_a_rank_outside_of_its_world_is_refused(name: str) -> None:
    environ, _, _ = PROCESSES[name]
    changed = dict(environ)
    for variable in {
        detect(environ).evidence["rank"],
        *(["PMI_RANK"] if "PMI_RANK" in environ else []),
    }:
        changed[variable] = "8"
    assert "rank is 8, outside 0..7" in "; ".join(detect(changed).conflicts)


@pytest.mark.parametrize("name", EVERY)
def test_a_master_that_every_node_is_itself_is_refused(name: str) -> None:
    environ, place, _ = EVERY[name]
    variable = detect(environ).evidence["master_addr"]
    for address in ("localhost", "127.0.1.1", "[::1]"):
        old = place.topology.master_addr if isinstance(place, Worker) else place.master_addr
        hidden = {"PBS_NODEFILE": pals_env.FIRST_NODE, "LSB_DJOB_RANKFILE": lsf_env.RANKFILE}.get(
            variable, variable
        )
        if hidden == flux_env.HOSTLIST or (
            variable in ("PADDLE_MASTER", "AZ_BATCH_MASTER_NODE", "PET_RDZV_ENDPOINT")
            and address == "[::1]"
        ):
            continue
        changed = environ | {hidden: environ[hidden].replace(old, address)}
        conflicts = "; ".join(detect(changed).conflicts)
        assert "which each of the 2 nodes is itself" in conflicts or "SM_" in conflicts, conflicts


@pytest.mark.parametrize("name", EVERY)
def test_one_family_at_a_time_answers_for_its_own_variables(name: str) -> None:
    """Nothing depends on variables that the platform does not document: strangers change nothing."""
    environ, _, _ = EVERY[name]
    assert detect(environ | {"HOME": "/", "MY_RANK": "7", "PATH": "/bin"}) == detect(environ)


# -- what each adds ----------------------------------------------------------------------------------------------------------


def test_open_mpi_meets_at_its_launcher_where_nobody_says_more() -> None:
    finding = detect(OPENMPI)
    assert isinstance(finding.place, Worker)
    assert finding.place.topology.master_addr == "192.0.2.2"
    assert finding.evidence["master_addr"] == "OMPI_MCA_orte_hnp_uri"
    other = detect(OPENMPI | {"OMPI_MCA_ess_base_jobid": "1"}).place
    assert isinstance(other, Worker)
    assert finding.place.topology.master_port != other.topology.master_port
    six = detect(OPENMPI | {"OMPI_MCA_orte_hnp_uri": "7.0;tcp6://[fd00::2]:34697"}).place
    assert isinstance(six, Worker)
    assert six.topology.master_addr == "fd00::2"


@pytest.mark.parametrize(
    ("environ", "size"),
    [(OPENMPI, "OMPI_COMM_WORLD_SIZE"), (HYDRA | {hydra_env.PROXY: "77"}, "PMI_SIZE")],
)
def test_the_processes_of_one_node_meet_at_home(environ: dict[str, str], size: str) -> None:
    alone = {name: value for name, value in environ.items() if name not in MASTER} | {
        size: "4",
        "PMI_RANK": "1",
        "OMPI_COMM_WORLD_RANK": "1",
    }
    if size == "PMI_SIZE":
        del alone["OMPI_COMM_WORLD_RANK"]
    found = detect(alone)
    assert isinstance(found.place, Worker)
    assert (found.place.topology.master_addr, found.place.topology.nnodes) == ("127.0.0.1", 1)


def test_pmi_of_srun_is_the_step_s() -> None:
    step = {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1",
        "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "n1", "PMI_RANK": "1",
        "PMI_SIZE": "2",
    }  # fmt: skip
    assert detect(step).source == "slurm"
    # mpiexec's proxies are tasks of a step, and its processes are mpiexec's.
    inside = detect(
        step
        | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0"}
        | HYDRA
    )
    assert (inside.source, inside.place) == ("hydra", PROCESSES["hydra"][1])
    assert "SLURM_NODEID" in {item.variable for item in inside.ignored}


def test_lsf_reads_its_hosts_from_the_variable_too() -> None:
    hidden = {lsf_env.RANKFILE, "LSB_DJOB_RANKFILE"}
    environ = {name: value for name, value in LSF.items() if name not in hidden} | {
        "LSB_MCPU_HOSTS": "batch1 1 h36n01 42 h36n02 42"
    }
    assert detect(environ).place == PROCESSES["lsf"][1]


def test_flux_that_spreads_unevenly_is_refused() -> None:
    assert "no multiple of FLUX_JOB_NNODES=2" in "; ".join(
        detect(FLUX | {"FLUX_JOB_SIZE": "7"}).conflicts
    )


def test_paddle_s_endpoints_tell_the_place_on_the_node() -> None:
    endpoints = "10.0.0.1:6170,10.0.0.1:6171,10.0.0.2:6170,10.0.0.2:6171"
    for rank, (node, local) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        own = {
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": "4",
            "PADDLE_TRAINER_ENDPOINTS": endpoints,
        }
        own["PADDLE_CURRENT_ENDPOINT"] = endpoints.split(",")[rank]
        assert detect(own).place == process("paddle", rank, local, 4, 2, node, 2, "10.0.0.1", 6170)
        wrong = detect(own | {"PADDLE_CURRENT_ENDPOINT": "10.0.0.9:1"})
        assert f"is not entry {rank} of PADDLE_TRAINER_ENDPOINTS" in "; ".join(wrong.conflicts)
        assert "lists 4 processes" in "; ".join(
            detect(own | {"PADDLE_TRAINERS_NUM": "5"}).conflicts
        )


@pytest.mark.parametrize("nproc", ["auto", "gpu", "cpu"])
def test_kubeflow_may_leave_the_number_of_processes_to_the_launcher(nproc: str) -> None:
    finding = detect(KUBEFLOW | {"PET_NPROC_PER_NODE": nproc})
    assert isinstance(finding.place, Topology)
    assert finding.place.nproc_per_node is None
    assert "PET_NPROC_PER_NODE" in {item.variable for item in finding.ignored}


def test_an_elastic_number_of_nodes_is_refused() -> None:
    assert "PET_NNODES='1:3' is elastic" in "; ".join(
        detect(KUBEFLOW | {"PET_NNODES": "1:3"}).conflicts
    )


def test_volcano_s_index_counts_within_a_task() -> None:
    several = VOLCANO | {"VC_MASTER_HOSTS": "job-master-0.job", "VC_MASTER_NUM": "1"}
    assert "list several tasks, of which this is VC_WORKER_HOSTS's" in "; ".join(
        detect(several).conflicts
    )
    assert "VC_WORKER_NUM=3, but VC_WORKER_HOSTS lists 2" in "; ".join(
        detect(VOLCANO | {"VC_WORKER_NUM": "3"}).conflicts
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"SM_CURRENT_HOST": "algo-3"}, "is not in SM_HOSTS"),
        ({"SM_HOSTS": "algo-1"}, "is no JSON list of hosts"),
        ({"SM_HOSTS": "[" * 5000}, "is no JSON list of hosts"),
        ({"SM_HOSTS": '["a", 1]'}, "is no JSON list of hosts"),
        ({"SM_HOST_COUNT": "3"}, "SM_HOST_COUNT=3, but SM_HOSTS lists 2"),
    ],
)
def test_sagemaker_s_list_has_to_hold(change: dict[str, str], words: str) -> None:
    assert words in "; ".join(detect(SAGEMAKER | change).conflicts)


@pytest.mark.parametrize(
    "environ",
    [
        SKYPILOT | {"SKYPILOT_NODE_IPS": "10.0.0.1"},
        MODELARTS | {"VC_WORKER_HOSTS": "w-0.job"},
        MLP | {"MLP_WORKER_ALL_HOSTS": "a,b,c"},
    ],
)
def test_a_list_of_another_length_than_the_number_of_nodes_is_refused(
    environ: dict[str, str],
) -> None:
    assert "lists" in "; ".join(detect(environ).conflicts)


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
def test_a_single_node_needs_no_address(alone: dict[str, str]) -> None:
    found = detect(alone).place
    assert isinstance(found, Topology)
    assert (found.nnodes, found.node_rank, found.nproc_per_node) == (1, 0, None)


# -- several at once -----------------------------------------------------------------------------------------------------------

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
def test_a_launcher_inside_of_any_platform_has_the_last_word(name: str) -> None:
    environ, _, _ = EVERY[name]
    finding = detect(environ | TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"})
    assert finding.source == "torchrun"
    assert finding.place == process("torchrun", 5, 1, 8, 4, 1, 2, "10.0.0.1", 29500)
    assert all(item.why for item in finding.ignored)


@pytest.mark.parametrize("name", NODES)
def test_what_is_set_by_hand_comes_before_any_platform(name: str) -> None:
    own = {"CLUSTERJOB_NNODES": "3", "CLUSTERJOB_NODE_RANK": "2", "CLUSTERJOB_MASTER_ADDR": "n0"}
    finding = detect(NODES[name][0] | own)
    assert finding.place == Topology(
        3, 2, nproc_per_node=None, master_addr="n0", master_port=None, source="clusterjob"
    )
    assert finding.ignored


@pytest.mark.parametrize(
    ("environ", "words"),
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
def test_two_sources_that_disagree_are_one_clear_error(environ: dict[str, str], words: str) -> None:
    finding = detect(environ)
    assert finding.place is None
    assert len(finding.conflicts) == 1
    assert words in finding.conflicts[0]


@pytest.mark.parametrize("name", ["mlp", "kubeflow"])
def test_torch_s_own_variables_beside_a_platform_s_are_shown_as_ignored(name: str) -> None:
    finding = detect(EVERY[name][0] | {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "1"})
    assert finding.place == EVERY[name][1]
    assert {"MASTER_ADDR", "MASTER_PORT"} <= {item.variable for item in finding.ignored}


@pytest.mark.parametrize(
    ("environ", "missing"),
    [
        ({"MLP_WORKER_0_HOST": "10.0.0.1", "MLP_WORKER_GPU": "8"}, "MLP_WORKER_NUM"),
        ({"MLP_WORKER_0_PRIMARY_HOST": "10.0.0.1"}, "MLP_ROLE_INDEX"),
        ({"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}, "SKYPILOT_NUM_NODES"),
    ],
)
def test_an_address_without_a_number_is_a_half_set_platform_and_no_world_of_one(
    environ: dict[str, str], missing: str
) -> None:
    assert f"{missing} is not set" in "; ".join(detect(environ).conflicts)


def test_what_is_left_of_a_step_is_shown_beside_a_count_of_several() -> None:
    finding = detect({"SLURM_JOB_ID": "3", "WORLD_SIZE": "2"})
    assert [item.variable for item in finding.ignored] == ["SLURM_JOB_ID"]
    assert detect({"MASTER_ADDR": "h"}).ignored[0].variable == "MASTER_ADDR"


def test_two_sources_that_agree_are_no_conflict() -> None:
    assert detect(KUBEFLOW | RANKS).place == NODES["kubeflow"][1]
    assert detect(MLP | RANKS | {"MASTER_ADDR": "10.0.0.1"}).place == NODES["mlp"][1]
    assert detect(OPENMPI | TORCHRUN).source == "env"


names = sorted(
    {name for environ, _, _ in EVERY.values() for name in environ}
    | {"RANK", "LOCAL_RANK", "SLURM_STEP_ID", "HOSTNAME"}
)
values = (
    st.integers(-1, 9).map(str)
    | st.sampled_from(
        ["", "h", "1:2", "h:1", "[::1]:5", "a,b", '["a"]', '"2"', "a b", "h[1-", "1" * 30]
    )
    | st.text(max_size=5)
)


@given(st.dictionaries(st.sampled_from(names), values, max_size=12))
def test_any_mapping_gives_a_place_or_its_conflicts(environ: dict[str, str]) -> None:
    finding = detect(environ)
    assert finding == detect(dict(environ))
    assert not (finding.place is not None and finding.conflicts)
    assert (finding.source == "none") == (finding.place is None and not finding.conflicts)


@given(st.sampled_from(sorted(EVERY)), st.sampled_from(names), values)
def test_no_single_value_breaks_a_platform_silently(name: str, variable: str, value: str) -> None:
    environ, _, _ = EVERY[name]
    finding = detect(environ | {variable: value})
    assert (finding.place is None) == bool(finding.conflicts)


def test_every_family_has_a_fixture() -> None:
    found = {
        family.__module__.rpartition(".")[2]
        for family in FAMILIES
        for environ, _, _ in EVERY.values()
        if family(environ) is not None
    }
    assert found | {"torch_env", "clusterjob_env", "slurm_env"} == {
        family.__module__.rpartition(".")[2] for family in FAMILIES
    }


@pytest.mark.parametrize("name", EVERY)
def test_without_any_one_of_its_variables_a_platform_s_place_is_the_same_or_refused(
    name: str,
) -> None:
    """Never a silent world of one, whichever variable got lost on the way."""
    environ = dict(EVERY[name][0])

    def standing(variables: dict[str, str]) -> object:
        place = detect(variables).place
        return (
            (place.rank, place.world_size)
            if isinstance(place, Worker)
            else place and (place.node_rank, place.nnodes)
        )

    whole = standing(environ)
    for lost in environ:
        left = {variable: value for variable, value in environ.items() if variable != lost}
        assert detect(left).conflicts or standing(left) == whole, lost


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is not set, and WORLD_SIZE=2"),
        (
            {"WORLD_SIZE": "'2'", "MASTER_ADDR": "h", "MASTER_PORT": "23456"},
            "RANK is not set, and WORLD_SIZE=2",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "8"}, "OMPI_COMM_WORLD_RANK is not set"),
        ({"PMI_SIZE": "8"}, "PMI_RANK is not set"),
        ({"PADDLE_TRAINERS_NUM": "2"}, "PADDLE_TRAINER_ID is not set"),
        (
            {"VC_WORKER_HOSTS": "a.job,b.job"},
            "VC_TASK_INDEX is not set, and VC_WORKER_HOSTS lists 2",
        ),
    ],
)
def test_a_count_of_several_that_says_not_which_one_is_refused(
    environ: dict[str, str], words: str
) -> None:
    finding = detect(environ)
    assert finding.place is None
    assert words in finding.conflicts[0]


@pytest.mark.parametrize(
    "environ",
    [
        {"WORLD_SIZE": "1"},
        {"WORLD_SIZE": "many"},
        {"VC_WORKER_HOSTS": "a.job"},
        {"MASTER_ADDR": "h"},
    ],
)
def test_what_counts_nobody_else_is_no_job(environ: dict[str, str]) -> None:
    assert detect(environ).sound
    assert detect(environ).place is None


def test_a_count_that_is_exported_for_a_step_is_no_conflict_in_it() -> None:
    environ = {
        "CLUSTERJOB_NNODES": "1",
        "CLUSTERJOB_NODE_RANK": "0",
        "CLUSTERJOB_MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": "16",
    }
    assert detect(environ).level == "node"


def test_a_rank_beyond_the_world_is_named_with_its_variables() -> None:
    environ = {
        "RANK": "2",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "29500",
    }
    assert detect(environ).conflicts == ("RANK: rank is 2, outside 0..1 (WORLD_SIZE=2)",)


def test_a_number_that_is_impossible_is_named_with_its_variable() -> None:
    environ = dict(EVERY["mlp"][0]) | {"MLP_ROLE_INDEX": "7"}
    assert detect(environ).conflicts[0].startswith("MLP_ROLE_INDEX: node_rank is 7, outside 0..")
