"""Hash the inputs of a stage, so that a changed input is noticed: files, models, and data in memory."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from rlhf_core import artifacts, runtime
from rlhf_core.data.source import json_text
from rlhf_core.errors import UNREADABLE, InputError, RunError, exists
from rlhf_core.mesh import fetch_array
from rlhf_core.runtime.files import disk_reason, seal, unseal, write_atomic
from rlhf_core.tokenizer import template_hash, tokenizer_hash

if TYPE_CHECKING:
    from rlhf_core.models import Model

SMALL = 2**20
"""Files below this size are hashed every time: caching their hashes would take as long."""
SETTLED_SECONDS = 2.0
"""A file written more recently may change again without a new time stamp, so its hash is not cached."""
MOST_CACHED = 4096
MOST_FILES = 10_000
"""Files of a directory that is hashed. Whoever gives a home directory by mistake should not wait for all of it."""


def identify(path: Path) -> str:
    """Hash a path: every byte of a file, or every file of a directory except hidden ones.

    For an artifact only the manifest is read, which has the hash of each file; see `artifacts.identity`.
    """
    if path.is_file():
        return _Hashes.open().of([path])[0]
    if (path / artifacts.MANIFEST).is_file():
        return artifacts.identity(path)
    files = sorted(itertools.islice(_visible_files(path), MOST_FILES + 1))
    if len(files) > MOST_FILES:
        raise InputError(
            f"{path} is a directory of more than {MOST_FILES:,} files: give a data file, a directory that `datasets` "
            "saved, or the directory of a model"
        )
    hashes = _Hashes.open().of(files)
    names = (file.relative_to(path).as_posix() for file in files)
    return digest(*(f"{name}\0{content}" for name, content in zip(names, hashes, strict=True)))


def _visible_files(directory: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        visible = (Path(folder, name) for name in files if not name.startswith("."))
        yield from (file for file in visible if os.path.isfile(file))  # False where it may not be looked at


class _Hashes:
    """Cache hashes of large files on disk, by size, inode, and the times of modification and of change.

    A program may set the first of these times, as `rsync --times` does; the second is the kernel's.
    """

    def __init__(self, file: Path, cached: dict[str, list[Any]]) -> None:
        self.file, self.cached = file, cached

    @classmethod
    def open(cls) -> _Hashes:
        file = runtime.cache_root() / "hashes.json"
        try:
            cached = unseal(file.read_bytes())["files"]
        except UNREADABLE:  # missing or damaged: hashes are computed again
            cached = {}
        return cls(file, cached)

    def of(self, paths: Sequence[Path]) -> list[str]:
        """Return the SHA-256 of each file's bytes."""
        with ThreadPoolExecutor(8) as pool:
            try:
                results = list(pool.map(self._hash, paths))
            except OSError as error:
                raise InputError(f"{error.filename} cannot be read: {disk_reason(error)}") from error
        added = {key: entry for _, key, entry in results if entry is not None}
        if added:
            self._save(added)
        return [content for content, _, _ in results]

    def _hash(self, path: Path) -> tuple[str, str, list[Any] | None]:
        """Return (hash, key, new cache entry or None)."""
        key, stat = str(path.resolve()), path.stat()
        stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
        entry = self.cached.get(key)
        if isinstance(entry, list) and entry[:-1] == stamp:
            return str(entry[-1]), key, None
        content = artifacts.hash_file(path)
        settled = time.time() - max(stat.st_mtime, stat.st_ctime) > SETTLED_SECONDS
        cacheable = stat.st_size >= SMALL and settled
        return content, key, [*stamp, content] if cacheable else None

    def _save(self, added: Mapping[str, list[Any]]) -> None:
        latest = {**_Hashes.open().cached, **added}  # another process may have added some
        files = dict(list(latest.items())[-MOST_CACHED:])
        with suppress(OSError, RunError):  # the cache only saves time
            write_atomic(self.file, seal({"files": files}))


def of_rows(data: Any) -> str:
    """Hash the rows of data in memory: a list of mappings, a `datasets.Dataset`, a data frame, or any sequence.

    A list may also mix these with file names and tables that name a file; then the contents of the files count.
    """
    if isinstance(data, list | tuple) and not all(isinstance(item, Mapping) for item in data):
        return digest("several", *map(_of_item, data))
    content = hashlib.sha256()
    for row in _rows(data):
        content.update(json_text(row).encode() + b"\n")
    return content.hexdigest()


def _of_item(item: Any) -> str:
    if not isinstance(item, str | Path | Mapping):
        return of_rows(item)
    table = item if isinstance(item, Mapping) else {"path": str(item)}
    path = Path(str(table.get("path", ""))).expanduser()
    content = identify(path) if table.get("path") and exists(path) else ""
    return digest(json_text({key: table[key] for key in table if not content or key != "path"}), content)


def _rows(data: Any) -> Iterable[Any]:
    if hasattr(data, "fingerprint") and hasattr(data, "sources"):  # our own Records
        return [data.fingerprint]
    if hasattr(data, "iloc") and hasattr(data, "columns"):  # a data frame
        names = [str(name) for name in data.columns]
        return (dict(zip(names, values, strict=True)) for values in data.itertuples(index=False, name=None))
    if hasattr(data, "with_format") and hasattr(data, "column_names"):  # the format changes types, not rows
        data = data.with_format(None)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return (data[i] for i in range(len(data)))
    return [repr(data)]


def of_model(model: Model) -> str:
    """Hash a model in memory: its parameters, its configuration and its adapters."""
    content = hashlib.sha256(
        json.dumps([model.hf_config, str(model.definition.lora)], sort_keys=True, default=str).encode()
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
        content.update(f"{jax.tree_util.keystr(path)}\0{leaf.dtype}\0{leaf.shape}\0".encode())
        content.update(np.ascontiguousarray(np.atleast_1d(fetch_array(leaf))).view(np.uint8).data)
    return content.hexdigest()


def of_tokenizer(tokenizer: Any) -> str:
    """Hash a tokenizer in memory, with its chat template."""
    return digest(tokenizer_hash(tokenizer), str(template_hash(tokenizer)))


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
