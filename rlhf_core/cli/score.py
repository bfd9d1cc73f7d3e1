"""`rlhf score`: write scores as they are computed, so that an interrupted command can resume."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core import plugins as plugin_loading
from rlhf_core.cli.row_output import number, row_text, write_text
from rlhf_core.errors import UNREADABLE
from rlhf_core.runtime.disk_errors import attempt
from rlhf_core.runtime.files import flush, make_directory, require_writable
from rlhf_core.runtime.terminal import echo

if TYPE_CHECKING:
    from rlhf_core.data import Records
    from rlhf_core.scoring import ScoredPart, Scorer


def score(
    model: str,
    file: Path,
    output: Path | None,
    *,
    normalize: bool = False,
    prompt_repeated: bool | None = None,
    plugins: Sequence[Path] = (),
) -> None:
    """Write the rows of `file` with their scores, and print the accuracy where they are preferences.

    normalize: whether scores are standard deviations from the mean, both stored in the model's artifact.
    prompt_repeated: whether completions begin with their prompt; None: as in the model's training data.
    """
    from rlhf_core import data, runtime
    from rlhf_core.scoring import Scorer, warn_unread

    require_writable(output)
    runtime.prepare()
    registry = plugin_loading.load(files=plugins).registry
    records = data.load(str(file), registry=registry)
    scorer = Scorer.load(model, registry=registry, normalize=normalize)
    counts = Counts()
    if output is None:
        for part in scorer.score_parts(records, prompt_repeated=prompt_repeated):
            write_text("".join(_lines(records, counts.rows, part)))
            counts.add(part)
    else:
        settings = [model, normalize, prompt_repeated]
        unfinished = Unfinished(output, _identity(scorer, records, settings), counts, scorer)
        done = unfinished.open()
        if counts.rows:
            echo(f"{output}: resuming after {counts.rows:,} rows that were scored before", err=True)
        for part in scorer.score_parts(records, prompt_repeated=prompt_repeated, skip=done):
            unfinished.write(part, _lines(records, counts.rows, part))
        unfinished.finish()
    warn_unread(counts.unread)
    if counts.pairs is not None:
        right, ties, scored = counts.pairs
        line = f"{right:,} of {scored:,} pairs scored higher; {ties:,} tied"
        echo(f"accuracy {right / max(scored, 1):.4f}: {line}", err=output is None)


class Counts:
    """Count rows, correct pairs and unread rows for the summary."""

    def __init__(self) -> None:
        self.rows = 0
        self.pairs: tuple[int, int, int] | None = None
        """Pairs whose chosen completion scored higher, pairs that tied, and pairs scored."""
        self.unread: list[str] = []

    def add(self, part: ScoredPart) -> None:
        if "chosen_score" in part.scores:
            chosen, rejected = part.scores["chosen_score"], part.scores["rejected_score"]
            counts = (chosen > rejected).sum(), (chosen == rejected).sum(), np.isfinite(chosen).sum()
            before = self.pairs or (0, 0, 0)
            self.pairs = tuple(a + int(b) for a, b in zip(before, counts, strict=True))  # type: ignore[assignment]
        self.unread += part.unread
        self.rows += len(next(iter(part.scores.values())))


class Unfinished:
    """Write rows to a hidden file beside the output, and the state needed to resume to another one."""

    def __init__(self, output: Path, identity: str, counts: Counts, scorer: Scorer) -> None:
        """identity: hash of the rows, model and settings; files with another one are not resumed."""
        self.output, self.identity, self.counts, self.scorer = output, identity, counts, scorer
        self.rows = output.with_name(f".{output.name}.unfinished")
        self.state = output.with_name(f".{output.name}.unfinished.json")
        self.parts = 0
        self.file: Any = None

    def open(self) -> int:
        """Return the number of parts already written; start over unless they have the same identity."""
        size = 0
        with suppress(*UNREADABLE):
            state = json.loads(self.state.read_bytes())
            if state["identity"] == self.identity and self.rows.stat().st_size >= state["bytes"]:
                self.scorer.restore(state["layout"])
                self.counts.rows, self.counts.unread = state["rows"], state["unread"]
                self.counts.pairs = None if state["pairs"] is None else tuple(state["pairs"])
                self.parts, size = state["parts"], state["bytes"]
        self._attempt(lambda: self._open_rows(size))
        return self.parts

    def _open_rows(self, size: int) -> None:
        make_directory(self.output.parent)
        self.file = open(self.rows, "r+b" if self.parts else "wb")  # noqa: SIM115  (`finish` closes it)
        self.file.truncate(size)
        self.file.seek(size)

    def _attempt(self, write: Callable[[], None]) -> None:
        attempt(write, self.output.name, self.output)

    def write(self, part: ScoredPart, lines: Sequence[str]) -> None:
        """Add a part; flush its rows to disk before the state that counts them."""
        from rlhf_core.artifacts import write_atomic

        self._attempt(lambda: self._append("".join(lines).encode()))
        self.parts += 1
        self.counts.add(part)
        if self.scorer.layout is None:  # no row could be scored so far
            return
        state: Mapping[str, Any] = {
            "identity": self.identity,
            "parts": self.parts,
            "bytes": self.file.tell(),
            "rows": self.counts.rows,
            "pairs": self.counts.pairs,
            "unread": self.counts.unread,
            "layout": self.scorer.snapshot(),
        }
        write_atomic(self.state, json.dumps(state))

    def _append(self, content: bytes) -> None:
        self.file.write(content)
        self.file.flush()
        os.fsync(self.file.fileno())

    def finish(self) -> None:
        self.file.close()
        self._attempt(self._put_in_place)

    def _put_in_place(self) -> None:
        os.replace(self.rows, self.output)
        flush(self.output.parent)
        self.state.unlink(missing_ok=True)


def _lines(records: Records, start: int, part: ScoredPart) -> list[str]:
    count = len(next(iter(part.scores.values())))
    return [
        row_text({**records[start + i], **{name: number(s[i]) for name, s in part.scores.items()}})
        for i in range(count)
    ]


def _identity(scorer: Scorer, records: Records, settings: Sequence[Any]) -> str:
    """Hash everything that decides the scores; the model's files count by name, size and times."""
    import jax

    from rlhf_core import artifacts
    from rlhf_core.data.source import digest

    source = scorer.model.source
    files: list[Any] = []
    if source is not None and Path(source).is_dir():
        stats = [(path.name, path.stat()) for path in sorted(Path(source).iterdir()) if path.is_file()]
        files = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats]
    devices = [device.device_kind for device in jax.devices()]
    facts = [files, settings, scorer.contract.to_dict(), devices, artifacts.versions()]
    return digest(records.fingerprint, json.dumps(facts, default=str, sort_keys=True))
