"""Answers of a judge that are kept on disk: what is damaged is asked again, or an error."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from rlhf_remote.answers import Answers

from rlhf_core.errors import InputError

KEY, OTHER = "ab" * 32, "cd" * 32
RECORD = {"answer": "Score: 7", "failures": 0, "vote": 0}


def kept(directory: Path) -> tuple[Answers, Path]:
    answers = Answers(directory / "answers", directory)
    asyncio.run(answers.keep(KEY, RECORD))
    assert answers.get(KEY) == RECORD
    return answers, directory / "answers" / "ab" / f"{KEY}.json"


def test_an_answer_with_any_changed_bit_is_asked_again(tmp_path: Path) -> None:
    answers, path = kept(tmp_path)
    content = path.read_bytes()
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 8]) + content[at + 1 :])
        found = answers.get(KEY)
        # Without the name of its checksum it counts as one of an earlier version.
        assert found is None or {**found, **RECORD} == found


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b'"checksum"', b"\xff", b"[" * 50_000, b"7" * 5000])
def test_what_is_no_answer_is_asked_again(content: bytes, tmp_path: Path) -> None:
    answers, path = kept(tmp_path)
    path.write_bytes(content)
    assert answers.get(KEY) is None


def test_the_answer_to_another_question_is_not_taken_and_one_of_an_earlier_version_is(tmp_path: Path) -> None:
    answers, path = kept(tmp_path)
    other = tmp_path / "answers" / "cd" / f"{OTHER}.json"
    other.parent.mkdir()
    other.write_bytes(path.read_bytes())
    assert answers.get(OTHER) is None
    other.write_text(json.dumps(RECORD))
    assert answers.get(OTHER) == RECORD


def noted(directory: Path) -> Path:
    answers = Answers(directory / "answers", directory)
    for call, key in ((1, KEY), (2, OTHER)):
        answers.note_unanswered(call, key, 3)
    again = Answers(directory / "answers", directory)
    assert (again.failures(1, KEY), again.failures(2, OTHER), again.failures(2, KEY)) == (3, 3, None)
    return directory / "unanswered.jsonl"


@pytest.mark.parametrize(
    "line",
    [
        b"[]",
        b"null",
        b"7",
        b"\xff\xfe",
        b"[" * 50_000,
        b'{"call": ' + b"9" * 5000 + b"}",
        b'{"call": [1], "key": "a", "failures": 1}',
        None,
    ],
)
def test_a_damaged_note_is_an_error_that_names_its_line(line: bytes | None, tmp_path: Path) -> None:
    path = noted(tmp_path)
    first, second = path.read_bytes().splitlines(keepends=True)
    changed = first.replace(b'"failures": 3', b'"failures": 2') if line is None else line + b"\n"
    path.write_bytes(changed + second)
    with pytest.raises(InputError, match=r"unanswered\.jsonl line 1 is damaged .*delete the line to ask its"):
        Answers(tmp_path / "answers", tmp_path)


def test_any_changed_bit_of_a_note_is_an_error(tmp_path: Path) -> None:
    path = noted(tmp_path)
    content = path.read_bytes()
    first = content.index(b"\n")
    for at in range(first):
        path.write_bytes(content[:at] + bytes([content[at] ^ 8]) + content[at + 1 :])
        try:
            again = Answers(tmp_path / "answers", tmp_path)
        except InputError:
            continue
        # Without the name of its checksum it counts as one of an earlier version.
        assert (again.failures(1, KEY), again.failures(2, OTHER)) == (3, 3)


@pytest.mark.parametrize("length", [0, 1, 9, 40, 100])
def test_a_note_that_a_killed_process_left_unfinished_is_none(length: int, tmp_path: Path) -> None:
    path = noted(tmp_path)
    first, second = path.read_bytes().splitlines(keepends=True)
    old = b'{"call": 4, "key": "earlier", "failures": 2}\n'
    path.write_bytes(first + second[:length] + b"\n" + old + second[:length])
    again = Answers(tmp_path / "answers", tmp_path)
    assert (again.failures(1, KEY), again.failures(2, OTHER), again.failures(4, "earlier")) == (3, None, 2)
