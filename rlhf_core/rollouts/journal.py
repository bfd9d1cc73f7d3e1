"""The journal of a stage's rollouts: each is on disk, whole, before an update uses it."""

from __future__ import annotations

import io
import json
import math
import os
import re
import struct
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

if TYPE_CHECKING:
    from rlhf_core.rewards.reward import Reward
    from rlhf_core.stage import Stage

FOLDER = "journal"
RECORD = "record.json"
MANIFEST = "manifest.json"
"""The member of a rollout's file that has the size of every other, whose checksums are the zip file's own; earlier
versions wrote none.
"""
MOST_MANIFEST = 2**20
PLAIN = (2**28, 200)
"""Of a file without a manifest: it unpacks to at most so many bytes, and so many for each of its own."""
END = struct.Struct("<4s4H2LH")
"""How a zip file without a comment ends; the fifth value is the number of its members."""
_NAME = re.compile(r"rollout-([0-9]{6,})\.zip")
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
            directory, json.loads(broadcast_text(json.dumps(numbers(directory)))), writes=stage.is_main
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
            return _entry(_members(path), number)
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
        for number, path in _files(self.directory).items() if self.writes else ():
            if number < first or (before is not None and number >= before):
                attempt(path.unlink, path.name, path)

    def _path(self, number: int) -> Path:
        return self.directory / f"rollout-{number:06d}.zip"


def _listed(rounds: Sequence[int]) -> str:
    return ", ".join(map(str, rounds))


def numbers(directory: Path) -> list[int]:
    """List the numbers of the rollouts in a journal's directory."""
    return sorted(_files(directory))


def _files(directory: Path) -> dict[int, Path]:
    """Return {number: file} of the rollouts in a directory."""
    named = [(_NAME.fullmatch(path.name), path) for path in directory.glob("rollout-*.zip")]
    return {int(match[1]): path for match, path in named if match}


def _packed(array: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.lib.format.write_array(content, np.asarray(array), allow_pickle=False)
    return content.getvalue()


def _members(path: Path) -> dict[str, bytes]:
    """Read the members of a rollout's file, each as long as it was written. Raises what is wrong with the file."""
    with zipfile.ZipFile(path) as file:
        sizes = {info.filename: info.file_size for info in file.infolist()}
        if len(sizes) < len(file.infolist()):
            raise ValueError("it has a member twice")
        if len(sizes) != _announced(path):  # one entry of its directory may have taken in the next
            raise ValueError("it has not the members that it announces")
        if MANIFEST not in sizes:
            at_once, times = PLAIN
            if sum(sizes.values()) > at_once + times * path.stat().st_size:
                raise ValueError("it unpacks to far more than a rollout")
            return {name: file.read(name) for name in sizes}
        if sizes[MANIFEST] > MOST_MANIFEST:
            raise ValueError(f"{MANIFEST} is too large")
        manifest = json.loads(file.read(MANIFEST))
        del sizes[MANIFEST]
        if manifest != sizes:
            raise ValueError(f"its members are not those of {MANIFEST}")
        return {name: file.read(name) for name in sizes}


def _announced(path: Path) -> int:
    """Return how many members the end of a zip file says that it has."""
    with path.open("rb") as file:
        file.seek(-END.size, os.SEEK_END)
        count: int = END.unpack(file.read())[4]
    return count


def _entry(members: dict[str, bytes], number: int) -> JournalEntry:
    """Make a rollout of the members of its file. Raises what is wrong with them."""
    facts, samples = json.loads(members.pop("rollout.json")), json.loads(members.pop("samples.json"))
    if unknown := [name for name in members if not name.endswith(".npy")]:
        raise ValueError(f"it has a member {unknown[0]!r}")
    arrays = {name.removesuffix(".npy"): _array(name, content) for name, content in members.items()}
    rollout = Rollout.from_arrays(
        arrays, number=number, rounds=int(facts["rounds"]), metrics=dict(facts["metrics"])
    )
    if not isinstance(samples, list) or not all(isinstance(row, dict) for row in samples):
        raise ValueError("samples.json is not a list of objects")
    return JournalEntry(replace(rollout, samples_read=samples), list(facts["taken"]), dict(facts["rewards"]))


def _array(name: str, content: bytes) -> np.ndarray:
    """Read an array. Raises ValueError where its header announces more, or less, than there is."""
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    read_header = (
        np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    )
    shape, _, dtype = read_header(file)
    if math.prod(shape) * dtype.itemsize != len(content) - file.tell():
        raise ValueError(f"{name} has not the size that it begins with")
    file.seek(0)
    array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
    return array
