"""Agreement among the processes of one job, so that all of them do the same; with one process, nothing is exchanged."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from rlhf_core.errors import InputError
from rlhf_core.runtime import signals

SHARED_SECONDS = 5.0
"""How long a network disk may take to show a file that another host has just written."""


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
def enter_on_first(context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Enter a context on the first process alone. If that raises InputError, every process raises it."""
    problems: tuple[str, ...] = ()
    entered = context() if jax.process_index() == 0 else None
    if entered is not None:
        try:
            entered.__enter__()
        except InputError as error:
            problems = error.problems
    message = broadcast_text("\n".join(problems))
    if message:
        raise InputError(*message.split("\n"))
    try:
        yield
    finally:
        if entered is not None:
            entered.__exit__(None, None, None)


def require_shared_directory(directory: Path, field: str = "dir") -> None:
    """Raise InputError on every process unless `directory` is the same directory for all of them.

    The first process, which has made it, writes a file there, and the others look for that file.
    """
    if jax.process_count() == 1:
        return
    shared = directory / f".shared-{broadcast_text(secrets.token_hex(8))}"
    if jax.process_index() == 0:
        shared.touch()
    wait_for_all("the shared directory")
    until = time.monotonic() + SHARED_SECONDS
    while not shared.exists() and time.monotonic() < until:
        time.sleep(0.1)
    here = f"{directory} on {socket.gethostname()}"
    views, first = gather_texts("" if shared.exists() else here), broadcast_text(here)
    if jax.process_index() == 0:
        with suppress(OSError):
            shared.unlink()
    problems = [
        f"{field}: process {number} does not find in {view} what process 0 wrote to {first}; give a run directory "
        "that all processes share, under the same path"
        for number, view in enumerate(views)
        if view
    ]
    if problems:
        raise InputError(*problems)
