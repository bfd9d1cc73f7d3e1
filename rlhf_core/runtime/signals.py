"""Stop a run by a signal: one stop request per process, from before anything loads until the run ends."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from rlhf_core.errors import Stopped

AT_A_SAFE_POINT = "at the next safe point"
NOW = "stopped; saved state is intact, rerun the same command to resume"
UNWIND_SECONDS = 0.5
"""How long a second Ctrl-C waits for the main thread, which may be inside a computation that no handler can leave."""
_NUMBERS: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
SAME_PRESS_SECONDS = 0.3
"""`timeout`, `srun` and others pass on a Ctrl-C that the terminal has already sent to the whole process group."""


class _Request:
    """A request to stop, by a signal or by another process of the job."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.number: int | None = None
        self.handled: list[int] = []
        self.over = False
        self.stops = AT_A_SAFE_POINT
        self.pressed_again = False
        self.interrupted = False
        self._interrupted_at: float | None = None

    def handle(self, number: int, _: Any) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            before = self._interrupted_at
            if before is not None and now - before < SAME_PRESS_SECONDS:
                return
            self._interrupted_at = now
            if self.event.is_set() or self.pressed_again:
                self.interrupted = True
                raise KeyboardInterrupt
        self.number = self.number or number
        self.event.set()

    def announce(self, numbers: int, exits: bool) -> None:
        """Say that the run stops as soon as a signal arrives, in a thread: a long computation delays `handle`.

        numbers: a file descriptor from which the numbers of signals are read. exits: whether a second Ctrl-C may end
        the process where the main thread does not get to it.
        """
        said, pressed_at = False, -SAME_PRESS_SECONDS
        while received := os.read(numbers, 64):
            for number in (each for each in received if each in self.handled and not self.over):
                now = time.monotonic()
                again = number == signal.SIGINT and said and now - pressed_at >= SAME_PRESS_SECONDS
                pressed_at = now if number == signal.SIGINT else pressed_at
                if not said:
                    said = True
                    _write(self._line(number))
                elif again:
                    self.pressed_again = True
                    time.sleep(UNWIND_SECONDS)
                    if exits and not self.interrupted and not self.over:
                        _write(NOW)
                        os._exit(128 + number)

    def _line(self, number: int) -> str:
        if number != signal.SIGINT:
            return f"stopping ({signal.Signals(number).name}): {self.stops}; Ctrl-C (SIGINT) stops now"
        again = "press Ctrl-C again" if os.isatty(2) else "press Ctrl-C (send SIGINT) again"
        return f"stopping: {self.stops}; {again} to stop now"


_current: _Request | None = None
may_print: Callable[[str], bool] | None = None
"""Whether this process of several prints a line, so that one does; set by `job`."""


def _write(line: str) -> None:
    """Write a line to stderr without Python's streams or the progress bar, whose locks may be held."""
    if may_print is None or may_print(line):
        with suppress(OSError):
            os.write(2, f"\n{line}\n".encode() if os.isatty(2) else f"{line}\n".encode())


@contextmanager
def _announced(request: _Request, exits: bool) -> Iterator[None]:
    """Announce signals to the main thread, inside the block, on which Python's own handlers may have to wait."""
    numbers, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    _watch_forks()
    thread = threading.Thread(target=request.announce, args=(numbers, exits), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        thread.join()
        os.close(numbers)


@functools.cache
def _watch_forks() -> None:
    """Keep forked processes, which share this one's pipe, from announcing their signals here."""

    def forget() -> None:
        if _current is not None:
            signal.set_wakeup_fd(-1)

    os.register_at_fork(after_in_child=forget)


@contextmanager
def stop_signals(
    *, redeliver: bool = False, stops: str | None = None, exits: bool = False
) -> Iterator[threading.Event]:
    """Handle SIGTERM, SIGINT, SIGHUP and SIGUSR1: the first sets the event, a later SIGINT raises KeyboardInterrupt.

    The first is announced on stderr as it arrives. stops: how the run stops inside this block, in words. exits: a
    second SIGINT ends the process with code 130 where the main thread is inside a computation.

    There is one event per process: inside another `stop_signals`, this one returns the outer event, and only `stops`
    counts. The previous handlers are restored at the end. redeliver: send the signal again then, so that a run
    which ended normally does not swallow it. SIGHUP stays ignored under `nohup`, and SIGUSR1, the only one that Open
    MPI passes on, keeps a handler that it has. In a thread other than the main one no handler can be set, and only
    other processes of the job set the event.
    """
    global _current
    if _current is not None:
        outer = _current.stops
        _current.stops = stops or outer
        try:
            yield _current.event
        finally:
            if _current is not None:
                _current.stops = outer
        return
    request = _current = _Request()
    request.stops = stops or request.stops
    before: dict[int, Any] = {}
    is_main = threading.current_thread() is threading.main_thread()
    numbers = _NUMBERS if is_main else ()
    try:
        with _announced(request, exits) if is_main else nullcontext():
            for number in numbers:
                present = signal.getsignal(number)
                if number == signal.SIGHUP and present == signal.SIG_IGN:
                    continue
                if number == signal.SIGUSR1 and present != signal.SIG_DFL:
                    continue
                before[number] = signal.signal(number, request.handle)
                request.handled.append(number)
            yield request.event
    finally:
        _current = None
        if not request.over:
            for number, handler in before.items():
                # None: a handler that was not set from Python, and that Python cannot restore.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
    if redeliver and request.number is not None:
        signal.raise_signal(request.number)


def ignore_until_exit() -> None:
    """Ignore signals for the rest of a command, whose exit code is decided: cleaning up must not replace it."""
    if _current is not None and threading.current_thread() is threading.main_thread():
        _current.over = True
        for number in _current.handled:
            signal.signal(number, signal.SIG_IGN)


def request_stop() -> None:
    """Ask this process's run to stop, as a signal does."""
    if _current is not None:
        _current.event.set()


def stop_requested() -> bool:
    """Check whether the run was asked to stop."""
    return _current is not None and _current.event.is_set()


def signal_received() -> bool:
    """Check whether a signal to this process asked the run to stop."""
    return _current is not None and _current.number is not None


def stop_if_asked(where: str) -> None:
    """Raise Stopped if the run was asked to stop; call it only where a stop loses nothing, as between steps of loading.

    where: what was about to happen, such as "before stage 'base' was trained".
    """
    if stop_requested():
        raise stopped_error(where)


def stopped_error(where: str) -> Stopped:
    """Make the exception for a stop at a place where there is nothing new to save."""
    number = _current.number if _current is not None else None
    name = f"by {signal.Signals(number).name} " if number is not None else ""
    return Stopped(f"stopped {name}{where}; nothing is lost; rerun the same command to continue")
