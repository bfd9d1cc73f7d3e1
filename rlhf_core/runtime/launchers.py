"""Which process of how many this one is, as the launcher says through environment variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_core.errors import InputError

DETECTION_SECONDS = 300
_OPEN_MPI_PORTS = range(61440, 65536)


@dataclass(frozen=True)
class Place:
    """One process of a job: its number, how many there are, and where the first one waits for the others.

    devices: the local devices that are its own; None leaves that to jax.
    """

    address: str
    process: int
    count: int
    devices: Sequence[int] | None = None

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def __str__(self) -> str:
        return f"process {self.process} of {self.count}"


def find_place(env: Mapping[str, str]) -> Place | None:
    """The place of this process, as its launcher says; None where it was started alone.

    Raises InputError for variables that cannot be right, naming them.
    """
    address = env.get("JAX_COORDINATOR_ADDRESS")
    if address and "JAX_PROCESS_ID" in env:
        return _place(address, env, "JAX_PROCESS_ID", "JAX_NUM_PROCESSES")
    if _number(env, "OMPI_COMM_WORLD_SIZE", 1) > 1 and "OMPI_MCA_orte_hnp_uri" not in env:  # Open MPI 5
        local = _number(env, "OMPI_COMM_WORLD_LOCAL_RANK")
        address = address or _one_machine(env)
        return _place(address, env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", [local])
    many = any(_number(env, name, 1) > 1 for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"))
    indexed = "KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" in env
    if many or indexed or "," in env.get("TPU_WORKER_HOSTNAMES", ""):
        return _detected(address)
    return None


def _one_machine(env: Mapping[str, str]) -> str:
    """Where the first process of an `mpirun` waits, if all of them are on one machine."""
    if env.get("OMPI_COMM_WORLD_LOCAL_SIZE") != env["OMPI_COMM_WORLD_SIZE"]:
        raise InputError(
            "JAX_COORDINATOR_ADDRESS: missing; Open MPI 5 does not say where its first process is. Give the host of "
            "rank 0 and a port that is free there: mpirun -x JAX_COORDINATOR_ADDRESS=HOST:8476 …"
        )
    name = env.get("PMIX_NAMESPACE", "")
    return f"127.0.0.1:{_OPEN_MPI_PORTS[sum(map(ord, name)) * 31 % len(_OPEN_MPI_PORTS)]}"


def _detected(address: str | None) -> Place:
    """What jax finds out from the launcher."""
    from jax._src.clusters import ClusterEnv

    try:
        found, count, process, devices = ClusterEnv.auto_detect_unset_distributed_params(
            address, None, None, None, None, DETECTION_SECONDS
        )
    except (RuntimeError, KeyError, ValueError) as error:
        raise InputError(
            f"jax could not find this job's processes ({error}); {_three_variables()}"
        ) from error
    if found is None or count is None or process is None:
        raise InputError(f"jax knows no such launcher; {_three_variables()}")
    return Place(found, process, count, devices)


def _place(
    address: str, env: Mapping[str, str], process: str, count: str, devices: Sequence[int] | None = None
) -> Place:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"JAX_COORDINATOR_ADDRESS={address}: write HOST:PORT of the first process")
    place = Place(address, _number(env, process), _number(env, count), devices)
    if not 0 <= place.process < place.count:
        raise InputError(
            f"{process}={place.process}: with {count}={place.count} it is one of 0 … {place.count - 1}"
        )
    return place


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name) or ("" if default is None else str(default))
    if not text.isdecimal():
        raise InputError(
            f"{name}: {f'{text!r} is not a number' if text else 'missing'}; {_three_variables()}"
        )
    return int(text)


def _three_variables() -> str:
    return "set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in every process"
