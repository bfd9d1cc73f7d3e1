"""Sequences that are made of others when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Chosen(Sequence[Any]):
    """Some elements of a sequence, in the order given, each as often as it is named."""

    def __init__(self, whole: Sequence[Any], which: NDArray[np.int64]) -> None:
        self.whole, self.which = whole, which

    def __len__(self) -> int:
        return len(self.which)

    def __getitem__(self, i: Any) -> Any:
        if not isinstance(i, slice):
            return self.whole[int(self.which[range(len(self))[i]])]
        which = self.which[i]
        if len(which) > 1 and (np.diff(which) == 1).all():
            return list(self.whole[int(which[0]) : int(which[-1]) + 1])
        return [self.whole[k] for k in which.tolist()]


class Changed(Sequence[Any]):
    """Rows that are changed when they are asked for."""

    def __init__(self, whole: Sequence[Any], change: Callable[[Any], Any]) -> None:
        self.whole, self.change = whole, change

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, i: Any) -> Any:
        return list(map(self.change, self.whole[i])) if isinstance(i, slice) else self.change(self.whole[i])
