"""Simulate a disk in memory: what calls made of it, what of that is durable, and what a power cut may leave.

A call changes entries of directories, or the data of a file. `fsync` of a directory makes its entries durable, `fsync`
of a file its data, and nothing else does: so POSIX promises.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TypeAlias

Tree: TypeAlias = "dict[str, Tree | bytes]"
ROOT = 0


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
