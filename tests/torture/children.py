"""Start `rlhf`, or a function, in a forked process that has everything imported, so that a run takes a few seconds.

The process that forks must not have started a thread of Python's own, or a computation: it imports `jax` and makes no
backend.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.torture import shim


@dataclass(frozen=True)
class Ended:
    """How a process ended. code: its exit code, or minus the number of the signal that ended it."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.out + self.err

    def __str__(self) -> str:
        return f"ended with {self.code}\n{self.out[-2000:]}{self.err[-4000:]}"


class Child:
    """A forked process in a session of its own, whose output goes to files."""

    def __init__(
        self,
        function: Callable[..., Any],
        *arguments: object,
        cwd: Path | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> None:
        self._began = time.monotonic()
        self._streams = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115  # open as long as the child is
        self._code: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # jax warns of every fork
            self.pid = os.fork()
        if self.pid == 0:
            self._become(function, arguments, cwd, env or {})

    def _become(
        self,
        function: Callable[..., Any],
        arguments: tuple[object, ...],
        cwd: Path | None,
        env: Mapping[str, str | None],
    ) -> NoReturn:
        code = 1
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            finalizer.atexit = False  # temporary directories belong to the process that was forked
        try:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number, stream in enumerate(self._streams, 1):
                os.dup2(stream.fileno(), number)
            for name, value in env.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            if cwd is not None:
                os.chdir(cwd)
            shim.arm()
            code = function(*arguments) or 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
        except BaseException:
            traceback.print_exc()
        finally:
            _leave(code)

    def running(self) -> bool:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code is None

    def output(self) -> tuple[str, str]:
        """Read what it has written so far to stdout and stderr."""
        texts = []
        for stream in self._streams:
            size = os.fstat(stream.fileno()).st_size
            texts.append(os.pread(stream.fileno(), size, 0).decode(errors="replace"))
        return texts[0], texts[1]

    def signal(self, number: int, *, group: bool = False) -> None:
        """Send a signal to the process, or to its group; do nothing if it has ended."""
        if self.running():
            os.killpg(self.pid, number) if group else os.kill(self.pid, number)

    def wait(self, seconds: float = 120.0) -> Ended:
        """Wait for its end; kill it with its group after `seconds`, which gives the code -9 and `hung` in `err`."""
        until, note = time.monotonic() + seconds, ""
        while self.running():
            if time.monotonic() > until:
                note = f"hung: not done after {seconds:.0f} s\n"
                self.signal(signal.SIGKILL, group=True)
                until = float("inf")
            time.sleep(0.005)
        out, err = self.output()
        assert self._code is not None
        return Ended(self._code, out, note + err, time.monotonic() - self._began)


def _leave(code: int) -> NoReturn:
    """End a forked process as Python ends, without what belongs to the process that it was forked from."""
    import atexit
    import threading

    try:
        threading._shutdown()  # type: ignore[attr-defined]  # joins threads and runs what was registered for their end
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def rlhf(*arguments: str, cwd: Path, env: Mapping[str, str | None] | None = None) -> Child:
    """Start the command `rlhf` in a forked process."""
    return Child(_command, arguments, cwd=cwd, env=env)


def _command(arguments: tuple[str, ...]) -> None:
    from rlhf_core import cli

    sys.argv = ["rlhf", *arguments]
    cli.main()


def import_everything() -> None:
    """Import what a run needs, so that forked processes need not."""
    import datasets  # noqa: F401
    import transformers  # noqa: F401
    from orbax.checkpoint import v1  # noqa: F401
    from rlhf_tools import export  # noqa: F401

    from rlhf_core import plugins
    from rlhf_core.cli import program, train  # noqa: F401
    from rlhf_core.contracts import TRAINER

    registry = plugins.load().registry
    for name in registry.names(TRAINER):
        registry.get(TRAINER, name)
