"""What is particular about rows that are kept, found when they are encoded and told with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.data.report import Report
from rlhf_core.encoding import Encoder, Turns


class Notes:
    """Rows of a source by the name of the `Report` list they belong to."""

    def __init__(self, names: Sequence[str]) -> None:
        self.rows: dict[str, set[int]] = {name: set() for name in names}

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]], names: Sequence[str]) -> Notes:
        """The inverse of `arrays`."""
        notes = cls(names)
        notes.rows = {name: set(arrays[name].tolist()) for name in names}
        return notes

    def arrays(self) -> dict[str, NDArray[Any]]:
        """int64 row numbers by name."""
        return {name: np.array(sorted(rows), np.int64) for name, rows in self.rows.items()}

    def tell(self, i: int, place: str, report: Report) -> None:
        """Add row i, which is called `place`, to the report's lists."""
        for name, rows in self.rows.items():
            if i in rows:
                getattr(report, name).append(place)

    def add(self, name: str, i: int, applies: bool) -> None:
        if applies:
            self.rows[name].add(i)

    def written(
        self, i: int, encoder: Encoder, turns: Turns, tools: Any, kwargs: Mapping[str, Any] | None = None
    ) -> tuple[str, bool]:
        """As `Encoder.text`, of a text, or of what of row i's conversation is judged."""
        kept = encoder.judged(turns)
        text = encoder.text(kept, tools=tools, kwargs=kwargs)
        if not isinstance(kept, str):
            self.add("after_reply", i, len(kept) < len(turns))
            self.add("left_out", i, encoder.chat.leaves_out(kept, text[0], tools))
        return text
