"""Cases of bad input in a place (places.py): what makes one, the command, and what it has to say."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tests.shared import places

PAIR = places.FILES["pairs.jsonl"]
LINE = (json.dumps(PAIR) + "\n").encode()
ASKED = [{"role": "user", "content": "who"}]
TALK = {
    side: [*ASKED, {"role": "assistant", "content": said}]
    for side, said in (("chosen", "me"), ("rejected", "you"))
}
TRAIN = "stage 'rm'.train_data: "
MODEL = "stage 'rm'.model: "


class Case(NamedTuple):
    make: Callable[[Any], object]
    expected: tuple[str, ...]
    """Parts of the message, in this order."""
    command: tuple[str, ...] = ("check", "rm.toml")
    lines: int = 1
    """Of the message."""


def wrong_among(cases: Sequence[Case], place: Any, rlhf: Callable[..., Any]) -> list[str]:
    """What was said of each case that did not end with exit code 2 and the message that is expected."""
    wrong = []
    for number, case in enumerate(cases):
        place.restore(anew=True)
        case.make(place)
        ended = rlhf(*case.command)
        at = [ended.message.find(part) for part in case.expected]
        if ended.code != 2 or -1 in at or at != sorted(at) or len(ended.message.splitlines()) != case.lines:
            wrong.append(f"{number}: exit code {ended.code}, {ended.message!r}, expected {case.expected}")
    return wrong


def setting(line: str, *expected: str, lines: int = 1) -> Case:
    """Lines of the stage, and what is said after its name."""
    return Case(lambda p: p.settings("rm.toml", line), ("stage 'rm'", *expected), lines=lines)


def bytes_of(content: bytes, *expected: str) -> Case:
    return Case(lambda p: p.write("pairs.jsonl", content), expected)


def second(row: Any, *expected: str, first: Any = PAIR, settings: str = "") -> Case:
    """A file whose second row is wrong. settings: lines of the stage."""

    def make(place: Any) -> None:
        place.write("pairs.jsonl", "".join(json.dumps(each) + "\n" for each in (first, row)))
        place.settings("rm.toml", settings)

    return Case(make, ("pairs.jsonl row 2: ", *expected))


def every(row: Any, settings: str, *expected: str, lines: int = 1) -> Case:
    """Four times the same row."""

    def make(place: Any) -> None:
        place.write("pairs.jsonl", (json.dumps(row) + "\n") * 4)
        place.settings("rm.toml", settings)

    return Case(make, expected, lines=lines)
