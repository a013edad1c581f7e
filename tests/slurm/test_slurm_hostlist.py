"""Host lists that Slurm writes expand to the same names in the same order."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slurm_cluster import SlurmCluster

from clusterjob.node.system.hostlist import expand_hostlist

# Names as sites use them: a stem, one or two numbers, leading zeros, and sometimes a suffix.
_stems = st.sampled_from(["n", "gpu", "gpu-", "node-a-", "r1c", "cn0", "dgx-h100-"])
_numbers = st.tuples(st.integers(0, 130), st.integers(1, 4)).map(
    lambda pair: f"{pair[0]:0{pair[1]}d}"
)
_runs = st.tuples(st.integers(0, 130), st.integers(1, 9), st.integers(1, 4)).map(
    lambda run: [f"{number:0{run[2]}d}" for number in range(run[0], run[0] + run[1])]
)  # consecutive numbers, as nodes have
_plain = st.tuples(_stems, _runs).map(lambda parts: [parts[0] + number for number in parts[1]])
_endings = st.sampled_from(["-ib", "x", ".rack"])
_ended = st.tuples(_stems, _runs, _endings).map(
    lambda parts: [parts[0] + number + parts[2] for number in parts[1]]
)
_twofold = st.tuples(_stems, _numbers, _runs).map(
    lambda parts: [f"{parts[0]}{parts[1]}-{number}" for number in parts[2]]
)
_single = st.sampled_from([["login"], ["a"], ["head-node"]])
_nodes = st.lists(_plain | _ended | _twofold | _single, min_size=1, max_size=5).map(
    lambda runs: [name for run in runs for name in run]
)
_of_a_function = [HealthCheck.function_scoped_fixture]  # the cluster is the same for all examples


@settings(max_examples=150, suppress_health_check=_of_a_function)
@given(names=_nodes)
def test_host_list_from_slurm_expands_to_names_in_order(
    slurm: SlurmCluster, names: list[str]
) -> None:
    written = slurm.run("scontrol", "show", "hostlist", ",".join(names)).stdout.strip()
    assert expand_hostlist(written) == names


@settings(max_examples=50, suppress_health_check=_of_a_function)
@given(names=_nodes)
def test_sorted_host_list_expands_as_slurm_expands_it(
    slurm: SlurmCluster, names: list[str]
) -> None:
    """Slurm sorts a job's nodes and drops duplicates; the expansion must keep Slurm's order."""
    written = slurm.run("scontrol", "show", "hostlistsorted", ",".join(names)).stdout.strip()
    assert (
        expand_hostlist(written)
        == slurm.run("scontrol", "show", "hostnames", written).stdout.split()
    )
    assert set(expand_hostlist(written)) == set(names)


def test_host_list_of_step_expands_in_order_of_tasks(slurm: SlurmCluster) -> None:
    """Rank 0 is on the first host of SLURM_STEP_NODELIST.

    This also holds where the step has only some of the job's nodes.
    """
    show = (
        "--ntasks-per-node=1",
        "sh",
        "-c",
        'echo "$SLURM_PROCID $SLURMD_NODENAME $SLURM_STEP_NODELIST"',
    )
    part = ("salloc", "--quiet", "--nodes=4", "srun", "--nodes=2", "--nodelist=n2,n4")
    for step in (("srun", "--nodes=4"), ("srun", "--nodes=3", "--exclude=n2"), part):
        tasks = sorted(line.split() for line in slurm.run(*step, *show).stdout.splitlines())
        assert expand_hostlist(tasks[0][2]) == [node for _, node, _ in tasks]
    assert tasks[0][1:] == ["n2", "n[2,4]"]
