"""Turn recorded calls into the operations of a simulated disk."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from tests.torture.disk import Image, Operation
from tests.torture.file_calls import MARK, FileCall

RANDOM_PART = re.compile(r"[0-9a-f]{8,}")


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
            if any(self._below(path) is not None for path in _paths(call)):
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
        flags = call.arguments[1 if call.name == "open" else 2] if call.name != "creat" else "O_CREAT|O_TRUNC"
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
        elif file is not None and "O_TRUNC" in flags and self.live.contents.get(file):
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
        flags = call.arguments[4] if call.name == "renameat2" else "0"
        if old is None or new is None or flags not in ("0", "RENAME_NOREPLACE"):
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
            size = len(self.live.contents.get(file, b""))  # a power cut may have left the name alone
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
        return self.live.contents.get(file, b"")[int(start[1]) :]


def _paths(call: FileCall) -> Iterator[str]:
    for i, argument in enumerate(call.arguments):
        if argument.startswith('"'):
            yield call.text(i)
        elif argument.endswith(">"):
            yield call.descriptor(i)[1]
