"""Reports: every dropped, cut or repeated row is named, and a column's type is that of most of its cells."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_core import data

TOOLED = (
    "{% for t in tools or [] %}{{ t.name }} {{ t.parameters | length }} {% endfor %}{% for m in messages %}"
    "{{ m.role }} {{ m.content }} {% for c in m.tool_calls or [] %}{{ c.function.name }} {% endfor %}{% endfor %}"
)


def pairs(rows, tokenizer, **options):
    return data.encode_pairs(data.load(rows), tokenizer, **{"max_length": None, **options})


def row(prompt, chosen, rejected):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def test_every_kind_of_row_is_counted_and_named(tokenizer):
    rows = [
        row("a", " b", " c"),
        row("a", " b", " c"),
        row("a", " c", " b"),
        row("a", " d", " d"),
        row("a", "\n", " d"),
        row("a", " b c d e f g", " b"),
        row("a", "a e", " f"),
        row("b", " e", " b f"),  # begins with the prompt, on the other side
    ]
    report = pairs(rows, tokenizer, max_length=6).report
    assert report.lines() == [
        "8 pairs: 5 kept",
        "1 over 6 tokens filtered: dataset row 6",
        "1 empty dropped: dataset row 5",
        "1 with chosen and rejected alike dropped: dataset row 4",
        "2 with the prompt again in a completion: dataset rows 7, 8",
        "1 that reverse an earlier row: dataset row 3",
        "1 with words that the tokenizer does not know: dataset row 7",
        "1 the same as an earlier row: dataset row 2",
    ]
    assert report.total == report.kept + len(report.filtered) + len(report.empty) + len(report.identical)
    cut = pairs(rows, tokenizer, max_length=6, overlong="truncate").report
    assert (cut.kept, cut.truncated, cut.filtered) == (6, ["dataset row 6"], [])
    assert not report.all_as_given
    # Repeated rows are used whole and teach something.
    assert pairs(rows[:2], tokenizer).report.all_as_given


def test_a_report_in_one_line_names_a_row_of_each_kind_and_the_command_that_lists_them(
    tokenizer, tmp_path, monkeypatch
):
    alike = row("a", " d", " d")
    wide = {**alike, "v": 1, "w": 1, "x": 1, "y": 1, "z": 1}
    files = [tmp_path / "some pairs.jsonl", tmp_path / "more.jsonl"]
    for path, rows in zip(
        files, ([row("a", " b", " c"), wide, alike, alike], [row("a", " ", " c")]), strict=True
    ):
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    monkeypatch.chdir(tmp_path)
    report = pairs([str(path) for path in files], tokenizer).report
    assert str(report) == (
        "5 pairs: 1 kept, 1 empty dropped (more.jsonl row 1), 3 with chosen and rejected alike dropped "
        "(first some pairs.jsonl row 2), unused columns: v (in 1), w (in 1), x (in 1) and 2 more; rlhf data more.jsonl "
        "--model DIR lists the rows"
    )
    one = pairs(str(files[0]), tokenizer).report
    assert str(one).startswith(
        "4 pairs: 1 kept, 3 with chosen and rejected alike dropped (first some pairs.jsonl row 2), unused "
    )
    assert str(one).endswith("; rlhf data 'some pairs.jsonl' --model DIR lists the rows")


def test_rows_that_a_weight_draws_again_are_no_duplicates(tokenizer, tiny, tmp_path):
    path = tiny.write_rows(tmp_path / "rows.jsonl", [row("a", " b", " c"), row("d", " e", " f")])
    records = data.load({"path": str(path), "weight": 2})
    assert len(records) == 4
    encoded = data.encode_pairs(records, tokenizer, max_length=None)
    assert (len(encoded), encoded.report.duplicates) == (4, [])


def test_texts_and_prompts_are_counted_alike(tokenizer):
    rows = [{"prompt": "a", "completion": c} for c in (" b", "a b", " b", "")]
    report = data.encode_texts(data.load(rows), tokenizer, max_length=None).report
    assert (report.doubled, report.duplicates, report.empty) == (
        ["dataset row 2"],
        ["dataset row 3"],
        ["dataset row 4"],
    )
    assert data.encode_prompts(data.load(rows), tokenizer, max_prompt_length=None).report.duplicates == [
        f"dataset row {i}" for i in (2, 3, 4)
    ]


def conversation(role="assistant", **message):
    return [{"role": "user", "content": "a"}, {"role": role, "content": "b", **message}]


TOOLS = [{"name": "f", "parameters": {"x": 1, "y": 2}}, {"name": "g", "parameters": {"z": 1}}]
CALL = {"tool_calls": [{"function": {"name": "h"}}]}
CALLS = {"chosen": conversation(**CALL), "rejected": conversation(), "tools": TOOLS}


def test_tools_and_tool_calls_reach_the_template(tokenizer, tmp_path):
    wanted = tokenizer("f 2 g 1 user a assistant b h")["input_ids"] + [tokenizer.eos_token_id]
    pq.write_table(pa.Table.from_pylist([CALLS]), tmp_path / "calls.parquet")  # adds nulls to objects
    for rows in ([CALLS], [{**CALLS, "tools": json.dumps(TOOLS)}], str(tmp_path / "calls.parquet")):
        assert pairs(rows, tokenizer, chat_template=TOOLED).sequences["chosen"][0].tolist() == wanted
    bare = {name: CALLS[name] for name in ("chosen", "rejected")}
    for tools in ([], "", None):
        shorter = pairs([{**bare, "tools": tools}], tokenizer, chat_template=TOOLED)
        assert shorter.sequences["chosen"][0].tolist() == wanted[4:]
    texts = data.encode_texts(data.load([CALLS]), tokenizer, max_length=None, chat_template=TOOLED)
    assert texts.sequences["tokens"][0].tolist() == wanted


def test_the_fingerprint_is_of_every_element_of_the_order_of_keys_and_of_how_it_was_read(tmp_path):
    ids = np.arange(5000)
    other = np.where(ids == 2500, 0, ids)  # str() of the arrays shows no difference
    prints = {data.load([{"chosen_ids": each, "rejected_ids": [1]}]).fingerprint for each in (ids, other)}
    prints |= {
        data.load([{"text": "a", "tools": tools}]).fingerprint
        for tools in ({"x": 1, "y": 2}, {"y": 2, "x": 1})
    }
    assert len(prints) == 4

    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    specs = [{"name": kind, "path": str(tmp_path / "a.jsonl")} for kind in ("jsonl", "txt")]
    assert len({data.load(spec).fingerprint for spec in specs}) == 2


def test_the_columns_that_are_read_are_listed_with_the_rows_that_have_them(tokenizer, tmp_path):
    names = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    rows = [{"question": "a", "good": " b", "bad": " c", "margin": 2, "source": "d"}] * 2
    rows.append({"question": "a", "good": " c", "bad": " d", "margin": None, "source": None})
    found = data.encode_pairs(data.load(rows, columns=names), tokenizer, max_length=None)
    renamed = "prompt ← question, chosen ← good, rejected ← bad (3)"
    assert found.report.columns == f"{renamed}, margin (2)"
    assert found.report.not_read == ["unused columns: source (in 2)"]
    unread = data.encode_pairs(data.load(rows, columns=names), tokenizer, max_length=None, margins=False)
    assert (unread.report.columns, unread.report.unread) == (renamed, ["dataset row 1", "dataset row 2"])

    turns = [{"role": "user", "content": "a"}]
    answered = [*turns, {"role": "assistant", "content": "b"}]
    chats, texts = [{"messages": answered}] * 2, [{"prompt": "a", "completion": "b", "tools": None}]
    both = data.load([data.load(chats), data.load(texts)])
    options = {"max_length": None, "chat_template": "plain"}
    assert data.encode_texts(both, tokenizer, **options).report.columns == (
        "messages (2 conversations), prompt, completion (1)"
    )
    prompts = data.load([{"prompt": turns, "answer": "2", "level": None}])
    read = data.encode_prompts(prompts, tokenizer, max_prompt_length=None, chat_template="plain").report
    assert read.columns == "prompt (1 conversation); for rewards: answer (1)"
