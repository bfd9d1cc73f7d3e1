"""A reward function that misbehaves as its column `how` says; a file of its own, as users write them."""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Any, NoReturn

kept: list[Any] = []
FOREVER = 100_000


def right(completions: Sequence[str]) -> list[float]:
    """Return what every completion is worth: a reward that does nothing else."""
    return [len(text) / 8 for text in completions]


def judge(completions: Sequence[str], how: Sequence[str], **_: object) -> Any:
    """Misbehave, and return the right values if that is still possible."""
    values = right(completions)
    answer = BEHAVIOURS[how[0]](values)
    return values if answer is None else answer


def _ignoring_signals(values: Any) -> None:
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.Signals)
    time.sleep(FOREVER)


def _waits_for_itself(values: Any) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _memory_error(values: Any) -> NoReturn:
    raise MemoryError


def _crash_soon(values: Any) -> None:
    threading.Thread(target=lambda: (time.sleep(0.01), os.kill(os.getpid(), signal.SIGSEGV))).start()


def _flood(stream: int, content: bytes) -> None:
    for _ in range(50):
        os.write(stream, content)


def _leak_descriptors(values: Any) -> None:
    kept.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(5))


def _remove_directory(values: Any) -> None:
    place = tempfile.mkdtemp()
    os.chdir(place)
    os.rmdir(place)


def _subprocess(values: Any, **settings: Any) -> None:
    kept.append(subprocess.Popen(["sleep", str(FOREVER)], **settings))


def _subprocess_and_hang(values: Any) -> None:
    _subprocess(values)
    time.sleep(FOREVER)


def _many_processes(values: Any) -> None:
    context = multiprocessing.get_context("fork")
    for _ in range(4):
        process = context.Process(target=time.sleep, args=(FOREVER,))
        process.start()
        kept.append(process)


def _threads(values: Any) -> None:
    for _ in range(8):
        threading.Thread(target=time.sleep, args=(FOREVER,)).start()


def _endless(values: Any) -> Iterator[float]:
    return itertools.repeat(1.0)


class Bomb:
    """An object that does its harm where it is unpickled."""

    def __reduce__(self) -> Any:
        return os._exit, (7,)


class Sluggish:
    """A number that takes forever to convert."""

    def __float__(self) -> float:
        time.sleep(FOREVER)
        return 1.0


class Talkative:
    """No number, with a long description."""

    def __repr__(self) -> str:
        return "x" * 50_000_000


def _raise_loudly(values: Any) -> NoReturn:
    raise ValueError("y" * 50_000_000)


class Unpicklable(Exception):
    """An exception that no other process can be sent."""

    def __init__(self, lock: Any, more: Any) -> None:
        super().__init__(lock, more)


def _raise_unpicklable(values: Any) -> NoReturn:
    raise Unpicklable(threading.Lock(), lambda: None)


FAILS: dict[str, Callable[[list[float]], Any]] = {
    "sleeps": lambda values: time.sleep(FOREVER),
    "spins": lambda values: sum(itertools.repeat(0)),
    "searches": lambda values: re.fullmatch("(a+)+b", "a" * 60),
    "ignores signals": _ignoring_signals,
    "waits for itself": _waits_for_itself,
    "stops itself": lambda values: os.kill(os.getpid(), signal.SIGSTOP),
    "exits": lambda values: os._exit(0),
    "exits with 3": lambda values: os._exit(3),
    "sys.exit": lambda values: sys.exit(5),
    "is killed": lambda values: os.kill(os.getpid(), signal.SIGKILL),
    "segfaults": lambda values: ctypes.string_at(0),
    "aborts": lambda values: os.abort(),
    "recurses": lambda values: BEHAVIOURS["recurses"](values),
    "lacks memory": _memory_error,
    "closes everything": lambda values: os.closerange(0, 4096),
    "closes everything and sleeps": lambda values: (os.closerange(0, 4096), time.sleep(FOREVER)),
    "starts a process and hangs": _subprocess_and_hang,
    "raises loudly": _raise_loudly,
    "raises what cannot be sent": _raise_unpicklable,
    "interrupts": lambda values: (_ for _ in ()).throw(KeyboardInterrupt),
    "endless": _endless,
    "sluggish": lambda values: [Sluggish() for _ in values],
}
"""Each makes its call fail: it takes too long, dies or raises."""
WRONG: dict[str, Callable[[list[float]], Any]] = {
    "too few": lambda values: values[1:],
    "too many": lambda values: values + [1.0] * 1_000_000,
    "a text": lambda values: "1" * len(values),
    "a long text": lambda values: "1" * 300_000_000,
    "bytes": lambda values: bytes(len(values)),
    "a table": lambda values: dict.fromkeys(range(len(values)), 1.0),
    "a number": lambda values: 1.0,
    "texts": lambda values: ["1"] * len(values),
    "infinite": lambda values: [float("inf")] * len(values),
    "too large": lambda values: [10**400] * len(values),
    "complex": lambda values: [1j] * len(values),
    "lambdas": lambda values: [lambda: 1.0] * len(values),
    "bombs": lambda values: [Bomb()] * len(values),
    "a bomb": lambda values: Bomb(),
    "talkative": lambda values: [Talkative()] * len(values),
    "nested": lambda values: [[[1.0] * 1000] * 1000] * len(values),
}
"""Each returns what is no list of one number per completion."""
WORKS: dict[str, Callable[[list[float]], Any]] = {
    "nothing": lambda values: None,
    "none": lambda values: [None] * len(values),
    "not a number": lambda values: [float("nan")] * len(values),
    "decimals": lambda values: [Decimal(value) for value in values],
    "a generator": lambda values: (value for value in values),
    "leaks memory": lambda values: kept.append(bytearray(os.urandom(1 << 20))),
    "leaks descriptors": _leak_descriptors,
    "floods stdout": lambda values: _flood(1, b"o" * 65536),
    "floods stderr": lambda values: _flood(2, b"e" * 65536),
    "prints binary": lambda values: _flood(1, bytes(range(256)) * 16),
    "changes directory": lambda values: os.chdir("/"),
    "removes its directory": _remove_directory,
    "changes the environment": lambda values: os.environ.clear(),
    "starts a process": _subprocess,
    "starts processes": _many_processes,
    "starts threads": _threads,
    "takes signals": lambda values: [signal.signal(number, signal.SIG_DFL) for number in (2, 15)] and None,
}
"""Each leaves something behind and returns the right values, or None for all."""
LATER: dict[str, Callable[[list[float]], Any]] = {
    "crashes soon": _crash_soon,
    "closes stdio": lambda values: os.closerange(0, 3),
    "clears modules": lambda values: sys.path.clear(),
}
"""Each answers as it should, or dies of it; later calls may find its process in a bad state."""
HEAVY = ("too many", "a long text", "talkative", "nested")
"""Behaviours that take a while on a busy machine, and so may exceed a short timeout."""
BEHAVIOURS = FAILS | WRONG | WORKS | LATER
