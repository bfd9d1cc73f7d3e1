"""What a stage leaves behind: directories with a manifest, of which a reader sees all or nothing."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf_core.contracts import Artifact
from rlhf_core.errors import InputError, RunError

if TYPE_CHECKING:
    from rlhf_core.models import Model
    from rlhf_core.stage import Stage

T = TypeVar("T")
MANIFEST = "rlhf_artifact.json"
FORMAT = 1
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FULL_WORDS = ("No space left on device", "Disk quota exceeded", "File too large")


def save_model(
    stage: Stage, output: str, kind: str, model: Model, *, contract: Mapping[str, Any] | None = None
) -> Artifact:
    """Write `model` to STAGE_DIR/artifacts/OUTPUT with a manifest, in place of what was there.

    kind: "language_model", "reward_model", or a plugin's own. contract: JSON, what a user of the artifact has
    to repeat (a reward model's template, maximum length, …), found in `artifact.metadata["contract"]`.

    Every process calls this, as weights may be spread over them; one of them writes. Raises RunError, with
    what was there before untouched, where the disk is full or not writable.
    """
    final = stage.dir / "artifacts" / output
    beside = final.with_name(f".{output}.tmp")

    def write() -> None:
        model.save(beside)
        if not stage.is_main:
            return
        described = {
            "format": FORMAT,
            "name": output,
            "kind": kind,
            "stage": stage.name,
            "files": describe(beside),
            "versions": versions(),
            "contract": dict(contract or {}),
        }
        write_atomic(
            beside / MANIFEST, json.dumps(described, indent=2, sort_keys=True, allow_nan=False) + "\n"
        )
        replace_directory(beside, final)

    if stage.is_main:
        shutil.rmtree(beside, ignore_errors=True)  # a run that was killed in the middle of this
    _barrier(f"before {final}")
    attempt(write, f"artifact '{stage.name}.{output}'", final, leftover=beside)
    _barrier(f"after {final}")
    artifact = _open(final)
    stage.hook.rlhf_artifact_saved(stage=stage, artifact=artifact)
    return artifact


def read(path: str | Path) -> Artifact:
    """The artifact in a directory, after every file in it was compared with the manifest.

    Raises InputError naming every file that is missing or was changed.
    """
    artifact = _open(Path(path))
    problems = damage(artifact.path, artifact.metadata["files"])
    if problems:
        raise InputError(*(f"{p}; run the stage that made it again, with another --dir" for p in problems))
    return artifact


def identity(path: Path) -> str:
    """A hash of the artifact in a directory, hence of every byte of it: equal where artifacts are the same, whatever
    versions they were made with. It reads the manifest alone; of a damaged one it is the hash of its bytes.
    """
    content = (path / MANIFEST).read_bytes()
    with suppress(ValueError, TypeError):
        content = json.dumps({**json.loads(content), "versions": None}, sort_keys=True).encode()
    return _digest(content)


def versions() -> dict[str, str]:
    """{distribution: version} of rlhf-core and of every installed distribution that extends it."""
    names = {point.dist.name for point in entry_points(group="rlhf") if point.dist is not None}
    return {name: version(name) for name in sorted({*names, "rlhf-core"})}


def describe(directory: Path) -> dict[str, dict[str, Any]]:
    """{relative path: {size in bytes, sha256}} of every file below `directory`, all flushed to the disk."""

    def one(path: Path) -> dict[str, Any]:
        _flush(path)
        return {"size": path.stat().st_size, "sha256": hash_file(path)}

    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    with ThreadPoolExecutor(8) as pool:
        files = dict(
            zip((path.relative_to(directory).as_posix() for path in paths), pool.map(one, paths), strict=True)
        )
    for folder in (directory, *(path for path in directory.rglob("*") if path.is_dir())):
        _flush(folder)
    return files


def damage(directory: Path, files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What differs between `directory` and what `describe` said of it, one line a file; sizes come first."""
    problems = [
        f"{directory / name} is missing or has another size than when it was written"
        for name, said in files.items()
        if not (directory / name).is_file() or (directory / name).stat().st_size != said["size"]
    ]
    if problems:
        return problems
    with ThreadPoolExecutor(8) as pool:
        hashes = pool.map(lambda name: hash_file(directory / name), files)
        return [
            f"{directory / name} was changed since it was written"
            for (name, said), found in zip(files.items(), hashes, strict=True)
            if found != said["sha256"]
        ]


def hash_file(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomic(path: str | Path, content: bytes | str) -> None:
    """Write a file so that a reader, or a power cut, finds the whole of the old or of the new one.

    Makes missing parent directories. Raises RunError where the disk is full or not writable.
    """
    path = Path(path)
    beside = path.with_name(f".{path.name}.tmp")

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(beside, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        _flush(path.parent)

    attempt(write, path.name, path, leftover=beside)


def replace_directory(new: Path, final: Path) -> None:
    """Rename `new` to `final`. A directory that is there already is moved aside first and deleted last."""
    aside = final.with_name(f".{final.name}.replaced")
    shutil.rmtree(aside, ignore_errors=True)
    if final.exists():
        os.rename(final, aside)
    os.rename(new, final)
    _flush(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def attempt(write: Callable[[], T], what: str, path: Path, *, leftover: Path) -> T:
    """Call `write`; where it fails, delete `leftover`, and raise RunError if the file system is to blame."""
    try:
        return write()
    except BaseException as error:
        free = _free(path)  # before the deletion: the space there was when it failed
        with suppress(OSError):  # what stopped the writing may stop the deletion
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        reason = _reason(error)
        if reason is None:
            raise
        raise RunError(
            f"{what} could not be written to {path}: {reason} ({free}). What was written before is whole; "
            "the same command goes on from there."
        ) from error


def _reason(error: BaseException) -> str | None:
    """What the file system said, in words; None where the error is not the file system's."""
    for cause in _causes(error):
        full = isinstance(cause, OSError) and cause.errno in _FULL
        if full or any(words in str(cause) for words in _FULL_WORDS):  # tensorstore has no error types
            return "no space left on the disk"
        if isinstance(cause, OSError):
            return str(cause.strerror or cause)
    return None


def _causes(error: BaseException | None) -> Iterable[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _free(path: Path) -> str:
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    return f"{shutil.disk_usage(there).free / 2**20:,.1f} MiB free"


def _open(path: Path) -> Artifact:
    manifest = path / MANIFEST
    if not manifest.is_file():
        raise InputError(
            f"{path} is not an artifact: it has no {MANIFEST}. Give the directory "
            "DIR/STAGE/artifacts/OUTPUT of a finished stage"
        )
    try:
        metadata = json.loads(manifest.read_bytes())
        if metadata["format"] != FORMAT:
            raise InputError(
                f"{manifest} has format {metadata['format']}, this rlhf-core reads format {FORMAT}; install "
                f"the versions that wrote it: {metadata.get('versions')}"
            )
        name, kind, _ = metadata["name"], metadata["kind"], {**metadata["files"]}
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{manifest} is damaged ({error}); run the stage that made it again, with another --dir"
        ) from error
    return Artifact(name, kind, path, metadata)


def _flush(path: Path) -> None:
    """fsync of a file or directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _barrier(name: str) -> None:
    import jax

    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)
