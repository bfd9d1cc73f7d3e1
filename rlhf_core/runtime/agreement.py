"""Agreement among the processes of one job, so that all of them do the same; with one process, nothing is exchanged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import rlhf_core.runtime.signals as signals
from rlhf_core.errors import InputError


def gather_maximum(numbers: Any) -> np.ndarray:
    """Take the maximum of each number over all processes."""
    if jax.process_count() == 1:
        return np.asarray(numbers)
    return np.asarray(multihost_utils.process_allgather(np.asarray(numbers))).max(axis=0)


def any_process(*flags: bool) -> list[bool]:
    """Check whether each flag is set on any process: clocks and signals differ, collectives must not."""
    return gather_maximum(flags).tolist()


def broadcast_numbers(numbers: Any) -> np.ndarray:
    """Return the first process's numbers, of 4 or 8 bytes each, on every process, bit for bit."""
    numbers = np.asarray(numbers)
    if jax.process_count() == 1:
        return numbers
    bits = np.atleast_1d(numbers).view(np.uint32)  # float64 itself would be rounded to float32
    bits = np.array(multihost_utils.broadcast_one_to_all(bits))
    return bits.view(numbers.dtype).reshape(numbers.shape)


def gather_texts(text: str) -> list[str]:
    """Return the text of every process, in process order, on all of them."""
    if jax.process_count() == 1:
        return [text]
    content = np.frombuffer(text.encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(len(content)))).reshape(-1)
    padded = np.zeros(int(sizes.max(initial=1)) or 1, np.uint8)
    padded[: len(content)] = content
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def broadcast_text(text: str) -> str:
    """Return the first process's text on every process."""
    return gather_texts(text)[0]


def wait_for_all(place: str) -> None:
    """Wait until every process has come to the same place, named for error messages."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(place)


def stop_together(where: str) -> None:
    """Raise Stopped on every process if any of them was asked to stop; call it only where a stop loses nothing."""
    if any_process(signals.stop_requested())[0]:
        raise signals.stopped_error(where)


@contextmanager
def raise_together() -> Iterator[None]:
    """Raise an InputError of any process on all of them, at the end of the block, which every process must reach."""
    problems: tuple[str, ...] = ()
    try:
        yield
    except InputError as error:
        problems = error.problems
    reports = [json.loads(text) for text in gather_texts(json.dumps(problems))]
    processes: dict[str, list[int]] = {}
    for process, lines in enumerate(reports):
        for line in lines:
            processes.setdefault(line, []).append(process)
    if processes:
        everywhere = {line for line, on in processes.items() if len(on) == len(reports)}
        raise InputError(
            *(line if line in everywhere else f"process {on[0]}: {line}" for line, on in processes.items())
        )
