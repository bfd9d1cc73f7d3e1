"""What became of the rows: counts that a person can read, and which rows they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rlhf_core.errors import InputError

SHOWN = 5  # rows or problems named one by one


@dataclass
class Report:
    """Counts of rows by what became of them; each list holds places such as "prefs.jsonl row 17"."""

    unit: str
    """What a row is, in the plural: "pairs"."""
    limit: int | None
    """Tokens allowed."""
    total: int = 0
    kept: int = 0
    filtered: list[str] = field(default_factory=list)
    """Dropped: over the limit."""
    truncated: list[str] = field(default_factory=list)
    """Kept, cut to the limit."""
    empty: list[str] = field(default_factory=list)
    """Dropped: nothing to train on."""
    identical: list[str] = field(default_factory=list)
    """Kept: chosen and rejected are the same tokens, so they teach nothing."""

    def __str__(self) -> str:
        """One line, such as "1,843 pairs: 1,204 kept, 639 over 512 tokens filtered (35 %)"."""
        parts = [f"{self.total:,} {self.unit}: {self.kept:,} kept"]
        if self.filtered:
            parts.append(
                f"{len(self.filtered):,} over {self.limit:,} tokens filtered {self._share(self.filtered)}"
            )
        if self.truncated:
            parts.append(
                f"{len(self.truncated):,} over {self.limit:,} tokens cut {self._share(self.truncated)}"
            )
        if self.empty:
            parts.append(f"{len(self.empty):,} empty dropped ({shorten(self.empty)})")
        if self.identical:
            parts.append(
                f"{len(self.identical):,} with chosen and rejected alike ({shorten(self.identical)})"
            )
        return ", ".join(parts)

    @property
    def all_as_given(self) -> bool:
        """Whether every row is used whole and teaches something."""
        return not (self.filtered or self.truncated or self.empty or self.identical)

    def _share(self, rows: Sequence[str]) -> str:
        percent = 100 * len(rows) / self.total
        return f"({percent:.0f} %)" if percent >= 1 else "(under 1 %)"

    def require_some(self, name: str, lengths: Sequence[int], setting: str) -> None:
        """Raise InputError where no row was kept, with the lengths there are and what to set.

        lengths: tokens of every row that is not empty. setting: the option that is the limit.
        """
        if self.kept:
            return
        if not lengths:
            raise InputError(f"{name}: all {self.total:,} {self.unit} are empty ({shorten(self.empty)})")
        spread = f"shortest {min(lengths):,}, median {int(np.median(lengths)):,}, longest {max(lengths):,}"
        raise InputError(
            f"{name}: all {self.total:,} {self.unit} are over {self.limit:,} tokens ({spread}): set "
            f'{setting} = {max(lengths)}, or overlong = "truncate"'
        )


def shorten(places: Sequence[str]) -> str:
    """The first few places, and how many more there are."""
    more = f" and {len(places) - SHOWN:,} more" if len(places) > SHOWN else ""
    return ", ".join(places[:SHOWN]) + more


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
        if self.count > len(self.lines):
            raise InputError(*self.lines, f"… and {self.count - len(self.lines):,} more rows like these")
        if self.lines:
            raise InputError(*self.lines)
