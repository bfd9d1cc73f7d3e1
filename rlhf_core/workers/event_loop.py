"""Run coroutines on one event loop per stage, so that clients and locks made in one call work in the next."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from rlhf_core.errors import Stopped
from rlhf_core.workers.pool import TooSlowError, at_stage_end

T = TypeVar("T")
_lock = threading.Lock()
_current: _LoopThread | None = None


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
    cancelled and not waited for. One that blocks the loop is noticed only when it returns.
    """
    future: Future[T] = Future()
    loop = _running_loop()

    async def run() -> None:
        task = asyncio.ensure_future(_outcome(work))
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(task.cancel))
        result: Any = None
        error: BaseException | None = TooSlowError()
        try:
            if (await asyncio.wait({task}, timeout=seconds))[0]:
                result, error = task.result()
        except asyncio.CancelledError:  # the stage ends
            error = futures.CancelledError()
        with suppress(futures.InvalidStateError):  # the caller was interrupted, and cancelled it
            future.set_result(result) if error is None else future.set_exception(error)

    asyncio.run_coroutine_threadsafe(run(), loop)
    return future


async def _outcome(work: Coroutine[Any, Any, T]) -> tuple[T | None, BaseException | None]:
    """Return a coroutine's result or what it raised: a task's SystemExit would end the loop."""
    try:
        return await work, None
    except BaseException as error:
        return None, error


def is_async(function: Any) -> bool:
    """Return whether a call of a function, a `functools.partial` of one, or a callable object is a coroutine."""
    call = getattr(function, "func", function)
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)


async def awaited(value: Any) -> Any:
    """Await a value until it is none that can be awaited."""
    while inspect.isawaitable(value):
        value = await value
    return value


def call_now(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Call a function in this thread; return its outcome as a future that is done, or the future that it returns.

    What a function raises is its outcome, exit() included; what interrupts the run is raised.
    """
    future: Future[Any] = Future()
    try:
        value = function(*arguments)
    except (KeyboardInterrupt, Stopped):
        raise
    except BaseException as error:
        future.set_exception(error)
        return future
    if isinstance(value, Future):
        return value
    future.set_result(value)
    return future


def outcome_of(call: Future[T]) -> T | BaseException:
    """Wait for a call; return its value or, as a value, what it raised. Raises only what interrupts the wait."""
    try:
        error = call.exception()
    except futures.CancelledError as cancelled:
        return cancelled
    return call.result() if error is None else error


def _running_loop() -> asyncio.AbstractEventLoop:
    global _current
    with _lock:
        if _current is None or _current.owner != os.getpid():
            _current = _LoopThread()
            at_stage_end(_close)
        return _current.loop


def _close() -> None:
    global _current
    with _lock:
        ending, _current = _current, None
    if ending is not None and ending.owner == os.getpid():
        ending.close()


class _LoopThread:
    """A thread with an event loop."""

    def __init__(self) -> None:
        self.owner = os.getpid()  # a forked copy of the process has no such thread
        self.loop = asyncio.new_event_loop()
        self.ending = False
        # A daemon, so that a coroutine that never returns does not keep Python from exiting.
        self.thread = threading.Thread(target=self._run, name="rlhf calls", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            while not self.ending:
                # SystemExit or KeyboardInterrupt of a task that a coroutine started also ends the loop.
                with suppress(SystemExit, KeyboardInterrupt):
                    self.loop.run_forever()
            self.loop.set_exception_handler(lambda *_: None)  # what is left behind has been reported
            tasks = asyncio.all_tasks(self.loop)
            if tasks:
                for task in tasks:
                    task.cancel()
                self.loop.run_until_complete(asyncio.wait(tasks, timeout=1))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()

    def close(self) -> None:
        """Cancel the coroutines that still run, and wait up to 5 s for the thread to end."""
        self.ending = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        if self.thread is not threading.current_thread():
            self.thread.join(timeout=5)
