"""The worker process, run as a script. It imports only the standard library until it gets the function to load.

Every message begins with its length, 8 bytes. The first message in holds the module path and the function; each later
one is a call. A message out is ("value", value), ("refused", exception) or ("raised", text, class name).
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from typing import Any, BinaryIO

PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
LARGEST_REPLY = 1 << 28
"""Bytes of a message out: the parent has to hold all of it."""


def main() -> None:
    """Serve calls until the parent closes the pipe."""
    requests, replies = _take_pipes()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, _ignore)  # the parent handles signals, and ends this process when it wants to
    first = receive(requests)
    if first is None:
        return
    start: dict[str, Any] = pickle.loads(first)
    _die_with(start["parent"])
    _limit_memory(start["memory"])
    sys.path[:] = start["path"]
    from rlhf_core.hidden import hide_in_output

    hide_in_output(start["secrets"])
    function, reply = None, _try(lambda: (pickle.loads(start["function"]),))
    if reply[0] == "value":
        function, reply = reply[1][0], ("value", None)
    send(replies, _pickle_reply(reply))
    while function is not None and (message := receive(requests)) is not None:
        packed = _pickle_reply(_try(lambda: _call(function, message)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(replies, packed)


def _call(function: Any, message: bytes) -> Any:
    arguments, named, cpu_seconds = pickle.loads(message)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds or 0)  # its signal ends the process, whatever is running
    return function(*arguments, **named)


def receive(stream: BinaryIO) -> bytes | None:
    """Read one message; None at the end of the stream."""
    head = stream.read(8)
    return stream.read(int.from_bytes(head, "big")) if len(head) == 8 else None


def send(stream: BinaryIO, message: bytes) -> None:
    """Write one message."""
    stream.write(len(message).to_bytes(8, "big") + message)
    stream.flush()


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the two pipes out of the function's reach: its output goes to stderr, and it has no input."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return requests, replies


def _ignore(number: int, frame: Any) -> None:
    """Ignore a signal; unlike SIG_IGN, programs that a function starts do not inherit this."""


def _die_with(parent: int) -> None:
    """End with the parent, however it ends."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    except (ImportError, OSError, AttributeError):
        pass  # not Linux: the end of the pipe has to do
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
    """Call `work` and return its outcome as a message."""
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
        here = os.path.dirname(__file__)
        return "raised", error_line(error, here), type(error).__name__


def _pickle_reply(reply: tuple[Any, ...]) -> bytes:
    try:
        packed = pickle.dumps(reply, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        from rlhf_core.hidden import scrub

        text = f"returned what cannot be sent from its process: {type(error).__name__}: {scrub(str(error))[:300]}"
        return pickle.dumps(("raised", text, type(error).__name__))
    if len(packed) > LARGEST_REPLY:
        text = (
            f"returned {len(packed):,} bytes, more than the {LARGEST_REPLY:,} that are sent from its process"
        )
        return pickle.dumps(("raised", text, "ValueError"))
    return packed


if __name__ == "__main__":
    main()
