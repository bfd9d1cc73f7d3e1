"""A pool of worker processes that serve many calls each."""

from __future__ import annotations

import atexit
import functools
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlhf_core.errors import RunError, error_line
from rlhf_core.hidden import known
from rlhf_core.workers.pickling import dumps

CORE = str(Path(__file__).parent.parent)
CHILD = str(Path(__file__).with_name("child.py"))
ATTEMPTS = 3
"""How often to make a call before giving up on processes that die."""
LOAD_SECONDS = 600.0
"""How long a worker may take to import what it calls."""
SLICE = 0.25
"""Seconds between checks that a process is alive, in case a child of it holds the pipe open."""


_closers = ExitStack()


def at_stage_end(closer: Callable[[], object]) -> None:
    """Register a function for `close` to call."""
    _close_at_exit()
    _closers.callback(closer)


def close() -> None:
    """End every worker process and the event loop; they start again when next needed."""
    _closers.pop_all().close()


@functools.cache
def _close_at_exit() -> None:
    atexit.register(close)


class TooSlowError(Exception):
    """The call exceeded its limit of CPU or wall time. Its process was ended, or its coroutine cancelled and left."""


class DiedError(Exception):
    """The process died for another reason on every attempt: out of memory, a crash, a signal."""


class RaisedError(Exception):
    """The function raised. The text says what and where; `type_name` names the exception's class."""

    def __init__(self, text: str, type_name: str = "") -> None:
        super().__init__(text)
        self.type_name = type_name


def describe_failure(error: BaseException, timeout: float | None) -> str:
    """Describe how a call of user code failed, as what follows its name. timeout: the limit of the call, seconds."""
    if isinstance(error, TooSlowError):
        return f"took longer than its timeout of {timeout:g} s"
    if isinstance(error, DiedError):
        return f"could not be called: {error}"
    return str(error) if isinstance(error, RaisedError) else error_line(error, CORE)


def cores() -> int:
    """Count the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Pool:
    """Up to `size` processes that call one function, each in its own process session.

    Signals sent to this process's group, such as Ctrl-C, do not reach the workers, and they end with this process,
    however it ends. They start when first needed, in a fresh interpreter that inherits no threads, locks or files, and
    run until `close`, which the end of a stage calls. What a function prints goes to stderr. Processes of its group
    that it left behind are killed with its worker.

    function: imported again in the worker by its module or file and its name, as are the classes of objects.
    memory: bytes of data a worker may have, beyond which the function gets a MemoryError. None: no limit.

    Raises UnsendableError for a function that cannot be imported by name, such as a lambda.
    """

    def __init__(self, function: Any, size: int, *, memory: int | None = None) -> None:
        self._function = dumps(function)
        self._memory = memory
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="worker")  # one waits for each process
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self.closed = False
        at_stage_end(self.close)

    def submit(
        self, *arguments: Any, cpu_seconds: float | None = None, seconds: float | None = None
    ) -> Future[Any]:
        """Call the function in a free worker, or in the first that becomes free.

        cpu_seconds: limit of CPU time, which does not depend on the load of the machine. seconds: limit of wall time.
        Both count from the call itself, after the worker has started and imported.

        The future raises TooSlowError beyond these limits; DiedError if the process died three times for another
        reason; InputError and RunError as the function raised them; RaisedError for its other exceptions.
        """
        if self.closed:
            raise RuntimeError("the pool is closed")
        message = pickle.dumps((arguments, cpu_seconds), pickle.HIGHEST_PROTOCOL)
        return self._threads.submit(self._call, message, cpu_seconds, seconds)

    def outcomes(self, calls: Iterable[Sequence[Any]], **limits: Any) -> list[Any]:
        """Make all calls; return for each, in their order, its value or the exception that its future raised."""
        futures = [self.submit(*arguments, **limits) for arguments in calls]
        return [future.exception() or future.result() for future in futures]

    @property
    def processes(self) -> list[int]:
        """The ids of the running processes."""
        with self._lock:
            return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """End all workers; calls in progress raise DiedError."""
        if os.getpid() != self._owner:
            return  # in a forked child: the workers belong to its parent
        with self._lock:
            self.closed = True
            workers = list(self._workers)
        for worker in workers:
            worker.kill()
        self._threads.shutdown()
        for worker in workers:
            worker.dispose()
        self._workers.clear()

    def _call(self, message: bytes, cpu_seconds: float | None, seconds: float | None) -> Any:
        """Make a call in a worker that no other thread uses, again in another one if the process dies."""
        cause = "the pool is closed"
        for _ in range(ATTEMPTS):
            worker = self._take()
            if worker is None:
                break
            try:
                reply = worker.call(message, cpu_seconds, seconds)
            except _Ended as ended:
                cause = str(ended)
                if ended.slow:
                    raise TooSlowError(cause) from None
                continue
            finally:
                self._give_back(worker)
            if reply[0] == "value":
                return reply[1]
            raise reply[1] if reply[0] == "refused" else RaisedError(reply[1], reply[2])
        raise DiedError(cause)

    def _take(self) -> _Worker | None:
        with self._lock:
            if self.closed:
                return None
            if self._idle:
                return self._idle.pop()
            try:
                worker = _Worker(self._function, self._memory)
            except OSError as error:
                raise RunError(f"a worker process could not be started: {error}") from error
            self._workers.add(worker)
            return worker

    def _give_back(self, worker: _Worker) -> None:
        """Keep a process for the next call, or remove what is left of it."""
        with self._lock:
            if worker.usable and not self.closed:
                self._idle.append(worker)
                return
            self._workers.discard(worker)
        worker.kill()
        worker.dispose()


class _Ended(Exception):
    """The process is gone; slow: because the call exceeded its limit."""

    def __init__(self, text: str, *, slow: bool = False) -> None:
        super().__init__(text)
        self.slow = slow


class _Worker:
    """One worker process. unready: its reply if it could not load the function. usable: whether it answers calls."""

    def __init__(self, function: bytes, memory: int | None) -> None:
        self._function, self._memory = function, memory
        self.unready: tuple[Any, ...] | None = None
        self.usable = self._loaded = False
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", CHILD, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, "JAX_PLATFORMS": "cpu"},  # the accelerators belong to the parent
            )
            self.pipe = Connection(ours.detach())

    def _load(self) -> None:
        """Have the process import the function."""
        start = {
            "parent": os.getpid(),
            "path": sys.path,
            "memory": self._memory,
            "function": self._function,
            "secrets": known(),
        }
        reply = self._exchange(pickle.dumps(start), LOAD_SECONDS)
        self._loaded = True
        self.unready = None if reply[0] == "value" else reply

    def call(self, message: bytes, cpu_seconds: float | None, seconds: float | None) -> tuple[Any, ...]:
        """Make a call and return the reply. Raises _Ended if none arrives."""
        self.usable = False
        if not self._loaded:
            self._load()
        if self.unready is not None:
            return self.unready
        # The function may sleep, which takes no CPU time.
        wall = max(60.0, 30 * cpu_seconds) if seconds is None and cpu_seconds is not None else seconds
        try:
            reply = self._exchange(message, wall)
        except _Ended as ended:
            if cpu_seconds is not None and self.process.returncode == -signal.SIGPROF:
                raise _Ended(f"took longer than {cpu_seconds:g} s of CPU time", slow=True) from None
            ended.slow = ended.slow and seconds is not None
            raise
        self.usable = True
        return reply

    def _exchange(self, message: bytes, seconds: float | None) -> tuple[Any, ...]:
        """Send a message and return the reply. Raises _Ended if none comes in time, and ends the process."""
        until = float("inf") if seconds is None else time.monotonic() + seconds
        try:
            self.pipe.send_bytes(message)
            while not self.pipe.poll(min(SLICE, max(until - time.monotonic(), 0))):
                if time.monotonic() >= until:
                    self.kill()
                    raise _Ended(f"took longer than {seconds:g} s", slow=True)
                if self.process.poll() is not None and not self.pipe.poll(0):
                    break
            else:
                return pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            pass
        self.kill()
        code = self.process.wait()
        if code >= 0:
            raise _Ended(f"its process ended with code {code}")
        name = next((each.name for each in signal.Signals if each == -code), f"signal {-code}")
        memory = ", probably out of memory" if -code == signal.SIGKILL else ""
        raise _Ended(f"its process was ended by {name}{memory}")

    def kill(self) -> None:
        """Kill the process and the others of its group."""
        with suppress(ProcessLookupError, PermissionError):  # nobody is left; a zombie, on some systems
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # where its session does not exist yet

    def dispose(self) -> None:
        """Wait for the process to end, and close the pipe."""
        self.process.wait()
        self.pipe.close()
