"""Well-known formats under other names: the error has the line that maps them, and the line works."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlhf_core import data
from rlhf_core.config import TrainerConfig
from rlhf_core.errors import InputError

ALPACA = [
    {"instruction": "a", "input": "b", "output": " c"},
    {"instruction": "a", "input": "", "output": " d"},
]
SHAREGPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def encode(kind: str, records: data.Records, tokenizer: Any) -> Any:
    if kind == "texts":
        return data.encode_texts(records, tokenizer, max_length=None, chat_template="plain")
    if kind == "pairs":
        return data.encode_pairs(records, tokenizer, max_length=None, chat_template="plain")
    return data.encode_prompts(records, tokenizer, max_prompt_length=None, chat_template="plain")


@pytest.mark.parametrize(
    ("kind", "rows", "line", "first"),
    [
        (
            "texts",
            ALPACA,
            'columns = { prompt = ["instruction", "input"], completion = "output" }',
            {"prompt": "a\n\nb", "completion": " c"},
        ),
        (
            "prompts",
            ALPACA[1:],
            'columns = { prompt = ["instruction", "input"] }',
            {"prompt": "a", "output": " d"},
        ),
        (
            "texts",
            {"version": 1, "data": ALPACA},
            'train_data = { path = "PATH", field = "data", columns = { prompt = ["instruction", "input"], '
            'completion = "output" } }',
            {"prompt": "a\n\nb", "completion": " c"},
        ),
        ("texts", {"rows": [{"text": "a"}]}, 'train_data = { path = "PATH", field = "rows" }', {"text": "a"}),
        (
            "texts",
            [{"question": "a", "answer": " b"}],
            'columns = { prompt = "question", completion = "answer" }',
            {"prompt": "a", "completion": " b"},
        ),
        (
            "prompts",
            [{"question": "a", "answer": "b"}],
            'columns = { prompt = "question" }',
            {"prompt": "a", "answer": "b"},
        ),
        (
            "texts",
            [{"input": "a", "output": " b"}],
            'columns = { prompt = "input", completion = "output" }',
            {"prompt": "a", "completion": " b"},
        ),
        ("texts", [{"prompt": "a", "response": " b"}], 'columns = { completion = "response" }', None),
        (
            "texts",
            [{"id": 1, "talk": SHAREGPT}],
            'columns = { messages = "talk" }',
            {"id": 1, "messages": TALK},
        ),
        ("prompts", [{"talk": TALK}], 'columns = { messages = "talk" }', {"messages": TALK}),
        (
            "pairs",
            [{"question": "a", "better": " b", "worse": " c"}],
            'columns = { prompt = "question", chosen = "better", rejected = "worse" }',
            {"prompt": "a", "chosen": " b", "rejected": " c"},
        ),
        (
            "pairs",
            [{"question": "a", "good_answer": " b", "bad": " c"}],
            'columns = { prompt = "question", chosen = "good_answer", rejected = "bad" }',
            {"prompt": "a", "chosen": " b", "rejected": " c"},
        ),
        (
            "pairs",
            [{"good": TALK, "bad": [TALK[0], {"role": "assistant", "content": "c"}]}],
            'columns = { chosen = "good", rejected = "bad" }',
            None,
        ),
        ("texts", [{"foo": "a", "bar": ["b"]}], None, None),
    ],
)
def test_the_line_in_the_message_maps_the_data(
    kind: str, rows: Any, line: str | None, first: Any, tiny: ModuleType, tmp_path: Path, rlhf: Any
) -> None:
    tokenizer, path = tiny.make_tokenizer(), str(tmp_path / "rows.json")
    Path(path).write_text(json.dumps(rows))
    with pytest.raises(InputError) as caught:
        encode(kind, data.load(path), tokenizer)
    found = re.search(r"[Ii]n a stage write (.*? \})\. Accepted", str(caught.value))
    assert (found and found[1]) == (line and line.replace("PATH", path))
    if found is None:
        return
    if "prompt" not in data.load(path).columns:
        assert re.search(r"[Ii]n a stage write", rlhf("data", path).message)
    config = TrainerConfig.from_dict({"train_data": path, **tomllib.loads(found[1])})
    records = data.load(config.train_data, columns=config.columns)
    assert len(encode(kind, records, tokenizer)) == len(records)
    assert first is None or records[0] == first


def test_columns_that_are_joined_and_fields_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"data": ALPACA, "other": 1}))
    table = {"path": str(path), "field": "data"}
    assert data.load(table).fingerprint != data.load(str(path)).fingerprint
    assert data.load({**table, "split": "[1:]", "weight": 2}).where(1).endswith("rows.json row 2")
    mapped = data.load({**table, "columns": {"x": ["input", "output", "instruction"]}})
    assert list(mapped) == [{"x": "b\n\n c\n\na"}, {"x": " d\n\na"}]
    assert mapped.columns == ("x",)
    joined = data.load([{"a": "b", "c": 1}], columns={"text": ["a", "c"]})
    assert joined[0] == {"text": ["b", 1]}
