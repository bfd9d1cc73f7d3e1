"""What is particular about rows that are kept, found when they are encoded and told with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.data.cache import ROWS
from rlhf_core.tokenizer.encoding import Encoder, Turns


class Notes:
    """Rows of a source by the name of the `Report` list they belong to."""

    def __init__(self, names: Sequence[str]) -> None:
        self.rows: dict[str, set[int]] = {name: set() for name in names}

    def arrays(self) -> dict[str, NDArray[Any]]:
        """int64 row numbers by name and `ROWS`."""
        return {f"{name}{ROWS}": np.array(sorted(rows), np.int64) for name, rows in self.rows.items()}

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
