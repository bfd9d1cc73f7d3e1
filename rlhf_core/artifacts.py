"""What a stage leaves behind: directories with a manifest, of which a reader sees all or nothing."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.contracts import Artifact
from rlhf_core.errors import InputError
from rlhf_core.runtime import distributions
from rlhf_core.runtime.agreement import gather_texts, wait_for_all
from rlhf_core.runtime.disk_errors import attempt, disk_reason
from rlhf_core.runtime.files import flush, make_directory, replace_directory, seal, unseal
from rlhf_core.runtime.files import write_atomic as write_atomic
from rlhf_core.tokenizer.chat_template import writes_date

if TYPE_CHECKING:
    from rlhf_core.models import Model
    from rlhf_core.stage import Stage

MANIFEST = "rlhf_artifact.json"
FORMAT = 1


def save_model(
    stage: Stage, output: str, kind: str, model: Model, *, contract: Mapping[str, Any] | None = None
) -> Artifact:
    """Write `model` to STAGE_DIR/artifacts/OUTPUT with a manifest, in place of what was there.

    kind: "language_model", "reward_model", or a plugin's own. contract: JSON, what a user of the artifact has
    to repeat (a reward model's template, maximum length, …), found in `artifact.metadata["contract"]`.

    Every process calls this, as weights may be spread over them; one of them writes. Raises RunError, with
    what was there before untouched, where the disk is full or not writable.
    """
    tokenizer = getattr(model, "tokenizer", None)  # a trainer may save something that has none
    dated = tokenizer is not None and writes_date(tokenizer)
    day = {"template_date": stage.template_date} if dated else {}
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
            "files": describe_files(beside),
            "versions": versions(),
            "contract": {**day, **(contract or {})},
        }
        write_manifest(beside, described)
        replace_directory(beside, final)

    if stage.is_main:
        shutil.rmtree(beside, ignore_errors=True)  # a run that was killed in the middle of this
        attempt(lambda: make_directory(final.parent), final.parent.name, final.parent)
    wait_for_all(f"before {final}")
    attempt(write, f"artifact '{stage.name}.{output}'", final, leftover=beside)
    wait_for_all(f"after {final}")
    artifact = _open(final)
    stage.hook.rlhf_artifact_saved(stage=stage, artifact=artifact)
    return artifact


def open_artifact(path: str | Path, *, verify: bool = True, together: bool = False) -> Artifact:
    """Open the artifact in a directory, after every file in it was compared with the manifest.

    verify: without it, only the manifest is read. together: every process makes this call, and each file is compared by
    one of them. Raises InputError naming every file that is missing or was changed.
    """
    artifact = _open(Path(path))
    if not verify:
        return artifact
    files = artifact.metadata["files"]
    if together:
        import jax

        names = sorted(files)[jax.process_index() :: jax.process_count()]
        files = {name: files[name] for name in names}
    try:
        problems = find_damage(artifact.path, files)
    except PermissionError as error:
        problems = [f"{error.filename} cannot be read: {disk_reason(error)}"]
        if not together:
            raise InputError(*problems) from error
    if together:
        problems = [line for said in gather_texts("\n".join(problems)) for line in said.splitlines()]
    if problems:
        raise InputError(*(f"{p}; run the stage that made it again, with another --dir" for p in problems))
    return artifact


def write_manifest(directory: Path, described: Mapping[str, Any]) -> None:
    """Write an artifact's manifest, strict JSON with a checksum of its own."""
    write_atomic(directory / MANIFEST, seal(described))


def read_contract(path: str | Path) -> dict[str, Any]:
    """What the artifact in a directory says of its use, its contract; empty for a directory that is no artifact."""
    if not (Path(path) / MANIFEST).is_file():
        return {}
    return dict(_open(Path(path)).metadata.get("contract") or {})


def identity(path: Path) -> str:
    """A hash of the artifact in a directory, hence of every byte of it: equal where artifacts are the same, whatever
    versions they were made with. It reads the manifest alone; of a damaged one it is the hash of its bytes.
    """
    content = (path / MANIFEST).read_bytes()
    with suppress(ValueError):
        content = json.dumps({**unseal(content), "versions": None}, sort_keys=True).encode()
    return _digest(content)


def versions() -> dict[str, str]:
    """{distribution: version} of rlhf-core and of every installed distribution that extends it."""
    return dict(sorted({**distributions.versions(), "rlhf-core": version("rlhf-core")}.items()))


def describe_files(directory: Path) -> dict[str, dict[str, Any]]:
    """{relative path: {size in bytes, sha256}} of every file below `directory`, all flushed to the disk."""

    def one(path: Path) -> dict[str, Any]:
        flush(path)
        return {"size": path.stat().st_size, "sha256": hash_file(path)}

    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    with ThreadPoolExecutor(8) as pool:
        files = dict(
            zip((path.relative_to(directory).as_posix() for path in paths), pool.map(one, paths), strict=True)
        )
    for folder in (directory, *(path for path in directory.rglob("*") if path.is_dir())):
        flush(folder)
    return files


def find_damage(directory: Path, files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What differs between `directory` and what `describe_files` said of it, one line per file; sizes come first.

    Raises PermissionError where that is not for this user to see.
    """

    def other_size(name: str) -> str | None:
        path = directory / name
        if path.is_file() and path.stat().st_size == files[name]["size"]:
            return None
        return f"{path} is missing or has another size than when it was written"

    def other_content(name: str) -> str | None:
        if hash_file(directory / name) == files[name]["sha256"]:
            return None
        return f"{directory / name} was changed since it was written"

    def readable(name: str, check: Callable[[str], str | None]) -> str | None:
        try:
            return check(name)
        except PermissionError:
            raise
        except OSError as error:
            return f"{directory / name} cannot be read: {disk_reason(error)}"

    problems = [line for name in files if (line := readable(name, other_size))]
    if problems:
        return problems
    with ThreadPoolExecutor(8) as pool:
        return [line for line in pool.map(readable, files, repeat(other_content)) if line]


def hash_file(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open(path: Path) -> Artifact:
    manifest = path / MANIFEST
    if not manifest.is_file():
        raise InputError(
            f"{path} is not an artifact: it has no {MANIFEST}. Give the directory "
            "DIR/STAGE/artifacts/OUTPUT of a finished stage"
        )
    try:
        metadata = unseal(manifest.read_bytes())
        if metadata["format"] == FORMAT:
            return Artifact(
                metadata["name"], metadata["kind"], path, {**metadata, "files": {**metadata["files"]}}
            )
    except OSError as error:
        raise InputError(f"{manifest} cannot be read: {disk_reason(error)}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{manifest} is damaged ({error}); run the stage that made it again, with another --dir"
        ) from error
    raise InputError(
        f"{manifest} has format {metadata['format']}, this rlhf-core reads format {FORMAT}; install "
        f"the versions that wrote it: {metadata.get('versions')}"
    )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
