"""Data from Python: files that cannot be read, tables that name them wrongly, and rows that cannot be encoded."""

from __future__ import annotations

import bz2
import gzip
import json
from collections.abc import Callable
from typing import Any

import datasets
import grain

from rlhf_core import data
from rlhf_core.tokenizer import load_tokenizer
from tests.mistakes.mistake import Mistake, call

PAIR = {"prompt": "a", "chosen": " b", "rejected": " c"}
ROWS = [{**PAIR, "prompt": f"p{i}"} for i in range(4)]
ASKED, SAID = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
TALK = {"prompt": [ASKED], "chosen": [SAID], "rejected": [{**SAID, "content": "c"}]}
PLAIN = {"chat_template": "plain"}
ALPACA = [{"instruction": "a", "input": "b", "output": " c"}]


def broken(path: str, name: str, content: bytes) -> Mistake:
    """A file of data that cannot be read."""
    return Mistake(f"{path}: {name}", lambda place: place.write(path, content), lambda place: data.load(path))


def loads(name: str, source: Any, files: dict[str, Any] | None = None) -> Mistake:
    """What `data.load` is given; source: that, or a function which makes it. files: what they hold, as JSON."""

    def make(place: Any) -> None:
        for path, rows in (files or {}).items():
            text = json.dumps(rows) if path.endswith(".json") else "".join(json.dumps(r) + "\n" for r in rows)
            place.write(path, text)

    return call(name, lambda place: data.load(source() if isinstance(source, Callable) else source), make)  # type: ignore[arg-type]


def table(name: str = "", **fields: Any) -> Mistake:
    """A table that names a file of four rows."""
    given = {"name": "jsonl", "path": "prefs.jsonl", **fields}
    return loads(name or ", ".join(f"{k} = {v!r}" for k, v in fields.items()), given, {"prefs.jsonl": ROWS})


def field(name: str, **fields: Any) -> Mistake:
    """A table that names a list in a JSON file."""
    given = {"path": "rows.json", "field": "data", **fields}
    return loads(name, given, {"rows.json": {"data": ALPACA, "other": 1}})


def encodes(name: str, kind: str, *rows: Any, **options: Any) -> Mistake:
    """Rows that are no pairs, texts or prompts. options: of the call."""
    limit = "max_prompt_length" if kind == "prompts" else "max_length"
    options = {limit: None, **options}

    def encode(place: Any) -> None:
        calls: dict[str, Any] = {
            "pairs": data.encode_pairs,
            "texts": data.encode_texts,
            "prompts": data.encode_prompts,
        }
        calls[kind](data.load(list(rows)), load_tokenizer("words"), **options)

    return call(name, encode)


def part(name: str, content: Any) -> Mistake:
    """A reply whose second part is no text."""
    reply = {"role": "assistant", "content": [{"type": "text", "text": "a "}, content]}
    return encodes(name, "texts", {"messages": [ASKED, reply]}, **PLAIN)


def arguments(name: str, given: Any, kind: str = "texts") -> Mistake:
    """The second of two calls of a tool."""
    calls = [{"type": "function", "function": {"name": "f", "arguments": each}} for each in ("{}", given)]
    turns = [ASKED, {"role": "assistant", "content": "b", "tool_calls": calls}, ASKED]
    row = {"prompt": turns} if kind == "prompts" else {"messages": [*turns, SAID]}
    return encodes(name, kind, row, **PLAIN)


def variables(given: Any) -> dict[str, Any]:
    return {"chat_template_kwargs": given}


def images(name: str, value: Any) -> Mistake:
    rows = [{"images": empty, "prompt": "a"} for empty in (None, [], "")]
    return loads(name, [*rows, {"images": value, "prompt": "b"}])


def splits(make: Callable[[Any], Any]) -> Any:
    rows = datasets.Dataset.from_list(ROWS)
    return make(datasets.DatasetDict({"train": rows, "test": rows}))


class Broken:
    """Rows of which the second is none."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return [{}, ""][index]


def circle() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return [PAIR, {**PAIR, "answer": made}]


REPEATED = {"prompt": "ab", "chosen": "ab c", "rejected": "ab d"}
CALLS = {"chosen": [ASKED, SAID], "rejected": [ASKED, {**SAID, "content": "c"}]}
RATED = [{"prompt": "a", "completion": " b", "rating": 1}]
UNREAD = "Files that cannot be read"
SECTIONS = {
    UNREAD: [
        broken("a.jsonl", "nothing", b""),
        broken("a.jsonl", "blank lines", b" \n\n"),
        broken("a.json", "no rows", b"[]"),
        broken("a.csv", "no rows", b"prompt,chosen\n"),
        broken("a.jsonl", "a line cut off", b'{"a": 1}\n{"a": \n'),
        broken("a.jsonl", "a text cut off", b'{"a": "b\n'),
        broken("a.jsonl", "an array", b'{"a": 1}\n[1]\n'),
        broken("a.jsonl", "Latin-1", b'{"a": 1}\n{"a": "\xff"}\n'),
        broken("a.jsonl", "UTF-16", '{"a": 1}'.encode("utf-16")),
        broken("a.jsonl", "eight rows cut off", b"{\n" * 8),
        broken("a.json", "no colon", b'[{"a": 1},\n{"a" 2}]'),
        broken("a.json", "a number for a row", b'[{"a": 1}, 3]'),
        broken("a.json", "a text", b'"x"'),
        broken("a.csv", "three cells for two", b"a,b\n1,2\n1,2,3\n"),
        broken("a.csv", "a column twice", b"a,a\n1,2\n"),
        broken("a.csv", "a quote that is not closed", b'a,b\n1,"2\n'),
        broken(
            "a.csv",
            "conversations among texts",
            b'prompt\n"[{""role"": ""user"", ""content"": ""a""}]"\na\nb\n',
        ),
        broken(
            "a.csv",
            "a conversation in Python's notation",
            b"prompt\na\n\"[{'role': 'user', 'content': 'a'}]\"\n",
        ),
        broken("a.parquet", "no Parquet", b"PAR1 no"),
        broken("a.arrow", "no Arrow", b"ARROW1 no"),
        broken("a.array_record", "no ArrayRecord", b"no"),
        broken("a.xlsx", "a table of Excel", b"x"),
        broken("a.jsonl.bz2", "another compression", bz2.compress(b"{}")),
        broken("a.jsonl.gz", "cut off", gzip.compress(b'{"a": 1}\n' * 99, mtime=0)[:-9]),
        broken("a.jsonl.gz", "no gzip", b"no gzip"),
        broken("a.jsonl.zst", "no zstd", b"no zstd"),
        broken("a.jsonl", "half an emoji", b'{"prompt": "a", "answer": "x\\ud83d"}\n'),
        broken("a.jsonl", "half an emoji in a list", b'{"a": {"b": ["\\udc00"]}}\n'),
        broken("a.json", "half an emoji", b'[{"a": "b"}, {"a": "\\ud800"}]'),
        broken("a.jsonl", "nested 5,000 deep", b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}\n"),
        broken("a.json", "a number of 5,000 digits", b'[{"a": ' + b"9" * 5000 + b"}]"),
        broken("a.jsonl", "a zero byte in the first row", b'{"a": "b\0"}' + b" " * 2000),
        broken("a.jsonl", "a zero byte in row 201", b'{"a": "b"}\n' * 200 + b'{"a": "b\0"}\n'),
    ],
    "Data that are not there": [
        loads("a name without its last letter", "pair.jsonl"),
        loads("a name without its ending", "./pair"),
        loads("no such directory", "dta/pairs.jsonl"),
        loads("a directory", "model"),
        loads("an empty list", []),
        loads("no name and no path", {"weight": 2}),
        loads("no path", {"name": "jsonl"}),
    ],
    "Tables of data": [
        loads("a format that is misspelt", {"name": "jsonlines", "path": "pairs.jsonl"}),
        table(wieght=2),
        table(weight=0),
        table(split="test"),
        table(split="[9:]"),
        table(revision="v1"),
        table(columns={"prompt": "promptt"}),
        table(columns={"promt": "prompt"}),
        table(columns={"rejected": "chosen"}),
        table(columns={"prompt": "chosen", "answer": "chosen"}),
        table(columns="prompt"),
        field("a field that is misspelt", field="dat"),
        field("a field that is no list", field="other"),
        field("a column that is misspelt", columns={"x": ["input", "nothing"]}),
        field("no columns", columns={"x": []}),
        field("one column twice", columns={"x": ["input", "input"]}),
        loads("rows in a field, in memory", {"data": ALPACA}),
        loads("an option that is misspelt, on the hub", {"name": "some/pairs", "revison": "v1"}),
    ],
    "Data in memory": [
        loads("several splits", lambda: splits(lambda made: made)),
        loads("a generator", lambda: (row for row in ROWS)),
        loads("a row that is text", Broken),
        loads("a list that holds itself", circle),
        loads("half an emoji", [PAIR, {**PAIR, "answer": "\ud83d"}]),
        loads("none left", lambda: grain.MapDataset.source(ROWS).filter(lambda row: False)),
        loads("repeated without end", lambda: grain.MapDataset.source(ROWS).repeat(None)),
        images("a list of images", ["a.png"]),
        images("the name of an image", "a.png"),
        images("the bytes of an image", {"bytes": b"x"}),
        images("an image as an object", object()),
        loads("an image", [{"image": "a.png", "prompt": "b"}]),
    ],
    "Parts of contents": [
        part("an image", {"type": "image_url", "image_url": {"url": "x"}}),
        part("a sound", {"type": "input_audio"}),
        part("no text", {"type": "text"}),
        part("a number", 3),
    ],
    "Arguments of tool calls": [
        arguments("a number", "2"),
        arguments("an array", "[1]"),
        arguments("a list", [1]),
        arguments("cut off", '{"a": 2'),
        arguments("NaN", '{"a": NaN}'),
        arguments("half an emoji", '{"a": "\\ud800"}'),
        arguments("nested 100,000 deep", '{"a": ' * 100_000),
        arguments("a number of 5,000 digits", '{"a": ' + "9" * 5000 + "}"),
        arguments("cut off, in a prompt", '{"a": 2', "prompts"),
    ],
    "Tools": [
        encodes("cut off", "pairs", {**CALLS, "tools": "{"}, **PLAIN),
        encodes("a number", "pairs", {**CALLS, "tools": 3}, **PLAIN),
        encodes("a name", "pairs", {**CALLS, "tools": ["f"]}, **PLAIN),
        encodes(
            "calls in text",
            "texts",
            {"messages": [ASKED, {**SAID, "tool_calls": "f()"}]},
            chat_template="plain",
        ),
    ],
    "Rows that are no preferences": [
        encodes(
            "ShareGPT's keys",
            "pairs",
            TALK,
            {**TALK, "chosen": [{"speaker": "gpt", "value": "x"}]},
            chat_template="plain",
        ),
        encodes(
            "a number for content",
            "pairs",
            {**TALK, "chosen": [{**SAID, "content": 1}]},
            chat_template="plain",
        ),
        encodes(
            "another prompt", "pairs", {**TALK, "prompt": "q", "chosen": [ASKED, SAID]}, chat_template="plain"
        ),
        encodes(
            "replies that repeat the prompt",
            "pairs",
            *[REPEATED] * 3,
        ),
        encodes("ids below 0", "pairs", {"chosen_ids": [1, -2], "rejected_ids": [1]}),
        encodes("one pair, which is empty", "pairs", {**PAIR, "chosen": "  "}),
        encodes("one pair, whose replies are the same", "pairs", {**PAIR, "rejected": " b"}),
        encodes("overlong = drop", "pairs", PAIR, overlong="drop"),
    ],
    "Rows that are no texts": [
        encodes("conversations, without a template", "texts", {"messages": [ASKED, SAID]}),
        encodes("nobody replies", "texts", {"messages": [ASKED]}, **PLAIN),
        encodes(
            "the only reply has weight 0",
            "texts",
            {"messages": [ASKED, {**SAID, "weight": 0}]},
            chat_template="plain",
        ),
        *(
            encodes(
                f"weight {w!r}", "texts", {"messages": [ASKED, {**SAID, "weight": w}]}, chat_template="plain"
            )
            for w in (0.5, True, "0", 2, [1])
        ),
        encodes(
            "a completion without a reply",
            "texts",
            {"prompt": [ASKED], "completion": [ASKED]},
            chat_template="plain",
        ),
        *(
            encodes(f"a rating of {x!r}", "texts", *RATED, {**RATED[0], "rating": x}, values=("rating",))
            for x in (None, "good", float("nan"), float("inf"), True)
        ),
    ],
    "Rows that are no prompts": [
        encodes("a conversation, without a template", "prompts", TALK),
        encodes("a conversation after a text", "prompts", {"prompt": "x"}, {"prompt": [ASKED]}),
        encodes("a column of completions", "prompts", {"prompt": "x", "completions": 1}),
        encodes(
            "variables in a list",
            "prompts",
            {"prompt": [ASKED], **variables([1])},
            chat_template="plain",
        ),
        encodes(
            "variables cut off",
            "prompts",
            {"prompt": [ASKED], **variables("{")},
            chat_template="plain",
        ),
        encodes(
            "a variable called tools",
            "prompts",
            {"prompt": [ASKED], **variables({"tools": []})},
            chat_template="plain",
        ),
    ],
}
