"""Read the number of this process and of all from the variables that launchers set."""

from __future__ import annotations

import pytest

from rlhf_core.errors import InputError
from rlhf_core.runtime.launch import Place, find_place

GIVEN = {"JAX_COORDINATOR_ADDRESS": "node1:8476", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.0.0.1,172.17.0.1:45513",
}
OPEN_MPI_5 = {key: value for key, value in OPEN_MPI_4.items() if "orte" not in key} | {
    "PMIX_NAMESPACE": "prterun-node1-4711@1"
}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[3-4]",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_NODES": "2",
}


def test_alone() -> None:
    assert find_place({}) is None
    assert find_place({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}) is None


def test_the_three_variables() -> None:
    assert find_place(GIVEN) == Place("node1:8476", 3, 4)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "node1"}, "write HOST:PORT"),
        ({"JAX_COORDINATOR_ADDRESS": "node1:99999"}, "write HOST:PORT"),
        ({"JAX_PROCESS_ID": "4"}, "it is one of 0 … 3"),
        ({"JAX_PROCESS_ID": "-1"}, "JAX_PROCESS_ID: '-1' is not a number"),
        ({"JAX_NUM_PROCESSES": ""}, "JAX_NUM_PROCESSES: missing"),
    ],
)
def test_variables_that_cannot_be_right(change: dict[str, str], named: str) -> None:
    with pytest.raises(InputError, match=named):
        find_place(GIVEN | change)


def test_slurm_and_open_mpi_4_as_jax_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for environment, expected in ((SLURM, "node3:61447"), (OPEN_MPI_4, "10.0.0.1:65297")):
        with monkeypatch.context() as patched:
            for key, value in environment.items():
                patched.setenv(key, value)
            place = find_place(environment)
            assert place is not None
            assert (place.process, place.count) == (1, 2)
            assert place.host == expected.partition(":")[0]


def test_open_mpi_5_on_one_machine() -> None:
    place, first = find_place(OPEN_MPI_5), find_place(OPEN_MPI_5 | {"OMPI_COMM_WORLD_RANK": "0"})
    assert place is not None
    assert first is not None
    assert (place.process, place.count, place.devices, place.host) == (1, 2, [1], "127.0.0.1")
    assert place.address == first.address
    other = find_place(OPEN_MPI_5 | {"PMIX_NAMESPACE": "prterun-node1-4712@1"})
    assert other is not None
    assert other.address != place.address


def test_open_mpi_5_on_several_machines() -> None:
    several = OPEN_MPI_5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    with pytest.raises(InputError, match="mpirun -x JAX_COORDINATOR_ADDRESS=HOST:8476"):
        find_place(several)
    assert find_place(several | {"JAX_COORDINATOR_ADDRESS": "node1:9000"}) == Place("node1:9000", 1, 2, [0])
