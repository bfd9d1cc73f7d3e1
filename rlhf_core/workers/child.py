"""The worker process, run as a script. It imports nothing but Python's own until it is told what to load.

Messages have their length, 8 bytes, in front. The first one in says where modules are found and what to call; each
later one is a call. A message out is ("value", value), ("refused", exception) or ("raised", text, class name).
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from typing import Any, BinaryIO

PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def main() -> None:
    """Answer calls until the parent hangs up."""
    requests, replies = _take_pipes()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(
            number, _ignore
        )  # they are the parent's to answer; it ends this process when it wants to
    first = receive(requests)
    if first is None:
        return
    start: dict[str, Any] = pickle.loads(first)
    _die_with(start["parent"])
    _limit_memory(start["memory"])
    sys.path[:] = start["path"]
    function, reply = None, _try(lambda: (pickle.loads(start["function"]),))
    if reply[0] == "value":
        function, reply = reply[1][0], ("value", None)
    send(replies, _packed(reply))
    while function is not None and (message := receive(requests)) is not None:
        packed = _packed(_try(lambda: _call(function, message)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(replies, packed)


def _call(function: Any, message: bytes) -> Any:
    arguments, named, cpu_seconds = pickle.loads(message)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds or 0)  # its signal ends the process, whatever runs
    return function(*arguments, **named)


def receive(stream: BinaryIO) -> bytes | None:
    """One message; None at the end of the stream."""
    head = stream.read(8)
    return stream.read(int.from_bytes(head, "big")) if len(head) == 8 else None


def send(stream: BinaryIO, message: bytes) -> None:
    """Write one message."""
    stream.write(len(message).to_bytes(8, "big") + message)
    stream.flush()


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The two pipes, out of reach of what is called: its output goes to stderr, and it has no input."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return requests, replies


def _ignore(number: int, frame: Any) -> None:
    """Handle a signal by doing nothing; unlike SIG_IGN, it is not inherited by what a function starts."""


def _die_with(parent: int) -> None:
    """End with the parent, however it ends."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    except (ImportError, OSError, AttributeError):
        pass  # not Linux: the pipe's end is what is left
    if os.getppid() != parent:
        os._exit(1)


def _limit_memory(limit: int | None) -> None:
    if limit is None:
        return
    import resource

    for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
        try:
            resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))
            return
        except (ValueError, OSError):
            continue


def _try(work: Any) -> tuple[Any, ...]:
    """What came of a call, as a message."""
    try:
        return "value", work()
    except BaseException as error:
        from rlhf_core.errors import InputError, RunError, error_line

        if isinstance(error, InputError | RunError):
            try:
                pickle.loads(pickle.dumps(error))
                return "refused", error
            except Exception:
                problems = error.problems if isinstance(error, InputError) else (str(error),)
                return "refused", (InputError if isinstance(error, InputError) else RunError)(*problems)
        own = os.path.dirname(__file__)
        return "raised", error_line(error, own), type(error).__name__


def _packed(reply: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps(reply, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        text = f"returned what cannot be sent from its process: {type(error).__name__}: {error}"
        return pickle.dumps(("raised", text, type(error).__name__))


if __name__ == "__main__":
    main()
