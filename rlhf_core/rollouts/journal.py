"""The journal of a stage's rollouts: each is on disk, whole, before an update uses it."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlhf_core.errors import UNREADABLE, InputError
from rlhf_core.rollouts.rollout import Rollout, scrubbed
from rlhf_core.runtime.agreement import broadcast_text
from rlhf_core.runtime.files import attempt, make_directory, write_atomic
from rlhf_core.stage.decide import compare

if TYPE_CHECKING:
    from rlhf_core.rewards.reward import Reward
    from rlhf_core.stage import Stage

FOLDER = "journal"
RECORD = "record.json"
BYTES = {"token": 9, "completion": 200, "rollout": 4000}
"""On disk, at most: of a token its id, its log-probability, whether the policy wrote it, and its text."""


def most_bytes(*, rollouts: int, completions: int, tokens: int) -> int:
    """Forecast the size of a journal, without the columns of the prompts. tokens: those of the prompts, too."""
    return rollouts * BYTES["rollout"] + completions * BYTES["completion"] + tokens * BYTES["token"]


class Entry(NamedTuple):
    """A rollout as it was scored, before a trainer prepared it.

    taken: the rounds of prompts reserved for it. rewards: the states of the rewards after it, see `snapshots`.
    """

    rollout: Rollout
    taken: Sequence[int]
    rewards: Mapping[str, Any]


class Journal:
    """The rollouts of one stage, by number, in DIR/STAGE/journal/rollout-NNNNNN.zip.

    A run that resumes takes from it what was sampled after its checkpoint, so that it trains on the same completions
    and rewards, whatever sampled and scored them. The first process writes; all processes read.
    """

    def __init__(self, directory: Path, known: Sequence[int], *, writes: bool) -> None:
        """known: the numbers of the rollouts to be read. writes: whether this process writes."""
        self.directory, self.known, self.writes = directory, frozenset(known), writes

    @classmethod
    def open(cls, stage: Stage, record: Mapping[str, Any], *, keep: int, fresh: bool) -> Journal:
        """Open a stage's journal. Deletes the rollouts from number `keep` on where `fresh`, or for another record."""
        directory = stage.dir / FOLDER
        if stage.is_main:
            attempt(lambda: make_directory(directory), FOLDER, directory)
            written = directory / RECORD
            then: Any = None
            with suppress(*UNREADABLE):
                then = json.loads(written.read_bytes())
            if fresh or then is None or any(compare(then, record)[::2]):
                cls(directory, (), writes=True).keep(before=keep)
            if then != record:
                write_atomic(written, json.dumps(record), private=True)
        return cls(
            directory, json.loads(broadcast_text(json.dumps(numbers(directory)))), writes=stage.is_main
        )

    def write(self, entry: Entry, rewards: Sequence[Reward]) -> None:
        """Write a rollout. Raises RunError where the disk refuses it."""
        if not self.writes:
            return
        rollout = entry.rollout
        facts = {
            "rounds": rollout.rounds,
            "metrics": dict(rollout.metrics),
            "taken": list(entry.taken),
            "rewards": entry.rewards,
        }
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
            file.writestr("rollout.json", json.dumps(facts))
            file.writestr("samples.json", json.dumps(rollout.rows(rewards), default=scrubbed))
            for name, array in rollout.arrays().items():
                with file.open(f"{name}.npy", "w") as out:
                    np.lib.format.write_array(out, np.asarray(array), allow_pickle=False)
        write_atomic(self._path(rollout.number), content.getvalue(), private=True)

    def read(self, number: int) -> Entry | None:
        """Read a rollout; None where the journal did not have it when it was opened.

        Raises InputError for a file that is damaged.
        """
        if number not in self.known:
            return None
        path = self._path(number)
        try:
            with zipfile.ZipFile(path) as file:
                facts = json.loads(file.read("rollout.json"))
                samples = json.loads(file.read("samples.json"))
                arrays = {
                    name.removesuffix(".npy"): np.lib.format.read_array(io.BytesIO(file.read(name)))
                    for name in file.namelist()
                    if name.endswith(".npy")
                }
        except (*UNREADABLE, zipfile.BadZipFile, EOFError) as error:
            raise InputError(
                f"{path} is damaged ({error}): restore it, or delete it to sample this rollout again"
            ) from error
        rollout = Rollout.from_arrays(arrays, number=number, rounds=facts["rounds"], metrics=facts["metrics"])
        return Entry(replace(rollout, samples_read=samples), facts["taken"], facts["rewards"])

    def require(self, number: int) -> Entry:
        """Read a rollout that a checkpoint needs. Raises InputError where it is missing."""
        entry = self.read(number)
        if entry is None:
            raise InputError(
                f"{self._path(number)} is missing: the newest checkpoint needs it; restore the file"
            )
        return entry

    def require_rounds(self, entry: Entry, due: Sequence[int]) -> None:
        """Raise InputError unless a rollout has the rounds of prompts that are due."""
        if [*entry.taken] != [*due]:
            raise InputError(
                f"{self._path(entry.rollout.number)} has the prompts of rounds {_listed(entry.taken)}, and "
                f"{_listed(due)} are due: it is of another run; delete it to sample this rollout again"
            )

    def keep(self, first: int = 0, before: int | None = None) -> None:
        """Delete the rollouts before number `first`, and from number `before` on."""
        for number, path in _files(self.directory).items() if self.writes else ():
            if number < first or (before is not None and number >= before):
                path.unlink()

    def _path(self, number: int) -> Path:
        return self.directory / f"rollout-{number:06d}.zip"


def _listed(rounds: Sequence[int]) -> str:
    return ", ".join(map(str, rounds))


def numbers(directory: Path) -> list[int]:
    """List the numbers of the rollouts in a journal's directory."""
    return sorted(_files(directory))


def _files(directory: Path) -> dict[int, Path]:
    """Return {number: file} of the rollouts in a directory."""
    return {int(path.stem.rpartition("-")[2]): path for path in directory.glob("rollout-*.zip")}
