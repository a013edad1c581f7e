"""The families of environment variables, in the order in which they apply.

A row of `FAMILIES` names a family, the variables that show it, and the variables of its fields. A
family with logic of its own has a function too, which completes the reading. No function reads a
file, a socket or a clock: `detection.look_up` adds what variables point at to the mapping.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from clusterjob.node.environments import mlp_env, slurm_env
from clusterjob.node.environments.topology import (
    Finding,
    Reading,
    Topology,
    Worker,
    candidate_ports,
)

# Keys under which `detection.look_up` adds values. They are no names of variables.
FLUX_HOSTS = "flux hostlist local"  # the output of this command
HYDRA_PROXY = "PMI_FD peer"  # pid of the proxy that started this node's processes
LSF_RANKFILE = "LSB_DJOB_RANKFILE lines"  # content of the file
LSF_OWN_NAME = "this host"
PALS_FIRST_NODE = "PBS_NODEFILE first"  # first line of the file

MPIRUN_ADDRESS = "OMPI_MCA_orte_hnp_uri"  # rank 0 runs on mpirun's host by default
VOLCANO_HOSTS = re.compile(r"VC_(\w+)_HOSTS\Z")

# RANK alone counts nodes on several platforms; with one of these variables it counts processes.
_OF_A_PROCESS = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID")
# The agents of these launchers have used MASTER_ADDR already, so a loopback address is right.
_AGENTS_CONNECTED = ("clusterjob", "torchrun")
# Prefixes of variables that identify a platform on which RANK counts nodes.
_RANK_PLATFORMS = (
    ("pai", ("DLC_", "PAI_")),
    ("aihc", ("AIHC_",)),
    ("volcano", ("VC_", "VK_TASK_INDEX", "VOLCANO_")),
    ("pytorchjob", ("PET_",)),
)


# -- what most families have in common -------------------------------------------------------------


def _node(
    reading: Reading,
    *,
    addr: str = "MASTER_ADDR",
    port: str = "MASTER_PORT",
    hosts: str = "",
    by_platform: bool = True,
) -> Topology | None:
    """Return the placement of a node whose numbers have been read.

    Args:
        reading: the variables.
        addr: the variable of node 0's host.
        port: the variable of the rendezvous port.
        hosts: the variable that lists the nodes, node 0 first; empty if there is none.
        by_platform: as for `Reading.node`.
    """
    listed = reading.hosts(hosts)
    reading.find_master(
        addr, port, first=(hosts, listed[0] if listed else ""), missing=hosts or addr
    )
    nnodes = reading.numbers.get("nnodes")
    if listed and nnodes not in (None, len(listed)):
        reading.conflicts.append(
            f"{hosts} lists {len(listed)} hosts, {reading.evidence['nnodes']} is {nnodes}"
        )
    return reading.node(by_platform=by_platform)


def _process(
    reading: Reading, *, first: tuple[str, str] = ("", ""), job: str = "", key: str = ""
) -> Worker | None:
    """Return the placement of a process whose numbers have been read.

    Args:
        reading: the variables.
        first: a variable that names rank 0's host, and this host, as for `Reading.find_master`.
        job: a variable that only the processes of this launch share. If no variable gives a port,
            it is computed from this one. Empty if there is none; MASTER_PORT is then required.
        key: the text to compute the port from; by default the value of ``job``.
    """
    reading.find_master(first=first)
    if "master_port" not in reading.numbers and not reading.is_set("MASTER_PORT"):
        key = key or reading.value(job)
        if key:
            reading.numbers["master_port"] = candidate_ports(f"{reading.source} {key}", 0)[0]
            reading.evidence["master_port"] = job
        elif not job:
            reading.conflicts.append("MASTER_PORT is not set (master_port)")
    return reading.worker()


@dataclass(frozen=True)
class Family:
    """A family of variables that one launcher or platform sets.

    Attributes:
        source: the name of the family in a finding.
        signs: variables, with spaces between them; one of them is set if the family applies.
        fields: the variable of each number. With several, the first that is set is used.
            All but ``nproc_per_node`` are required.
        complete: the function that returns the placement once the fields have been read. None
            means conflicts, or no placement.
        applies: whether the family applies although the signs may be those of another one.
        is_platform: whether the family is a platform, which starts one command per node. A machine
            belongs to one platform, so two platforms that disagree are a conflict.
        quoted: whether values may have quotes around them.
    """

    source: str
    signs: str
    fields: Mapping[str, str] = field(default_factory=dict)
    complete: Callable[[Reading], Topology | Worker | None] = _node
    applies: Callable[[Reading], bool] = lambda _reading: True
    is_platform: bool = False
    quoted: bool = False

    def detect(self, environ: Mapping[str, str]) -> Finding:
        """Return the family's finding; its source is ``none`` if the family does not apply.

        Args:
            environ: the variables, and the values that `detection.look_up` adds.
        """
        return Reading(environ, self.source, quoted=self.quoted).finding(self._place)

    def _place(self, reading: Reading) -> Topology | Worker | None:
        if not reading.is_set(*self.signs.split()) or not self.applies(reading):
            return None
        for name, variables in self.fields.items():
            reading.number(name, *variables.split(), required=name != "nproc_per_node")
        return self.complete(reading)


# -- processes -------------------------------------------------------------------------------------


def _is_torch(reading: Reading) -> bool:
    of_step = reading.value(slurm_env.TASK_RANK)
    if of_step and of_step == reading.value("RANK") and not reading.is_set("TORCHELASTIC_RUN_ID"):
        return False  # the step's own variables contain the same and more
    return reading.is_set("LOCAL_RANK") or (
        reading.is_set("RANK") and reading.is_set(*_OF_A_PROCESS)
    )


def _torch(reading: Reading) -> Worker | None:
    """Read the variables of torchrun and of clusterjob's agent.

    Source: torch's documentation of torchrun ("Environment Variables"),
    https://docs.pytorch.org/docs/stable/elastic/run.html
    """
    if reading.environ.get("CLUSTERJOB_JOB_ID") and reading.environ.get("CLUSTERJOB_REPORT_FD"):
        reading.source = "clusterjob"
    elif reading.environ.get("TORCHELASTIC_RUN_ID"):
        reading.source = "torchrun"
    numbers = reading.numbers
    rank = reading.number("rank", "RANK")
    world_size = reading.number("world_size", "WORLD_SIZE")
    local_rank = reading.number("local_rank", "LOCAL_RANK")
    reading.host("MASTER_ADDR")
    reading.number("master_port", "MASTER_PORT")
    reading.number("local_world_size", "LOCAL_WORLD_SIZE", required=False)
    reading.number("node_rank", "GROUP_RANK", required=False)
    nnodes = reading.number("nnodes", "GROUP_WORLD_SIZE", required=False) or 1
    if reading.conflicts or rank is None or world_size is None:
        return None
    if rank >= world_size > 0:
        reading.conflicts.append(
            f"RANK: rank is {rank}, outside 0..{world_size - 1} (WORLD_SIZE={world_size})"
        )
    elif "local_world_size" not in numbers and nnodes == 1 and rank != local_rank:
        # On a single node RANK would equal LOCAL_RANK. So the job has several nodes, and the number
        # of workers on each is unknown.
        reading.conflicts.append(
            "LOCAL_WORLD_SIZE is not set (local_world_size), and RANK differs from LOCAL_RANK"
        )
    size = max(1, numbers.setdefault("local_world_size", max(1, world_size // nnodes)))
    numbers.setdefault("nnodes", max(1, world_size // size))
    numbers.setdefault("node_rank", rank // size)
    return reading.worker(refuse_loopback=reading.source not in _AGENTS_CONNECTED)


def read_torch(environ: Mapping[str, str]) -> Finding:
    """Return the rank assignment from torch's variables; missing ones are conflicts."""
    return Reading(environ, "env").finding(_torch)


def _lsf(reading: Reading) -> Worker | None:
    """Read the variables of IBM's jsrun under LSF.

    LSB_DJOB_RANKFILE names a file with one host per line. The first host is the launch node, which
    is not a node of the job. LSB_MCPU_HOSTS contains the same list:
    ``launch 1 host1 42 host2 42``. Source: IBM's documentation of LSF, "Environment variables set
    for job execution", and Lightning's LSF environment,
    lightning/fabric/plugins/environments/lsf.py.
    """
    numbers = reading.numbers
    variable, hosts = "LSB_DJOB_RANKFILE", reading.value(LSF_RANKFILE).split()[1:]
    if not reading.is_set(LSF_RANKFILE):
        variable, hosts = "LSB_MCPU_HOSTS", reading.value("LSB_MCPU_HOSTS").split()[2::2]
    nodes = list(dict.fromkeys(hosts))
    size, world_size = "JSM_NAMESPACE_LOCAL_SIZE", numbers.get("world_size")
    is_even = world_size is not None and nodes and world_size % len(nodes) == 0
    reading.number("local_world_size", size, required=not is_even)
    if world_size is not None and is_even and not reading.is_set(size):
        numbers["local_world_size"] = world_size // len(nodes)  # jsrun fills resource sets evenly
    first = (variable, nodes[0]) if nodes and not reading.alone else ("", "")
    if nodes:
        numbers["nnodes"], reading.evidence["nnodes"] = len(nodes), variable
    if reading.value(LSF_OWN_NAME) in nodes:
        numbers["node_rank"] = nodes.index(reading.value(LSF_OWN_NAME))
    if not reading.is_set("MASTER_PORT"):
        job = reading.number("master_port", "LSB_JOBID", required=False)
        numbers |= {} if job is None else {"master_port": job % 1000 + 10000}
    return _process(reading, first=first)


def _pals(reading: Reading) -> Worker | None:
    """Read the variables of PALS, HPE Cray's launcher under PBS.

    PBS_NODEFILE names a file with one host per line; the first host has rank 0. Source: aprun(1)
    and mpiexec(1) of HPE's PALS, and https://docs.alcf.anl.gov/polaris/running-jobs/
    """
    reading.number("node_rank", "PALS_NODEID", required=False)
    return _process(
        reading,
        first=("PBS_NODEFILE", reading.value(PALS_FIRST_NODE)),
        job=reading.first_set("PALS_APID", "PBS_JOBID"),
    )


def _flux(reading: Reading) -> Worker | None:
    """Read the variables of ``flux run``.

    No variable contains the hosts; ``flux hostlist local`` prints them. Flux does not set the
    number of tasks per node; it spreads them evenly. Source: flux-environment(7),
    https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man7/flux-environment.html
    """
    world_size, nnodes = reading.numbers.get("world_size"), reading.numbers.get("nnodes")
    if world_size is None or nnodes is None:
        return None
    reading.numbers["local_world_size"] = world_size // max(1, nnodes)
    if nnodes and world_size % nnodes:
        reading.conflicts.append(
            f"FLUX_JOB_SIZE={world_size} is not a multiple of FLUX_JOB_NNODES={nnodes}: no "
            "variable gives the number of tasks of each node"
        )
    hosts = [] if reading.is_set("MASTER_ADDR") else reading.hostlist(FLUX_HOSTS)
    return _process(reading, first=(FLUX_HOSTS, hosts[0] if hosts else ""), job="FLUX_JOB_ID")


def _openmpi(reading: Reading) -> Worker | None:
    """Read the variables of Open MPI's mpirun.

    Azure ML and SageMaker also start mpirun; they add variables with the master's address.
    OMPI_COMM_WORLD_NODE_RANK is the index of the process on its node, not of the node. Source: Open
    MPI's FAQ, "Running MPI jobs",
    https://www.open-mpi.org/faq/?category=running#mpi-environmental-variables, and dumps of Open
    MPI 4.1.4. For Azure ML:
    https://learn.microsoft.com/azure/machine-learning/how-to-train-distributed-gpu#mpi
    """
    hosts = _sagemaker_hosts(reading) if reading.is_set("SM_HOSTS", "SM_CURRENT_HOST") else []
    batch = reading.first_set("AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE")
    mpirun = reading.value(MPIRUN_ADDRESS)
    first = ("", "")
    if reading.is_set(batch):
        if not reading.is_set("MASTER_ADDR"):
            reading.endpoint(batch, reading.value(batch))
        first = (batch, reading.master_addr)
    elif hosts:
        first = ("SM_HOSTS", hosts[0])
    elif not reading.alone:
        # Such as ``1234.0;tcp://10.0.0.1,172.17.0.1:41234``.
        found = re.search(r"tcp6?://\[?([^,;\]/]+?)\]?(?:,[^;]*)?:\d+(?:;|$)", mpirun)
        first = (MPIRUN_ADDRESS, found[1]) if found else first
    job = reading.first_set("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", MPIRUN_ADDRESS)
    key = f"{mpirun} {reading.value(job)}" if reading.is_set(job) else ""
    return _process(reading, first=first, job=job, key=key)


def _is_hydra(reading: Reading) -> bool:
    return reading.is_set("MPI_LOCALRANKID") or not reading.is_set("SLURM_STEP_ID")


def _hydra(reading: Reading) -> Worker | None:
    """Read the variables of Hydra's mpiexec, as in MPICH, Intel MPI and related MPIs.

    PMI_RANK alone is ambiguous: srun, Flux and PALS set it for their tasks too. Only Hydra sets
    MPI_LOCALRANKID. Source: the documentation of Intel MPI, "Global Hydra Environment Variables",
    and dumps of MPICH 4.0.2.
    """
    peer = reading.value(HYDRA_PROXY) if reading.alone else ""
    return _process(reading, job="PMI_FD" if peer else "", key=peer)


def _paddle(reading: Reading) -> Worker | None:
    """Read the variables of PaddlePaddle's launcher, or of a node whose platform sets them.

    PADDLE_TRAINER_ENDPOINTS has an entry for each process. If no variable gives the local rank, it
    is counted in this list. Source:
    https://www.paddlepaddle.org.cn/documentation/docs/en/api/paddle/distributed/launch_en.html and
    runs of PaddlePaddle 3.3.1.
    """
    numbers, listed = reading.numbers, "PADDLE_TRAINER_ENDPOINTS"
    rank, world_size = numbers.get("rank"), numbers.get("world_size")
    endpoints = [item.strip() for item in reading.value(listed).split(",") if item.strip()]
    if endpoints and world_size not in (None, len(endpoints)):
        reading.conflicts.append(
            f"{listed} lists {len(endpoints)} processes, PADDLE_TRAINERS_NUM is {world_size}"
        )
    local = reading.first_set("PADDLE_RANK_IN_NODE", "PADDLE_LOCAL_RANK")
    is_counted = bool(endpoints) and not reading.is_set(local, "PADDLE_LOCAL_SIZE")
    reading.number("local_rank", local, required=not is_counted)
    reading.number("local_world_size", "PADDLE_LOCAL_SIZE", required=not is_counted)
    reading.number("nnodes", "PADDLE_NNODES", required=False)
    if endpoints and rank is not None and rank < len(endpoints):
        own = reading.value("PADDLE_CURRENT_ENDPOINT")
        if own not in ("", endpoints[rank]):
            reading.conflicts.append(
                f"PADDLE_CURRENT_ENDPOINT={own[:80]!r} is not entry {rank} of {listed}, "
                f"{endpoints[rank][:80]!r}"
            )
        if is_counted:
            hosts = [item.rpartition(":")[0] or item for item in endpoints]
            nodes = list(dict.fromkeys(hosts))
            numbers["local_rank"] = hosts[:rank].count(hosts[rank])
            numbers["local_world_size"] = hosts.count(hosts[rank])
            numbers["node_rank"], numbers["nnodes"] = nodes.index(hosts[rank]), len(nodes)
            reading.evidence |= {"local_rank": listed, "local_world_size": listed}
    elif is_counted and rank is not None:
        reading.conflicts.append(f"PADDLE_TRAINER_ID: rank is {rank}, outside {listed}")
    if reading.is_set("MASTER_ADDR", "MASTER_PORT"):
        return _process(reading)
    master = reading.first_set("PADDLE_MASTER", listed)
    if text := reading.text("master_addr", master):
        reading.endpoint(master, text.partition(",")[0].strip())
    if "master_port" not in numbers and not reading.conflicts:
        reading.conflicts.append(f"{master} names no port (master_port)")
    return reading.worker()


# -- nodes -----------------------------------------------------------------------------------------


def _kubeflow(reading: Reading) -> Topology | None:
    """Read the variables of Kubeflow's trainer v2, which are torchrun's options with PET_.

    Source: pkg/constants/constants.go of https://github.com/kubeflow/trainer, and
    torch/distributed/run.py: each option has a PET_ variable.
    """
    nodes = reading.text("nnodes", "PET_NNODES")
    least, colon, most = nodes.partition(":")
    if colon and least.strip() != most.strip():
        reading.conflicts.append(
            f"PET_NNODES={nodes[:80]!r} is elastic: the number of nodes must be fixed"
        )
    elif nodes:
        reading.as_number("nnodes", "PET_NNODES", least.strip())
    reading.number("node_rank", "PET_NODE_RANK", required=not reading.alone)
    nproc = reading.first_set("PET_NPROC_PER_NODE", "PET_N_PROC_PER_NODE")
    if reading.value(nproc).lower() in ("auto", "gpu", "cpu", "xpu"):
        reading.ignore("launch counts the devices itself, as torchrun does", nproc)
    else:
        reading.number("nproc_per_node", nproc, required=False)
    endpoint = reading.value("PET_RDZV_ENDPOINT")
    if reading.is_set("PET_MASTER_ADDR") or not endpoint:
        return _node(reading, addr="PET_MASTER_ADDR", port="PET_MASTER_PORT")
    reading.endpoint("PET_RDZV_ENDPOINT", endpoint)
    reading.number("master_port", "PET_MASTER_PORT", required=False)
    return reading.node()


def _modelarts(reading: Reading) -> Topology | None:
    """Read the variables of Huawei's ModelArts, which runs on Volcano.

    Source: https://support.huaweicloud.com/intl/en-us/develop-modelarts/develop-modelarts-0120.html
    """
    reading.number("node_rank", "VC_TASK_INDEX", required=not reading.alone)
    return _node(reading, hosts="VC_WORKER_HOSTS")


def _rank_of_nodes(reading: Reading) -> Topology | None:
    """Read RANK and WORLD_SIZE where they count nodes; with LOCAL_RANK they count processes.

    These are Kubeflow's PyTorchJob v1, Volcano's pytorch plugin, PAI DLC and Baidu's AIHC. Sources:
    https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/pytorch/,
    https://volcano.sh/en/docs/pytorch_on_volcano/,
    https://help.aliyun.com/zh/pai/user-guide/built-in-environment-variables,
    https://cloud.baidu.com/doc/AIHC/index.html
    """
    reading.source = next(
        (
            name
            for name, marks in _RANK_PLATFORMS
            if any(key.startswith(marks) for key in reading.environ)
        ),
        reading.source,
    )
    return _node(reading)


def _volcano(reading: Reading) -> Topology | None:
    """Read the variables of Volcano, whose svc and env plugins list the hosts of each task.

    The variables are VC_<TASK>_HOSTS, VC_<TASK>_NUM and VC_TASK_INDEX. Source:
    https://github.com/volcano-sh/volcano/blob/master/docs/user-guide/how_to_use_svc_plugin.md and
    how_to_use_env_plugin.md
    """
    lists = {
        name: hosts
        for name in sorted(reading.environ)
        if VOLCANO_HOSTS.match(name) and (hosts := reading.hosts(name))
    }
    if len(lists) != 1:
        reading.conflicts.append(
            _several_tasks(lists, own=reading.value("HOSTNAME"))
            if lists
            else "VC_WORKER_HOSTS is not set (nnodes)"
        )
        return None
    [(chosen, hosts)] = lists.items()
    count = chosen.removesuffix("_HOSTS") + "_NUM"
    nnodes = reading.number("nnodes", count, required=False)
    if not reading.is_set(count):
        reading.numbers["nnodes"], reading.evidence["nnodes"] = len(hosts), chosen
    elif nnodes not in (None, len(hosts)):
        reading.conflicts.append(f"{count}={nnodes}, but {chosen} lists {len(hosts)}")
    reading.find_master(first=(chosen, hosts[0]))
    return reading.node()


def _several_tasks(lists: Mapping[str, list[str]], own: str) -> str:
    """Return the conflict of several tasks: an index counts the pods of one of them."""
    own = own.partition(".")[0]  # only the host name shows the task of this pod
    mine = [
        name
        for name, hosts in lists.items()
        if own and any(host.partition(".")[0] == own for host in hosts)
    ]
    others = " and ".join(name for name in lists if name not in mine)
    return (
        f"{' and '.join(lists)} list several tasks"
        + (f"; this host is in {mine[0]}" if mine else "")
        + f"; no variable counts the nodes across {f'it and {others}' if mine else 'them'}: "
        "Volcano's pytorch plugin sets RANK and WORLD_SIZE"
    )


def _sagemaker(reading: Reading) -> Topology | None:
    hosts = _sagemaker_hosts(reading)
    reading.number("nproc_per_node", "SM_NUM_GPUS", required=False)
    if hosts:
        reading.find_master(first=("SM_HOSTS", hosts[0]))
    return reading.node()


def _sagemaker_hosts(reading: Reading) -> list[str]:
    """Return SageMaker's hosts, and read their number and this host's index among them.

    Source: https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md
    """
    import json

    text = reading.text("nnodes", "SM_HOSTS")
    own = reading.text("node_rank", "SM_CURRENT_HOST")
    if not text or not own:
        return []
    try:
        hosts = json.loads(text)
    except (ValueError, RecursionError):
        hosts = None
    if not isinstance(hosts, list) or not all(name and isinstance(name, str) for name in hosts):
        hosts = []
    if not hosts:
        reading.conflicts.append(f"SM_HOSTS={text[:80]!r} is not a JSON list of hosts")
    elif own not in hosts:
        reading.conflicts.append(f"SM_CURRENT_HOST={own[:80]!r} is not in SM_HOSTS")
    else:
        count = reading.number("nnodes", "SM_HOST_COUNT", required=False)
        if count not in (None, len(hosts)):
            reading.conflicts.append(f"SM_HOST_COUNT={count}, but SM_HOSTS lists {len(hosts)}")
        reading.numbers |= {"nnodes": len(hosts), "node_rank": hosts.index(own)}
        reading.evidence["nnodes"] = "SM_HOSTS"
    return hosts


# -- the table -------------------------------------------------------------------------------------

# The first family that applies wins. The launcher nearest to the process comes first.
FAMILIES = (
    # torchrun may run inside clusterjob, Slurm, MPI or a platform; then its variables apply.
    Family("env", "LOCAL_RANK RANK", complete=_torch, applies=_is_torch),
    # The rendered script sets more values for this job than the platform that runs the script.
    # Users may set the variables too, on bare machines. A job of several nodes on one machine has a
    # loopback address.
    Family(
        "clusterjob",
        "CLUSTERJOB_NNODES CLUSTERJOB_NODE_RANK",
        {
            "nnodes": "CLUSTERJOB_NNODES",
            "node_rank": "CLUSTERJOB_NODE_RANK",
            "nproc_per_node": "CLUSTERJOB_NPROC_PER_NODE",
        },
        partial(
            _node, addr="CLUSTERJOB_MASTER_ADDR", port="CLUSTERJOB_MASTER_PORT", by_platform=False
        ),
    ),
    # jsrun, PALS and Flux also set variables of Open MPI or PMI. Their own variables say more.
    Family(
        "lsf",
        "JSM_NAMESPACE_RANK JSM_NAMESPACE_LOCAL_RANK",
        {
            "rank": "JSM_NAMESPACE_RANK",
            "world_size": "JSM_NAMESPACE_SIZE",
            "local_rank": "JSM_NAMESPACE_LOCAL_RANK",
        },
        _lsf,
    ),
    Family(
        "pals",
        "PALS_RANKID PALS_LOCAL_RANKID",
        {
            "rank": "PALS_RANKID",
            "world_size": "PMI_SIZE PALS_SIZE",
            "local_rank": "PALS_LOCAL_RANKID",
            "local_world_size": "PALS_LOCAL_SIZE PMI_LOCAL_SIZE",
        },
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
        _flux,
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
        _openmpi,
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
        _process,
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
        _hydra,
        _is_hydra,
    ),
    # Paddle's launcher starts a node's processes, inside the platform that started the node.
    Family(
        "paddle",
        "PADDLE_TRAINER_ID",
        {"rank": "PADDLE_TRAINER_ID", "world_size": "PADDLE_TRAINERS_NUM"},
        _paddle,
    ),
    # A step's variables describe this task; a platform's variables describe its machine.
    Family(slurm_env.SOURCE, slurm_env.SIGNS, complete=slurm_env.place),
    # Platforms come next; they start one command per node. A machine belongs to one platform, so
    # two platforms that disagree are a conflict.
    Family(mlp_env.SOURCE, mlp_env.SIGNS, complete=mlp_env.place, is_platform=True, quoted=True),
    # PET_ variables without RANK belong to trainer v2. Trainer v1 sets RANK too.
    Family(
        "kubeflow", "PET_NNODES PET_NODE_RANK", complete=_kubeflow, is_platform=True, quoted=True
    ),
    # ModelArts runs on Volcano and has its own host count.
    Family(
        "modelarts",
        "MA_NUM_HOSTS",
        {"nnodes": "MA_NUM_HOSTS", "nproc_per_node": "MA_NUM_GPUS"},
        _modelarts,
        is_platform=True,
        quoted=True,
    ),
    # RANK without LOCAL_RANK is ambiguous, so more specific families come first. Volcano's index
    # comes later: it counts the pods of one task of the job, and RANK counts those of all tasks.
    Family(
        "nodes",
        "RANK",
        {"node_rank": "RANK", "nnodes": "WORLD_SIZE", "nproc_per_node": "NPROC_PER_NODE"},
        _rank_of_nodes,
        lambda reading: not reading.is_set("LOCAL_RANK"),
        is_platform=True,
        quoted=True,
    ),
    Family(
        "volcano",
        "VC_TASK_INDEX VK_TASK_INDEX",
        {"node_rank": "VC_TASK_INDEX VK_TASK_INDEX", "nproc_per_node": "NPROC_PER_NODE"},
        _volcano,
        is_platform=True,
        quoted=True,
    ),
    # Source: https://docs.skypilot.co/en/latest/running-jobs/environment-variables.html
    Family(
        "skypilot",
        "SKYPILOT_NODE_RANK SKYPILOT_NUM_NODES SKYPILOT_NODE_IPS",
        {
            "nnodes": "SKYPILOT_NUM_NODES",
            "node_rank": "SKYPILOT_NODE_RANK",
            "nproc_per_node": "SKYPILOT_NUM_GPUS_PER_NODE",
        },
        partial(_node, hosts="SKYPILOT_NODE_IPS"),
        is_platform=True,
    ),
    # `_openmpi` reads SageMaker's MPI jobs; SageMaker's other jobs run one command per host.
    Family(
        "sagemaker",
        "SM_HOSTS SM_CURRENT_HOST",
        complete=_sagemaker,
        is_platform=True,
    ),
)
