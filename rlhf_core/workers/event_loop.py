"""Run coroutines on one event loop per stage, so that clients and locks made in one call work in the next."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from rlhf_core.workers import stage_end

T = TypeVar("T")
_lock = threading.Lock()
_running: _LoopThread | None = None


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the loop; return its result or raise what it raised."""
    future = start_async(work)
    try:
        return future.result()
    except BaseException:
        future.cancel()  # in case this thread was interrupted
        raise


def start_async(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a coroutine on the loop; return the future of its result."""
    global _running
    with _lock:
        if _running is None or _running.owner != os.getpid():
            _running = _LoopThread()
            stage_end.before_end(_close)
        loop = _running.loop
    return asyncio.run_coroutine_threadsafe(work, loop)


def _close() -> None:
    global _running
    with _lock:
        ending, _running = _running, None
    if ending is not None and ending.owner == os.getpid():
        ending.close()


class _LoopThread:
    def __init__(self) -> None:
        self.owner = os.getpid()  # a forked copy of the process has no such thread
        self.loop = asyncio.new_event_loop()
        self.ending = False
        # A daemon, so that a coroutine that never returns does not keep Python from exiting.
        self.thread = threading.Thread(target=self._run, name="rewards", daemon=True)
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
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()

    def close(self) -> None:
        """Cancel the coroutines that still run, and wait up to 5 s for the thread to end."""
        self.ending = True
        if self.thread is not threading.current_thread():
            with suppress(RuntimeError):  # it has ended by itself
                self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join(timeout=5)
