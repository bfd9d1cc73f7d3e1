"""A mistake: how it is made, and the command or the call that meets it. `table.py` has all of them."""

from __future__ import annotations

import json
import re
import shlex
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_core.errors import InputError, RunError

NUMBERS_THAT_DIFFER = (
    (re.compile(r"0x[0-9a-f]{6,}|\b[0-9a-f]{12,64}\b"), "HASH"),
    (re.compile(r"\b127\.0\.0\.1:\d+|\blocalhost:\d+"), "HOST"),
    (re.compile(r"\b\d[\d,]*(\.\d+)? (ms|s|MiB|GiB|MB|GB)\b"), r"N \2"),
    (re.compile(r"\bpid \d+"), "pid N"),
    # Where the library is installed, and a line of it; the name that a file of the user's has as a module.
    (re.compile(r"[^\s(]*/(rlhf_\w+/\S+\.py) line \d+"), r"\1 line N"),
    (re.compile(r"\b(rlhf_file_\w+)_[0-9a-f]{8}\b"), r"\1_HASH"),
)
LONG_WORD = re.compile(r"\S{1000,}")


class Mistake(NamedTuple):
    """One wrong input, and what is typed or called with it.

    name: its heading in messages.txt; unique in its section. make: changes a good directory, which is current then
    (tests/shared/places.py). command: what is typed after `rlhf`, or a function of the place which calls the
    package as a program would, and raises or warns. long: met by `make test-long` alone.
    """

    name: str
    make: Callable[[Any], object]
    command: str | Callable[[Any], object] = "check rm.toml"
    long: bool = False


def unchanged(place: Any) -> None:
    """Make no mistake in the directory: the command has it."""


def typed(command: str, name: str = "", make: Callable[[Any], object] = unchanged) -> Mistake:
    """A command that is wrong itself, or that finds something wrong."""
    return Mistake(name or f"$ rlhf {command}", make, command)


def call(name: str, function: Callable[[Any], object], make: Callable[[Any], object] = unchanged) -> Mistake:
    """A call from Python; `name` reads as what is called."""
    return Mistake(name, make, function)


def setting(lines: str, name: str = "", command: str = "check rm.toml") -> Mistake:
    """Lines of the stage's table in rm.toml, or in another pipeline of the place that the command names."""
    pipeline = next(word for word in command.split() if word.endswith(".toml"))
    return Mistake(name or lines.replace("\n", "; "), lambda place: place.settings(pipeline, lines), command)


def file(name: str, path: str, content: str | bytes, command: str = "check rm.toml") -> Mistake:
    """A file with other content."""
    return Mistake(name, lambda place: place.write(path, content), command)


def second_row(name: str, row: Any, *, first: Any = None, settings: str = "") -> Mistake:
    """Pairs whose second row is wrong."""

    def make(place: Any) -> None:
        rows = (
            (first, row)
            if first is not None
            else (json.loads(place.good["pairs.jsonl"].splitlines()[0]), row)
        )
        place.write("pairs.jsonl", "".join(json.dumps(each) + "\n" for each in rows))
        place.settings("rm.toml", settings)

    return Mistake(name, make)


def every_row(name: str, row: Any, settings: str = "") -> Mistake:
    """Four pairs, all of them wrong alike."""

    def make(place: Any) -> None:
        place.write("pairs.jsonl", (json.dumps(row) + "\n") * 4)
        place.settings("rm.toml", settings)

    return Mistake(name, make)


def met(mistake: Mistake, place: Any, rlhf: Callable[..., Any]) -> str:
    """Return what a user is told of a mistake, as it stands in messages.txt."""
    place.restore(anew=True)
    mistake.make(place)
    if callable(mistake.command):
        lines = _called(mistake.command, place)
    else:
        ended = rlhf(*shlex.split(mistake.command))
        typed_line = f"$ rlhf {mistake.command}"
        lines = [] if mistake.name == typed_line else [typed_line]
        shown = [line.strip() for line in ended.out.splitlines()]
        in_the_plan = [line for line in shown if line.startswith("warning: ")]
        lines += [*in_the_plan, *ended.warned.splitlines(), *ended.message.splitlines()]
        lines.append(f"exit code {ended.code}")
    return "\n".join([f"## {mistake.name}", *(masked(line, place.path) for line in lines)])


def _called(function: Callable[[Any], object], place: Any) -> list[str]:
    raised = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            function(place)
        except InputError as error:
            raised = [f"InputError: {problem}" for problem in error.problems]
        except (RunError, TypeError, ValueError, KeyError, AttributeError) as error:
            raised = [f"{type(error).__name__}: {line}" for line in str(error).splitlines()]
    return [*(f"{each.category.__name__}: {each.message}" for each in caught), *raised]


def masked(line: str, directory: Path) -> str:
    """Replace what differs between machines and runs: directories, hashes, addresses, times and sizes.

    A word that no reader would read to its end is cut.
    """
    line = LONG_WORD.sub(lambda word: f"{word[0][:20]}[and {len(word[0]) - 20} characters]", line)
    line = line.replace(str(directory.resolve()), "DIR").replace(str(directory), "DIR")
    for pattern, word in NUMBERS_THAT_DIFFER:
        line = pattern.sub(word, line)
    return line
