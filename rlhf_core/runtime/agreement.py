"""What the processes of one job tell each other, so that all of them do the same."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import jax
import numpy as np

from rlhf_core.errors import InputError
from rlhf_core.runtime import signals

SHARED_SECONDS = 5.0
"""How long a network disk may take to show a file that another host has just written."""


def any_process(*flags: bool) -> list[bool]:
    """Each flag as it is on any process: clocks and signals differ, collectives must not."""
    if jax.process_count() == 1:
        return list(flags)
    from jax.experimental import multihost_utils

    return [bool(flag) for flag in multihost_utils.process_allgather(np.array(flags)).any(axis=0)]


def stop_together(where: str) -> None:
    """Raise Stopped, on every process, where one of them was asked to stop: at a place where nothing is lost by it."""
    if any_process(signals.stop_requested())[0]:
        raise signals.stopped_error(where)


def gather_texts(text: str) -> list[str]:
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


def broadcast_text(text: str) -> str:
    """The text of the first process, on every one of them."""
    return gather_texts(text)[0]


@contextmanager
def enter_on_first(context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Enter a context on the first process alone. Where that raises InputError, every process raises it."""
    problems: tuple[str, ...] = ()
    entered = context() if jax.process_index() == 0 else None
    if entered is not None:
        try:
            entered.__enter__()
        except InputError as error:
            problems = error.problems
    told = broadcast_text("\n".join(problems))
    if told:
        raise InputError(*told.split("\n"))
    try:
        yield
    finally:
        if entered is not None:
            entered.__exit__(None, None, None)


def require_shared_directory(directory: Path, field: str = "dir") -> None:
    """Raise InputError, on every process, where `directory` is not one directory for all of them.

    The first process, for whom it exists, writes a file there that the others look for.
    """
    if jax.process_count() == 1:
        return
    token = secrets.token_hex(8)
    if jax.process_index() == 0:
        (directory / f".shared-{token}").touch()
    token = broadcast_text(token)
    seen, until = False, time.monotonic() + SHARED_SECONDS
    while not seen and time.monotonic() < until:
        seen = (directory / f".shared-{token}").exists()
        time.sleep(0 if seen else 0.1)
    mine = "" if seen else f"{directory} on {socket.gethostname()}"
    views = gather_texts(mine)
    if jax.process_index() == 0:
        with suppress(OSError):
            os.unlink(directory / f".shared-{token}")
    first = broadcast_text(f"{directory} on {socket.gethostname()}")
    problems = [
        f"{field}: process {number} does not find in {view} what process 0 wrote to {first}; give a run directory "
        "that all processes share, under the same path"
        for number, view in enumerate(views)
        if view
    ]
    if problems:
        raise InputError(*problems)
