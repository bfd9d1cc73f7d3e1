"""docs/reference/data.md: every row in it is read, its table is complete, its code and its command say what it says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import fields

import pytest

from rlhf_core import data
from rlhf_core.tokenizer import Encoder
from tests.shared import chat_cases


@pytest.fixture(scope="module")
def page(repository):
    return (repository / "docs/reference/data.md").read_text(encoding="utf-8")


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def section(page, title):
    return re.split(r"^#+ ", page.split(f"# {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


@pytest.mark.parametrize(
    ("title", "encode", "limit"),
    [
        ("Preferences", data.encode_pairs, "max_length"),
        ("Demonstrations", data.encode_texts, "max_length"),
        ("Prompts", data.encode_prompts, "max_prompt_length"),
        ("Conversations", data.encode_texts, "max_length"),
    ],
)
def test_each_row_is_a_layout(title, encode, limit, page):
    (block,) = blocks(section(page, title), "json")
    options = {
        limit: None,
        "chat_template": "{{ tools or '' }}{% for m in messages %}{{ m | tojson }}{% endfor %}",
    }
    for row in map(json.loads, block.splitlines()):
        encoded = encode(data.load([row]), chat_cases.byte_level(eos="<eos>", pad="<pad>"), **options)
        assert (len(encoded), encoded.report.doubled) == (1, [])


def test_each_row_is_a_list_of_completions(page, tiny):
    (block,) = blocks(section(page, "Lists of completions"), "json")
    encoder = Encoder(tiny.make_tokenizer(), "plain")
    for row in map(json.loads, block.splitlines()):
        [whole] = data.whole_parts(data.load([row]), encoder)
        assert whole.chosen == [len(row["chosen"])]
        assert len(whole.sequences[0]) == len(row["chosen"]) + len(row["rejected"])


def test_datasets_are_mixed(page, tiny, tmp_path):
    (block,) = blocks(section(page, "Several datasets"), "toml")
    for name in ("pairs.jsonl", "more.jsonl", "rest.txt"):
        tiny.write_rows(tmp_path / name, [{"text": f"{name} {i}"} for i in range(4)])
    records = data.load(tomllib.loads(block)["train_data"], base=tmp_path)
    taken = {"pairs.jsonl": [0, 1, 2, 3], "more.jsonl": [0, 1, 2, 3] * 2, "rest.txt": [0]}
    assert [row["text"] for row in records] == [f"{name} {i}" for name, rows in taken.items() for i in rows]


def test_everything_that_is_said_of_rows_is_in_the_table(page):
    rows = section(page, "What happened to the rows")
    documented = re.findall(r"^\| ([\w… ]+?) +\|", rows, re.MULTILINE)[1:]
    others = ("unit", "limit", "total", "kept", "read_as", "field_counts", "not_read")
    lists = [f.name for f in fields(data.Report) if f.name not in others]
    report = data.Report("pairs", 16, total=9, kept=1, **{name: ["x row 1"] for name in lists})
    kept, *said = report.lines()
    assert kept.endswith(documented[0])
    assert [re.sub(r"over \d+ ", "over … ", line[2 : line.index(":")]) for line in said] == documented[1:]


@pytest.mark.long
def test_the_code_and_the_command(page, tiny, tmp_path, monkeypatch, capsys):
    (rows,), (shown,), (code,) = (blocks(page, language) for language in ("jsonl", "console", "python"))
    tiny.make_tokenizer().save_pretrained(tmp_path / "path/to/model")
    (tmp_path / "pairs.jsonl").write_text(rows)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "document", "exec", dont_inherit=True), {})
    assert "1 empty dropped: pairs.jsonl row 4" in capsys.readouterr().out
    command, *wanted = shown.splitlines()
    program = "from rlhf_core import cli; cli.main()"
    arguments = [sys.executable, "-c", program, *command.removeprefix("$ rlhf ").split()]
    monkeypatch.setenv("COLUMNS", "80")
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert [line.rstrip() for line in done.stdout.rstrip().splitlines()] == wanted
