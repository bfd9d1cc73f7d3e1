"""Unusual input: missing cells, other column names, compressed files, data frames, JSON in cells."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from rlhf_core import data
from rlhf_core.errors import InputError

PAIR = {"prompt": "a", "chosen": " b", "rejected": " c"}
TALK = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
FOREIGN = [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c"}]


@pytest.fixture(params=["in memory", "on the disk"])
def place(request, tmp_path, in_memory):
    """Run with files held in memory, and with files read from disk."""
    in_memory(0 if request.param == "on the disk" else 1 << 23)
    return tmp_path


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_a_missing_cell_of_csv_is_null_and_a_quoted_one_is_empty(place):
    text = 'prompt,answer,more\r\n"a, ""b""",,x\nc,"",\n"d\ne","  ","f"\n\n,"g",""\n'
    (place / "a.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    records = data.load(place / "a.csv")
    assert list(records) == [
        {"prompt": 'a, "b"', "answer": None, "more": "x"},
        {"prompt": "c", "answer": "", "more": None},
        {"prompt": "d\ne", "answer": "  ", "more": "f"},
        {"prompt": None, "answer": "g", "more": ""},
    ]
    assert [records.where(i).rpartition(" ")[2] for i in range(4)] == ["1", "2", "3", "4"]
    assert records[2] == list(records)[2]


def test_missing_values_are_null_and_data_sets_of_one_name_are_told_apart(tokenizer):
    frame = pd.DataFrame({"prompt": ["a", "b"], "answer": ["x", None], "score": [1.0, np.nan]})
    assert list(data.load(frame)) == [
        {"prompt": "a", "answer": "x", "score": 1.0},
        {"prompt": "b", "answer": None, "score": None},
    ]
    assert len(data.encode_prompts(data.load(frame), tokenizer, max_prompt_length=None)) == 2
    assert list(data.load(pa.table({"prompt": ["a", None]}))) == [{"prompt": "a"}, {"prompt": None}]

    one = [{**PAIR, "subset": "one"}, {**PAIR, "chosen": " d", "subset": "one"}]
    other = [{**PAIR, "chosen": " e", "subset": "other"}]
    records = data.load([one, other])
    assert [records.where(i) for i in range(3)] == ["dataset 1 row 1", "dataset 1 row 2", "dataset 2 row 1"]
    pairs = data.encode_pairs(records, tokenizer, max_length=None)
    assert [records[i]["subset"] for i in pairs.rows.tolist()] == ["one", "one", "other"]
    again = data.load([one, one])
    assert again.where(0) == again.where(2) == "dataset row 1"  # the same rows twice

    long = {**PAIR, "chosen": " b" * 40, "subset": "long"}
    one = [long, {**PAIR, "subset": "one"}]
    other = [{**PAIR, "chosen": " e", "subset": "other"}, {**PAIR, "chosen": " f", "subset": None}]
    records = data.load([one, other])
    pairs = data.encode_pairs(records, tokenizer, max_length=8)
    assert pairs.report.filtered == ["dataset 1 row 1"]
    assert pairs.column("subset") == ["one", "other", None]
    assert pairs.column("subset")[1:] == ["other", None]
    assert pairs.column("source") == [None] * 3


def test_a_column_is_read_one_row_at_a_time(tokenizer):
    class Counting(list):
        read = 0

        def __getitem__(self, i):
            Counting.read += 1
            return super().__getitem__(i)

    rows = Counting({**PAIR, "subset": str(i)} for i in range(50))
    pairs = data.encode_pairs(data.load(rows), tokenizer, max_length=8)
    Counting.read = 0
    column = pairs.column("subset")
    assert (len(column), Counting.read) == (50, 0)
    assert column[:3] == ["0", "1", "2"]
    assert Counting.read <= 3


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_compressed_files_are_read(place, kind):
    table = pd.DataFrame([PAIR] * 3)
    plain = place / f"a.{kind}"
    if kind == "jsonl":
        plain.write_bytes(lines([PAIR] * 3))
    elif kind == "csv":
        table.to_csv(plain, index=False)
    else:
        table.to_parquet(plain)
    (place / f"a.{kind}.gz").write_bytes(gzip.compress(plain.read_bytes()))
    with pa.CompressedOutputStream(str(place / f"a.{kind}.zst"), "zstd") as file:
        file.write(plain.read_bytes())
    wanted = data.load(plain)
    assert list(wanted) == [PAIR] * 3
    for ending in ("gz", "zst"):
        found = data.load(place / f"a.{kind}.{ending}")
        assert list(found) == [PAIR] * 3
        assert found.fingerprint == wanted.fingerprint


def test_other_names_of_columns(place, tokenizer):
    (place / "a.jsonl").write_bytes(lines([{"question": "a", "better": " b", "rejected": " c", "x": 1}] * 2))
    path = str(place / "a.jsonl")
    columns = {"prompt": "question", "chosen": "better"}
    table = {"name": "jsonl", "path": path, "columns": columns}
    for records in (data.load(table), data.load(path, columns=columns), data.load([path], columns=columns)):
        assert records.columns == ("prompt", "chosen", "rejected", "x")
        assert records[0] == {**PAIR, "x": 1}
        assert len(data.encode_pairs(records, tokenizer, max_length=None)) == 2
    assert data.load(table).fingerprint != data.load(path).fingerprint
    twice = data.load({**table, "weight": 2, "split": "[:1]"})
    assert list(twice) == [{**PAIR, "x": 1}] * 2


def test_sharegpt_and_conversations_as_json_are_read_and_said(place, tokenizer, tiny):
    (place / "a.jsonl").write_bytes(lines([{"conversations": FOREIGN}, {"conversations": TALK}] * 2))
    records = data.load(place / "a.jsonl")
    assert list(records) == [{"messages": TALK}] * 4
    encoded = data.encode_texts(records, tokenizer, max_length=None, chat_template="plain")
    wanted = data.encode_texts(
        data.load([{"messages": TALK}]), tokenizer, max_length=None, chat_template="plain"
    )
    assert encoded.sequences["tokens"][0].tolist() == wanted.sequences["tokens"][0].tolist()
    assert wanted.report.read_as == []
    said = "\n".join(encoded.report.lines())
    assert "a.jsonl: reading column 'conversations' as 'messages'" in said
    assert "'human' as 'user'" in said
    roles = [{"role": "human", "content": "a"}, {"role": "gpt", "content": "b"}]
    (row,) = data.load([{"prompt": roles[:1], "completion": roles[1:]}])
    assert [row["prompt"][0]["role"], row["completion"][0]["role"]] == ["user", "assistant"]

    frame = pd.DataFrame({"messages": [json.dumps(TALK), json.dumps(FOREIGN)]})
    frame.to_csv(place / "a.csv", index=False)
    records = data.load(place / "a.csv")
    assert list(records) == [{"messages": TALK}] * 2
    assert records.remarks
    assert len(data.encode_texts(records, tokenizer, max_length=None, chat_template="plain")) == 2
    sides = {"prompt": json.dumps(TALK[:1]), "chosen": json.dumps(TALK[1:]), "rejected": json.dumps(TALK[1:])}
    pd.DataFrame([sides]).to_csv(place / "b.csv", index=False)
    assert list(data.load(place / "b.csv")) == [
        {"prompt": TALK[:1], "chosen": TALK[1:], "rejected": TALK[1:]}
    ]


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz", "d.csv", "d.txt"])
def test_a_line_that_is_too_long_is_no_row(name, tmp_path, monkeypatch):
    monkeypatch.setattr("rlhf_core.data.files.limited_rows.__kwdefaults__", {"most": 100})
    monkeypatch.setattr("rlhf_core.data.files._lines.__defaults__", (100,))
    content = b'{"text": "a"}\n{"text": "' + b"a" * 200 + b'"}\n'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    with pytest.raises(InputError, match=rf"{name} row 2 has more than 100 bytes: a line is one row"):
        data.load(tmp_path / name)


def test_a_file_that_changes_while_it_is_used_is_reported(tmp_path, in_memory):
    in_memory(0)
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines([PAIR, {**PAIR, "prompt": "b"}]))
    records = data.load(path)
    with path.open("ab") as file:
        file.write(lines([PAIR]))
    assert [row["prompt"] for row in records] == ["a", "b"]  # appended rows are not read
    changed = path.read_bytes().replace(b'"b"', b'"c"')
    with path.open("r+b") as file:
        file.write(changed)
    fresh = data.load(path)
    assert [row["prompt"] for row in fresh] == ["a", "c", "a"]
    late = data.load(path)
    with path.open("r+b") as file:
        file.write(changed.replace(b'"c"', b'"c'))
    with pytest.raises(InputError, match=r"a\.jsonl row 2 has changed since the file was read"):
        late[1]
    assert late[0]["prompt"] == "a"


def test_revision_and_files_of_the_hub(monkeypatch):
    import datasets
    import huggingface_hub

    calls = []
    made = datasets.Dataset.from_list([PAIR] * 2)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub, "dataset_info", lambda *a, **k: calls.append((a, k)))
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: calls.append((a, k)) or made)
    table = {
        "name": "some/pairs",
        "subset": "hard",
        "split": "test",
        "revision": "v1",
        "data_files": "a/*.jsonl",
    }
    assert list(data.load(table)) == [PAIR] * 2
    assert calls == [
        (("some/pairs",), {"revision": "v1", "timeout": 10}),
        (("some/pairs", "hard"), {"split": "test", "revision": "v1", "data_files": "a/*.jsonl"}),
    ]
    calls.clear()
    data.load("some/pairs")
    assert calls[1] == (("some/pairs", None), {"split": "train"})
