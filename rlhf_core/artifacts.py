"""The outputs of a stage: directories with a manifest, which appear whole or not at all."""

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
from typing import TYPE_CHECKING, Any, Protocol

from rlhf_core.contracts import Artifact
from rlhf_core.errors import InputError, read_limited
from rlhf_core.runtime import distributions
from rlhf_core.runtime.agreement import gather_texts, wait_for_all
from rlhf_core.runtime.files import (
    attempt,
    disk_reason,
    flush,
    make_directory,
    replace_directory,
    seal,
    unseal,
)
from rlhf_core.runtime.files import write_atomic as write_atomic
from rlhf_core.tokenizer.chat_template import writes_date

if TYPE_CHECKING:
    from rlhf_core.stage import Stage

__all__ = ["save_model", "write_atomic"]


MANIFEST = "rlhf_artifact.json"
FORMAT = 1
ADAPTER_CONFIG = "adapter_config.json"
QUANTIZED = "quantized_base"
"""The manifest's field that says how the base of its adapters was held, "nf4" or "int8"."""
BASE = ("base_model_name_or_path", "revision")
"""Fields of adapter_config.json that may be edited: they say where the base model is."""


class Savable(Protocol):
    def save(self, path: Path, /) -> Any: ...


def save_model(
    stage: Stage, output: str, kind: str, model: Savable, *, contract: Mapping[str, Any] | None = None
) -> Artifact:
    """Write `model` with a manifest to STAGE_DIR/artifacts/OUTPUT, replacing what was there.

    kind: "language_model", "reward_model", or a plugin's own. contract: JSON that whoever uses the artifact must
    follow (a reward model's template, maximum length, …), stored in `artifact.metadata["contract"]`.

    Every process must call this, since weights may be sharded over processes; one of them writes. Raises RunError
    if the disk is full or not writable, leaving the previous artifact untouched.
    """
    tokenizer = getattr(model, "tokenizer", None)  # a trainer may save a model that has none
    dated = tokenizer is not None and writes_date(tokenizer)
    day = {"template_date": stage.template_date} if dated else {}
    quantized = getattr(model, "quantized", None)
    final = stage.dir / "artifacts" / output
    temporary = final.with_name(f".{output}.tmp")

    def write() -> None:
        model.save(temporary)
        if not stage.is_main:
            return
        base = _make_base_relative(temporary, stage.dir.parent.resolve())
        manifest = {
            "format": FORMAT,
            "name": output,
            "kind": kind,
            "stage": stage.name,
            "files": describe_files(temporary),
            "versions": versions(),
            "contract": {**day, **(contract or {})},
            **({} if base is None else {"base": base}),
            **({} if quantized is None else {QUANTIZED: quantized}),
        }
        write_manifest(temporary, manifest)
        replace_directory(temporary, final)

    if stage.is_main:
        shutil.rmtree(temporary, ignore_errors=True)  # left by a run that was killed while it saved
        attempt(lambda: make_directory(final.parent), final.parent.name, final.parent)
    wait_for_all(f"before {final}")
    attempt(write, f"artifact '{stage.name}.{output}'", final, leftover=temporary)
    wait_for_all(f"after {final}")
    artifact = _open(final)
    stage.hook.rlhf_artifact_saved(stage=stage, artifact=artifact)
    return artifact


def copy_artifact(artifact: Artifact, path: Path) -> None:
    """Copy an artifact to `path`, a new or empty directory; adapters keep the base that they name.

    Raises InputError where `path` is a file, or holds something.
    """
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise InputError(f"{path} exists and is not an empty directory: give a new one")
    file = path / ADAPTER_CONFIG

    def copy() -> None:
        shutil.copytree(artifact.path, path, dirs_exist_ok=True)
        if not file.is_file():
            return
        config = json.loads(file.read_bytes())
        name = config["base_model_name_or_path"] or ""
        base = artifact.path / name
        # A base of the same run is named relative to the artifact.
        if name and not Path(name).is_absolute() and (base / MANIFEST).is_file():
            file.write_text(json.dumps({**config, "base_model_name_or_path": str(base.resolve())}, indent=2))

    attempt(copy, path.name, path)


def _make_base_relative(directory: Path, run: Path) -> str | None:
    """Name the base of an adapter in `directory` relative to it where a stage of the same run made the base.

    Returns the base's `identity`; None for a base from elsewhere, which keeps its name.
    """
    file = directory / ADAPTER_CONFIG
    if not file.is_file():
        return None
    config = json.loads(file.read_bytes())
    base = Path(config["base_model_name_or_path"] or "")
    if not (base / MANIFEST).is_file() or base.parents[2:3] != (run,) or base.parent.name != "artifacts":
        return None
    relative = Path("..", "..", "..", base.relative_to(run)).as_posix()
    file.write_text(json.dumps({**config, "base_model_name_or_path": relative}, indent=2) + "\n", "utf-8")
    return identity(base)


def require_base(adapter: Path, base: Path) -> None:
    """Raise InputError where an adapter's manifest names another base than the artifact in `base`."""
    named = _open(adapter).metadata.get("base") if (adapter / MANIFEST).is_file() else None
    if named is not None and (base / MANIFEST).is_file() and identity(base) != named:
        raise InputError(
            f"{adapter / ADAPTER_CONFIG}: its base model, {base}, is not the model the adapter was trained on: "
            "restore that model, set base_model_name_or_path to its location, or give it as --base"
        )


def open_artifact(path: str | Path, *, verify: bool = True, together: bool = False) -> Artifact:
    """Open the artifact in a directory, after comparing every file in it with the manifest.

    verify: if false, read the manifest alone. together: every process makes this call, and the files are divided among
    the processes. Raises InputError, naming every file that is missing or was changed.
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
    except (LookupError, TypeError) as error:
        problems = [
            f"{artifact.path / MANIFEST} does not describe its files ({type(error).__name__}: {error})"
        ]
    if together:
        problems = [line for text in gather_texts("\n".join(problems)) for line in text.splitlines()]
    if problems:
        raise InputError(
            *(f"{problem}; run the stage that made it again, with another --dir" for problem in problems)
        )
    return artifact


def quantized_base(directory: Path) -> Any:
    """Read how the base of the adapters in a directory was held while they were trained; None: in float32."""
    return _open(directory).metadata.get(QUANTIZED) if (directory / MANIFEST).is_file() else None


def write_manifest(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Write an artifact's manifest: strict JSON with a checksum of itself."""
    write_atomic(directory / MANIFEST, seal(manifest))


def read_contract(path: str | Path) -> dict[str, Any]:
    """Read the contract of the artifact in a directory; empty for a directory that is no artifact."""
    if not (Path(path) / MANIFEST).is_file():
        return {}
    return dict(_open(Path(path)).metadata.get("contract") or {})


def identity(path: Path) -> str:
    """Hash the manifest of an artifact, and through it every byte of its files, but not the versions that wrote it.

    Equal artifacts have equal hashes. A damaged manifest is hashed as bytes.
    """
    content = (path / MANIFEST).read_bytes()
    with suppress(ValueError):
        content = json.dumps({**unseal(content), "versions": None}, sort_keys=True).encode()
    return _digest(content)


def versions() -> dict[str, str]:
    """Collect {distribution: version} of rlhf-core and of every installed distribution that extends it."""
    return dict(sorted({**distributions.versions(), "rlhf-core": version("rlhf-core")}.items()))


def describe_files(directory: Path) -> dict[str, dict[str, Any]]:
    """Flush every file below `directory` to disk and return {relative path: {size in bytes, sha256}}.

    An adapter_config.json also has `without_base`, a hash of everything but the name of its base model.
    """

    def describe_file(path: Path) -> dict[str, Any]:
        flush(path)
        rest = {"without_base": _without_base(path)} if path.name == ADAPTER_CONFIG else {}
        return {"size": path.stat().st_size, "sha256": hash_file(path), **rest}

    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    with ThreadPoolExecutor(8) as pool:
        files = dict(
            zip(
                (path.relative_to(directory).as_posix() for path in paths),
                pool.map(describe_file, paths),
                strict=True,
            )
        )
    for folder in (directory, *(path for path in directory.rglob("*") if path.is_dir())):
        flush(folder)
    return files


def find_damage(directory: Path, files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Compare `directory` with what `describe_files` returned for it, sizes first; one line per file that differs.

    Raises PermissionError where this user may not read a file.
    """

    def has_other_base(name: str) -> bool:
        expected = files[name].get("without_base")
        return expected is not None and _without_base(directory / name) == expected

    def other_size(name: str) -> str | None:
        path = directory / name
        if path.is_file() and (path.stat().st_size == files[name]["size"] or has_other_base(name)):
            return None
        return f"{path} is missing or its size has changed since it was written"

    def other_content(name: str) -> str | None:
        if hash_file(directory / name) == files[name]["sha256"] or has_other_base(name):
            return None
        return f"{directory / name} was changed since it was written"

    def check_readable(name: str, check: Callable[[str], str | None]) -> str | None:
        try:
            return check(name)
        except PermissionError:
            raise
        except OSError as error:
            return f"{directory / name} cannot be read: {disk_reason(error)}"

    problems = [line for name in files if (line := check_readable(name, other_size))]
    if problems:
        return problems
    with ThreadPoolExecutor(8) as pool:
        return [line for line in pool.map(check_readable, files, repeat(other_content)) if line]


def _without_base(file: Path) -> str:
    """Hash an adapter_config.json without the name of its base model; "" where it is no JSON object."""
    try:
        config = dict(json.loads(read_limited(file)))
    except (ValueError, TypeError):
        return ""
    rest = {name: value for name, value in config.items() if name not in BASE}
    return _digest(json.dumps(rest, sort_keys=True).encode())


def hash_file(path: str | Path) -> str:
    """Compute the SHA-256 of a file's bytes, in hex."""
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
        metadata = unseal(read_limited(manifest))
        if metadata["format"] == FORMAT:
            return Artifact(
                metadata["name"],
                metadata["kind"],
                path,
                {
                    **metadata,
                    "files": {**metadata["files"]},
                    "contract": {**(metadata.get("contract") or {})},
                },
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
