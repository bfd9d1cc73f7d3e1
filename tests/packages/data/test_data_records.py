"""Loading: every format gives the same rows, and errors name the file and row."""

from __future__ import annotations

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


def test_text_files_have_a_text_a_line(tmp_path):
    (tmp_path / "corpus.txt").write_bytes("one\r\n\n  two\u2028two\nthree".encode())
    records = data.load(tmp_path / "corpus.txt")
    assert [row["text"] for row in records] == ["one", "  two\u2028two", "three"]
    assert records.where(1).endswith("corpus.txt row 3")


def test_rows_are_numbered_as_in_the_file(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n\n{"prompt": "y"}\n')
    assert data.load(tmp_path / "a.jsonl").where(1) == f"{tmp_path / 'a.jsonl'} row 3"
    records = data.load(write(tmp_path / "b.csv"))
    assert records.where(0).endswith("b.csv row 2")  # the header is row 1
    assert records.where(1).endswith("b.csv row 4")  # the first record has two lines


def test_memory_and_saved_datasets(tmp_path):
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
    with pytest.raises(InputError, match=r"several splits \(train, test\)"):
        data.load(datasets.DatasetDict({"train": table, "test": table}))
    with pytest.raises(InputError, match=r"dataset is generator: data in memory needs __len__"):
        data.load(row for row in ROWS)
    broken = type("Broken", (), {"__len__": lambda self: 2, "__getitem__": lambda self, i: [{}, ""][i]})()
    with pytest.raises(InputError, match="dataset row 2 is str, not a mapping"):
        data.load(broken)


def test_what_grain_filters_is_passed_over_and_what_it_repeats_for_ever_is_refused():
    rows = grain.MapDataset.source(ROWS)
    kept = data.load(rows.filter(lambda row: row["prompt"] != "p1"))
    assert list(kept) == [ROWS[0], *ROWS[2:]]
    assert kept.where(1) == "dataset row 3"
    with pytest.raises(InputError, match="dataset has no rows"):
        data.load(rows.filter(lambda row: False))
    for endless in (rows.repeat(None), [rows, rows.shuffle(seed=0).repeat(None)]):
        with pytest.raises(InputError, match=r"repeats without end: give it without \.repeat\(None\)"):
            data.load(endless)


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


def test_paths_start_from_base(tmp_path):
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub" / "prefs.jsonl")
    assert len(data.load("prefs.jsonl", base=tmp_path / "sub")) == 4
    assert data.load("prefs.jsonl", base=tmp_path / "sub").where(0) == "prefs.jsonl row 1"


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


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", r"a\.jsonl is empty"),
        ("a.jsonl", b" \n\n", r"a\.jsonl is empty"),
        ("a.json", b"[]", r"a\.json has no rows"),
        ("a.csv", b"prompt,chosen\n", r"a\.csv has no rows"),
        ("a.jsonl", b'{"a": 1}\n{"a": \n', r"a\.jsonl row 2 is not JSON: Expecting value at column 7"),
        ("a.jsonl", b'{"a": "b\n', r"a\.jsonl row 1 is not JSON: Unterminated string starting at column 7"),
        (
            "a.jsonl",
            b'{"a": 1}\n[1]\n',
            r"a\.jsonl row 2 is not a JSON object, but an array; a JSON array goes in",
        ),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', r"a\.jsonl row 2 is not UTF-8 \(byte 0xff at column 8\)"),
        ("a.jsonl", '{"a": 1}'.encode("utf-16"), r"a\.jsonl is UTF-16: save it as UTF-8"),
        (
            "a.json",
            b'[{"a": 1},\n{"a" 2}]',
            r"a\.json line 2 is not JSON: Expecting ':' delimiter at column 6",
        ),
        ("a.json", b'[{"a": 1}, 3]', r"a\.json row 2 is not a JSON object, but a number"),
        ("a.json", b'"x"', r"a\.json is a text: a \.json file holds an array"),
        ("a.csv", b"a,b\n1,2\n1,2,3\n", r"a\.csv row 3 has 3 fields, its header has 2"),
        ("a.csv", b"a,a\n1,2\n", r"a\.csv row 1 names a column twice: a"),
        ("a.csv", b'a,b\n1,"2\n', r"a\.csv row 2 is not CSV"),
        ("a.parquet", b"PAR1 no", r"a\.parquet is not a readable parquet file"),
        ("a.arrow", b"ARROW1 no", r"a\.arrow is not a readable arrow file"),
        ("a.array_record", b"no", r"a\.array_record is not an ArrayRecord file: .*64KB"),
        ("a.xlsx", b"x", r"'\.xlsx' is not a supported format \(jsonl, json, csv"),
    ],
)
def test_broken_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        data.load(tmp_path / name)


def test_a_byte_order_mark_and_json_lines_under_json_are_read(tmp_path):
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"a": 1}\n{"a": 2}\n')
    assert [row["a"] for row in data.load(tmp_path / "a.json")] == [1, 2]


def test_several_problems_are_reported_at_once(tmp_path):
    (tmp_path / "a.jsonl").write_text("{\n" * 8)
    with pytest.raises(InputError) as error:
        data.load(tmp_path / "a.jsonl")
    assert [problem.split(" is not")[0].split(".jsonl ")[1] for problem in error.value.problems[:5]] == [
        f"row {i}" for i in range(1, 6)
    ]
    assert error.value.problems[5] == "… and 3 more rows like these"


def test_missing_files_and_bad_tables(tmp_path, monkeypatch):
    write(tmp_path / "prefs.jsonl")
    monkeypatch.chdir(tmp_path)
    cases = [
        ("pref.jsonl", r"no file pref\.jsonl\. Did you mean 'prefs\.jsonl'\?"),
        ("./pref", r"no file \./pref"),
        ("dta/prefs.jsonl", r"its directory does not exist"),
        (str(tmp_path), r"is a directory.*it has prefs\.jsonl"),
        ([], "empty list"),
        ({"weight": 2}, r"a data table needs a name or a path; it has weight"),
        ({"name": "jsonl"}, r"needs a path"),
        (
            {"name": "jsonlines", "path": "prefs.jsonl"},
            r"'jsonlines' is not a file format .* Did you mean 'jsonl'\?",
        ),
        (
            {"name": "jsonl", "path": "prefs.jsonl", "wieght": 2},
            r"no option 'wieght'\. Did you mean 'weight'\?",
        ),
        ({"path": "prefs.jsonl", "weight": 0}, r"weight of prefs\.jsonl is 0: give a number above 0"),
        ({"path": "prefs.jsonl", "split": "test"}, r"split 'test' of prefs\.jsonl: a file has only train"),
        ({"path": "prefs.jsonl", "split": "[9:]"}, r"has no rows: the file has 4"),
    ]
    for spec, message in cases:
        with pytest.raises(InputError, match=message):
            data.load(spec)


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
