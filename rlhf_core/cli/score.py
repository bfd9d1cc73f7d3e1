"""`rlhf score`: rows with their scores, written as they are computed, so that an interrupted command goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core import plugins as plugin_loading
from rlhf_core.cli.row_output import number, row_text, write_text
from rlhf_core.runtime.files import require_writable
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

    normalize: in standard deviations from the mean that the model's artifact has stored. prompt_repeated: whether
    completions begin with their prompt; None: as in the data that the model was trained on.
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
            echo(f"{output}: going on after {counts.rows:,} rows that were scored before", err=True)
        for part in scorer.score_parts(records, prompt_repeated=prompt_repeated, skip=done):
            unfinished.write(part, _lines(records, counts.rows, part))
        unfinished.finish()
    warn_unread(counts.unread)
    if counts.pairs is not None:
        right, ties, scored = counts.pairs
        line = f"{right:,} of {scored:,} pairs scored higher; {ties:,} tied"
        echo(f"accuracy {right / max(scored, 1):.4f}: {line}", err=output is None)


class Counts:
    """What is said of all rows when they are scored."""

    def __init__(self) -> None:
        self.rows = 0
        self.pairs: tuple[int, int, int] | None = None
        """Pairs whose chosen scored higher, that tied, and that were scored."""
        self.unread: list[str] = []

    def add(self, part: ScoredPart) -> None:
        if "chosen_score" in part.scores:
            chosen, rejected = part.scores["chosen_score"], part.scores["rejected_score"]
            found = (chosen > rejected).sum(), (chosen == rejected).sum(), np.isfinite(chosen).sum()
            before = self.pairs or (0, 0, 0)
            self.pairs = tuple(a + int(b) for a, b in zip(before, found, strict=True))  # type: ignore[assignment]
        self.unread += part.unread
        self.rows += len(next(iter(part.scores.values())))


class Unfinished:
    """The rows written so far, in a file beside the output, and in another beside that what going on needs."""

    def __init__(self, output: Path, identity: str, counts: Counts, scorer: Scorer) -> None:
        """identity: of the rows, the model and the settings: of another one, nothing is gone on with."""
        self.output, self.identity, self.counts, self.scorer = output, identity, counts, scorer
        self.rows = output.with_name(f".{output.name}.unfinished")
        self.state = output.with_name(f".{output.name}.unfinished.json")
        self.parts = 0
        self.file: Any = None

    def open(self) -> int:
        """The parts that are there; begins anew where there are none of the same."""
        self.output.parent.mkdir(parents=True, exist_ok=True)
        size = 0
        with suppress(OSError, ValueError, KeyError, TypeError):
            said = json.loads(self.state.read_bytes())
            if said["identity"] == self.identity and self.rows.stat().st_size >= said["bytes"]:
                from rlhf_core.packing.layout import Layout

                layout: dict[str, Any] = {
                    name: tuple(value) if isinstance(value, list) else value
                    for name, value in said["layout"].items()
                }
                self.scorer.layout = Layout(**layout)
                self.counts.rows, self.counts.unread = said["rows"], said["unread"]
                self.counts.pairs = None if said["pairs"] is None else tuple(said["pairs"])
                self.parts, size = said["parts"], said["bytes"]
        self.file = open(self.rows, "r+b" if self.parts else "wb")  # noqa: SIM115
        self.file.truncate(size)
        self.file.seek(size)
        return self.parts

    def write(self, part: ScoredPart, lines: Sequence[str]) -> None:
        """Add a part, which is on the disk before it is said to be there."""
        from rlhf_core.artifacts import write_atomic

        self.file.write("".join(lines).encode())
        self.file.flush()
        os.fsync(self.file.fileno())
        self.parts += 1
        self.counts.add(part)
        if self.scorer.layout is None:  # nothing could be read so far
            return
        said: Mapping[str, Any] = {
            "identity": self.identity,
            "parts": self.parts,
            "bytes": self.file.tell(),
            "rows": self.counts.rows,
            "pairs": self.counts.pairs,
            "unread": self.counts.unread,
            "layout": self.scorer.layout._asdict(),
        }
        write_atomic(self.state, json.dumps(said))

    def finish(self) -> None:
        self.file.close()
        os.replace(self.rows, self.output)
        self.state.unlink(missing_ok=True)


def _lines(records: Records, start: int, part: ScoredPart) -> list[str]:
    count = len(next(iter(part.scores.values())))
    return [
        row_text({**records[start + i], **{name: number(s[i]) for name, s in part.scores.items()}})
        for i in range(count)
    ]


def _identity(scorer: Scorer, records: Records, settings: Sequence[Any]) -> str:
    """Of all that decides the scores: the files of the model by name, size and time."""
    import jax

    from rlhf_core import artifacts
    from rlhf_core.data.source import digest

    place = scorer.model.source
    files: list[Any] = []
    if place is not None and Path(place).is_dir():
        stats = [(path.name, path.stat()) for path in sorted(Path(place).iterdir()) if path.is_file()]
        files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    devices = [device.device_kind for device in jax.devices()]
    said = [files, settings, scorer.contract.to_dict(), devices, artifacts.versions()]
    return digest(records.fingerprint, json.dumps(said, default=str, sort_keys=True))
