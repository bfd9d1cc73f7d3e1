"""Loading: every format gives the same rows, and errors name the file and row."""

from __future__ import annotations

import gzip
import json

import datasets
import grain
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from rlhf_core import data
from rlhf_core.contracts import DATASET
from rlhf_core.errors import InputError

ROWS = [
    {"prompt": f"p{i}", "chosen": f"c, {i}\nsecond \u2028 line", "rejected": 'quoted "r"'} for i in range(4)
]


def write(path, rows=ROWS):
    kind = path.suffix
    if kind == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    elif kind == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif kind == ".csv":
        datasets.Dataset.from_list(rows).to_csv(str(path), index=False)
    elif kind == ".array_record":
        writer = ArrayRecordWriter(str(path), "group_size:1")
        for row in rows:
            writer.write(json.dumps(row).encode())
        writer.close()
    elif kind == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        with (
            pa.OSFile(str(path), "wb") as sink,
            pa.ipc.new_file(sink, pa.Table.from_pylist(rows).schema) as writer,
        ):
            writer.write_table(pa.Table.from_pylist(rows))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "arrow", "array_record"])
def test_every_format_gives_the_same_rows(tmp_path, kind):
    records = data.load(str(write(tmp_path / f"prefs.{kind}")))
    assert list(records) == ROWS
    assert records.columns == ("prompt", "chosen", "rejected")
    assert records[-1] == ROWS[-1]
    assert len(records) == 4


def test_records_that_are_no_rows_are_named(tmp_path):
    path = write(tmp_path / "a.array_record", [*ROWS, 3, {"prompt": "a"}, [1]])
    with pytest.raises(InputError) as error:
        data.load(path)
    assert [line.partition(" row ")[2] for line in error.value.problems] == [
        "5 is not a JSON object, but a number",
        "7 is not a JSON object, but an array; a JSON array goes in a .json file",
    ]


def test_rows_are_numbered_as_in_their_file(tmp_path):
    (tmp_path / "corpus.txt").write_bytes("one\r\n\n  two\u2028two\nthree".encode())
    records = data.load(tmp_path / "corpus.txt")
    assert [row["text"] for row in records] == ["one", "  two\u2028two", "three"]
    assert records.where(1).endswith("corpus.txt row 3")

    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"a": 1}\n{"a": 2}\n')
    assert [row["a"] for row in data.load(tmp_path / "a.json")] == [1, 2]

    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n\n{"prompt": "y"}\n')
    assert data.load(tmp_path / "a.jsonl").where(1) == f"{tmp_path / 'a.jsonl'} row 3"
    records = data.load(write(tmp_path / "b.csv"))
    assert records.where(0).endswith("b.csv row 1")  # the first after the header
    assert records.where(1).endswith("b.csv row 2")  # the first has two lines
    text = 'text,n\n"one\n\nline",1\n\n\ntwo,2\nthree,3\n'
    (tmp_path / "c.csv.gz").write_bytes(gzip.compress(text.encode()))
    records = data.load(tmp_path / "c.csv.gz")
    assert [row["text"] for row in records] == ["one\n\nline", "two", "three"]
    assert [records.where(i).rpartition(" ")[2] for i in range(3)] == [
        "1",
        "2",
        "3",
    ]  # blank lines are no rows
    (tmp_path / "d.csv").write_text(text + "four\n")
    with pytest.raises(InputError, match=r"d\.csv row 4 has 1 fields, its header has 2"):
        data.load(tmp_path / "d.csv")

    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub" / "prefs.jsonl")
    assert len(data.load("prefs.jsonl", base=tmp_path / "sub")) == 4
    assert data.load("prefs.jsonl", base=tmp_path / "sub").where(0) == "prefs.jsonl row 1"


def test_data_in_memory_saved_datasets_and_those_of_grain(tmp_path):
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": table, "test": table.select([2])}).save_to_disk(str(tmp_path / "splits"))

    class Lazy:
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return ROWS[i]

    for spec in (ROWS, table, Lazy(), str(tmp_path / "saved"), data.load(ROWS)):
        assert list(data.load(spec)) == ROWS
    assert data.load(ROWS).where(2) == "dataset row 3"
    assert list(data.load({"name": str(tmp_path / "splits"), "split": "test"})) == [ROWS[2]]
    with pytest.raises(InputError, match="has the splits train, test"):
        data.load(str(tmp_path / "splits"))

    rows = grain.MapDataset.source(ROWS)
    kept = data.load(rows.filter(lambda row: row["prompt"] != "p1"))
    assert list(kept) == [ROWS[0], *ROWS[2:]]
    assert kept.where(1) == "dataset row 3"
    with pytest.raises(InputError, match="repeats without end"):
        data.load([rows, rows.shuffle(seed=0).repeat(None)])


def test_lists_tables_weights_and_splits(tmp_path):
    path = str(write(tmp_path / "prefs.jsonl"))
    other = str(write(tmp_path / "other.json", [{"prompt": "z"}]))
    records = data.load([path, {"name": "json", "path": other, "weight": 3}])
    assert [row["prompt"] for row in records] == ["p0", "p1", "p2", "p3", "z", "z", "z"]
    assert records.where(6).endswith("other.json row 1")
    half = data.load({"path": path, "weight": 0.5})
    assert [row["prompt"] for row in half] == ["p0", "p2"]
    assert half.where(1).endswith("prefs.jsonl row 3")
    more = data.load({"path": path, "weight": 1.5})
    assert sorted(row["prompt"] for row in more) == ["p0", "p0", "p1", "p2", "p2", "p3"]
    assert [row["prompt"] for row in data.load({"path": path, "split": "train[:75%]"})] == ["p0", "p1", "p2"]
    assert [row["prompt"] for row in data.load({"path": path, "split": "[-1:]"})] == ["p3"]
    prints = {
        data.load(s).fingerprint for s in (path, {"path": path, "weight": 2}, {"path": path, "split": "[1:]"})
    }
    assert len(prints) == 3
    assert data.load(path).fingerprint == data.load(path).fingerprint


def test_registered_datasets(tmp_path):
    path = str(write(tmp_path / "prefs.jsonl"))

    class Registry:
        def names(self, kind):
            assert kind is DATASET
            return ["mine", "file"]

        def get(self, kind, name, **options):
            return data.load(path) if name == "file" else ROWS[: options.get("count", 4)]

    assert list(data.load("mine", registry=Registry())) == ROWS
    assert list(data.load({"name": "mine", "count": 2, "weight": 2}, registry=Registry())) == ROWS[:2] * 2
    assert data.load("file", registry=Registry()).where(0).endswith("prefs.jsonl row 1")


def test_hub_names_without_network(monkeypatch, tmp_path):
    import huggingface_hub

    def unreachable(*args, **kwargs):
        raise OSError("Name or service not known")

    (tmp_path / "prefs.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub, "dataset_info", unreachable)
    with pytest.raises(InputError, match=r"no data 'prefs': .*Name or service not known.*'prefs\.jsonl'"):
        data.load("prefs")
