"""Write scored rows as they are computed, so that an interrupted `rlhf score` can resume."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.artifacts import write_atomic
from rlhf_core.data.table import Table
from rlhf_core.errors import UNREADABLE, InputError, read_limited
from rlhf_core.runtime.files import attempt, flush, make_directory, seal, unseal
from rlhf_core.runtime.terminal import number

if TYPE_CHECKING:
    from rlhf_core.data import Records
    from rlhf_core.scoring import ScoredPart, Scorer


def with_scores(rows: Sequence[Mapping[str, Any]], part: ScoredPart) -> list[dict[str, Any]]:
    """Add the scores of a part to its rows: numbers or lists of them, None where a row could not be scored."""
    return [
        {**row, **{name: _cell(score) for name, score in zip(part.scores, scores, strict=True)}}
        for row, *scores in zip(rows, *part.scores.values(), strict=True)
    ]


def _cell(score: Any) -> Any:
    if score is None:
        return None
    return [number(x) for x in score] if np.ndim(score) else number(score)


def prompts_as_turns(table: Table) -> Table:
    """Make a user's turn of every prompt that is a text, so that its completions are replies in a conversation.

    Raises InputError if there are no prompts.
    """
    kind = table.kinds.get("prompt")
    if kind is None:
        raise InputError(
            f"{table.name} has no column 'prompt' to use as the user's turn; it has {', '.join(table.columns)}"
        )

    def as_turn(row: Mapping[str, Any]) -> Mapping[str, Any]:
        prompt = row.get("prompt")
        return {**row, "prompt": [{"role": "user", "content": prompt}]} if isinstance(prompt, str) else row

    kinds = {**table.kinds, "prompt": replace(kind, texts=0, lists=kind.texts + kind.lists)}
    return table.changed(as_turn, "prompts as turns", kinds)


class Unfinished:
    """Write scored rows to a hidden file next to the output, with the state that an interrupted command needs."""

    def __init__(self, output: Path, identity: str, scorer: Scorer) -> None:
        """identity: hash of the rows, model and settings; files with another one are not resumed."""
        self.output, self.identity, self.scorer = output, identity, scorer
        self.target = Path(os.path.realpath(output))  # a link stays one
        self.rows = self.target.with_name(f".{output.name}.unfinished")
        self.state = self.target.with_name(f".{output.name}.unfinished.json")
        self.parts = 0
        self.unread: list[str] = []
        self.file: Any = None
        self.digest = hashlib.sha256()

    def open(self) -> list[dict[str, Any]]:
        """Return the rows already written, of `parts` parts; start over unless they have the same identity.

        Raises InputError where the rows are not those that were written.
        """
        written = b""
        with suppress(*UNREADABLE):
            state = unseal(read_limited(self.state))
            if state["identity"] == self.identity and self.rows.stat().st_size >= state["bytes"]:
                written = self.rows.read_bytes()[: state["bytes"]]
                self.scorer.restore(state["layout"])
                self.parts, self.unread = state["parts"], state["unread"]
                self.digest = hashlib.sha256(written)
                if self.digest.hexdigest() != state["sha256"]:
                    raise InputError(f"{self.rows} is damaged: delete it to score all rows again")

        def open_rows() -> None:
            make_directory(self.target.parent)
            self.file = open(self.rows, "r+b" if self.parts else "wb")  # noqa: SIM115  (`finish` closes it)
            self.file.truncate(len(written))
            self.file.seek(len(written))

        self._attempt(open_rows)
        return [json.loads(line) for line in written.splitlines()]

    def _attempt(self, write: Callable[[], None]) -> None:
        attempt(write, self.output.name, self.output)

    def write(self, text: str, unread: Sequence[str]) -> None:
        """Add a part; flush its rows to disk before the state that counts them."""
        content = text.encode()

        def append() -> None:
            self.file.write(content)
            self.file.flush()
            os.fsync(self.file.fileno())

        self._attempt(append)
        self.digest.update(content)
        self.parts += 1
        self.unread += unread
        if self.scorer.layout is None:  # no row could be scored so far
            return
        state: Mapping[str, Any] = {
            "identity": self.identity,
            "parts": self.parts,
            "bytes": self.file.tell(),
            "sha256": self.digest.hexdigest(),
            "unread": self.unread,
            "layout": self.scorer.snapshot(),
        }
        write_atomic(self.state, seal(state))

    def finish(self) -> None:
        """Put the rows in the output's place."""
        self.file.close()

        def replace() -> None:
            if self.target.exists():
                shutil.copymode(self.target, self.rows)
            os.replace(self.rows, self.target)
            flush(self.target.parent)
            self.state.unlink(missing_ok=True)

        self._attempt(replace)


def identity_of(scorer: Scorer, records: Records, settings: Sequence[Any]) -> str:
    """Hash everything that decides the scores; the model's files count by name, size and times."""
    import jax

    from rlhf_core import artifacts
    from rlhf_core.data.table import digest

    source = scorer.model.source
    files: list[Any] = []
    if source is not None and Path(source).is_dir():
        stats = [(path.name, path.stat()) for path in sorted(Path(source).iterdir()) if path.is_file()]
        files = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats]
    devices = [device.device_kind for device in jax.devices()]
    facts = [files, settings, scorer.contract.to_dict(), devices, artifacts.versions()]
    return digest(records.fingerprint, json.dumps(facts, default=str, sort_keys=True))
