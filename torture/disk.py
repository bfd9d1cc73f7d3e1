"""Simulate a disk in memory: what calls made of it, what of that is durable, and what a power cut may leave.

A call changes entries of directories, or the data of a file. `fsync` of a directory makes its entries durable, `fsync`
of a file its data, and nothing else does: so POSIX promises.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TypeAlias

from torture.file_calls import MARK, FileCall

Tree: TypeAlias = "dict[str, Tree | bytes]"
ROOT = 0
RANDOM_PART = re.compile(r"[0-9a-f]{8,}")
CUT = "O_TRUNC"


@dataclass(frozen=True)
class Operation:
    """One change, or what is noted beside the changes.

    call: its name, "rename 0 run/base/stage.json": the call, how many of them on that path came before, and the path,
    whose random parts are "#". entries: (directory, name, file or None) of the entries that are set or removed at
    once. directory: whether what they name is a directory, which is new. file: whose data change, by `data` at `offset`
    or by a cut to `size`. sync: the file or directory that is durable from here on, −1: all. mark: a text.
    """

    call: str
    entries: tuple[tuple[int, str, int | None], ...] = ()
    directory: bool = False
    file: int | None = None
    offset: int = 0
    data: bytes = b""
    size: int | None = None
    sync: int | None = None
    mark: str = ""


class Image:
    """Directories, {name: number of a file or directory}, and the data of files, by their numbers."""

    def __init__(
        self,
        directories: Mapping[int, Mapping[str, int]] | None = None,
        contents: Mapping[int, bytes] | None = None,
    ) -> None:
        self.directories = {number: dict(entries) for number, entries in (directories or {ROOT: {}}).items()}
        self.contents = dict(contents or {})

    def copy(self) -> Image:
        return Image(self.directories, self.contents)

    def apply(self, operation: Operation, *, length: int | None = None, zeros: bool = False) -> None:
        """Make a change; of data written, only the first `length` bytes, or zeros in their place."""
        for directory, name, file in operation.entries:
            if file is None:
                self.directories.setdefault(directory, {}).pop(name, None)
            else:
                self.directories.setdefault(directory, {})[name] = file
                if operation.directory:
                    self.directories.setdefault(file, {})
        if operation.file is None:
            return
        before = self.contents.get(operation.file, b"")
        if operation.size is not None:
            after = before[: operation.size].ljust(operation.size, b"\0")
        else:
            data = operation.data[:length]
            data = bytes(len(data)) if zeros else data
            end = operation.offset + len(data)
            after = before[: operation.offset].ljust(operation.offset, b"\0") + data + before[end:]
        self.contents[operation.file] = after

    def find(self, path: str) -> int | None:
        """Return the number of the file or directory at a path below the root."""
        number: int | None = ROOT
        for name in PurePosixPath(path).parts:
            number = None if number is None else self.directories.get(number, {}).get(name)
        return number

    def tree(self, number: int = ROOT) -> Tree:
        """Return what is below a directory as nested mappings; a file of which nothing is there is empty."""
        return {
            name: self.tree(file) if file in self.directories else self.contents.get(file, b"")
            for name, file in self.directories[number].items()
        }

    def reachable(self, numbers: Iterable[int]) -> set[int]:
        seen: set[int] = set()
        waiting = list(numbers)
        while waiting:
            number = waiting.pop()
            if number not in seen:
                seen.add(number)
                waiting += self.directories.get(number, {}).values()
        return seen


class Translator:
    """Turn calls on files below a directory into operations, beginning with the image that the first of them found."""

    def __init__(self, root: str, image: Image, first: int) -> None:
        self.root, self.live, self.next = root, image.copy(), first
        self.positions: dict[tuple[str, int], int] = {}
        self.appends: set[tuple[str, int]] = set()
        self.counted: Counter[str] = Counter()

    def translate(self, calls: Iterable[FileCall]) -> Iterator[Operation]:
        """Raises ValueError for a call on a file below the directory that is not simulated."""
        for call in calls:
            for operation in self._operations(call):
                self.live.apply(operation)
                yield operation

    def _name(self, call: str, path: str) -> str:
        name = f"{call} {RANDOM_PART.sub('#', path)}"
        self.counted[name] += 1
        return name.replace(" ", f" {self.counted[name] - 1} ", 1)

    def _below(self, path: str, base: str = "") -> str | None:
        """Return a path relative to the root, None if it is elsewhere."""
        absolute = path if path.startswith("/") else f"{base or self.root}/{path}"
        below = absolute == self.root or absolute.startswith(self.root + "/")
        return absolute[len(self.root) + 1 :] if below else None

    def _entry(self, path: str) -> tuple[int, str]:
        parent, _, name = path.rpartition("/")
        directory = self.live.find(parent)
        if directory is None:
            raise ValueError(f"{path} was changed in a directory that the trace did not make")
        return directory, name

    def _operations(self, call: FileCall) -> Iterator[Operation]:
        name = call.name
        if "access" in name:
            text = call.text(0 if name == "access" else 1)
            if text.startswith(MARK):
                yield Operation(self._name("mark", text.removeprefix(MARK)), mark=text.removeprefix(MARK))
        elif name in ("chdir", "fchdir"):
            raise ValueError("the program changes its directory, to which paths are relative")
        elif name == "sync":
            yield Operation(self._name("sync", "."), sync=-1)
        elif name in ("open", "openat", "creat"):
            yield from self._open(call)
        elif name in ("mkdir", "mkdirat", "rmdir", "unlink", "unlinkat"):
            at = name.endswith("at")
            path = self._below(call.text(at), call.descriptor(0)[1] if at else "")
            if path is not None:
                yield self._entries(call, path, self._new() if "mkdir" in name else None)
        elif name.startswith("rename"):
            yield from self._rename(call)
        elif "link" in name or name in ("fallocate", "truncate", "splice"):
            if any(self._below(os_path) is not None for os_path in _paths(call)):
                raise ValueError(f"{name} is not simulated")
        else:
            yield from self._on_descriptor(call)

    def _new(self) -> int:
        self.next += 1
        return self.next

    def _entries(self, call: FileCall, path: str, file: int | None) -> Operation:
        operation = "mkdir" if "mkdir" in call.name else "create" if file is not None else "unlink"
        entry = (*self._entry(path), file)
        return Operation(self._name(operation, path), (entry,), directory=operation == "mkdir")

    def _open(self, call: FileCall) -> Iterator[Operation]:
        flags = call.arguments[1 if call.name == "open" else 2] if call.name != "creat" else f"O_CREAT|{CUT}"
        path = self._below(call.path)
        if path is None:
            return
        if "O_TMPFILE" in flags:
            raise ValueError("a file without a name is not simulated")
        file = self.live.find(path)
        if file is None and "O_CREAT" in flags:
            file = self._new()
            self.live.contents[file] = b""
            yield self._entries(call, path, file)
        elif file is not None and CUT in flags and self.live.contents.get(file):
            yield Operation(self._name("truncate", path), file=file, size=0)
        if file is not None:
            opened = (str(call.result), file)
            self.positions[opened] = 0
            (self.appends.add if "O_APPEND" in flags else self.appends.discard)(opened)

    def _rename(self, call: FileCall) -> Iterator[Operation]:
        if call.name == "rename":
            old, new = self._below(call.text(0)), self._below(call.text(1))
        else:
            old = self._below(call.text(1), call.descriptor(0)[1])
            new = self._below(call.text(3), call.descriptor(2)[1])
        if old is None and new is None:
            return
        if (
            old is None
            or new is None
            or (call.name == "renameat2" and call.arguments[4] not in ("0", "RENAME_NOREPLACE"))
        ):
            raise ValueError("a rename across the root, or with flags, is not simulated")
        file = self.live.find(old)
        yield Operation(
            self._name("rename", new), entries=((*self._entry(old), None), (*self._entry(new), file))
        )

    def _on_descriptor(self, call: FileCall) -> Iterator[Operation]:
        number, absolute = call.descriptor(0)
        path = self._below(absolute) if absolute else None
        file = None if path is None else self.live.find(path)
        if path is None or file is None:
            return
        if call.name in ("fsync", "fdatasync", "syncfs"):
            yield Operation(self._name("fsync", path), sync=-1 if call.name == "syncfs" else file)
        elif call.name == "ftruncate":
            yield Operation(self._name("truncate", path), file=file, size=call.number(1))
        elif call.name == "lseek":
            self.positions[number, file] = call.result
        elif call.result:
            size = len(self.live.contents[file])
            opened = (number, file)
            if call.name.startswith("pwrite"):
                offset, data = call.number(3), call.data(1)
            else:
                offset = size if opened in self.appends else self.positions.get(opened, 0)
                data = self._sent(call) if call.name in ("sendfile", "copy_file_range") else call.data(1)
                self.positions[opened] = offset + call.result
            yield Operation(self._name("write", path), file=file, offset=offset, data=data[: call.result])

    def _sent(self, call: FileCall) -> bytes:
        """Return what was copied from another file below the root."""
        source = self._below(call.descriptor(1)[1])
        file = None if source is None else self.live.find(source)
        start = re.match(r"\[(\d+)\]", call.arguments[2])
        if call.name != "sendfile" or file is None or start is None:
            raise ValueError(f"{call.name} from another place is not simulated")
        return self.live.contents[file][int(start[1]) :]


def _paths(call: FileCall) -> Iterator[str]:
    for i, argument in enumerate(call.arguments):
        if argument.startswith('"'):
            yield call.text(i)
        elif argument.endswith(">"):
            yield call.descriptor(i)[1]


@dataclass
class Crash:
    """What a power cut, or a kill, left. lost: the calls of which nothing, or not all, is there."""

    image: Image
    lost: list[str] = field(default_factory=list)


class Disk:
    """The disk after some operations: as programs see it, what is durable of it, and changes that are not durable."""

    def __init__(self) -> None:
        self.live, self.durable = Image(), Image()
        self.pending: list[Operation] = []
        self.synced = 0

    def apply(self, operation: Operation) -> None:
        if operation.sync is not None:
            self._sync(operation.sync)
        elif operation.entries or operation.file is not None:
            self.live.apply(operation)
            self.pending.append(operation)

    def crash(self, image: Image) -> None:
        """Go on from what a power cut left, all of which is durable."""
        self.live, self.durable, self.pending, self.synced = image.copy(), image.copy(), [], 0

    def _sync(self, number: int) -> None:
        """Make durable what changed of a file or directory, and whatever else the same renames changed."""
        entries: set[tuple[int, str]] = set()
        durable: list[Operation] = []
        waiting: list[Operation] = []
        for operation in reversed(self.pending):
            changed = {(directory, name) for directory, name, _ in operation.entries}
            touched = number in (-1, operation.file) or any(directory == number for directory, _ in changed)
            if touched or entries & changed:
                entries |= changed
                durable.append(operation)
            else:
                waiting.append(operation)
        for operation in reversed(durable):
            self.durable.apply(operation)
        self.pending = waiting[::-1]
        self._forget()
        self.synced = len(self.pending)

    def _forget(self) -> None:
        """Forget files that no power cut can bring back."""
        named = [file for operation in self.pending for _, _, file in operation.entries if file is not None]
        there = self.durable.reachable([ROOT, *named])
        self.pending = [
            operation
            for operation in self.pending
            if operation.file in there or any(directory in there for directory, _, _ in operation.entries)
        ]
        self.durable = Image(
            {number: entries for number, entries in self.durable.directories.items() if number in there},
            {number: content for number, content in self.durable.contents.items() if number in there},
        )

    def killed(self) -> Crash:
        """Return what a process leaves that is killed here: all of it."""
        return Crash(self.live)

    def strict(self, stream: random.Random, most: int) -> Iterator[Crash]:
        """Yield up to `most` of what POSIX allows: any changes that are not durable may be lost, and writes be torn.

        All of them, if there are so few; else those that lose or keep one change, and random ones.
        """
        n = len(self.pending)
        if 2**n <= most:
            for mask in range(2**n):
                yield self._without([i for i in range(n) if mask >> i & 1], {})
            return
        everything = list(range(n))
        chosen: list[list[int]] = [[], everything]
        few = [[i] for i in everything] + [everything[:i] + everything[i + 1 :] for i in everything]
        chosen += stream.sample(few, min(len(few), (most - 2) // 2))
        while len(chosen) < most:
            density = stream.random()
            chosen.append([i for i in everything if stream.random() < density])
        for lost in chosen:
            torn = {
                i: stream.randrange(len(self.pending[i].data))
                for i in set(everything) - set(lost)
                if self.pending[i].data and stream.random() < 0.05
            }
            yield self._without(lost, torn)

    def _without(self, lost: Sequence[int], torn: Mapping[int, int]) -> Crash:
        image = self._base()
        gone = set(lost)
        for i, operation in enumerate(self.pending):
            if i not in gone:
                image.apply(operation, length=torn.get(i))
        return Crash(
            image,
            [self.pending[i].call for i in lost]
            + [f"{self.pending[i].call}, from byte {torn[i]} on" for i in torn],
        )

    def ordered(self, stream: random.Random, most: int) -> Iterator[Crash]:
        """Yield up to `most` of what a journal of metadata allows, which is in order and which any fsync writes.

        Names and sizes are those of a moment after the last fsync; data that were not flushed may be zeros, missing,
        or missing from some place on.
        """
        yield Crash(self.live)
        for _ in range(most - 1):
            end = stream.randint(self.synced, len(self.pending))
            yield self._journal(self.pending[:end], stream)

    def _journal(self, operations: Sequence[Operation], stream: random.Random) -> Crash:
        image = self._base()
        lost = [operation.call for operation in self.pending[len(operations) :]]
        fates = {
            operation.file: stream.choice(("whole", "zeros", "missing", "short")) for operation in operations
        }
        for operation in operations:
            fate = fates[operation.file] if operation.data else "whole"
            if fate == "missing":
                lost.append(f"{operation.call}, missing")
                continue
            length = stream.randrange(len(operation.data)) if fate == "short" else None
            image.apply(operation, length=length, zeros=fate == "zeros")
            if fate != "whole":
                lost.append(f"{operation.call}, {fate}")
        return Crash(image, lost)

    def _base(self) -> Image:
        image = self.durable.copy()
        for number in self.live.directories:
            image.directories.setdefault(number, {})
        return image


class Digests:
    """Hash trees, remembering files' hashes."""

    def __init__(self) -> None:
        self._known: dict[bytes, bytes] = {}

    def of(self, thing: Tree | bytes) -> bytes:
        if isinstance(thing, bytes):
            if thing not in self._known:
                self._known[thing] = hashlib.blake2b(thing, digest_size=16).digest()
            return self._known[thing]
        parts = [f"{name}\0".encode() + self.of(thing[name]) for name in sorted(thing)]
        return hashlib.blake2b(b"".join(parts), digest_size=16, person=b"directory").digest()
