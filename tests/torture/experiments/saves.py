"""End a process before and after each system call of a save: what was acknowledged must be there, and whole."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rlhf_core.runtime.files import (
    append_line,
    fill_directory,
    make_directory,
    remove_leftovers,
    write_atomic,
)
from rlhf_core.stage.record import StageRecord
from tests.torture import shim
from tests.torture.children import Child, Ended
from tests.torture.experiment import Case, Trial

SHARE = 1.0
ACTIONS = ("kill", "killed")
Acknowledge = Callable[[], None]


class Saves(Protocol):
    """A series of saves in one directory. Each method is called in a process of its own.

    prepare: makes what was there before. save: makes the saves, and calls `acknowledge` once per save that the suite
    calls done. problems: says what is wrong after `acknowledged` of them, and after another save.
    """

    def prepare(self, root: Path) -> None: ...

    def save(self, root: Path, acknowledge: Acknowledge) -> None: ...

    def problems(self, root: Path, acknowledged: int) -> Iterator[str]: ...


def run(trial: Trial) -> None:
    shim.require()
    # Not a TemporaryDirectory, which forked processes would delete when they end.
    before = Path(tempfile.mkdtemp(prefix="torture-saves-"))
    try:
        names = [
            f"{kind} {action} {call}"
            for kind in SAVES
            if trial.only is None or trial.only.startswith(f"{kind} ")
            for call in _prepare(kind, before)
            for action in ACTIONS
        ]
        trial.random("order").shuffle(names)
        trial.each(names, lambda case: judge(case, before))
    finally:
        shutil.rmtree(before, ignore_errors=True)


def judge(case: Case, before: Path) -> None:
    kind, action, call = case.name.split(" ", 2)
    saves, root, acknowledgements = SAVES[kind], case.directory / "root", case.directory / "acknowledged"
    shutil.copytree(before / kind, root)
    ended = _save(saves, root, acknowledgements, at=shim.Call.parse(call), action=action)
    case.require(ended.code in (-9, 0), f"the saves themselves failed: {ended}")
    case.count("ended in a save", int(ended.code == -9))
    acknowledged = acknowledgements.stat().st_size if acknowledgements.exists() else 0
    reading = Child(_print_problems, saves, root, acknowledged).wait()
    case.require(not reading.code and not reading.traceback, f"nothing can be read any more: {reading}")
    for line in reading.out.splitlines():
        case.fail(f"{line} ({acknowledged} saves were acknowledged)")


def _prepare(kind: str, before: Path) -> list[shim.Call]:
    """Make what saves of this kind find, in `before/KIND`, and list the calls of undisturbed ones."""
    saves, root, log = SAVES[kind], before / kind, before / f"{kind}.log"
    root.mkdir()
    prepared = Child(saves.prepare, root).wait()
    shutil.copytree(root, before / "logged" / kind)
    ended = _save(saves, before / "logged" / kind, before / "acknowledged", log=log)
    if prepared.code or ended.code:
        raise RuntimeError(f"saves '{kind}' fail undisturbed: {prepared}{ended}")
    return list(shim.calls(log))


def _save(saves: Saves, root: Path, acknowledgements: Path, **plan: Any) -> Ended:
    """Make the saves in a process of its own, with a plan for the library."""

    def acknowledge() -> None:
        with acknowledgements.open("ab") as file:
            file.write(b".")
            file.flush()
            os.fsync(file.fileno())

    return Child(saves.save, root, acknowledge, env=shim.environment(root, **plan)).wait()


def _print_problems(saves: Saves, root: Path, acknowledged: int) -> None:
    for line in saves.problems(root, acknowledged):
        print(line.replace("\n", " "))


def _leftovers(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob(".*"))


@dataclass(frozen=True)
class CheckpointSaves:
    """Checkpoints of steps whose arrays depend on the step and a version, so that each can be told from any other.

    prepared, saves: (step, version) in their order. damage: what happened to the prepared ones, of which the steps
    `lost` cannot be read any more. large: write them array by array, as a large state is written.
    """

    prepared: Sequence[tuple[int, int]]
    saves: Sequence[tuple[int, int]]
    keep: int = 2
    protect: int | None = None
    damage: Callable[[Path], None] | None = None
    lost: Sequence[int] = ()
    large: bool = False

    def prepare(self, root: Path) -> None:
        self._save(root, self.prepared, lambda: None)
        if self.damage is not None:
            self.damage(root / "checkpoints")

    def save(self, root: Path, acknowledge: Acknowledge) -> None:
        self._save(root, self.saves, acknowledge)

    def _save(self, root: Path, saves: Sequence[tuple[int, int]], acknowledge: Acknowledge) -> None:
        from rlhf_core import checkpoint
        from rlhf_core.checkpoint import Checkpoints

        if self.large:
            checkpoint.ENCODED_AT_ONCE = 1
        checkpoints = Checkpoints(root / "checkpoints", keep=self.keep)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says which checkpoint is damaged
            checkpoints.restore(_state(0, 0))
        for step, version in saves:
            checkpoints.save(
                step,
                _state(step, version),
                host={"version": version},
                arrays={"rows": np.arange(step + version)},
                protect=self.protect,
                before=lambda row=f"{step} {version}": append_line(root / "rows", row, durable=True),  # type: ignore[misc]
            )
            checkpoints.wait()
            acknowledge()
        checkpoints.close()

    def problems(self, root: Path, acknowledged: int) -> Iterator[str]:
        from rlhf_core.checkpoint import Checkpoints

        checkpoints = Checkpoints(root / "checkpoints", keep=self.keep)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            newest = checkpoints.restore(_state(0, 0))
        history = [pair for pair in self.prepared if pair[0] not in self.lost]
        history += self.saves[:acknowledged]
        current = next(iter(self.saves[acknowledged:]), None)
        versions = dict(history)
        if newest is None:
            if history:
                yield "the newest checkpoint is lost: there is none"
            return
        if history and newest.step < history[-1][0]:
            yield f"the newest checkpoint is that of step {newest.step}, acknowledged was {history[-1][0]}"
        expected = self._retained(history)
        if current is not None and newest.step == current[0]:
            expected &= self._retained([*history, current])
        if missing := sorted(expected - {*checkpoints.steps()}):
            yield f"retained checkpoints are lost: {missing}; there are {checkpoints.steps()}"
        rows = (root / "rows").read_text().splitlines() if (root / "rows").exists() else []
        for step in checkpoints.steps():
            if step in self.lost and step not in versions and step != newest.step:
                continue
            allowed = {versions.get(step), current[1] if current and current[0] == step else None}
            yield from _wrong_content(checkpoints, step, allowed, rows)
        again = newest.step + 1
        checkpoints.save(again, _state(again, 9), host={"version": 9}, protect=self.protect, block=True)
        checkpoints.close()
        restored = Checkpoints(root / "checkpoints", keep=self.keep).restore(_state(0, 0))
        if restored is None or restored.step != again:
            yield f"another save, of step {again}, is not the newest afterwards"
        expected = self._retained([(step, 0) for step in sorted({*versions, newest.step, again})])
        if {*checkpoints.steps()} - expected:
            yield f"another save retains {checkpoints.steps()}, not {sorted(expected)}"
        if left := _leftovers(root):
            yield f"another save leaves {left}"

    def _retained(self, saves: Sequence[tuple[int, int]]) -> set[int]:
        steps = sorted({step for step, _ in saves})
        return {*steps[-self.keep :], *({self.protect} & {*steps})} if steps else set()  # type: ignore[return-value]


def _state(step: int, version: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    return {"w": jnp.arange(8.0) + 100 * step + version, "key": jax.random.key(10 * step + version)}


def _wrong_content(
    checkpoints: Any, step: int, versions: set[int | None], rows: Sequence[str]
) -> Iterator[str]:
    """Yield what is wrong with a checkpoint that must be one of `versions`."""
    import jax

    restored = checkpoints.restore(_state(0, 0), step=step)
    version = restored.host["version"]
    expected = _state(step, version)
    if version not in versions:
        yield f"the checkpoint of step {step} is of version {version}, not {versions}"
    if f"{step} {version}" not in rows:
        yield f"the checkpoint of step {step} is there, and the row that `before` wrote is not"
    same_key = (jax.random.key_data(restored.state["key"]) == jax.random.key_data(expected["key"])).all()
    same = (np.asarray(restored.state["w"]) == np.asarray(expected["w"])).all() and same_key
    if not same or restored.arrays["rows"].tolist() != list(range(step + version)):
        yield f"the checkpoint of step {step} has another content"


def _cut_the_newest(checkpoints: Path) -> None:
    path = checkpoints / "3" / "arrays.npz"
    path.write_bytes(path.read_bytes()[:-7])


def _interrupt_a_replacement(checkpoints: Path) -> None:
    """Leave what a save that was killed between its two renames leaves, and an older one that was killed before."""
    shutil.copytree(checkpoints / "2", checkpoints / ".3.tmp")
    (checkpoints / "3").rename(checkpoints / ".3.replaced")


class FileSaves:
    """`write_atomic`: a file in a new directory, another content, and a private file."""

    texts = ("first", "second" * 2000, "third")

    def prepare(self, root: Path) -> None:
        (root / "there").mkdir()
        (root / "there" / "mode").write_text("")
        (root / "there" / "mode").chmod(0o640)

    def save(self, root: Path, acknowledge: Acknowledge) -> None:
        for text in self.texts:
            write_atomic(root / "new" / "deep" / "file", text)
            acknowledge()
        write_atomic(root / "there" / "mode", "x")
        acknowledge()
        write_atomic(root / "there" / "private", "x", private=True)
        acknowledge()

    def problems(self, root: Path, acknowledged: int) -> Iterator[str]:
        file, mode, private = (
            root / "new" / "deep" / "file",
            root / "there" / "mode",
            root / "there" / "private",
        )
        text = file.read_text() if file.exists() else None
        if text not in (None, *self.texts, self.texts[-1])[min(acknowledged, 3) :][:2]:
            yield f"the file holds {str(text)[:40]!r}"
        if mode.read_text() not in (["x"] if acknowledged > 3 else ["", "x"]):
            yield f"a file that was there holds {mode.read_text()!r}"
        if mode.stat().st_mode & 0o777 != 0o640:
            yield f"the mode became {mode.stat().st_mode & 0o777:o}"
        if private.exists() and (private.read_text() != "x" or private.stat().st_mode & 0o77):
            yield "the private file is half, or open to others"
        for path in (file, mode, private):
            write_atomic(path, "again", private=path == private)
            remove_leftovers(path.parent)
            if path.read_text() != "again":
                yield f"{path.name} cannot be written again"
        if left := _leftovers(root):
            yield f"another write leaves {left}"


class LineSaves:
    """`append_line`: to a new file, and to one whose last line was never finished."""

    def prepare(self, root: Path) -> None:
        (root / "torn").write_text("before\nhal")

    def save(self, root: Path, acknowledge: Acknowledge) -> None:
        for number in range(3):
            for path in (root / "new" / "lines", root / "torn"):
                append_line(path, json.dumps({"row": number}), durable=True)
                acknowledge()

    def problems(self, root: Path, acknowledged: int) -> Iterator[str]:
        counts = {root / "new" / "lines": (acknowledged + 1) // 2, root / "torn": acknowledged // 2}
        for path, count in counts.items():
            append_line(path, "again", durable=True)
            lines = path.read_text().splitlines()
            begin = ["before", "hal"] if path.name == "torn" else []
            rows = [json.dumps({"row": number}) for number in range(3)]
            if lines not in [[*begin, *rows[:number], "again"] for number in (count, count + 1)]:
                yield f"{path.name} holds {lines}, with {count} acknowledged"
        if left := _leftovers(root):
            yield f"another line leaves {left}"


class DirectorySaves:
    """`fill_directory`: a directory that is not there, and one that is there and empty."""

    def prepare(self, root: Path) -> None:
        (root / "empty").mkdir()

    def save(self, root: Path, acknowledge: Acknowledge) -> None:
        self._fill(root / "deep" / "new", "1")
        acknowledge()
        self._fill(root / "empty", "1")
        acknowledge()

    def _fill(self, directory: Path, text: str) -> None:
        def write(place: Path) -> None:
            (place / "inner").mkdir(exist_ok=True)
            (place / "a").write_text(text)
            (place / "inner" / "b").write_text(text)

        fill_directory(directory, write, "a model")

    def problems(self, root: Path, acknowledged: int) -> Iterator[str]:
        for number, path in enumerate((root / "deep" / "new", root / "empty")):
            if (acknowledged > number or (number == 0 and path.exists())) and not self._whole(path, "1"):
                yield f"{path.name} is not whole: {sorted(path.rglob('*'))}"
            if number or not path.exists():
                self._fill(path, "2")
                if not self._whole(path, "2"):
                    yield f"{path.name} cannot be filled again"
        if left := _leftovers(root):
            yield f"filling it again leaves {left}"

    def _whole(self, path: Path, text: str) -> bool:
        return all((path / name).is_file() and (path / name).read_text() == text for name in ("a", "inner/b"))


@dataclass(frozen=True)
class ArtifactSaves:
    """The end of a stage: it is recorded as running, its artifact is written, and it is recorded as done."""

    prepared: int
    saves: int = 1

    def prepare(self, root: Path) -> None:
        for version in range(self.prepared):
            self._end_stage(root / "run" / "base", version)

    def save(self, root: Path, acknowledge: Acknowledge) -> None:
        for version in range(self.prepared, self.prepared + self.saves):
            self._end_stage(root / "run" / "base", version)
            acknowledge()

    def _end_stage(self, directory: Path, version: int) -> None:
        from rlhf_testing import fixtures

        from rlhf_core.artifacts import save_model
        from rlhf_core.models import fresh_model
        from tests.shared.specs import recorded_as

        make_directory(directory)
        remove_leftovers(directory)
        tokenizer = fixtures.tokenizer()
        model = fresh_model(fixtures.MODEL_TABLE, tokenizer=tokenizer, seed=version)
        record = StageRecord(directory, "base")
        settings: dict[str, dict[str, object]] = {"config": {}, "inputs": {}, "code": {}, "versions": {}}
        record.write_running(recorded_as({"trainer": "sft", "seed": 0, **settings}, "base"))
        stage = fixtures.a_stage(directory)
        artifact = save_model(stage, "model", "language_model", model, contract={"version": version})
        record.write_done({"loss": float(version)}, {"model": artifact})

    def problems(self, root: Path, acknowledged: int) -> Iterator[str]:
        from rlhf_core.artifacts import open_artifact
        from rlhf_core.models import load_model

        directory, done = root / "run" / "base", self.prepared + acknowledged
        record = StageRecord(directory, "base")
        versions = {done - 1, done} if acknowledged < self.saves else {done - 1}
        if record.done:
            artifact = open_artifact(directory / "artifacts" / "model")
            record.require_outputs({"model": artifact})
            version = artifact.metadata["contract"]["version"]
            if version not in versions or record.metrics != {"loss": float(version)}:
                yield f"the finished stage has the artifact of version {version} and metrics {record.metrics}"
            load_model(artifact.path)
        elif acknowledged == self.saves:
            yield f"the stage was done, and its record says {record.then.get('state')}"
        self._end_stage(directory, 7)
        artifact = open_artifact(directory / "artifacts" / "model")
        if artifact.metadata["contract"]["version"] != 7:
            yield "the stage cannot end again"
        if left := _leftovers(root):
            yield f"another end of the stage leaves {left}"


SAVES: dict[str, Saves] = {
    "first": CheckpointSaves([], [(1, 0)], keep=1),
    "only": CheckpointSaves([(1, 0)], [(2, 0), (3, 0)], keep=1),
    "protected": CheckpointSaves([(1, 0), (2, 0), (3, 0)], [(4, 0)], protect=1),
    "again": CheckpointSaves([(1, 0), (2, 0)], [(2, 1)]),
    "interrupted": CheckpointSaves([(2, 0), (3, 0)], [(4, 0)], damage=_interrupt_a_replacement),
    "damaged": CheckpointSaves([(2, 0), (3, 0)], [(3, 1)], damage=_cut_the_newest, lost=[3]),
    "large": CheckpointSaves([(1, 0), (2, 0)], [(3, 0), (4, 0)], large=True),
    "file": FileSaves(),
    "lines": LineSaves(),
    "directory": DirectorySaves(),
    "artifact": ArtifactSaves(0),
    "artifact-again": ArtifactSaves(1),
}
