"""Preference files that cannot be read, or not as preferences, through `rlhf check`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.shared import cases

bytes_of, every, second, setting = cases.bytes_of, cases.every, cases.second, cases.setting
ASKED, LINE, PAIR, TALK, TRAIN = cases.ASKED, cases.LINE, cases.PAIR, cases.TALK, cases.TRAIN
IDS = {"input_ids_chosen": [1, 2, 3], "input_ids_rejected": [1, 2, 4]}


def cells(*expected: str, **values: Any) -> Any:
    return second({**PAIR, **values}, *expected)


CASES = {
    "missing file": [
        setting(
            'train_data = "pears.jsonl"', ".train_data: ", "no such file: ", "Did you mean 'pairs.jsonl'?"
        ),
        setting('train_data = "no/pairs.jsonl"', ".train_data: ", "no such file: ", "There is no directory "),
        setting('eval_data = "pears.jsonl"', ".eval_data: no such file: ", "Did you mean"),
        setting('train_data = ["pairs.jsonl", "pears.jsonl"]', ".train_data[1]: no such file: "),
        setting('train_data = ""', ".train_data: ", "is empty; give a path or a name"),
        setting('train_data = "model"', ".train_data: ", "is a directory, not a file"),
        setting(
            'train_data = "./rm.toml"',
            ".train_data: ",
            "'.toml' is not a supported format",
            '{ name = "jsonl"',
        ),
    ],
    "encoding": [
        bytes_of(
            LINE + '{"prompt": "café"}\n'.encode("latin-1"),
            TRAIN,
            "row 2 is not UTF-8 (byte 0xe9 at column 16)",
            "as UTF-8",
        ),
        bytes_of(LINE.decode().encode("utf-16"), TRAIN, "is UTF-16: save it as UTF-8"),
        bytes_of(LINE.decode().encode("utf-16-le"), TRAIN, "is UTF-16: save it as UTF-8"),
        bytes_of(gzip.compress(LINE), TRAIN, "is a gzip file, not text: unpack it first"),
        bytes_of(b"PAR1\x15\x00", TRAIN, "is a parquet file, not text: rename it to end in .parquet"),
        cells("'chosen' is not valid Unicode: \\ud83d at character 2", "remove it", chosen="a\ud83d"),
    ],
    "JSON": [
        bytes_of(LINE + b'{"prompt": "a", "chosen": \n', "row 2 is not JSON: Expecting value at column 27"),
        bytes_of(LINE + b"{'prompt': 'a'}\n", "row 2 is not JSON: ", "in double quotes at column 2"),
        bytes_of(b'["a"]\n', "row 1 is not a JSON object, but an array; a JSON array goes in a .json file"),
        bytes_of(LINE + b"[" * 100_000, "row 2 cannot be read: it is nested too deeply"),
        bytes_of(LINE + b'{"margin": ' + b"1" * 5000 + b"}", "row 2 cannot be read: Exceeds the limit"),
        bytes_of(b"\n \n", "pairs.jsonl is empty"),
    ],
    "schema": [
        every(
            {"question": "a", "answer": "b"},
            "",
            "no column 'chosen', 'rejected'; it has question, answer",
            "Accepted: prompt + chosen",
        ),
        every({"prompt": "a", "chosen": "b", "reject": "c"}, "", "Did you mean 'reject'?"),
        every(
            {"input_ids_chosen": [1]},
            "",
            "no column 'chosen', 'rejected'",
            "input_ids_chosen + input_ids_rejected",
        ),
        second({"prompt": "a", "chosen": "b"}, "has no 'rejected' (it has prompt, chosen)"),
        second({**TALK, "prompt": ASKED}, "'prompt' is a list, not text; 'chosen' is a list, not text"),
        second(
            {"chosen": "a", "rejected": "b"},
            "'chosen' is text, not a list of messages",
            first=TALK,
            settings='chat_template = "plain"',
        ),
        second(
            {"input_ids_chosen": [1]},
            "'input_ids_rejected' is missing, which other rows of the file have",
            first=IDS,
        ),
        every(
            {**TALK, "rejected": "b"},
            "",
            "row 1: one of 'chosen' and 'rejected' is a conversation",
            "make both",
        ),
    ],
    "types": [
        cells("'rejected' is a number, not text", rejected=3),
        cells("'rejected' is a list, not text", rejected=["a", "b"]),
        cells("'chosen' is a truth value, not text", chosen=True),
        cells("'prompt' is an object, not text; 'chosen' is a number", prompt={"text": "a"}, chosen=1.5),
    ],
    "nulls": [
        cells("'prompt' is null", prompt=None),
        cells("'chosen' is null; 'rejected' is null", chosen=None, rejected=None),
        every({**PAIR, "chosen": " "}, "", TRAIN, "all 4 pairs are empty", "rows 1, 2, 3, 4"),
    ],
}


@pytest.mark.parametrize("category", CASES)
def test_one_message_with_place_and_remedy(category: str, place: Any, rlhf: Callable[..., Any]) -> None:
    wrong = cases.wrong_among(CASES[category], place, rlhf)
    assert not wrong, "\n".join(wrong)


def test_many_wrong_rows_are_counted(place: Any, rlhf: Callable[..., Any]) -> None:
    place.write("pairs.jsonl", LINE + (json.dumps({**PAIR, "chosen": None}) + "\n").encode() * 9)
    told = rlhf("check", "rm.toml").message.splitlines()
    assert [line.partition(" row ")[2] for line in told[:5]] == [
        f"{n}: 'chosen' is null" for n in range(2, 7)
    ]
    assert told[5:] == [f"{TRAIN}… and 4 more rows like these"]


@pytest.mark.parametrize(
    ("content", "settings"),
    [
        (b"\xef\xbb\xbf" + LINE * 4, ""),
        ((json.dumps({**PAIR, "margin": -1.5}) + "\r\n").encode() * 4, ""),
        ((json.dumps({**PAIR, "margin": None}) + "\n\n").encode() * 4, ""),
        (
            (json.dumps({**TALK, "chosen": [*ASKED, *TALK["chosen"]]}) + "\n").encode() * 4,
            'chat_template = "plain"',
        ),
        (json.dumps([PAIR] * 4).encode(), 'train_data = { name = "json", path = "pairs.jsonl" }'),
    ],
    ids=[
        "byte order mark",
        "negative margin, CRLF",
        "no margin, blank lines",
        "two turns of one role",
        "JSON under another name",
    ],
)
def test_what_is_not_wrong(content: bytes, settings: str, place: Any, rlhf: Callable[..., Any]) -> None:
    place.write("pairs.jsonl", content)
    place.settings("rm.toml", settings)
    assert rlhf("check", "rm.toml")[:3] == (0, "", "")
