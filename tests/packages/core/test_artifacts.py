"""Artifacts appear whole or not at all, and every changed byte is detected."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core import Stage, artifacts
from rlhf_core.errors import InputError, RunError


class FakeModel:
    tokenizer = None

    def __init__(self, weights: bytes, fails: Exception | None = None) -> None:
        self.weights, self.fails = weights, fails

    def save(self, path: Path) -> None:
        (path / "deep").mkdir(parents=True)
        (path / "config.json").write_text("{}")
        (path / "deep" / "model.safetensors").write_bytes(self.weights)
        if self.fails is not None:
            raise self.fails


@pytest.fixture
def told() -> list[Any]:
    return []


@pytest.fixture
def stage(tmp_path: Path, told: list[Any]) -> Stage:
    hook = SimpleNamespace(rlhf_artifact_saved=lambda stage, artifact: told.append((stage, artifact)))
    return Stage("rm", tmp_path / "run" / "rm", 0, None, True, None, hook)  # type: ignore[arg-type]


def save(stage: Stage, model: FakeModel, **contract: Any) -> artifacts.Artifact:
    return artifacts.save_model(stage, "model", "reward_model", model, contract=contract)  # type: ignore[arg-type]


def test_saved_is_what_is_read_and_announced(stage: Stage, told: list[Any]) -> None:
    saved = save(stage, FakeModel(b"weights"), max_length=512)
    assert saved.path == stage.dir / "artifacts" / "model"
    assert told == [(stage, saved)]
    found = artifacts.open_artifact(saved.path)
    assert found == saved
    assert (found.name, found.kind, found.metadata["stage"]) == ("model", "reward_model", "rm")
    assert found.metadata["contract"] == {"max_length": 512}
    assert "rlhf-core" in found.metadata["versions"]
    assert set(found.metadata["files"]) == {"config.json", "deep/model.safetensors"}
    assert found.metadata["files"]["deep/model.safetensors"]["size"] == 7


def test_identity_is_of_the_content(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*what: Any, **more: Any) -> str:
        return artifacts.identity(save(stage, *what, **more).path)

    first = made(FakeModel(b"a"))
    assert made(FakeModel(b"a")) == first
    assert made(FakeModel(b"b")) != first
    assert made(FakeModel(b"a"), max_length=1) != first
    monkeypatch.setattr(artifacts, "versions", lambda: {"rlhf-core": "0.0.0"})
    assert made(FakeModel(b"a")) == first
    manifest = stage.dir / "artifacts" / "model" / artifacts.MANIFEST
    manifest.write_bytes(b"{")
    assert artifacts.identity(manifest.parent) != first


@pytest.mark.parametrize("harm", [b"Weights", b"weight", None])
def test_every_damaged_file_is_named(stage: Stage, harm: bytes | None) -> None:
    path = save(stage, FakeModel(b"weights")).path
    victim = path / "deep" / "model.safetensors"
    victim.unlink() if harm is None else victim.write_bytes(harm)
    with pytest.raises(InputError, match=r"deep/model\.safetensors (was changed|is missing)"):
        artifacts.open_artifact(path)
    same_size = harm == b"Weights"  # sizes are compared first, and contents where these are the same
    (path / "config.json").write_text("[]" if same_size else "[1]")
    with pytest.raises(InputError) as caught:
        artifacts.open_artifact(path)
    assert len(caught.value.problems) == 2


MADE = {"format": 1, "name": "model", "kind": "language_model", "files": {}}


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (None, "is not an artifact"),
        ({"format": 1}, "is damaged"),
        ({**MADE, "contract": ["template_date"]}, "is damaged"),
        ({**MADE, "files": {"config.json": None}}, "does not describe its files"),
        ({**MADE, "files": {"config.json": {"size": 0}}}, "does not describe its files"),
        ({"format": 9, "versions": {"rlhf-core": "9.0"}}, "format 9.*9.0"),
    ],
)
def test_manifests_that_cannot_be_used(tmp_path: Path, manifest: Any, message: str) -> None:
    if isinstance(manifest, dict):  # whole, but for what it says
        artifacts.write_manifest(tmp_path, manifest)
    elif manifest is not None:
        (tmp_path / artifacts.MANIFEST).write_text(manifest)
    (tmp_path / "config.json").touch()
    with pytest.raises(InputError, match=message):
        artifacts.open_artifact(tmp_path)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, r"no space left on the disk \([\d.,]+ MiB free\)\."),
        (errno.EDQUOT, r"disk quota exceeded\."),
    ],
)
def test_full_disk_keeps_the_artifact_that_was_there(
    stage: Stage, told: list[Any], number: int, words: str
) -> None:
    before = save(stage, FakeModel(b"old"))
    with pytest.raises(RunError) as caught:
        save(stage, FakeModel(b"new", OSError(number, "full")))
    text = str(caught.value)
    assert re.match(f"artifact 'rm.model' could not be written to {before.path}: {words}", text)
    assert "\n" not in text
    assert artifacts.open_artifact(before.path) == before
    assert [path.name for path in before.path.parent.iterdir()] == ["model"]
    assert len(told) == 1


def test_other_errors_stay_what_they_are_and_leave_nothing(stage: Stage) -> None:
    with pytest.raises(ZeroDivisionError):
        save(stage, FakeModel(b"", ZeroDivisionError()))
    assert list((stage.dir / "artifacts").iterdir()) == []


def test_manifest_is_strict_json(stage: Stage) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        save(stage, FakeModel(b""), mean=float("nan"))
    path = save(stage, FakeModel(b""), mean=0.5).path
    assert json.loads((path / artifacts.MANIFEST).read_text())["contract"] == {"mean": 0.5}


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.long)])
def test_every_flipped_bit_of_the_manifest_is_an_error(stage: Stage, every: int) -> None:
    """Regression: 103 of 300 such changes were accepted as another contract."""
    path = save(stage, FakeModel(b"weights"), max_length=512, template="é \x1b", mean=0.25, read_at=None).path
    manifest = path / artifacts.MANIFEST
    whole, made = manifest.read_bytes(), artifacts.identity(path)
    for bit in range(0, 8 * len(whole), every):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        manifest.write_bytes(bytes(content))
        with pytest.raises(InputError, match=r"rlhf_artifact\.json is damaged \(.*run the stage"):
            artifacts.open_artifact(path)
        assert artifacts.identity(path) != made
    manifest.write_bytes(whole)
    assert artifacts.open_artifact(path).metadata["contract"]["max_length"] == 512


def test_a_file_that_may_not_be_read_is_a_message(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(stage, FakeModel(b"weights")).path

    def refused(file: Path) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    monkeypatch.setattr(artifacts, "hash_file", refused)
    with pytest.raises(InputError, match=r"/\S+ cannot be read: Permission denied"):
        artifacts.open_artifact(path)


def test_several_processes_share_the_files_and_what_they_find(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(stage, FakeModel(b"weights")).path
    (path / "deep" / "model.safetensors").write_bytes(b"weighty")  # of the same size, and process 1's to read
    hashed: list[str] = []
    hash_file = artifacts.hash_file
    monkeypatch.setattr(artifacts, "hash_file", lambda path: hashed.append(path.name) or hash_file(path))
    monkeypatch.setattr("jax.process_count", lambda: 2)
    said: dict[int, str] = {}
    for process in (1, 0):
        monkeypatch.setattr("jax.process_index", lambda process=process: process)
        monkeypatch.setattr(
            artifacts, "gather_texts", lambda text, at=process: [said.setdefault(at, text), said.get(1, "")]
        )
        with pytest.raises(InputError, match=r"model\.safetensors was changed since it was written"):
            artifacts.open_artifact(path, together=True)
    assert sorted(hashed) == ["config.json", "model.safetensors"]
