"""Report which rows were kept, dropped, cut or are unusual, and collect problems of rows."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Annotated, get_type_hints

import numpy as np
from numpy.typing import NDArray

from rlhf_core.errors import SHOWN, InputError, counted


@dataclass
class Report:
    """Counts of rows by outcome; each list holds names of rows such as "prefs.jsonl row 17".

    `total` is kept + filtered + empty + identical + alike_once_cut. Rows in the other lists are kept, and may be in
    several of them. An annotation says what a message calls the rows.
    """

    unit: str
    """Plural noun for rows, such as "pairs"."""
    limit: int | None
    """Maximum tokens per row."""
    total: int = 0
    kept: int = 0
    filtered: Annotated[list[str], "over {limit:,} tokens filtered"] = field(default_factory=list)
    truncated: Annotated[list[str], "over {limit:,} tokens cut"] = field(default_factory=list)
    empty: Annotated[list[str], "empty dropped"] = field(default_factory=list)
    """There is nothing to train on."""
    identical: Annotated[list[str], "with chosen and rejected alike dropped"] = field(default_factory=list)
    """Both are the same tokens, so that the pair teaches nothing."""
    alike_once_cut: Annotated[list[str], "with chosen and rejected alike once cut dropped"] = field(
        default_factory=list
    )
    doubled: Annotated[list[str], "with the prompt again in a completion"] = field(default_factory=list)
    """In a file where most do not have it."""
    after_reply: Annotated[list[str], "that continue after the last reply"] = field(default_factory=list)
    """Those turns are ignored."""
    left_out: Annotated[list[str], "that lose content in the chat template"] = field(default_factory=list)
    """The chat template omits or alters a message, or omits the tools."""
    ignored_fields: Annotated[list[str], "with fields that the chat template ignores{fields}"] = field(
        default_factory=list
    )
    unlike: Annotated[list[str], "whose reply does not follow the generation prompt"] = field(
        default_factory=list
    )
    """The chat template renders the prompt differently once a reply follows, so sampling sees another prompt than
    training."""
    unlearned: Annotated[list[str], "whose earlier replies are not all learned"] = field(default_factory=list)
    """The chat template renders an earlier reply differently in later turns, so that reply is not learned."""
    unread: Annotated[list[str], "whose margin is ignored"] = field(default_factory=list)
    """The trainer fills this list."""
    reversed: Annotated[list[str], "that reverse an earlier row"] = field(default_factory=list)
    unknown: Annotated[list[str], "with words that the tokenizer does not know"] = field(default_factory=list)
    """Some text becomes the tokenizer's unknown token."""
    untemplated: Annotated[
        list[str],
        "plain texts that skip the chat template: for a chat model write messages, "
        '[{{"role": "user", "content": …}}]',
    ] = field(default_factory=list)
    duplicates: Annotated[list[str], "the same as an earlier row"] = field(default_factory=list)
    """The same tokens; repeats caused by `weight` do not count."""
    read_as: list[str] = field(default_factory=list)
    """Descriptions of columns that are renamed or converted on reading."""
    columns: str = ""
    """The columns that are read, with the rows that have them."""
    not_read: list[str] = field(default_factory=list)
    """A line that lists the columns that are not read; empty if all are."""
    field_counts: dict[str, int] = field(default_factory=dict)
    """{field of messages: rows} of `ignored_fields`."""

    def add_ignored_fields(self, place: str, names: Sequence[str]) -> None:
        """Count a row with these fields of messages that the chat template does not write, if there are any."""
        for name in names:
            self.field_counts[name] = self.field_counts.get(name, 0) + 1
        if names:
            self.ignored_fields.append(place)

    def __str__(self) -> str:
        """Summarise in one line, such as "1,843 pairs: 1,204 kept, 639 over 512 tokens filtered (35 %)".

        Of other categories it names the first row, and how to list the others.
        """
        parts = [self._counts()]
        for label, rows, long in self._categories():
            parts.append(f"{label} ({self._share(rows) if long else first_place(rows)})")
        parts += self.read_as
        parts += [first_columns(line) for line in self.not_read]
        file = self._file()
        command = f"; rlhf data {shlex.quote(short_path(file))} --model DIR lists the rows" if file else ""
        return ", ".join(parts) + command

    def lines(self) -> list[str]:
        """Describe what was kept, then each non-empty category with its first few rows."""
        return (
            [self._counts()]
            + [f"{label}: {shorten(rows)}" for label, rows, _ in self._categories()]
            + self.read_as
            + self.not_read
        )

    @property
    def all_as_given(self) -> bool:
        """Whether every row is used whole and teaches something; duplicates and other columns are no reason to warn."""
        return all(rows is self.duplicates for _, rows, _ in self._categories())

    def _counts(self) -> str:
        return f"{counted(self.total, self.unit)}: {self.kept:,} kept"

    def _categories(self) -> list[tuple[str, list[str], bool]]:
        """List the non-empty categories: (count and label, rows, whether they are over the limit)."""
        counts = ", ".join(f"{name} in {count:,}" for name, count in self.field_counts.items())
        words = {"limit": self.limit or 0, "fields": f" [{counts}]" if counts else ""}
        return [
            (f"{len(rows):,} {label.format(**words)}", rows, name in ("filtered", "truncated"))
            for name, label in LABELS.items()
            if (rows := getattr(self, name))
        ]

    def _file(self) -> str | None:
        """Return the path of the first file with rows of a category, as their names have it; None without one."""
        names = [rows[0].rpartition(" row ")[0] for _, rows, _ in self._categories()]
        return next((name for name in names if Path(name).is_file()), None)

    def _share(self, rows: Sequence[str]) -> str:
        percent = 100 * len(rows) / self.total
        return f"{percent:.0f} %" if percent >= 1 else "under 1 %"

    def require_some(self, name: str, lengths: NDArray[np.int64], setting: str) -> None:
        """Raise InputError if no row was kept, stating the rows' lengths and the option to change.

        lengths: tokens of every row that is not empty. setting: the option that sets the limit.
        """
        if self.kept:
            return
        only = f"the only {self.unit.removesuffix('s')}"
        every = f"all {self.total:,} {self.unit} are" if self.total > 1 else f"{only} is"
        if not len(lengths):
            learned = "; of messages, those of role 'assistant' are learned, unless their weight is 0"
            raise InputError(
                f"{name}: {every} empty ({shorten(self.empty)}){learned if self.unit == 'texts' else ''}"
            )
        alike = len(self.identical) + len(self.alike_once_cut)
        if alike and alike + len(self.empty) == self.total:
            pairs = f"all {alike:,} {self.unit}" if alike > 1 else only
            remedy = "check the columns and the chat template"
            if self.alike_once_cut:
                remedy = 'set a larger max_sequence_length, or truncation_mode = "keep_end"'
            raise InputError(
                f"{name}: chosen and rejected are the same tokens in {pairs} "
                f"({shorten(self.identical or self.alike_once_cut)}), so there is nothing to learn: {remedy}"
            )
        longest = int(lengths.max())
        spread = f"shortest {lengths.min():,}, median {int(np.median(lengths)):,}, longest {longest:,}"
        raise InputError(
            f"{name}: {every} over {self.limit:,} tokens ({spread}): set "
            f'{setting} = {longest}, or overlong = "truncate"'
        )


LABELS = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Report, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}
"""{list of rows: what a message says of them, after their number}."""


def shorten(places: Sequence[str]) -> str:
    """List the first few rows and count the others: "a.jsonl rows 2, 5, b.jsonl row 1 and 12 more"."""
    files = []
    for name, group in groupby(
        (place.rpartition(" row ") for place in places[:SHOWN]), lambda parts: parts[0]
    ):
        numbers = [number for _, _, number in group]
        files.append(f"{name} row{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}")
    more = f" and {len(places) - SHOWN:,} more" if len(places) > SHOWN else ""
    return ", ".join(files) + more


def first_place(places: Sequence[str]) -> str:
    """Name the first row by its file's name: "a.jsonl row 2", or "first a.jsonl row 2" of several."""
    name, _, number = places[0].rpartition(" row ")
    return f"{'first ' if len(places) > 1 else ''}{Path(name).name} row {number}"


def short_path(path: str) -> str:
    """Return a path relative to the current directory if it is inside, as the user would type it."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


COLUMNS_SHOWN = 3


def first_columns(line: str) -> str:
    """Shorten a list of columns, "unused columns: a (in 2), b (in 2)", to the first few, and count the others."""
    columns = line.split(", ")
    more = len(columns) - COLUMNS_SHOWN
    return ", ".join(columns[:COLUMNS_SHOWN]) + (f" and {more:,} more" if more > 0 else "")


class Problems:
    """Problems of rows, collected to raise the first few in one error."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.count = 0

    def add(self, line: str) -> None:
        self.count += 1
        if len(self.lines) < SHOWN:
            self.lines.append(line)

    def raise_if_any(self) -> None:
        """Raise RowProblems if there are any."""
        if self.lines:
            raise RowProblems(self)

    def merge(self, error: RowProblems) -> None:
        """Add the problems of an error that other rows raised."""
        self.count += error.collected.count
        self.lines += error.collected.lines[: SHOWN - len(self.lines)]


class RowProblems(InputError):
    """The first few problems of rows, and how many more there are."""

    def __init__(self, problems: Problems) -> None:
        more = problems.count - len(problems.lines)
        super().__init__(*problems.lines, *([f"… and {more:,} more rows like these"] if more else []))
        self.collected = problems
