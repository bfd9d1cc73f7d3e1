"""Record with strace every call with which a program changes files, and the bytes it writes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.torture.experiment import Skipped

MARK = "/torture-mark/"
"""The beginning of a path that does not exist: asking for it puts the rest of the path into the trace."""
LONGEST = 1 << 24
"""The most bytes of one write that a trace holds."""
CALLS = (
    *(
        "open",
        "openat",
        "creat",
        "write",
        "pwrite64",
        "writev",
        "pwritev",
        "pwritev2",
        "sendfile",
        "copy_file_range",
    ),
    *("lseek", "truncate", "ftruncate", "fallocate", "splice", "fsync", "fdatasync", "sync", "syncfs"),
    *(
        "rename",
        "renameat",
        "renameat2",
        "link",
        "linkat",
        "symlink",
        "symlinkat",
        "unlink",
        "unlinkat",
        "rmdir",
    ),
    *("mkdir", "mkdirat", "access", "faccessat", "faccessat2", "chdir", "fchdir"),
)
LINE = re.compile(r"(\d+) +(?:<\.\.\. \w+ resumed>)?(.*)", re.DOTALL)
CALL = re.compile(r"(\w+)\((.*)\)\s+= (-?\d+)(?:<((?:\\x..)*)>)?(?: E.*)?$", re.DOTALL)
BRACKET = re.compile(r"([\[{])|([\]}])|, ")


@dataclass(frozen=True)
class FileCall:
    """A call that succeeded: its name, its arguments as strace writes them, what it returned, and that file's path."""

    name: str
    arguments: list[str]
    result: int
    path: str

    def text(self, argument: int) -> str:
        """Decode a path."""
        return os.fsdecode(self.data(argument))

    def data(self, argument: int) -> bytes:
        """Decode the bytes of a string, or of all strings of a list. Raises ValueError if the trace cut them."""
        if '"...' in self.arguments[argument]:
            raise ValueError(f"a {self.name} of more than {LONGEST} bytes")
        return b"".join(map(_decode, re.findall(r'"((?:\\x..)*)"', self.arguments[argument])))

    def descriptor(self, argument: int) -> tuple[str, str]:
        """Decode an open file: its number, or AT_FDCWD, and its path; an empty path if it has been deleted."""
        number, _, path = self.arguments[argument].partition("<")
        return number, os.fsdecode(_decode(path[:-1])) if path.endswith(">") else ""

    def number(self, argument: int) -> int:
        return int(self.arguments[argument])


def mark(text: str) -> None:
    """Put a text into the trace of this process."""
    os.access(MARK + text, os.F_OK)


def require() -> None:
    """Raise Skipped without strace, or where it may not watch a process."""
    if shutil.which("strace") is None:
        raise Skipped("there is no strace: apt-get install strace")
    tried = subprocess.run([*_strace(Path(os.devnull)), "true"], capture_output=True, text=True)
    if tried.returncode:
        raise Skipped(f"strace cannot watch a process here: {tried.stderr.strip()}")


def record(command: Sequence[str], cwd: Path, trace: Path, output: Path) -> subprocess.Popen[bytes]:
    """Start a command whose calls are written to the file `trace`, and its output to another one."""
    with open(output, "wb") as file:
        return subprocess.Popen(
            [*_strace(trace), *command],
            cwd=cwd,
            env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _strace(trace: Path) -> list[str]:
    names = ",".join(f"?{name}" for name in CALLS)
    quickly = ["-f", "--seccomp-bpf"]  # stop at these calls alone
    return [
        "strace",
        *quickly,
        "-qq",
        "-y",
        "-xx",
        "-s",
        str(LONGEST),
        "-e",
        f"trace={names}",
        "-o",
        str(trace),
    ]


def read(trace: Path) -> Iterator[FileCall]:
    """Read the calls that succeeded, and the marks, in the order in which they ended."""
    begun: dict[str, str] = {}
    with open(trace) as lines:
        for line in lines:
            thread, text = LINE.fullmatch(line.rstrip("\n")).groups()  # type: ignore[union-attr]
            text = begun.pop(thread, "") + text
            if text.endswith("<unfinished ...>"):
                begun[thread] = text.removesuffix("<unfinished ...>")
            elif (call := CALL.match(text)) and (int(call[3]) >= 0 or "access" in call[1]):
                yield FileCall(call[1], _split(call[2]), int(call[3]), os.fsdecode(_decode(call[4] or "")))


def _split(arguments: str) -> list[str]:
    """Split at commas outside brackets; texts are written in hexadecimal digits, so they hold neither."""
    parts, depth, start = [], 0, 0
    for piece in BRACKET.finditer(arguments):
        depth += bool(piece[1]) - bool(piece[2])
        if piece[0] == ", " and depth == 0:
            parts.append(arguments[start : piece.start()])
            start = piece.end()
    return [*parts, arguments[start:].strip()]


def _decode(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))
