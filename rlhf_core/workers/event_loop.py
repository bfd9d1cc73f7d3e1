"""Run coroutines on one event loop per stage, so that clients and locks made in one call work in the next."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Coroutine
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

from rlhf_core.workers.pool import TooSlowError, at_stage_end

T = TypeVar("T")
ANSWER_SECONDS = 0.25
"""How long a loop may take to answer after a call on it was too slow; one that takes longer is blocked."""
_lock = threading.RLock()
_threads: dict[str, _LoopThread] = {}
"""The running threads: `calls` runs other people's coroutines, `clock` keeps their time limits."""


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the loop; return its result or raise what it raised."""
    future = start_async(work)
    try:
        return future.result()
    except BaseException:
        future.cancel()  # in case this thread was interrupted
        raise


def start_async(work: Coroutine[Any, Any, T], seconds: float | None = None) -> Future[T]:
    """Start a coroutine on the loop; return the future of its result.

    seconds: from the coroutine's first step until the future raises TooSlowError; None: no limit. The coroutine is then
    cancelled and not waited for. If it blocks the loop, so that it cannot be cancelled, calls that have not begun and
    later ones run on a new loop.
    """
    call = _Call(work, seconds)
    call.start(_thread("calls"))
    return call.future


def is_async(function: Any) -> bool:
    """Return whether a call of a function, a `functools.partial` of one, or a callable object is a coroutine."""
    call = getattr(function, "func", function)
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)


async def awaited(value: Any) -> Any:
    """Await a value until it is none that can be awaited."""
    while inspect.isawaitable(value):
        value = await value
    return value


def outcome_of(call: Future[T]) -> T | BaseException:
    """Wait for a call; return its value or, as a value, what it raised. Raises only what interrupts the wait."""
    try:
        error = call.exception()
    except futures.CancelledError as cancelled:
        return cancelled
    return call.result() if error is None else error


def _thread(name: str) -> _LoopThread:
    with _lock:
        thread = _threads.get(name)
        if thread is None or thread.owner != os.getpid():
            if not _threads or thread is not None:
                at_stage_end(_close)
            thread = _threads[name] = _LoopThread(name)
        return thread


def _close() -> None:
    with _lock:
        ending = [_threads.pop(name) for name in list(_threads)]
    for thread in ending:
        if thread.owner == os.getpid():
            thread.close()


def _leave_if_blocked(thread: _LoopThread) -> None:
    """Use another loop from now on if this one does not answer."""
    answered = threading.Event()
    thread.loop.call_soon_threadsafe(answered.set)

    def leave() -> None:
        with _lock:
            if answered.is_set() or _threads.get("calls") is not thread:
                return
            del _threads["calls"]
            thread.left, waiting, thread.waiting = True, thread.waiting, []
            for call in waiting:
                call.start(_thread("calls"))

    clock = _thread("clock").loop
    clock.call_soon_threadsafe(clock.call_later, ANSWER_SECONDS, leave)


class _Call(Generic[T]):
    """One call. Its future may be done before the coroutine is."""

    def __init__(self, work: Coroutine[Any, Any, T], seconds: float | None) -> None:
        self.work, self.seconds = work, seconds
        self.future: Future[T] = Future()

    def start(self, thread: _LoopThread) -> None:
        with _lock:
            thread.waiting.append(self)
        task = asyncio.run_coroutine_threadsafe(self._run(thread), thread.loop)
        self.future.add_done_callback(lambda _: task.cancel())
        task.add_done_callback(lambda _: self._end(thread))

    async def _run(self, thread: _LoopThread) -> None:
        if self._begin(thread):
            # Nothing is raised here: a task's SystemExit would end the loop, and late errors would be logged.
            try:
                self._set(await self.work)
            except BaseException as error:
                self._set(error=error)
        if thread.left and len(asyncio.all_tasks(thread.loop)) == 1:
            thread.stop()

    def _begin(self, thread: _LoopThread) -> bool:
        """Take the call from those that wait; return False where it has moved to another loop or was cancelled."""
        with _lock:
            if self not in thread.waiting:
                return False
            thread.waiting.remove(self)
        if self.seconds is not None:
            clock = _thread("clock").loop
            clock.call_soon_threadsafe(clock.call_later, self.seconds, self._expire, thread)
        return True

    def _set(self, value: Any = None, error: BaseException | None = None) -> None:
        with suppress(futures.InvalidStateError):  # it was too slow
            self.future.set_result(value) if error is None else self.future.set_exception(error)

    def _expire(self, thread: _LoopThread) -> None:
        if not self.future.done():
            self._set(error=TooSlowError())
            _leave_if_blocked(thread)

    def _end(self, thread: _LoopThread) -> None:
        """Settle a call that was cancelled before its first step, as at the end of a stage."""
        with _lock:
            if self not in thread.waiting:
                return
            thread.waiting.remove(self)
        self.work.close()
        self._set(error=futures.CancelledError())


class _LoopThread:
    """A thread with an event loop. left: whether another one has taken its place."""

    def __init__(self, name: str) -> None:
        self.owner = os.getpid()  # a forked copy of the process has no such thread
        self.loop = asyncio.new_event_loop()
        self.ending = self.left = False
        self.waiting: list[_Call[Any]] = []
        # A daemon, so that a coroutine that never returns does not keep Python from exiting.
        self.thread = threading.Thread(target=self._run, name=f"rlhf {name}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            while True:
                # A task's SystemExit or KeyboardInterrupt also ends the loop; every other call would then wait forever.
                with suppress(SystemExit, KeyboardInterrupt):
                    self.loop.run_forever()
                if self.ending:
                    break
            self.loop.set_exception_handler(lambda *_: None)  # what is left behind has been reported
            if tasks := asyncio.all_tasks(self.loop):
                for task in tasks:
                    task.cancel()
                self.loop.run_until_complete(asyncio.wait(tasks, timeout=1))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()

    def stop(self) -> None:
        """Have the loop end, without waiting for it."""
        self.ending = True
        with suppress(RuntimeError):  # it has ended by itself
            self.loop.call_soon_threadsafe(self.loop.stop)

    def close(self) -> None:
        """Cancel the coroutines that still run, and wait up to 5 s for the thread to end."""
        self.stop()
        if self.thread is not threading.current_thread():
            self.thread.join(timeout=5)
