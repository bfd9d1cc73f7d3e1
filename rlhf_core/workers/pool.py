"""A pool of worker processes that serve many calls each."""

from __future__ import annotations

import os
import pickle
import queue
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_core.errors import RunError
from rlhf_core.hidden import known
from rlhf_core.workers import stage_end
from rlhf_core.workers.child import LARGEST_REPLY
from rlhf_core.workers.pickling import dumps

CHILD = str(Path(__file__).with_name("child.py"))
ATTEMPTS, STARTS = 3, 6
"""How often to make a call, and to start a process for it, before giving up on processes that die."""
LOAD_SECONDS = 600.0
"""How long a worker may take to import what it calls."""
SLICE = 0.25
"""Seconds between checks that a process is alive, in case a child of it holds the pipe open."""
MARK = "RLHF_WORKER"
"""The environment variable by which processes that a function left behind are found."""
ROUNDS = 20
"""How often to look for such processes, which may start others while they are being killed."""


class TooSlowError(Exception):
    """The call exceeded its limit of CPU or wall time. Its process was ended, or its coroutine cancelled and left."""


class DiedError(Exception):
    """The process died for another reason on every attempt: out of memory, a crash, a signal."""


class RaisedError(Exception):
    """The function raised. The text says what and where; `type_name` names the exception's class."""

    def __init__(self, text: str, type_name: str = "") -> None:
        super().__init__(text)
        self.type_name = type_name


def cores() -> int:
    """Count the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Pool:
    """Up to `size` processes that call one function, each in a process session of its own.

    Signals sent to this process's group, such as Ctrl-C, do not reach the workers, and they end with this process,
    however it ends. They start when first needed, in a fresh interpreter that inherits no threads, locks or files, and
    run until `close`, which the end of a stage calls. What a function prints goes to stderr. Processes that it left
    behind are killed with its worker: those of the worker's group and, on Linux, those in groups of their own.

    function: imported again in the worker by its module or file and its name, as are the classes of objects.
    memory: bytes of data a worker may have, beyond which the function gets a MemoryError. None: no limit.

    Raises UnsendableError for a function that cannot be imported by name, such as a lambda.
    """

    def __init__(self, function: Any, size: int, *, memory: int | None = None) -> None:
        self._size = size
        self._shared = _Shared(dumps(function), memory)
        self._threads: list[threading.Thread] = []
        self._end = weakref.finalize(self, _end, self._shared, self._threads, os.getpid())
        stage_end.before_end(self._end)

    def submit(
        self,
        *arguments: Any,
        named: Mapping[str, Any] | None = None,
        cpu_seconds: float | None = None,
        seconds: float | None = None,
    ) -> Future[Any]:
        """Call the function in a free worker, or in the first that becomes free.

        named: keyword arguments. cpu_seconds: limit of CPU time, which does not depend on the load of the machine.
        seconds: limit of wall time. Both count from the call itself, after the worker has started and imported.

        The future raises TooSlowError beyond these limits; DiedError if the process died three times for another
        reason; InputError and RunError as the function raised them; RaisedError for its other exceptions.
        """
        if self.closed:
            raise RuntimeError("the pool is closed")
        message = pickle.dumps((arguments, dict(named or {}), cpu_seconds), pickle.HIGHEST_PROTOCOL)
        task = _Task(Future(), message, cpu_seconds, seconds)
        with self._shared.lock:
            self._shared.unfinished += 1
            if len(self._threads) < min(self._size, self._shared.unfinished):
                thread = threading.Thread(target=_serve, args=(self._shared,), daemon=True)
                self._threads.append(thread)
                thread.start()
        self._shared.tasks.put(task)
        return task.future

    def outcomes(self, calls: Iterable[Sequence[Any]], **limits: Any) -> list[Any]:
        """Make all calls; return for each, in their order, its value or the exception that its future raised."""
        futures = [self.submit(*arguments, **limits) for arguments in calls]
        return [future.exception() or future.result() for future in futures]

    @property
    def processes(self) -> list[int]:
        """The ids of the running processes."""
        with self._shared.lock:
            return [worker.process.pid for worker in self._shared.workers]

    @property
    def closed(self) -> bool:
        """Whether `close` or the end of a stage has closed the pool."""
        return not self._end.alive

    def close(self) -> None:
        """End all workers; calls in progress raise DiedError."""
        self._end()


class _Task(NamedTuple):
    future: Future[Any]
    message: bytes
    cpu_seconds: float | None
    seconds: float | None


class _Shared:
    """State that a pool shares with its threads, which must not keep the pool itself alive."""

    def __init__(self, function: bytes, memory: int | None) -> None:
        self.function, self.memory = function, memory
        self.tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self.lock = threading.RLock()  # the thread that holds it may collect, and so close, the pool
        self.unfinished = 0
        self.workers: list[_Worker] = []
        self.closed = False


def _end(shared: _Shared, threads: list[threading.Thread], owner: int) -> None:
    if os.getpid() != owner:
        return  # in a forked child: the workers belong to its parent
    with shared.lock:
        shared.closed = True
        for worker in shared.workers:
            worker.kill()
    for _ in threads:
        shared.tasks.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(timeout=10)


def _serve(shared: _Shared) -> None:
    """Run one task after another in one process, which is started by this thread and ends with it."""
    worker: _Worker | None = None
    while (task := shared.tasks.get()) is not None:
        if task.future.set_running_or_notify_cancel():
            try:
                worker = _run(shared, worker, task)
            except BaseException as error:
                worker = None
                task.future.set_exception(error)
        with shared.lock:
            shared.unfinished -= 1
    if worker is not None:
        _remove_worker(shared, worker)


def _run(shared: _Shared, worker: _Worker | None, task: _Task) -> _Worker | None:
    """Run the task and set its future; return the process if the next task can use it."""
    cause, calls = "the pool is closed", 0
    for _ in range(STARTS):
        if shared.closed or calls == ATTEMPTS:
            break
        try:
            worker = worker or _start_worker(shared)
            calls += 1
            if worker.unready is not None:
                reply = worker.unready
                _remove_worker(shared, worker)
                worker = None
            else:
                reply = worker.call(task)
        except _Ended as ended:
            _remove_worker(shared, worker or ended.worker)
            worker = None
            if ended.slow:
                task.future.set_exception(TooSlowError(str(ended)))
                return None
            cause = str(ended)
            continue
        except BaseException:
            _remove_worker(shared, worker)
            raise
        if reply[0] == "value":
            task.future.set_result(reply[1])
        else:
            task.future.set_exception(reply[1] if reply[0] == "refused" else RaisedError(reply[1], reply[2]))
        return worker
    task.future.set_exception(DiedError(cause))
    return worker


def _start_worker(shared: _Shared) -> _Worker:
    try:
        worker = _Worker()
    except OSError as error:
        raise RunError(f"a worker process could not be started: {error}") from error
    with shared.lock:
        shared.workers.append(worker)
        if shared.closed:
            worker.kill()
    worker.load(shared.function, shared.memory)
    return worker


def _remove_worker(shared: _Shared, worker: _Worker | None) -> None:
    """Kill a process and remove it from the pool."""
    if worker is not None:
        with shared.lock:  # once waited for, a process has no id that could be killed
            if worker in shared.workers:
                shared.workers.remove(worker)
            worker.kill()
        worker.dispose()


class _Ended(Exception):
    """The process is gone; slow: because the call exceeded its limit."""

    def __init__(self, text: str, *, slow: bool = False, worker: _Worker | None = None) -> None:
        super().__init__(text)
        self.slow, self.worker = slow, worker


class _Worker:
    """One worker process. unready: its reply if it could not load the function."""

    def __init__(self) -> None:
        self.unready: tuple[Any, ...] | None = None
        self._mark = secrets.token_hex(16)
        self._since = time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
        self.process = subprocess.Popen(
            [sys.executable, "-P", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            # The accelerators belong to the parent.
            env={**os.environ, "JAX_PLATFORMS": "cpu", MARK: self._mark},
        )
        assert self.process.stdin is not None
        os.set_blocking(
            self.process.stdin.fileno(), False
        )  # a worker that reads nothing must not block `_send`

    def load(self, function: bytes, memory: int | None) -> None:
        """Have the process import the function."""
        start = {
            "parent": os.getpid(),
            "path": sys.path,
            "memory": memory,
            "function": function,
            "secrets": known(),
        }
        deadline = time.monotonic() + LOAD_SECONDS
        try:
            self._send(pickle.dumps(start), deadline)
            reply = self._receive(deadline)
        except _TimeIsUp:
            raise _Ended(f"it took longer than {LOAD_SECONDS:g} s to import", worker=self) from None
        except _Ended as ended:
            ended.worker = self
            raise
        if reply[0] != "value":
            self.unready = reply

    def call(self, task: _Task) -> tuple[Any, ...]:
        """Make a call and return the reply. Raises _Ended if none arrives."""
        wall = task.seconds
        if wall is None and task.cpu_seconds is not None:
            wall = max(60.0, 30 * task.cpu_seconds)  # the function may sleep
        deadline = None if wall is None else time.monotonic() + wall
        try:
            self._send(task.message, deadline)
            return self._receive(deadline)
        except _TimeIsUp:
            if task.seconds is not None:
                raise _Ended(f"took longer than {task.seconds:g} s", slow=True) from None
            raise _Ended(f"gave no answer within {wall:g} s") from None
        except _Ended as ended:
            if task.cpu_seconds is not None and self.process.returncode == -signal.SIGPROF:
                raise _Ended(f"took longer than {task.cpu_seconds:g} s of CPU time", slow=True) from None
            raise ended from None

    def kill(self) -> None:
        """Kill the process and its children."""
        if self.process.returncode is None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                self.process.kill()  # its session does not exist yet
            except PermissionError:  # a zombie, on some systems
                pass

    def dispose(self) -> None:
        """Wait for the process to end, kill the processes that it left behind, and close its pipes."""
        self.process.wait()
        for _ in range(ROUNDS):
            if not _kill_marked(self._mark, self._since):
                break
            time.sleep(0.002)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _send(self, message: bytes, deadline: float | None) -> None:
        assert self.process.stdin is not None
        pipe = self.process.stdin.fileno()
        left = memoryview(len(message).to_bytes(8, "big") + message)
        while left:
            self._wait(pipe, select.POLLOUT, deadline)
            try:
                left = left[os.write(pipe, left) :]
            except BlockingIOError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                raise self._explain_end() from None

    def _receive(self, deadline: float | None) -> tuple[Any, ...]:
        size = int.from_bytes(self._read(8, deadline), "big")
        if size > LARGEST_REPLY:
            raise _Ended("something else than an answer was written to its pipe")
        reply: tuple[Any, ...] = pickle.loads(self._read(size, deadline))
        return reply

    def _read(self, count: int, deadline: float | None) -> bytes:
        assert self.process.stdout is not None
        pipe, parts = self.process.stdout.fileno(), bytearray()
        while len(parts) < count:
            self._wait(pipe, select.POLLIN, deadline)
            part = os.read(pipe, min(count - len(parts), 1 << 20))
            if not part:
                raise self._explain_end()
            parts += part
        return bytes(parts)

    def _wait(self, pipe: int, event: int, deadline: float | None) -> None:
        """Wait until a pipe is ready. Raises _Ended if the process has ended, _TimeIsUp at the deadline."""
        poll = select.poll()
        poll.register(pipe, event)
        while True:
            left = SLICE if deadline is None else min(SLICE, deadline - time.monotonic())
            if left <= 0:
                raise _TimeIsUp
            if poll.poll(left * 1000):
                return
            if self.process.poll() is not None and not poll.poll(0):
                raise self._explain_end()

    def _explain_end(self) -> _Ended:
        """Describe how the process ended."""
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return _Ended("it closed its end of the pipe")
        if code >= 0:
            return _Ended(f"its process ended with code {code}")
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        memory = ", as where memory ran out" if -code == signal.SIGKILL else ""
        return _Ended(f"its process was ended by {name}{memory}")


class _TimeIsUp(Exception):
    pass


def _kill_marked(mark: str, since: float) -> int:
    """Kill the processes whose environment, when they began, had this mark; return how many live. Linux only.

    since: seconds from the machine's start. A process begun since then may have the mark, although its environment is
    empty: exec replaces it in two steps.
    """
    variable, living = f"{MARK}={mark}".encode(), 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes()
            if variable in environment.split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
                living += 1
            elif not environment and os.readlink(entry / "exe") and _began(entry) > since - 1:
                living += 1
        except OSError:  # it has ended, or belongs to someone else
            continue
    return living


def _began(process: Path) -> float:
    """Return when a process of /proc began, in seconds from the machine's start."""
    ticks = (process / "stat").read_text().rpartition(")")[2].split()[19]
    return int(ticks) / os.sysconf("SC_CLK_TCK")
