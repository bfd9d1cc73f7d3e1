"""The worker process, run as a script. It imports only the standard library until it gets the function to load.

The first message in holds the module path and the function; each later one is a call. A message out is
("value", value), ("refused", exception) or ("raised", text, class name).
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def main() -> None:
    """Serve calls until the parent closes the pipe."""
    pipe = Connection(int(sys.argv[1]))
    os.set_inheritable(pipe.fileno(), False)
    sys.stdout = sys.stderr
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, _ignore)  # the parent handles signals, and ends this process when it wants to
    try:
        start: dict[str, Any] = pickle.loads(pipe.recv_bytes())
        _die_with(start["parent"])
        _limit_memory(start["memory"])
        sys.path[:] = start["path"]
        from rlhf_core.hidden import hide_in_output

        hide_in_output(start["secrets"])
        function = None
        reply = _try(lambda: (pickle.loads(start["function"]),))
        if reply[0] == "value":
            function, reply = reply[1][0], ("value", None)
        pipe.send_bytes(_pickle_reply(reply))
        while function is not None:
            message = pipe.recv_bytes()
            packed = _pickle_reply(_try(lambda: _call(function, message)))  # noqa: B023
            signal.setitimer(signal.ITIMER_PROF, 0)
            pipe.send_bytes(packed)
    except EOFError:
        return


def _call(function: Any, message: bytes) -> Any:
    arguments, cpu_seconds = pickle.loads(message)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds or 0)  # its signal ends the process, even inside C code
    return function(*arguments)


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
        return pickle.dumps(reply, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        from rlhf_core.hidden import scrub

        text = (
            f"returned something that cannot be sent from its process: {type(error).__name__}: "
            f"{scrub(str(error))[:300]}"
        )
        return pickle.dumps(("raised", text, type(error).__name__))


if __name__ == "__main__":
    main()
