"""One event loop per stage, in a thread of its own: clients and locks made in one call work in the next."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from rlhf_core.workers import stage_end

T = TypeVar("T")
_lock = threading.Lock()
_running: _LoopThread | None = None


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that runs on the loop; what it raises is raised here."""
    global _running
    with _lock:
        if _running is None or _running.owner != os.getpid():
            _running = _LoopThread()
            stage_end.before_end(_close)
        loop = _running.loop
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()  # where it is this thread that was interrupted
        raise


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
        # A daemon: what never comes back must not keep Python from ending.
        self.thread = threading.Thread(target=self._run, name="rewards", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()

    def close(self) -> None:
        """Cancel what still runs, and end the thread if it lets go."""
        if self.thread is not threading.current_thread():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join(timeout=5)
