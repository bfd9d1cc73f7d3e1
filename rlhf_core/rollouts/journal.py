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

from rlhf_core.errors import UNREADABLE, Damaged, InputError, library_words, read_limited
from rlhf_core.rollouts.rollout import Rollout, scrubbed
from rlhf_core.runtime.agreement import broadcast_text
from rlhf_core.runtime.files import attempt, make_directory, write_atomic
from rlhf_core.runtime.rollout_files import (
    FOLDER,
    MANIFEST,
    RolloutFile,
    read_rollout,
    rollout_files,
    rollout_numbers,
    rollout_path,
)

if TYPE_CHECKING:
    from rlhf_core.rewards.reward import Reward
    from rlhf_core.stage import Stage

RECORD = "record.json"
BYTES = {"token": 9, "completion": 200, "rollout": 4000}
"""On disk, at most: of a token its id, its log-probability, whether the policy wrote it, and its text."""


def most_bytes(*, rollouts: int, completions: int, tokens: int) -> int:
    """Forecast the size of a journal, without the columns of the prompts. tokens: those of the prompts, too."""
    return rollouts * BYTES["rollout"] + completions * BYTES["completion"] + tokens * BYTES["token"]


class JournalEntry(NamedTuple):
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
    def open(cls, stage: Stage, *, keep: int, fresh: bool) -> Journal:
        """Open a stage's journal. Deletes the rollouts from number `keep` on where `fresh`, or for another record."""
        directory = stage.dir / FOLDER
        spec = stage.specification()
        if stage.is_main:
            attempt(lambda: make_directory(directory), FOLDER, directory)
            written = directory / RECORD
            then: Any = None
            with suppress(*UNREADABLE):
                then = json.loads(read_limited(written))
            changes = None if then is None else spec.diff(then)
            if fresh or changes is None or changes.refused or changes.data:
                cls(directory, (), writes=True).keep(before=keep)
            if then != spec.record:
                write_atomic(written, json.dumps(spec.record), private=True)
        return cls(
            directory,
            json.loads(broadcast_text(json.dumps(rollout_numbers(directory)))),
            writes=stage.is_main,
        )

    def write(self, entry: JournalEntry, rewards: Sequence[Reward]) -> None:
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
        members = {
            "rollout.json": json.dumps(facts).encode(),
            "samples.json": json.dumps(rollout.rows(rewards), default=scrubbed).encode(),
            **{f"{name}.npy": _packed(array) for name, array in rollout.arrays().items()},
        }
        members[MANIFEST] = json.dumps({name: len(each) for name, each in members.items()}).encode()
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
            for name, each in members.items():
                file.writestr(name, each)
        write_atomic(self._path(rollout.number), content.getvalue(), private=True)

    def read(self, number: int) -> JournalEntry | None:
        """Read a rollout; None where the journal did not have it when it was opened.

        Raises Damaged for a file that is.
        """
        if number not in self.known:
            return None
        path = self._path(number)
        try:
            return _entry(read_rollout(path), number)
        # Of zipfile, zlib, json and NumPy: there is no end to what damaged bytes may be taken for.
        except Exception as error:
            fix = "restore it, or delete it to sample this rollout again"
            raise Damaged(path, library_words(error), fix) from error

    def require(self, number: int) -> JournalEntry:
        """Read a rollout that a checkpoint needs. Raises InputError where it is missing."""
        entry = self.read(number)
        if entry is None:
            raise InputError(
                f"{self._path(number)} is missing: the newest checkpoint needs it; restore the file"
            )
        return entry

    def require_rounds(self, entry: JournalEntry, due: Sequence[int]) -> None:
        """Raise InputError unless a rollout has the rounds of prompts that are due."""
        if [*entry.taken] != [*due]:
            raise InputError(
                f"{self._path(entry.rollout.number)} has the prompts of rounds {_listed(entry.taken)}, and "
                f"{_listed(due)} are due: it is of another run; delete it to sample this rollout again"
            )

    def keep(self, first: int = 0, before: int | None = None) -> None:
        """Delete the rollouts before number `first`, and from number `before` on."""
        for number, path in rollout_files(self.directory).items() if self.writes else ():
            if number < first or (before is not None and number >= before):
                attempt(path.unlink, path.name, path)

    def _path(self, number: int) -> Path:
        return rollout_path(self.directory, number)


def _listed(rounds: Sequence[int]) -> str:
    return ", ".join(map(str, rounds))


def _packed(array: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.lib.format.write_array(content, np.asarray(array), allow_pickle=False)
    return content.getvalue()


def _entry(file: RolloutFile, number: int) -> JournalEntry:
    """Make a rollout of its file. Raises what is wrong with it."""
    facts = file.facts
    rollout = Rollout.from_arrays(
        file.arrays, number=number, rounds=int(facts["rounds"]), metrics=dict(facts["metrics"])
    )
    return JournalEntry(
        replace(rollout, samples_read=file.samples), list(facts["taken"]), dict(facts["rewards"])
    )
