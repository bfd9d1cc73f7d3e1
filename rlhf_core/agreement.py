"""What the processes of one job tell each other, so that all of them do the same."""

from __future__ import annotations

import jax
import numpy as np


def any_of(*flags: bool) -> list[bool]:
    """Each flag as it is on any process: clocks and signals differ, collectives must not."""
    if jax.process_count() == 1:
        return list(flags)
    from jax.experimental import multihost_utils

    return [bool(flag) for flag in multihost_utils.process_allgather(np.array(flags)).any(axis=0)]


def texts_of_all(text: str) -> list[str]:
    """The text of every process, in their order; every process makes this call and gets the same list."""
    if jax.process_count() == 1:
        return [text]
    from jax.experimental import multihost_utils

    content = np.frombuffer(text.encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(len(content)))).reshape(-1)
    padded = np.zeros(int(sizes.max(initial=1)) or 1, np.uint8)
    padded[: len(content)] = content
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def text_of_first(text: str) -> str:
    """The text of the first process, on every one of them."""
    return texts_of_all(text)[0]
