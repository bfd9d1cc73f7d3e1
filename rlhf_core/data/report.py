"""What became of the rows: counts that a person can read, and which rows they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from rlhf_core.errors import InputError

SHOWN = 5  # rows or problems named one by one


@dataclass
class Report:
    """Counts of rows by what became of them; each list holds places such as "prefs.jsonl row 17".

    total is kept + filtered + empty; the rows of the other lists are kept, and may be in several of them.
    """

    unit: str
    """What a row is, in the plural: "pairs"."""
    limit: int | None
    """Tokens allowed."""
    total: int = 0
    kept: int = 0
    filtered: list[str] = field(default_factory=list)
    """Dropped: over the limit."""
    truncated: list[str] = field(default_factory=list)
    """Cut to the limit."""
    empty: list[str] = field(default_factory=list)
    """Dropped: nothing to train on."""
    identical: list[str] = field(default_factory=list)
    """Chosen and rejected are the same tokens, so they teach nothing."""
    alike_once_cut: list[str] = field(default_factory=list)
    """Chosen and rejected are the same tokens, but only since they were cut to the limit."""
    doubled: list[str] = field(default_factory=list)
    """A completion begins with the prompt that is put before it, in a file of which most rows do not do so."""
    after_reply: list[str] = field(default_factory=list)
    """A conversation goes on after its last reply; what follows is not read."""
    left_out: list[str] = field(default_factory=list)
    """The chat template does not write a message as it is, or not the tools."""
    unlike: list[str] = field(default_factory=list)
    """The chat template writes the prompt otherwise once it is answered, so that the reply is learned after something
    else than it will be sampled after."""
    unlearned: list[str] = field(default_factory=list)
    """The chat template writes an earlier reply otherwise once the conversation goes on, so that it is not learned."""
    unread: list[str] = field(default_factory=list)
    """It has a margin, and the trainer, which lists it here, reads none."""
    reversed: list[str] = field(default_factory=list)
    """An earlier row prefers what this one rejects, and the other way round."""
    unknown: list[str] = field(default_factory=list)
    """It has a text that the tokenizer has no token for, and that becomes its unknown token."""
    untemplated: list[str] = field(default_factory=list)
    """Plain texts, for a model whose tokenizer has a chat template: it is not applied to them."""
    duplicates: list[str] = field(default_factory=list)
    """The same tokens as an earlier row; one that a weight draws again is none."""
    read_as: list[str] = field(default_factory=list)
    """How columns are read, where that is not as the files have them."""

    def __str__(self) -> str:
        """One line, such as "1,843 pairs: 1,204 kept, 639 over 512 tokens filtered (35 %)"."""
        return ", ".join(
            [self._counts()]
            + [
                f"{said} ({self._share(rows) if long else shorten(rows)})"
                for said, rows, long in self._said()
            ]
            + self.read_as
        )

    def lines(self) -> list[str]:
        """What was kept, then a line with the first few rows for everything that is to be said of some."""
        return (
            [self._counts()] + [f"{said}: {shorten(rows)}" for said, rows, _ in self._said()] + self.read_as
        )

    @property
    def all_as_given(self) -> bool:
        """Whether every row is used whole and teaches something. Duplicates do: they are no reason to warn."""
        return all(rows is self.duplicates for _, rows, _ in self._said())

    def _counts(self) -> str:
        return f"{self.total:,} {self.unit}: {self.kept:,} kept"

    def _said(self) -> list[tuple[str, list[str], bool]]:
        """[(count and what, rows, whether they are over the limit)], without what is not there."""
        over = f"over {self.limit or 0:,} tokens"
        categories = [
            (f"{over} filtered", self.filtered, True),
            (f"{over} cut", self.truncated, True),
            ("empty dropped", self.empty, False),
            ("with chosen and rejected alike", self.identical, False),
            ("with chosen and rejected alike once cut", self.alike_once_cut, False),
            ("with the prompt again in a completion", self.doubled, False),
            ("that go on after the last reply", self.after_reply, False),
            ("of which the chat template leaves something out", self.left_out, False),
            ("whose reply does not follow the generation prompt", self.unlike, False),
            ("of which only the last replies are learned", self.unlearned, False),
            ("whose margin is not read", self.unread, False),
            ("that reverse an earlier row", self.reversed, False),
            ("with words that the tokenizer does not know", self.unknown, False),
            (
                "plain texts that skip the chat template: for a chat model write messages, "
                '[{"role": "user", "content": …}]',
                self.untemplated,
                False,
            ),
            ("the same as an earlier row", self.duplicates, False),
        ]
        return [(f"{len(rows):,} {what}", rows, long) for what, rows, long in categories if rows]

    def _share(self, rows: Sequence[str]) -> str:
        percent = 100 * len(rows) / self.total
        return f"{percent:.0f} %" if percent >= 1 else "under 1 %"

    def require_some(self, name: str, lengths: NDArray[np.int64], setting: str) -> None:
        """Raise InputError where no row was kept, with the lengths there are and what to set.

        lengths: tokens of every row that is not empty. setting: the option that is the limit.
        """
        if self.kept:
            return
        if not len(lengths):
            raise InputError(f"{name}: all {self.total:,} {self.unit} are empty ({shorten(self.empty)})")
        longest = int(lengths.max())
        spread = f"shortest {lengths.min():,}, median {int(np.median(lengths)):,}, longest {longest:,}"
        raise InputError(
            f"{name}: all {self.total:,} {self.unit} are over {self.limit:,} tokens ({spread}): set "
            f'{setting} = {longest}, or overlong = "truncate"'
        )

    def require_differences(self, name: str) -> None:
        """Raise InputError where chosen and rejected are the same tokens in every row that was kept."""
        if len(self.identical) + len(self.alike_once_cut) < self.kept:
            return
        remedy = "are the right columns, and the right chat template, read?"
        if self.alike_once_cut:
            remedy = 'set a larger max_sequence_length, or truncation_mode = "keep_end"'
        raise InputError(
            f"{name}: chosen and rejected are the same tokens in all {self.kept:,} {self.unit} "
            f"({shorten(self.identical or self.alike_once_cut)}), so that there is nothing to learn: {remedy}"
        )


def shorten(places: Sequence[str]) -> str:
    """The first few places, and how many more there are: "a.jsonl rows 2, 5, b.jsonl row 1 and 12 more"."""
    files = []
    for name, group in groupby(
        (place.rpartition(" row ") for place in places[:SHOWN]), lambda parts: parts[0]
    ):
        numbers = [number for _, _, number in group]
        files.append(f"{name} row{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}")
    more = f" and {len(places) - SHOWN:,} more" if len(places) > SHOWN else ""
    return ", ".join(files) + more


class Problems:
    """Problems of rows, collected so that several are told at once."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.count = 0

    def add(self, line: str) -> None:
        self.count += 1
        if len(self.lines) < SHOWN:
            self.lines.append(line)

    def stop(self) -> None:
        """Raise InputError where there was any."""
        if self.lines:
            raise RowProblems(self)

    def take(self, error: RowProblems) -> None:
        """Add those of other rows, which were told already."""
        self.count += error.found.count
        self.lines += error.found.lines[: SHOWN - len(self.lines)]


class RowProblems(InputError):
    """Problems of rows; of some others there may be more."""

    def __init__(self, found: Problems) -> None:
        more = found.count - len(found.lines)
        super().__init__(*found.lines, *([f"… and {more:,} more rows like these"] if more else []))
        self.found = found
