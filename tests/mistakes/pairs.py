"""Preference files that cannot be read, or not as preferences, and conversations, lengths and ids that do not do."""

from __future__ import annotations

import gzip
import json
from typing import Any

from tests.mistakes.mistake import Mistake, every_row, file, second_row, setting, typed
from tests.shared import places

PAIR = places.FILES["pairs.jsonl"]
LINE = (json.dumps(PAIR) + "\n").encode()
ASKED = [{"role": "user", "content": "who"}]
TALK = {
    side: [*ASKED, {"role": "assistant", "content": said}]
    for side, said in (("chosen", "me"), ("rejected", "you"))
}
IDS = {"input_ids_chosen": [1, 2, 3], "input_ids_rejected": [1, 2, 4]}
ALTERNATING = """{% for m in messages %}
{%- if not loop.first and m.role == messages[loop.index0 - 1].role %}
{{- raise_exception('roles must alternate') }}{% endif %}
{{- m.role + ': ' + m.content + eos_token }}{% endfor %}"""


def pairs(name: str, content: bytes) -> Mistake:
    return file(name, "pairs.jsonl", content)


def cells(name: str, **values: Any) -> Mistake:
    return second_row(name, {**PAIR, **values})


def talk(name: str, chosen: Any) -> Mistake:
    return second_row(name, {**TALK, "chosen": chosen}, first=TALK, settings='chat_template = "plain"')


def ids(name: str, **values: Any) -> Mistake:
    return second_row(name, {**IDS, **values}, first=IDS)


def template(name: str, content: str | bytes, *rows: Any) -> Mistake:
    """A template of the user's, and conversations."""

    def make(place: Any) -> None:
        place.write("t.jinja", content)
        place.write("pairs.jsonl", "".join(json.dumps(row) + "\n" for row in rows or [TALK] * 4))
        place.settings("rm.toml", 'chat_template = "t.jinja"')

    return Mistake(name, make)


def many_rows(place: Any) -> None:
    place.write("pairs.jsonl", LINE + (json.dumps({**PAIR, "chosen": None}) + "\n").encode() * 9)


def an_array(place: Any) -> None:
    place.write("pairs.jsonl", json.dumps([PAIR] * 4))
    place.settings("rm.toml", 'train_data = { name = "json", path = "pairs.jsonl" }')


def the_only_row_is_long(place: Any) -> None:
    place.write("pairs.jsonl", json.dumps({**PAIR, "prompt": " ".join([PAIR["prompt"]] * 9)}) + "\n")


SECTIONS = {
    "Preferences that are not there": [
        setting('train_data = "pears.jsonl"'),
        setting('train_data = "no/pairs.jsonl"'),
        setting('eval_data = "pears.jsonl"'),
        setting('train_data = ["pairs.jsonl", "pears.jsonl"]'),
        setting('train_data = ""'),
        setting('train_data = "model"'),
        setting('train_data = "./rm.toml"'),
    ],
    "Preferences in another encoding": [
        pairs("Latin-1 in the second row", LINE + '{"prompt": "café"}\n'.encode("latin-1")),
        pairs("UTF-16 with its mark", LINE.decode().encode("utf-16")),
        pairs("UTF-16 without a mark", LINE.decode().encode("utf-16-le")),
        pairs("compressed, by another name", gzip.compress(LINE, mtime=0)),
        pairs("Parquet, by another name", b"PAR1\x15\x00"),
        cells("half an emoji", chosen="a\ud83d"),
    ],
    "Preferences that are not JSON": [
        pairs("cut off in the second row", LINE + b'{"prompt": "a", "chosen": \n'),
        pairs("single quotes", LINE + b"{'prompt': 'a'}\n"),
        pairs("an array", b'["a"]\n'),
        pairs("nested 100,000 deep", LINE + b"[" * 100_000),
        pairs("a number of 5,000 digits", LINE + b'{"margin": ' + b"1" * 5000 + b"}"),
        pairs("blank lines alone", b"\n \n"),
        pairs("nothing", b""),
    ],
    "Preferences in other columns": [
        every_row("question and answer", {"question": "a", "answer": "b"}),
        every_row("reject for rejected", {"prompt": "a", "chosen": "b", "reject": "c"}),
        every_row("choosen for chosen", {"prompt": "a", "choosen": "b", "rejected": "c"}),
        every_row("ids of one side", {"input_ids_chosen": [1]}),
        second_row("no rejected reply in the second row", {"prompt": "a", "chosen": "b"}),
        second_row("a conversation where the first row has text", {**TALK, "prompt": ASKED}),
        second_row(
            "text where the first row has a conversation",
            {"chosen": "a", "rejected": "b"},
            first=TALK,
            settings='chat_template = "plain"',
        ),
        second_row("ids of one side in the second row", {"input_ids_chosen": [1]}, first=IDS),
        every_row("a conversation and a text", {**TALK, "rejected": "b"}),
        typed("check rm.toml", "ten rows, nine of them wrong", many_rows),
    ],
    "Cells of preferences": [
        cells("a number", rejected=3),
        cells("a list", rejected=["a", "b"]),
        cells("a truth value", chosen=True),
        cells("an object, and a number", prompt={"text": "a"}, chosen=1.5),
        cells("a prompt that is null", prompt=None),
        cells("replies that are null", chosen=None, rejected=None),
        every_row("replies of blanks alone", {**PAIR, "chosen": " "}),
        cells("a margin in words", margin="much"),
        cells("a margin that is NaN", margin=float("nan")),
        cells("a margin beyond float32", margin=1e300),
        cells("a margin in a list", margin=[1]),
        cells("a margin that is true", margin=True),
    ],
    "Conversations": [
        talk("half an emoji", [*ASKED, {"role": "assistant", "content": "\ude00"}]),
        talk("the role usr", [{"role": "usr", "content": "who"}, TALK["chosen"][1]]),
        talk("a tool's turn at the end", [ASKED[0], {"role": "tool", "content": "a"}]),
        talk("two users", ASKED * 2),
        talk("no messages", []),
        talk("ShareGPT's keys", [{"from": "human", "value": "a"}]),
        talk("no content", [{"role": "user"}]),
        talk(
            "an image",
            [{"role": "assistant", "content": [{"text": "a"}, {"type": "image_url", "image_url": "x"}]}],
        ),
        talk("text for a message", ["a"]),
        second_row(
            "a prompt that is not the start of the conversation",
            {"prompt": [*ASKED, *ASKED], **TALK},
            first={"prompt": ASKED, **TALK},
            settings='chat_template = "plain"',
        ),
    ],
    "Chat templates": [
        every_row("none", TALK),
        setting('chat_template = "plian"'),
        setting('chat_template = "model"'),
        template("a file that is not UTF-8", b"{#\n\xe9 #}"),
        template("a file that is not Jinja", "{% for m in messages %}\n{{ m.content }"),
        template("one that fails on every row", "{{ messages[0].contents.x }}"),
        template(
            "one that refuses the second row",
            ALTERNATING,
            TALK,
            {side: [*ASKED, *turns] for side, turns in TALK.items()},
        ),
        template(
            "one that does not know the role critic",
            ALTERNATING,
            {side: [{"role": "critic", "content": "who"}, turns[1]] for side, turns in TALK.items()},
        ),
        template(
            "one that names the role critic",
            ALTERNATING + "{# 'critic' #}",
            *[{side: [{"role": "critic", "content": "who"}, turns[1]] for side, turns in TALK.items()}] * 4,
        ),
        template("one that writes the same for every conversation", "{{ 'hello' }}"),
    ],
    "Lengths of preferences, and ties": [
        setting("max_sequence_length = 4"),
        setting('max_sequence_length = 4\noverlong = "truncate"\ntruncation_mode = "keep_start"'),
        typed("check rm.toml", "the only pair is too long", the_only_row_is_long),
        every_row("both replies the same", {**PAIR, "rejected": PAIR["chosen"]}),
    ],
    "Token ids": [
        ids("an id beyond the tokenizer's", input_ids_chosen=[1, 9999]),
        ids("padding among the ids", input_ids_rejected=[1, -100]),
        ids("half an id", input_ids_chosen=[1, 0.5]),
        ids("ids in text", input_ids_chosen="1 2"),
        ids("a list in a list", input_ids_chosen=[[1, 2]]),
        ids("an id beyond 64 bits", input_ids_chosen=[1, 2**70]),
        ids("null", input_ids_chosen=None),
        second_row(
            "a mask of another length",
            {**IDS, "chosen_mask": [1, 1]},
            first={**IDS, "chosen_mask": [1, 1, 1]},
        ),
        setting('model = "small"'),
    ],
    "Preferences that are right": [
        pairs("a byte order mark", b"\xef\xbb\xbf" + LINE * 4),
        pairs("a margin below 0, and CRLF", (json.dumps({**PAIR, "margin": -1.5}) + "\r\n").encode() * 4),
        pairs(
            "a margin that is null, and blank lines",
            (json.dumps({**PAIR, "margin": None}) + "\n\n").encode() * 4,
        ),
        every_row(
            "two turns of one role", {**TALK, "chosen": [*ASKED, *TALK["chosen"]]}, 'chat_template = "plain"'
        ),
        typed("check rm.toml", "a JSON array by another name", an_array),
    ],
}
