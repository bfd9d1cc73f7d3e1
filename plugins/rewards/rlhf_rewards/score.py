"""`rlhf score`: write scores as they are computed, so that an interrupted command can resume."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core import data
from rlhf_core import plugins as plugin_loading
from rlhf_core.data import Records
from rlhf_core.data.best_of_n import completion_lists
from rlhf_core.data.columns import prompts_as_turns, skips_template
from rlhf_core.errors import UNREADABLE, InputError, suggest
from rlhf_core.runtime.files import attempt, flush, make_directory, open_stream, require_writable
from rlhf_core.runtime.row_output import number, row_text, write_text
from rlhf_core.runtime.terminal import echo
from rlhf_rewards.reward_bench import Summary, check_ties

if TYPE_CHECKING:
    from rlhf_core.scoring import ScoredPart, Scorer


def score(
    model: str,
    file: Path,
    output: Path | None,
    *,
    prompt_repeated: bool | None = None,
    chat: bool = False,
    subset: str | None = None,
    plugins: Sequence[Path] = (),
    **scorer_options: Any,
) -> None:
    """Write the rows of `file` with their scores, and print the accuracy where they are preferences.

    prompt_repeated: whether completions begin with their prompt; None: as in the model's training data. chat: whether
    prompts that are texts are a user's turn, and their completions replies. subset: column that names the subset of a
    row; None: "subset", where there is one. scorer_options: of `Scorer.load`, such as `normalize` and `base`.
    """
    from rlhf_core import runtime
    from rlhf_core.scoring import Scorer, warn_unread

    require_writable(output, file)
    runtime.prepare()
    registry = plugin_loading.load(files=plugins).registry
    records = data.load(str(file), registry=registry)
    if subset is not None and subset not in records.columns:
        raise InputError(
            f"--subset {subset}: {records.name} has no such column; it has {', '.join(records.columns)}."
            f"{suggest(subset, records.columns)}"
        )
    column = subset or "subset"
    lists = [completion_lists(source) for source in records.sources]
    if any(lists) and column in records.columns:
        check_ties(records, column)
    scorer = Scorer.load(model, registry=registry, **scorer_options)
    read = Records([prompts_as_turns(source) for source in records.sources]) if chat else records
    _warn_untemplated(read, lists, scorer)
    counts = Counts(column)
    stream = None if output is None else open_stream(output)
    if output is None or stream is not None:
        write: Callable[[str], Any] = write_text if stream is None else stream.write
        with stream or nullcontext():
            for part in scorer.score_parts(read, prompt_repeated=prompt_repeated):
                rows = counts.next_rows(records, part)
                write("".join(_lines(rows, part)))
                counts.add(rows, part)
    else:
        settings = [model, scorer_options, prompt_repeated, chat, column]
        unfinished = Unfinished(output, _identity(scorer, records, settings), counts, scorer)
        done = unfinished.open()
        if counts.rows:
            echo(f"{output}: resuming after {counts.rows:,} rows that were scored before", err=True)
        for part in scorer.score_parts(read, prompt_repeated=prompt_repeated, skip=done):
            unfinished.write(counts.next_rows(records, part), part)
        unfinished.finish()
    warn_unread(counts.unread)
    for line in counts.summary.lines():
        echo(line, err=output is None or stream is not None)


def _warn_untemplated(records: Records, lists: Sequence[str | None], scorer: Scorer) -> None:
    """Warn about plain texts, if the model's tokenizer has a chat template."""
    for source, listed in zip(records.sources, lists, strict=True):
        names = [name for name in ("chosen", "rejected", "completion") if name in source.columns]
        names = [] if listed == "texts" else names
        if listed != "conversations" and skips_template(source, scorer.encoder, "prompt", *names):
            warnings.warn(
                f"{source.name}: plain texts skip the model's chat template, as if it was trained on such texts; for a "
                "chat model add --chat, which makes a user's turn of the prompt and a reply of each completion",
                stacklevel=3,
            )


class Counts:
    """Count rows, unread rows and what the summary needs."""

    def __init__(self, column: str) -> None:
        """column: as in `Summary`."""
        self.rows = 0
        self.summary = Summary(column)
        self.unread: list[str] = []

    def next_rows(self, records: Records, part: ScoredPart) -> Sequence[Mapping[str, Any]]:
        """Return the rows of a part that is not counted yet."""
        count = len(next(iter(part.scores.values())))
        rows: Sequence[Mapping[str, Any]] = records[self.rows : self.rows + count]
        return rows

    def add(self, rows: Sequence[Mapping[str, Any]], part: ScoredPart) -> None:
        self.summary.add(rows, part)
        self.unread += part.unread
        self.rows += len(rows)


class Unfinished:
    """Write rows to a hidden file beside the output, and the state needed to resume to another one."""

    def __init__(self, output: Path, identity: str, counts: Counts, scorer: Scorer) -> None:
        """identity: hash of the rows, model and settings; files with another one are not resumed."""
        self.output, self.identity, self.counts, self.scorer = output, identity, counts, scorer
        self.target = Path(os.path.realpath(output))  # a link stays one
        self.rows = self.target.with_name(f".{output.name}.unfinished")
        self.state = self.target.with_name(f".{output.name}.unfinished.json")
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
                self.counts.summary.restore(state["summary"])
                self.parts, size = state["parts"], state["bytes"]
        self._attempt(lambda: self._open_rows(size))
        return self.parts

    def _open_rows(self, size: int) -> None:
        make_directory(self.target.parent)
        self.file = open(self.rows, "r+b" if self.parts else "wb")  # noqa: SIM115  (`finish` closes it)
        self.file.truncate(size)
        self.file.seek(size)

    def _attempt(self, write: Callable[[], None]) -> None:
        attempt(write, self.output.name, self.output)

    def write(self, rows: Sequence[Mapping[str, Any]], part: ScoredPart) -> None:
        """Add a part; flush its rows to disk before the state that counts them."""
        from rlhf_core.artifacts import write_atomic

        self._attempt(lambda: self._append("".join(_lines(rows, part)).encode()))
        self.parts += 1
        self.counts.add(rows, part)
        if self.scorer.layout is None:  # no row could be scored so far
            return
        state: Mapping[str, Any] = {
            "identity": self.identity,
            "parts": self.parts,
            "bytes": self.file.tell(),
            "rows": self.counts.rows,
            "summary": self.counts.summary.to_dict(),
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
        if self.target.exists():
            shutil.copymode(self.target, self.rows)
        os.replace(self.rows, self.target)
        flush(self.target.parent)
        self.state.unlink(missing_ok=True)


def _lines(rows: Sequence[Mapping[str, Any]], part: ScoredPart) -> list[str]:
    names = part.scores.keys()
    return [
        row_text({**row, **dict(zip(names, map(_cell, scores), strict=True))})
        for row, *scores in zip(rows, *part.scores.values(), strict=True)
    ]


def _cell(score: Any) -> Any:
    """Return a score, or a list of scores, as JSON holds it; None for a row that could not be scored."""
    if score is None:
        return None
    return [number(x) for x in score] if np.ndim(score) else number(score)


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
