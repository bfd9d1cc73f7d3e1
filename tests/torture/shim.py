"""Build the library of `shim.c` and say what it shall do in a process: log calls, or break one of them."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.torture.experiment import Skipped

SOURCE = Path(__file__).with_name("shim.c")
BUILT = Path(__file__).resolve().parents[2] / ".cache" / "torture"


@dataclass(frozen=True)
class Call:
    """One call that changes a file: its operation, its path below the root, and how many such calls came before it."""

    operation: str
    ordinal: int
    path: str

    def __str__(self) -> str:
        return f"{self.operation} {self.ordinal} {self.path}"

    @classmethod
    def parse(cls, text: str) -> Call:
        operation, ordinal, path = text.split(" ", 2)
        return cls(operation, int(ordinal), path)


def environment(
    root: Path,
    *,
    log: Path | None = None,
    at: Call | None = None,
    action: str = "kill",
    error: int = errno.EIO,
) -> dict[str, str | None]:
    """Return the variables with which a process logs its calls below `root`, or breaks the call `at`.

    action: "kill" before it, "killed" after it, "error" (once), "errors" (from then on) or "short".
    log: a file outside `root`.
    """
    plan = None if at is None else "\t".join([action, str(error), at.operation, str(at.ordinal), at.path])
    return {"TORTURE_ROOT": str(root), "TORTURE_LOG": None if log is None else str(log), "TORTURE_PLAN": plan}


def arm() -> None:
    """Make the library read its variables again; for a forked process that has set its own."""
    if os.environ.get("LD_PRELOAD"):
        ctypes.CDLL(os.environ["LD_PRELOAD"].split(":")[0]).torture_read_environment()


def calls(log: Path) -> Iterator[Call]:
    """Read a log, in the order of the calls."""
    for line in log.read_text().splitlines():
        operation, ordinal, path = line.split("\t")
        yield Call(operation, int(ordinal), path)


def build() -> Path:
    """Compile the library, unless it is there. Raises Skipped without a compiler."""
    name = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    library = BUILT / f"shim-{name}.so"
    if library.exists():
        return library
    if shutil.which("gcc") is None:
        raise Skipped("there is no gcc: apt-get install gcc libc6-dev")
    BUILT.mkdir(parents=True, exist_ok=True)
    fresh = library.with_suffix(f".{os.getpid()}")
    subprocess.run(
        ["gcc", "-O1", "-Wall", "-shared", "-fPIC", "-o", fresh, SOURCE, "-ldl", "-pthread"], check=True
    )
    fresh.replace(library)
    return library


def preload() -> None:
    """Begin this process again with the library in it, unless it is there or cannot be built."""
    if "LD_PRELOAD" not in os.environ:
        try:
            library = build()
        except Skipped:
            return
        os.environ["LD_PRELOAD"] = str(library)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def require() -> None:
    """Raise Skipped unless the library is in this process."""
    if "LD_PRELOAD" not in os.environ:
        build()
