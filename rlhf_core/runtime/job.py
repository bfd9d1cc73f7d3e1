"""Join the processes of one job through jax, and end them together: when one ends, the others end and say why.

jax connects the processes, notices those that are gone by its heartbeats, and has a key-value store. Here a process
writes there why it ends, and the others, which may be inside a collective that never returns, read it in a thread.
That one was killed is known by a connection that breaks. jax's heartbeats do not replace it: they, too, end the others
within their time limit, but by SIGABRT with a trace of the stack; jax.distributed takes no function to call instead.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import rlhf_core.runtime.signals as signals
from rlhf_core.errors import InputError, RunError, Stopped, warn

JOIN_SECONDS = "RLHF_JOIN_SECONDS"
DEFAULT_JOIN_SECONDS = 300.0
WARN_AFTER_SECONDS = 20.0
HEARTBEAT_SECONDS = 20
POLL_SECONDS = 0.5
PORT_SECONDS = 20.0
GRACE_SECONDS = 5.0
"""How long this process may go on after another one failed: time to fail by itself, for the same reason."""
WRITING_SECONDS, STOPPING_SECONDS = 15.0, 600.0
"""How long an end waits for files being written: after another process failed, and after one was stopped."""
LEAVE_SECONDS = 20.0
"""How long the first process, with which jax's service ends, waits for the others to end before it."""
ENDS, PRESENCE, SAID, LEAVING = "rlhf/ends", "rlhf/presence", "rlhf/said", "rlhf/leaving"
"""Keys of jax's store."""
_OPEN_MPI_PORTS = range(61440, 65536)


def find_launcher(env: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the arguments of `jax.distributed.initialize`: none where jax reads them itself; None if started alone.

    Raises InputError, naming the variables, if they cannot be right.
    """
    address = env.get("JAX_COORDINATOR_ADDRESS")
    if address and "JAX_PROCESS_ID" in env:
        return _arguments(address, env, "JAX_PROCESS_ID", "JAX_NUM_PROCESSES")
    if _number(env, "OMPI_COMM_WORLD_SIZE", 1) > 1 and "OMPI_MCA_orte_hnp_uri" not in env:
        # Open MPI 5, whose variables jax does not read.
        local = [_number(env, "OMPI_COMM_WORLD_LOCAL_RANK")]
        found = _arguments(
            address or _local_address(env), env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
        )
        return {**found, "local_device_ids": local}
    many = any(_number(env, name, 1) > 1 for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"))
    indexed = "KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" in env
    return {} if many or indexed or "," in env.get("TPU_WORKER_HOSTNAMES", "") else None


def _local_address(env: Mapping[str, str]) -> str:
    """Choose where the first process of an `mpirun` waits, if all of them are on one machine."""
    if env.get("OMPI_COMM_WORLD_LOCAL_SIZE") != env["OMPI_COMM_WORLD_SIZE"]:
        raise InputError(
            "JAX_COORDINATOR_ADDRESS: missing; Open MPI 5 does not tell where its first process runs. Give the host of "
            "rank 0 and a port that is free there: mpirun -x JAX_COORDINATOR_ADDRESS=HOST:8476 …"
        )
    name = env.get("PMIX_NAMESPACE", "")
    return f"127.0.0.1:{_OPEN_MPI_PORTS[sum(map(ord, name)) * 31 % len(_OPEN_MPI_PORTS)]}"


def _arguments(address: str, env: Mapping[str, str], process: str, count: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"JAX_COORDINATOR_ADDRESS={address}: write HOST:PORT of the first process")
    number, size = _number(env, process), _number(env, count)
    if not 0 <= number < size:
        raise InputError(f"{process}={number}: with {count}={size} it is one of 0 … {size - 1}")
    return {"coordinator_address": address, "num_processes": size, "process_id": number}


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name) or ("" if default is None else str(default))
    if not text.isdecimal():
        wrong = f"{text!r} is not a number" if text else "missing"
        raise InputError(
            f"{name}: {wrong}; set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in every process"
        )
    return int(text)


def join() -> bool:
    """Join the other processes of a job; return False if this one was started alone.

    jax detects SLURM (`srun`), Open MPI 4 (`mpirun`), Kubernetes indexed jobs and TPU pods; Open MPI 5 is detected
    here; any other launcher must set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in every process.

    Raises InputError if those variables cannot be right; RunError if the port is taken or a process does not arrive
    within RLHF_JOIN_SECONDS (300).
    """
    import jax

    if not jax.distributed.is_initialized():
        arguments = find_launcher(os.environ)
        if arguments is None:
            return False
        if arguments.get("process_id") == 0:
            _require_free_port(arguments["coordinator_address"])
        # The service would take SIGTERM for itself, with a handler below Python's.
        jax.config.update("jax_enable_preemption_service", False)
        _initialize(arguments)
    if _job is None:
        _watch()
    return True


def join_seconds() -> float:
    """Return how long a process waits for the others, in seconds. Raises InputError if the variable is no number."""
    text = os.environ.get(JOIN_SECONDS) or str(DEFAULT_JOIN_SECONDS)
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{JOIN_SECONDS}: {text!r} is not a number of seconds") from None


def _require_free_port(address: str) -> None:
    """Raise RunError where the port stays taken, which jax answers with a segmentation fault.

    A run that has lost its connections, and is started again, may still be saving its state on this machine.
    """
    port = int(address.rpartition(":")[2])
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    until = time.monotonic() + PORT_SECONDS
    while True:
        try:
            socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
            return
        except OSError as failed:
            error = failed
        signals.stop_if_asked(f"while port {port} was taken")
        if time.monotonic() < until:
            time.sleep(POLL_SECONDS)
            continue
        raise RunError(
            f"port {port} of {socket.gethostname()}, where the other processes expect this one, cannot be opened "
            f"({error.strerror}); wait for the run that has it to end, or give another one in JAX_COORDINATOR_ADDRESS"
        ) from error


def _initialize(arguments: dict[str, Any]) -> None:
    """Call `jax.distributed.initialize` in a thread: in this one, no signal would reach Python until it returns."""
    import jax

    global _joining
    seconds = join_seconds()
    began = time.monotonic()
    warned = False
    raised: list[Exception] = []

    def initialize() -> None:
        try:
            jax.distributed.initialize(
                **arguments,
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
                initialization_timeout=round(seconds) + 60,  # jax itself would abort the process
            )
        except Exception as error:
            raised.append(error)

    who = "this process"
    if arguments:
        who = f"process {arguments['process_id']} of {arguments['num_processes']} ({arguments['coordinator_address']})"
    thread = threading.Thread(target=initialize, daemon=True, name="join")
    thread.start()
    _joining = True
    while thread.is_alive():
        thread.join(POLL_SECONDS)
        signals.stop_if_asked(f"while {who} waited for the others")
        waited = time.monotonic() - began
        if waited > seconds:
            raise RunError(
                f"{who} has waited {seconds:g} s for the others; check them. {JOIN_SECONDS} sets how "
                "long to wait"
            )
        if waited > WARN_AFTER_SECONDS and not warned:
            warned = True
            warn(f"{who} waits for the others, at most {seconds:g} s ({JOIN_SECONDS})")
    _joining = False
    if raised:
        raise InputError(
            f"jax could not join the processes of this job: {raised[0]} (A script calls "
            "rlhf_core.runtime.prepare() in its first line.)"
        ) from raised[0]


class Cause(NamedTuple):
    """Why the job ends: the process that ended first, and the exit code of all.

    run: the run that it was in, counted from 1; 0 before the first. killed: it did not say that it ends.
    """

    process: int
    code: int
    run: int
    killed: bool = False

    def line(self, job: _Job) -> str:
        how = "stopped by a signal" if self.code == 75 else "failed; see its output"
        how = "has disappeared: killed, crashed or unreachable" if self.killed else how
        rest = "; the same command resumes from the newest checkpoint" if self.killed else ""
        return f"process {job.process} of {job.count} ends: process {self.process} {how}{rest}"


@dataclass
class _Job:
    """This process among the others. client: of jax's key-value store."""

    client: Any
    process: int
    count: int
    run: int = 0  # the number of the newest run, from 1
    running: int = 0  # how many nested `joint_run` are entered
    left_run: int = -1  # the last run that raised
    writing: int = 0
    ended: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    links: set[socket.socket] = field(default_factory=set)

    def announce(self, code: int, *, killed: int | None = None) -> None:
        """Write why this process ends, or that another one was killed, unless an earlier reason is there."""
        process = self.process if killed is None else killed
        cause = Cause(process, code if code in (2, 75) else 1, self.run, killed is not None)
        with suppress(Exception):
            self.client.key_value_set(f"{ENDS}/{'killed' if cause.killed else self.run}", json.dumps(cause))

    def cause(self, after: int) -> Cause | None:
        """Read why another process ended in a run after run `after`; None if none did, or the store is gone."""
        try:
            found = [Cause(*json.loads(text)) for _, text in self.client.key_value_dir_get(ENDS)]
        except Exception:
            return None
        others = [each for each in found if each.process != self.process]
        valid = [each for each in others if each.killed or after < each.run <= self.run]
        return max(valid, key=lambda each: each.killed, default=None)

    def may_print(self, message: str) -> bool:
        """Check that no other process has printed the same message."""
        try:
            self.client.key_value_set(f"{SAID}/{hashlib.sha256(message.encode()).hexdigest()}", "")
        except Exception:
            return False
        return True

    def leave(self, code: int, message: str) -> NoReturn:
        """Exit without the cleanup of Python and jax, which would wait for processes that are gone."""
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.write(message.rstrip("\n") + "\n" if message else "")
            sys.stderr.flush()
        self.announce(code)
        if self.process == 0:
            with suppress(Exception):
                self.client.key_value_set(LEAVING, "")
            until = time.monotonic() + LEAVE_SECONDS
            time.sleep(3 * POLL_SECONDS)
            while self.links and time.monotonic() < until:
                time.sleep(0.05)
        elif code == 75:  # a launcher may kill the first one, still writing, as soon as one ends
            with suppress(Exception):
                self.client.blocking_key_value_get(LEAVING, round(STOPPING_SECONDS * 1000))
        self.say_goodbye()
        os._exit(code)

    def say_goodbye(self) -> None:
        for link in list(self.links) if self.process else ():
            with suppress(OSError):
                link.send(b".")


_job: _Job | None = None
_joining = False


def _watch() -> None:
    """Watch the other processes of a job, which have joined, until this process ends."""
    global _job
    from jax._src.distributed import global_state  # jax has no public way to its key-value store

    state: Any = global_state
    job = _Job(state.client, int(state.process_id), int(state.num_processes))
    if job.count == 1:
        return
    _job = job
    signals.may_print = job.may_print
    with suppress(OSError):  # then only jax's heartbeats notice that a process is gone
        if job.process == 0:
            listener = socket.create_server(("", 0), backlog=4096)
            host = str(state.coordinator_address).rpartition(":")[0].strip("[]")
            job.client.key_value_set(PRESENCE, f"{host}:{listener.getsockname()[1]}")
            threading.Thread(target=_accept, args=(job, listener), daemon=True, name="processes").start()
        else:
            host, _, port = job.client.blocking_key_value_get(PRESENCE, 60_000).rpartition(":")
            link = socket.create_connection((host, int(port)), timeout=20)
            link.settimeout(None)
            link.sendall(job.process.to_bytes(4, "big"))
            job.links.add(link)
            threading.Thread(target=_await_first, args=(job, link), daemon=True, name="first process").start()
    thread = threading.Thread(target=_end_with_others, args=(job,), daemon=True, name="end of the job")
    thread.start()
    atexit.register(_at_exit, job, thread)


def _accept(job: _Job, listener: socket.socket) -> None:
    while True:
        link, _ = listener.accept()
        threading.Thread(target=_await_end, args=(job, link), daemon=True, name="process").start()


def _await_end(job: _Job, link: socket.socket) -> None:
    """Wait until another process closes its connection, and tell all if it did so without a word."""
    job.links.add(link)
    received = b""
    with suppress(OSError):
        while part := link.recv(16):
            received += part
    job.links.discard(link)
    number = int.from_bytes(received[:4], "big")
    if len(received) == 4 and 0 < number < job.count and not job.ended.is_set():
        job.announce(75 if signals.stop_requested() else 1, killed=number)


def _await_first(job: _Job, link: socket.socket) -> None:
    """End this process when the first one is gone; jax aborts it too, some milliseconds later."""
    with suppress(OSError):
        link.recv(1)
    if not job.ended.is_set():
        code = 75 if signals.stop_requested() else 1
        os.write(2, f"{Cause(0, code, 0, killed=True).line(job)}\n".encode())
        os._exit(code)


def _end_with_others(job: _Job) -> None:
    """End this process soon after another one."""
    while not job.ended.wait(POLL_SECONDS):
        cause = job.cause(after=job.left_run)
        if cause is None:
            continue
        stopping = cause.code == 75 and not cause.killed
        if stopping:
            signals.request_stop()
        if not cause.killed:
            time.sleep(GRACE_SECONDS)
        until = time.monotonic() + (STOPPING_SECONDS if stopping else WRITING_SECONDS)
        while job.writing and time.monotonic() < until:
            time.sleep(0.05)
            if stopping and not job.writing:
                time.sleep(GRACE_SECONDS)
        with job.lock:
            # All may have left that run by the same error, and a script may continue.
            if job.ended.is_set() or not (cause.killed or cause.run > job.left_run):
                continue
            job.ended.set()
        job.leave(cause.code, cause.line(job))


@contextmanager
def joint_run() -> Iterator[None]:
    """Enter a run of this process that ends with those of the others, and tell them if it raises."""
    job = _job
    if job is None:
        yield
        return
    if not job.running:
        job.run += 1
    job.running += 1
    try:
        yield
    except BaseException as error:
        if job.running == 1:
            job.announce(_code_of(error))
            job.left_run = job.run
        raise
    finally:
        job.running -= 1


@contextmanager
def hold_end() -> Iterator[None]:
    """Delay an end that another process causes while this one writes files, which needs no other process."""
    job = _job
    if job is None:
        yield
        return
    job.writing += 1
    try:
        yield
    finally:
        job.writing -= 1


def end(code: int, message: str) -> None:
    """Exit a failed or stopped process of several, printing `message` once per job. In a job of one, just return."""
    if _joining:  # Python's own exit would wait for the thread that joins
        print(message, file=sys.stderr, flush=True)
        os._exit(code)
    job = _job
    if job is None:
        return
    if code not in (2, 75):  # a collective may have failed because another process did, which is said soon
        time.sleep(1.0)
    with job.lock:
        if job.ended.is_set():  # the thread is ending it
            threading.Event().wait()
        job.ended.set()
    cause = job.cause(after=-1)
    if cause is not None and (cause.killed or code not in (2, 75)):
        job.leave(cause.code, cause.line(job))
    if cause is not None and code == 75 and not signals.signal_received():
        message = cause.line(job)  # the process that received the signal prints the rest
    elif not job.may_print(message):
        message = ""
    job.leave(code, message)


def _code_of(error: BaseException) -> int:
    """Return the exit code for the exception that ended a run."""
    if isinstance(error, InputError):
        return 2
    if isinstance(error, Stopped):
        return 75
    return 1


def _at_exit(job: _Job, thread: threading.Thread) -> None:
    """End the others if a script ends by an exception; otherwise let it wait for them in jax's barrier."""
    raised: BaseException | None = getattr(sys, "last_value", None)
    job.ended.set()
    if raised is not None:
        job.leave(_code_of(raised), "")
    thread.join()
    job.say_goodbye()
