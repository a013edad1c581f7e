"""The families of environment variables, in the order in which they apply.

A row of `FAMILIES` names a family, the variables that show it, and the variables of its fields. A
family with logic of its own has a function too, which completes the finding. No function reads a
file, a socket or a clock: `this_node.look_up` adds what variables point at to the mapping.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from clusterjob.node.environments import slurm_env
from clusterjob.node.environments.topology import (
    NOWHERE,
    OWN_MASTER,
    Finding,
    Topology,
    Worker,
    candidate_ports,
)

# Keys under which `this_node.look_up` adds values. They are no names of variables.
FLUX_HOSTS = "flux hostlist local"  # the output of this command
HYDRA_PROXY = "PMI_FD peer"  # pid of the proxy that started this node's processes
PALS_FIRST_NODE = "PBS_NODEFILE first"  # first line of the file

MPIRUN_ADDRESS = "OMPI_MCA_orte_hnp_uri"  # rank 0 runs on mpirun's host by default
_VOLCANO_HOSTS = re.compile(r"VC_(\w+)_HOSTS\Z")

# RANK alone counts nodes on several platforms; with one of these variables it counts processes.
_OF_A_PROCESS = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID")
_MLP_ROLES = ("WORKER", "CHIEF", "PS", "SERVER", "SCHEDULER", "EVALUATOR")
_MLP_SIGNS = " ".join(
    ["MLP_ROLE", "MLP_ROLE_INDEX"]
    + [f"MLP_{role}_{what}" for role in _MLP_ROLES for what in ("NUM", "0_HOST", "0_PRIMARY_HOST")]
)


# -- what most families have in common -------------------------------------------------------------


def _node(
    found: Finding,
    *,
    addr: str = "MASTER_ADDR",
    port: str = "MASTER_PORT",
    hosts: str = "",
) -> Topology | None:
    """Return the placement of a node whose numbers have been read.

    Args:
        found: the variables.
        addr: the variable of node 0's host.
        port: the variable of the rendezvous port.
        hosts: the variable that lists the nodes, node 0 first; empty if there is none.
    """
    listed = found.hosts(hosts)
    if listed:
        found.numbers.setdefault("nnodes", len(listed))
    found.find_master(addr, port, first=(hosts, listed[0] if listed else ""), missing=hosts or addr)
    found.check_count(hosts, listed)
    return found.node()


def _process(
    found: Finding, *, first: tuple[str, str] = ("", ""), job: str = "", key: str = ""
) -> Worker | None:
    """Return the placement of a process whose numbers have been read.

    Args:
        found: the variables.
        first: a variable that names rank 0's host, and this host, as for `Finding.find_master`.
        job: a variable that only the processes of this launch share. If no variable gives a port,
            it is computed from this one. Empty if there is none; MASTER_PORT is then required.
        key: the text to compute the port from; by default the value of ``job``.
    """
    found.find_master(first=first)
    if "master_port" not in found.numbers and not found.is_set("MASTER_PORT"):
        key = key or found.value(job)
        if key:
            found.numbers["master_port"] = candidate_ports(f"{found.source} {key}", 0)[0]
            found.evidence["master_port"] = job
        elif not job:
            found.conflicts.append("MASTER_PORT is not set (master_port)")
    return found.worker()


@dataclass(frozen=True)
class Family:
    """A family of variables that one launcher or platform sets.

    Attributes:
        source: the name of the family in a finding.
        signs: variables, with spaces between them; one of them is set if the family applies. Empty
            if `applies` tells alone.
        fields: the variable of each number. With several, the first that is set is used.
        optional: the same for numbers that need not be set.
        complete: the function that returns the placement once the fields have been read. None
            means conflicts, or no placement.
        applies: whether the family applies although the signs may be those of another one.
        is_platform: whether the family is a platform, which starts one command per node. A machine
            belongs to one platform, so two platforms that disagree are a conflict.
    """

    source: str
    signs: str
    fields: dict[str, str] = field(default_factory=dict)
    optional: dict[str, str] = field(default_factory=dict)
    complete: Callable[[Finding], Topology | Worker | None] = _node
    applies: Callable[[Finding], bool] = lambda _found: True
    is_platform: bool = False

    def detect(self, environ: Mapping[str, str]) -> Finding:
        """Return the family's finding; its source is ``none`` if the family does not apply.

        Args:
            environ: the variables, and the values that `this_node.look_up` adds.
        """
        found = Finding(self.source, environ)
        signs = self.signs.split()
        if (found.is_set(*signs) or not signs) and self.applies(found):
            self.read(found)
        if found.placement is None and not found.conflicts:
            found.source = NOWHERE
        return found

    def read(self, found: Finding) -> Finding:
        """Read the placement from the family's variables; missing ones are conflicts."""
        for name, variables in (self.fields | self.optional).items():
            # One node needs no index.
            required = name in self.fields and not (name == "node_rank" and found.alone)
            found.number(name, *variables.split(), required=required)
        found.placement = self.complete(found)
        return found


# -- processes -------------------------------------------------------------------------------------


def _is_torch(found: Finding) -> bool:
    of_step = found.value(slurm_env.TASK_RANK)
    if of_step and of_step == found.value("RANK") and not found.is_set("TORCHELASTIC_RUN_ID"):
        return False  # the step's own variables contain the same and more
    return found.is_set("LOCAL_RANK") or (found.is_set("RANK") and found.is_set(*_OF_A_PROCESS))


def _torch(found: Finding) -> Worker | None:
    """Read the variables of torchrun and of clusterjob's agent.

    Source: torch's documentation of torchrun ("Environment Variables"),
    https://docs.pytorch.org/docs/stable/elastic/run.html
    """
    if found.environ.get("CLUSTERJOB_JOB_ID") and found.environ.get("CLUSTERJOB_REPORT_FD"):
        found.source = "clusterjob"
    elif found.environ.get("TORCHELASTIC_RUN_ID"):
        found.source = "torchrun"
    found.host("MASTER_ADDR")
    if found.conflicts:
        return None
    numbers = found.numbers
    rank, world_size, nnodes = numbers["rank"], numbers["world_size"], numbers.get("nnodes") or 1
    is_on_one = nnodes == 1 and "local_world_size" not in numbers
    if is_on_one and rank < world_size and rank != numbers["local_rank"]:
        # On a single node RANK would equal LOCAL_RANK. So the job has several nodes, and the number
        # of workers on each is unknown.
        found.conflicts.append(
            "LOCAL_WORLD_SIZE is not set (local_world_size), and RANK differs from LOCAL_RANK"
        )
    size = numbers.setdefault("local_world_size", max(1, world_size // nnodes))
    # Not more nodes for a wrong WORLD_SIZE: the rendezvous of ranks names it.
    numbers.setdefault("nnodes", max(1, world_size // max(1, size)))
    return found.worker()


def _pals(found: Finding) -> Worker | None:
    """Read the variables of PALS, HPE Cray's launcher under PBS.

    PBS_NODEFILE names a file with one host per line; the first host has rank 0. Source: aprun(1)
    and mpiexec(1) of HPE's PALS, and https://docs.alcf.anl.gov/polaris/running-jobs/
    """
    return _process(
        found,
        first=("PBS_NODEFILE", found.value(PALS_FIRST_NODE)),
        job=found.first_set("PALS_APID", "PBS_JOBID"),
    )


def _flux(found: Finding) -> Worker | None:
    """Read the variables of ``flux run``.

    No variable contains the hosts; ``flux hostlist local`` prints them. Flux does not set the
    number of tasks per node; it spreads them evenly. Source: flux-environment(7),
    https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man7/flux-environment.html
    """
    world_size, nnodes = found.numbers.get("world_size"), found.numbers.get("nnodes")
    if world_size is None or nnodes is None:
        return None
    found.numbers["local_world_size"] = world_size // max(1, nnodes)
    if nnodes and world_size % nnodes:
        found.conflicts.append(
            f"FLUX_JOB_SIZE={world_size} is not a multiple of FLUX_JOB_NNODES={nnodes}: no "
            "variable gives the number of tasks of each node"
        )
    hosts = [] if found.is_set("MASTER_ADDR") else found.hostlist(FLUX_HOSTS)
    return _process(found, first=(FLUX_HOSTS, hosts[0] if hosts else ""), job="FLUX_JOB_ID")


def _openmpi(found: Finding) -> Worker | None:
    """Read the variables of Open MPI's mpirun.

    Azure ML and SageMaker also start mpirun; they add variables with the master's address.
    OMPI_COMM_WORLD_NODE_RANK is the index of the process on its node, not of the node. Source: Open
    MPI's FAQ, "Running MPI jobs",
    https://www.open-mpi.org/faq/?category=running#mpi-environmental-variables, and dumps of Open
    MPI 4.1.4. For Azure ML:
    https://learn.microsoft.com/azure/machine-learning/how-to-train-distributed-gpu#mpi
    """
    hosts = _sagemaker_hosts(found) if found.is_set("SM_HOSTS", "SM_CURRENT_HOST") else []
    batch = found.first_set("AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE")
    mpirun = found.value(MPIRUN_ADDRESS)
    first = ("", "")
    if found.is_set(batch):
        if not found.is_set("MASTER_ADDR"):
            found.endpoint(batch)
        first = (batch, found.master_addr)
    elif hosts:
        first = ("SM_HOSTS", hosts[0])
    elif not found.alone:
        # Such as ``1234.0;tcp://10.0.0.1,172.17.0.1:41234``.
        host = re.search(r"tcp6?://\[?([^,;\]/]+?)\]?(?:,[^;]*)?:\d+(?:;|$)", mpirun)
        first = (MPIRUN_ADDRESS, host[1]) if host else first
    job = found.first_set("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", MPIRUN_ADDRESS)
    key = f"{mpirun} {found.value(job)}" if found.is_set(job) else ""
    return _process(found, first=first, job=job, key=key)


def _hydra(found: Finding) -> Worker | None:
    """Read the variables of Hydra's mpiexec, as in MPICH, Intel MPI and related MPIs.

    PMI_RANK alone is ambiguous: srun, Flux and PALS set it for their tasks too. Only Hydra sets
    MPI_LOCALRANKID. Source: the documentation of Intel MPI, "Global Hydra Environment Variables",
    and dumps of MPICH 4.0.2.
    """
    peer = found.value(HYDRA_PROXY) if found.alone else ""
    return _process(found, job="PMI_FD" if peer else "", key=peer)


# -- nodes -----------------------------------------------------------------------------------------


def _kubeflow(found: Finding) -> Topology | None:
    """Read the variables of Kubeflow's trainer v2, which are torchrun's options with PET_.

    Source: pkg/constants/constants.go of https://github.com/kubeflow/trainer, and
    torch/distributed/run.py: each option has a PET_ variable.
    """
    nodes = found.text("nnodes", "PET_NNODES")
    least, colon, most = nodes.partition(":")
    if colon and least.strip() != most.strip():
        found.conflicts.append(
            f"PET_NNODES={nodes[:80]!r} is elastic: the number of nodes must be fixed"
        )
    elif nodes:
        found.as_number("nnodes", "PET_NNODES", least.strip())
    found.number("node_rank", "PET_NODE_RANK", required=not found.alone)
    nproc = found.first_set("PET_NPROC_PER_NODE", "PET_N_PROC_PER_NODE")
    if found.value(nproc).lower() in ("auto", "gpu", "cpu", "xpu"):
        found.ignore("launch counts the devices itself, as torchrun does", nproc)
    else:
        found.number("nproc_per_node", nproc, required=False)
    if found.is_set("PET_MASTER_ADDR") or not found.is_set("PET_RDZV_ENDPOINT"):
        return _node(found, addr="PET_MASTER_ADDR", port="PET_MASTER_PORT")
    found.endpoint("PET_RDZV_ENDPOINT")
    found.number("master_port", "PET_MASTER_PORT", required=False)
    return found.node()


def _is_volcano(found: Finding) -> bool:
    return found.is_set("VC_TASK_INDEX", "VK_TASK_INDEX") or any(
        len(found.hosts(name)) > 1 for name in filter(_VOLCANO_HOSTS.match, found.environ)
    )


def _volcano(found: Finding) -> Topology | None:
    """Read the variables of Volcano, whose svc and env plugins list the hosts of each task.

    The variables are VC_<TASK>_HOSTS, VC_<TASK>_NUM and VC_TASK_INDEX. Source:
    https://github.com/volcano-sh/volcano/blob/master/docs/user-guide/how_to_use_svc_plugin.md and
    how_to_use_env_plugin.md
    """
    lists = [
        name for name in sorted(found.environ) if _VOLCANO_HOSTS.match(name) and found.is_set(name)
    ]
    if len(lists) > 1:
        found.conflicts.append(
            f"{' and '.join(lists)} list several tasks, and no variable counts the nodes across "
            "them: Volcano's pytorch plugin sets RANK and WORLD_SIZE"
        )
        return None
    hosts = lists[0] if lists else "VC_WORKER_HOSTS"
    found.text("nnodes", hosts)
    found.number("nnodes", hosts.removesuffix("_HOSTS") + "_NUM", required=False)
    return _node(found, hosts=hosts)


def _sagemaker(found: Finding) -> Topology | None:
    hosts = _sagemaker_hosts(found)
    if hosts:
        found.find_master(first=("SM_HOSTS", hosts[0]))
    return found.node()


def _sagemaker_hosts(found: Finding) -> list[str]:
    """Return SageMaker's hosts, and read their number and this host's index among them.

    Source: https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md
    """
    text = found.text("nnodes", "SM_HOSTS")
    own = found.text("node_rank", "SM_CURRENT_HOST")
    listed = re.fullmatch(r'\[((?:"[^"]+",?)+)\]', "".join(text.split()), re.ASCII)
    hosts = listed[1].replace('"', "").split(",") if listed else []
    if text and not hosts:
        found.conflicts.append(f"SM_HOSTS={text[:80]!r} is not a JSON list of hosts")
    elif hosts and own and own not in hosts:
        found.conflicts.append(f"SM_CURRENT_HOST={own[:80]!r} is not in SM_HOSTS")
    elif hosts and own:
        found.numbers |= {"nnodes": len(hosts), "node_rank": hosts.index(own)}
    return hosts


def _mlp(found: Finding) -> Topology | None:
    """Read the variables of Volcengine's machine learning platform (MLP) or a compatible one.

    The platform sets MLP_ROLE, MLP_ROLE_INDEX and, for each role, the number of nodes, their GPUs,
    hosts and ports. MLP_{ROLE}_{i}_HOST is the RDMA address if the node has RDMA. _PRIMARY_HOST is
    always the VPC address, which is right for TCP. MLP_{ROLE}_RACK_RANK_INDEX orders the nodes by
    switch. All nodes must use the same index; the agents check this at the rendezvous.

    Source: the platform's documentation of its environment variables,
    https://www.volcengine.com/docs/6459/96563
    """
    role = _mlp_role(found)
    if role not in _MLP_ROLES:
        found.conflicts.append(f"MLP_ROLE={role[:80]!r} is none of {', '.join(_MLP_ROLES)}")
        return None
    found.number("nnodes", f"MLP_{role}_NUM")
    _read_index(found, f"MLP_{role}_RACK_RANK_INDEX")
    found.number("nproc_per_node", f"MLP_{role}_GPU", required=False)
    host, primary = f"MLP_{role}_0_HOST", f"MLP_{role}_0_PRIMARY_HOST"
    found.find_master(found.first_set(primary, host), f"MLP_{role}_0_PORT", missing=host)
    if found.is_set(primary):
        found.ignore(
            f"{primary} is the VPC address, which is right for TCP; this may be an RDMA address",
            host,
        )
    _refuse_other_kinds(found, role)
    return found.node()


def mlp_peers(environ: Mapping[str, str], nnodes: int) -> list[str]:
    """Return the names and addresses of all nodes; empty if the variables do not give them all."""
    found = Finding("mlp", environ)
    role = _mlp_role(found)
    lists = []
    for kind in ("HOST", "PRIMARY_HOST"):
        each = (found.hosts(f"MLP_{role}_{node}_{kind}") for node in range(nnodes))
        lists += [found.hosts(f"MLP_{role}_ALL_{kind}S"), [*itertools.chain.from_iterable(each)]]
    are_all = any(len(hosts) >= nnodes for hosts in lists)
    return list(dict.fromkeys(itertools.chain.from_iterable(lists))) if are_all else []


def _mlp_role(found: Finding) -> str:
    return (found.value("MLP_ROLE") or "WORKER").upper()


def _read_index(found: Finding, by_rack: str) -> None:
    own = found.number("node_rank", "MLP_ROLE_INDEX", required=not found.is_set(by_rack))
    if not found.is_set(by_rack):
        return
    index = found.number("node_rank", by_rack)
    if own is not None and index is not None and (own == 0) != (index == 0):
        # All nodes use the address of worker 0, so it must be the first in both orders.
        found.conflicts.append(f"MLP_ROLE_INDEX={own} and {by_rack}={index} disagree about node 0")
    else:
        found.ignore(
            f"{by_rack} orders the nodes by switch; all nodes have to use the same index",
            "MLP_ROLE_INDEX",
        )


def _refuse_other_kinds(found: Finding, role: str) -> None:
    """Refuse roles and kinds of tasks in which nodes would train alone without an error."""
    workers = found.value("MLP_WORKER_NUM")
    if role != "WORKER" and workers not in ("", "0"):
        found.conflicts.append(
            f"MLP_ROLE={role}, but MLP_WORKER_NUM={workers}: only nodes with the role worker train"
        )
    hosts = found.hosts("MLP_MPI_HOSTS")
    if len(hosts) > 1:
        port = found.value("MLP_SSH_PORT")
        found.conflicts.append(
            "MLP_MPI_HOSTS is set: a task of the MPI kind runs its entry command on worker 0 "
            f"alone, but there are {len(hosts)} hosts. "
            "Choose the kind PyTorchDDP or Custom, or start `clusterjob run --cluster ssh "
            "--hostfile $MLP_MPI_HOSTFILE`" + (f" (SSH listens on port {port[:9]})" if port else "")
        )


# -- the table -------------------------------------------------------------------------------------

# The first family that applies wins. The launcher nearest to the process comes first.
FAMILIES = (
    # torchrun may run inside clusterjob, Slurm, MPI or a platform; then its variables apply.
    Family(
        "env",
        "LOCAL_RANK RANK",
        {
            "rank": "RANK",
            "world_size": "WORLD_SIZE",
            "local_rank": "LOCAL_RANK",
            "master_port": "MASTER_PORT",
        },
        {
            "local_world_size": "LOCAL_WORLD_SIZE",
            "node_rank": "GROUP_RANK",
            "nnodes": "GROUP_WORLD_SIZE",
        },
        _torch,
        _is_torch,
    ),
    # The rendered script sets more values for this job than the platform that runs the script.
    # Users may set the variables too, on bare machines.
    Family(
        "clusterjob",
        "CLUSTERJOB_NNODES CLUSTERJOB_NODE_RANK",
        {"nnodes": "CLUSTERJOB_NNODES", "node_rank": "CLUSTERJOB_NODE_RANK"},
        {"nproc_per_node": "CLUSTERJOB_NPROC_PER_NODE"},
        partial(_node, addr=OWN_MASTER, port="CLUSTERJOB_MASTER_PORT"),
    ),
    # PALS and Flux also set variables of PMI. Their own variables say more.
    Family(
        "pals",
        "PALS_RANKID PALS_LOCAL_RANKID",
        {
            "rank": "PALS_RANKID",
            "world_size": "PMI_SIZE PALS_SIZE",
            "local_rank": "PALS_LOCAL_RANKID",
            "local_world_size": "PALS_LOCAL_SIZE PMI_LOCAL_SIZE",
        },
        {"node_rank": "PALS_NODEID"},
        _pals,
    ),
    Family(
        "flux",
        "FLUX_TASK_RANK FLUX_TASK_LOCAL_ID",
        {
            "rank": "FLUX_TASK_RANK",
            "world_size": "FLUX_JOB_SIZE",
            "local_rank": "FLUX_TASK_LOCAL_ID",
            "nnodes": "FLUX_JOB_NNODES",
        },
        complete=_flux,
    ),
    # mpirun's processes inherit the variables of the platform and of the Slurm step of its daemons.
    Family(
        "openmpi",
        "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK",
        {
            "rank": "OMPI_COMM_WORLD_RANK",
            "world_size": "OMPI_COMM_WORLD_SIZE",
            "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
            "local_world_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
        },
        complete=_openmpi,
    ),
    # MVAPICH2's launchers also set Hydra's PMI_RANK. Their own variables say more. Source:
    # https://mvapich.cse.ohio-state.edu/static/media/mvapich/mvapich2-userguide.html
    Family(
        "mvapich2",
        "MV2_COMM_WORLD_RANK MV2_COMM_WORLD_LOCAL_RANK",
        {
            "rank": "MV2_COMM_WORLD_RANK",
            "world_size": "MV2_COMM_WORLD_SIZE",
            "local_rank": "MV2_COMM_WORLD_LOCAL_RANK",
            "local_world_size": "MV2_COMM_WORLD_LOCAL_SIZE",
        },
        complete=_process,
    ),
    Family(
        "hydra",
        "MPI_LOCALRANKID PMI_RANK",
        {
            "rank": "PMI_RANK",
            "world_size": "PMI_SIZE",
            "local_rank": "MPI_LOCALRANKID",
            "local_world_size": "MPI_LOCALNRANKS",
        },
        complete=_hydra,
        applies=lambda found: found.is_set("MPI_LOCALRANKID") or not found.is_set("SLURM_STEP_ID"),
    ),
    # A step's variables describe this task; a platform's variables describe its machine.
    Family(
        slurm_env.SOURCE,
        slurm_env.SIGNS,
        {"nnodes": "SLURM_STEP_NUM_NODES", "node_rank": "SLURM_NODEID"},
        complete=slurm_env.place,
        applies=slurm_env.is_step,
    ),
    # Platforms come next; they start one command per node. A machine belongs to one platform, so
    # two platforms that disagree are a conflict.
    Family("mlp", _MLP_SIGNS, complete=_mlp, is_platform=True),
    # PET_ variables without RANK belong to trainer v2. Trainer v1 sets RANK too.
    Family("kubeflow", "PET_NNODES PET_NODE_RANK", complete=_kubeflow, is_platform=True),
    # Huawei's ModelArts runs on Volcano and has its own host count. Source:
    # https://support.huaweicloud.com/intl/en-us/develop-modelarts/develop-modelarts-0120.html
    Family(
        "modelarts",
        "MA_NUM_HOSTS",
        {"nnodes": "MA_NUM_HOSTS", "node_rank": "VC_TASK_INDEX"},
        {"nproc_per_node": "MA_NUM_GPUS"},
        partial(_node, hosts="VC_WORKER_HOSTS"),
        is_platform=True,
    ),
    # RANK and WORLD_SIZE count nodes under Kubeflow's PyTorchJob v1, Volcano's pytorch plugin, PAI
    # DLC and Baidu's AIHC; with LOCAL_RANK they count processes. Sources:
    # https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/pytorch/,
    # https://volcano.sh/en/docs/pytorch_on_volcano/,
    # https://help.aliyun.com/zh/pai/user-guide/built-in-environment-variables,
    # https://cloud.baidu.com/doc/AIHC/index.html
    # RANK without LOCAL_RANK is ambiguous, so more specific families come first. Volcano's index
    # comes later: it counts the pods of one task of the job, and RANK counts those of all tasks.
    Family(
        "nodes",
        "RANK",
        {"node_rank": "RANK", "nnodes": "WORLD_SIZE"},
        {"nproc_per_node": "NPROC_PER_NODE"},
        applies=lambda found: not found.is_set("LOCAL_RANK"),
        is_platform=True,
    ),
    Family(
        "volcano",
        "",
        {"node_rank": "VC_TASK_INDEX VK_TASK_INDEX"},
        {"nproc_per_node": "NPROC_PER_NODE"},
        _volcano,
        _is_volcano,
        is_platform=True,
    ),
    # Source: https://docs.skypilot.co/en/latest/running-jobs/environment-variables.html
    Family(
        "skypilot",
        "SKYPILOT_NODE_RANK SKYPILOT_NUM_NODES SKYPILOT_NODE_IPS",
        {"nnodes": "SKYPILOT_NUM_NODES", "node_rank": "SKYPILOT_NODE_RANK"},
        {"nproc_per_node": "SKYPILOT_NUM_GPUS_PER_NODE"},
        partial(_node, hosts="SKYPILOT_NODE_IPS"),
        is_platform=True,
    ),
    # `_openmpi` reads SageMaker's MPI jobs; SageMaker's other jobs run one command per host.
    Family(
        "sagemaker",
        "SM_HOSTS SM_CURRENT_HOST",
        optional={"nproc_per_node": "SM_NUM_GPUS"},
        complete=_sagemaker,
        is_platform=True,
    ),
)
TORCH = FAMILIES[0]
