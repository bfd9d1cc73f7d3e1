"""Join a job of several processes: find out which one this is, wait for the others, and start jax in all of them."""

from __future__ import annotations

import ctypes
import inspect
import os
import signal
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rlhf_core.errors import InputError, RunError
from rlhf_core.runtime import peers, signals
from rlhf_core.runtime.peers import code_of, is_gone, receive, send

JOIN_SECONDS = "RLHF_JOIN_SECONDS"
DEFAULT_JOIN_SECONDS = 300.0
WARN_AFTER_SECONDS = 20.0
TAKEN_PORT_SECONDS = 10.0
"""How long a port may be taken, by a previous run on this machine that is still ending."""
STRANGER_SECONDS = 15.0
"""How long a stranger may answer at the address before this process gives up."""
ANSWER_SECONDS = 10.0
HEARTBEAT_SECONDS = 25
CONNECT_SECONDS = 60
DETECTION_SECONDS = 300
_OPEN_MPI_PORTS = range(61440, 65536)


@dataclass(frozen=True)
class Place:
    """One process of a job: its number, the number of processes, and the address where the first one waits.

    devices: the local devices of this process; None lets jax choose.
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
    """Read the place of this process from its launcher's variables; None if it was started alone.

    Raises InputError, naming the variables, if they cannot be right.
    """
    address = env.get("JAX_COORDINATOR_ADDRESS")
    if address and "JAX_PROCESS_ID" in env:
        return _read_place(address, env, "JAX_PROCESS_ID", "JAX_NUM_PROCESSES")
    if _read_number(env, "OMPI_COMM_WORLD_SIZE", 1) > 1 and "OMPI_MCA_orte_hnp_uri" not in env:  # Open MPI 5
        local = _read_number(env, "OMPI_COMM_WORLD_LOCAL_RANK")
        address = address or _local_address(env)
        return _read_place(address, env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", [local])
    many = any(_read_number(env, name, 1) > 1 for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"))
    indexed = "KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" in env
    if many or indexed or "," in env.get("TPU_WORKER_HOSTNAMES", ""):
        return _detect_place(address)
    return None


def _local_address(env: Mapping[str, str]) -> str:
    """Choose where the first process of an `mpirun` waits, if all of them are on one machine."""
    if env.get("OMPI_COMM_WORLD_LOCAL_SIZE") != env["OMPI_COMM_WORLD_SIZE"]:
        raise InputError(
            "JAX_COORDINATOR_ADDRESS: missing; Open MPI 5 does not say where its first process is. Give the host of "
            "rank 0 and a port that is free there: mpirun -x JAX_COORDINATOR_ADDRESS=HOST:8476 …"
        )
    name = env.get("PMIX_NAMESPACE", "")
    return f"127.0.0.1:{_OPEN_MPI_PORTS[sum(map(ord, name)) * 31 % len(_OPEN_MPI_PORTS)]}"


def _detect_place(address: str | None) -> Place:
    """Let jax detect the place from the launcher."""
    from jax._src.clusters import ClusterEnv

    try:
        coordinator, count, process, devices = ClusterEnv.auto_detect_unset_distributed_params(
            address, None, None, None, None, DETECTION_SECONDS
        )
    except (RuntimeError, KeyError, ValueError) as error:
        raise InputError(
            f"jax could not find this job's processes ({error}); {_three_variables()}"
        ) from error
    if coordinator is None or count is None or process is None:
        raise InputError(f"jax knows no such launcher; {_three_variables()}")
    return Place(coordinator, process, count, devices)


def _read_place(
    address: str, env: Mapping[str, str], process: str, count: str, devices: Sequence[int] | None = None
) -> Place:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"JAX_COORDINATOR_ADDRESS={address}: write HOST:PORT of the first process")
    place = Place(address, _read_number(env, process), _read_number(env, count), devices)
    if not 0 <= place.process < place.count:
        raise InputError(
            f"{process}={place.process}: with {count}={place.count} it is one of 0 … {place.count - 1}"
        )
    return place


def _read_number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name) or ("" if default is None else str(default))
    if not text.isdecimal():
        raise InputError(
            f"{name}: {f'{text!r} is not a number' if text else 'missing'}; {_three_variables()}"
        )
    return int(text)


def _three_variables() -> str:
    return "set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in every process"


def join() -> bool:
    """Join the other processes of a job; return False if this one was started alone.

    Detects SLURM (`srun`), Open MPI (`mpirun`), Kubernetes indexed jobs and TPU pods; any other launcher must set
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in every process.

    Raises InputError if those variables cannot be right; RunError if the port is taken or a process does not arrive
    within RLHF_JOIN_SECONDS (300).
    """
    import jax

    if jax.distributed.is_initialized():
        _watch_joined()
        return True
    place = find_place(os.environ)
    if place is None:
        return False
    from jax._src import xla_bridge

    if xla_bridge.backends_are_initialized():
        raise InputError(
            f"{place}: jax has computed something before the processes joined; call rlhf_core.runtime.prepare() "
            "in the first line of the script"
        )
    # The service would take SIGTERM for itself, with a handler below Python's.
    jax.config.update("jax_enable_preemption_service", False)
    links = gather(place) if place.process == 0 else {0: reach(place)}
    peers.watch(place.process, place.count, links)
    _hold_aborts()
    known_limits = inspect.signature(jax.distributed.initialize).parameters
    limits: dict[str, Any] = {
        "heartbeat_timeout_seconds": HEARTBEAT_SECONDS,
        "initialization_timeout": CONNECT_SECONDS,
    }
    jax.distributed.initialize(
        place.address,
        place.count,
        place.process,
        place.devices,
        **{name: value for name, value in limits.items() if name in known_limits},
    )
    return True


def join_seconds() -> float:
    """Return how long a process waits for the others, in seconds. Raises InputError if the variable is no number."""
    text = os.environ.get(JOIN_SECONDS) or str(DEFAULT_JOIN_SECONDS)
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{JOIN_SECONDS}: {text!r} is not a number of seconds") from None


def gather(place: Place) -> dict[int, socket.socket]:
    """On the first process, accept a connection from each other one at the coordinator's address.

    Frees the port afterwards, for jax, and notifies every process at once that all have arrived.
    """
    links: dict[int, socket.socket] = {}
    waiting = _Waiting(place, lambda: "process " + _list_numbers(set(range(1, place.count)) - set(links)))
    try:
        with _listen(place, waiting) as listener:
            listener.settimeout(peers.POLL_SECONDS)
            while len(links) < place.count - 1:
                waiting.check()
                for number in [n for n, link in links.items() if is_gone(link)]:
                    links.pop(number).close()  # its launcher may restart it
                try:
                    link, _ = listener.accept()
                except TimeoutError:
                    continue
                arrived = _greet(place, link)
                if arrived is not None:
                    if arrived in links:
                        raise RunError(
                            f"{place}: two processes say that they are number {arrived}; give each another number"
                        )
                    links[arrived] = link
        for link in links.values():
            send(link, {"go": True})
    except BaseException as error:
        for link in links.values():
            send(link, {"ended": code_of(error), "process": 0})
        raise
    return links


@contextmanager
def _listen(place: Place, waiting: _Waiting) -> Iterator[socket.socket]:
    until = time.monotonic() + TAKEN_PORT_SECONDS
    while True:
        try:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            listener = socket.create_server(
                ("", place.port), family=family, dualstack_ipv6=both, backlog=4096
            )
            break
        except OSError as error:
            if time.monotonic() > until:
                raise RunError(
                    f"{place}: port {place.port} of {socket.gethostname()} cannot be opened ({error.strerror}); "
                    "give another one in JAX_COORDINATOR_ADDRESS (JAX_COORDINATOR_PORT under SLURM and Open MPI)"
                ) from error
        waiting.check()
        time.sleep(peers.POLL_SECONDS)
    with listener:
        yield listener


def _greet(place: Place, link: socket.socket) -> int | None:
    """Return the number of the process that has connected; for anything else, close the connection and return None."""
    hello = receive(link, seconds=5)
    number = hello.get("process") if hello else None
    if hello is None or hello.get("rlhf") != peers.PROTOCOL or not isinstance(number, int):
        link.close()
        return None
    if hello.get("count") != place.count or not 0 < number < place.count:
        link.close()
        raise RunError(
            f"{place}: a process on {hello.get('host')} says that it is process {number} of {hello.get('count')}; "
            "give all of them the same JAX_NUM_PROCESSES, and each its own JAX_PROCESS_ID"
        )
    send(link, {"welcome": True})
    return number


def reach(place: Place) -> socket.socket:
    """On every other process, connect to the first one; return once all processes have arrived."""
    why, stranger_since = "nothing answers", None

    def missing() -> str:
        return f"process 0, which is not there: {why}"

    waiting = _Waiting(place, missing)
    hello = {
        "rlhf": peers.PROTOCOL,
        "process": place.process,
        "count": place.count,
        "host": socket.gethostname(),
    }
    while True:
        waiting.check()
        try:
            link = socket.create_connection((place.host, place.port), timeout=5)
        except OSError as error:
            why = str(error.strerror or error)
            time.sleep(peers.POLL_SECONDS)
            continue
        send(link, hello)
        answer = receive(link, seconds=ANSWER_SECONDS)
        if answer is not None and answer.get("welcome"):
            waiting.missing = lambda: "those that process 0 names"
            if _await_start(link, place, waiting):
                return link
            stranger_since, why = None, "it has gone again"
            waiting.missing = missing
        else:
            stranger_since = stranger_since or time.monotonic()
            why = "something else answers"
            if time.monotonic() - stranger_since > STRANGER_SECONDS:
                raise RunError(
                    f"{place}: what answers at {place.address} is not process 0; see its output, or give another port"
                )
        link.close()
        time.sleep(peers.POLL_SECONDS)


def _await_start(link: socket.socket, place: Place, waiting: _Waiting) -> bool:
    """Wait until the first process reports that all have arrived; False if it is gone, and may be restarted."""
    while not is_gone(link):
        message = receive(link, seconds=peers.POLL_SECONDS)
        if message and message.get("go"):
            return True
        if message and "ended" in message:
            peers.end_after(place.process, place.count, message)
        waiting.check(grace=10)
    return False


class _Waiting:
    """A wait for other processes, with a warning after a while; a signal or the time limit ends it.

    missing: describes who has not arrived.
    """

    def __init__(self, place: Place, missing: Callable[[], str]) -> None:
        self.place, self.missing = place, missing
        self.seconds, self.began, self.warned = join_seconds(), time.monotonic(), False

    def check(self, grace: float = 0.0) -> None:
        signals.stop_if_asked(f"while {self.place} waited for the others")
        waited = time.monotonic() - self.began
        if waited > self.seconds + grace:
            raise RunError(
                f"{self.place} has waited {self.seconds:g} s at {self.place.address} for {self.missing()}; "
                f"see what became of it. {JOIN_SECONDS} sets how long to wait"
            )
        if waited > WARN_AFTER_SECONDS and not self.warned:
            self.warned = True
            warnings.warn(
                f"{self.place} waits at {self.place.address} for {self.missing()}; "
                f"at most {self.seconds:g} s ({JOIN_SECONDS})",
                stacklevel=2,
            )


def _list_numbers(numbers: set[int]) -> str:
    texts = [str(number) for number in sorted(numbers)]
    return ", ".join(texts[:8]) + (f" and {len(texts) - 8} more" if len(texts) > 8 else "")


def _watch_joined() -> None:
    """Watch the other processes of a job that a script joined by its own `jax.distributed.initialize`."""
    if peers.is_watching():
        return
    from jax._src import distributed

    state: Any = distributed.global_state
    try:
        host = str(state.coordinator_address).rpartition(":")[0].strip("[]")
        peers.meet(state.client, host, int(state.process_id), int(state.num_processes))
        _hold_aborts()
    except (AttributeError, TypeError):  # in another version of jax: its heartbeats remain
        return


def _hold_aborts() -> None:
    """Delay the abort by which jax's threads end this process when the first one is gone, by six seconds.

    By then the thread that listens to the first process has ended this one, with a message and an exit code. The
    handler is C's own `sleep`, whose argument is the number of the signal, 6.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(int(signal.SIGABRT), ctypes.cast(libc.sleep, ctypes.c_void_p))
