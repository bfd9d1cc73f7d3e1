"""`rlhf data`: statistics of known rows for each kind of data, and unreadable data."""

from __future__ import annotations

import shlex

import numpy as np
import pytest
from rich.console import Console
from rlhf_report.data_profile import profile, render

from rlhf_core import data
from rlhf_core.errors import InputError

TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def pair(prompt, chosen, rejected, **more):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


PAIRS = [
    pair("a b", " c", " d e", margin=0.5),
    pair("a b", " c d e f", " d"),
    pair("a", " c d", " d e", margin=2),
    pair("a", " c d", " d e"),
    pair("a", "", " d e"),
]


def shown(found, width=80):
    console = Console(width=width, markup=False, highlight=False)
    with console.capture() as capture:
        console.print(render(found))
    return capture.get()


def test_figures_of_pairs(tiny):
    found = profile(data.load(PAIRS), tiny.make_tokenizer(), max_length=5)
    assert (found.unit, found.format) == ("tokens", "preferences: prompt + chosen + rejected, texts")
    assert found.columns == ("prompt", "chosen", "rejected", "margin")
    assert {name: values.tolist() for name, values in found.lengths.items()} == {  # EOS is a token
        "shared start": [2, 2, 1, 1],
        "chosen, after it": [2, 5, 3, 3],
        "rejected, after it": [3, 2, 3, 3],
        "longer of the two": [5, 7, 4, 4],
    }
    assert found.over == ["dataset row 2"]
    assert found.report.empty == ["dataset row 5"]
    assert found.report.duplicates == ["dataset row 4"]
    assert found.facts == {
        "longer wins": "chosen is longer in 25 % of the pairs, as long in 50 %",
        "shared start": "36 tokens as two sequences per pair, 30 with the start they share once: 17 % saved",
        "margin": "0 to 2, 0 in 2 of 4 pairs",
    }
    assert profile(data.load(PAIRS), tiny.make_tokenizer()).limit == 1024


def test_the_profile_fits_80_columns(tiny):
    long = data.load([{**row, "chosen": row["chosen"] * 700} for row in PAIRS])
    text = shown(profile(long, tiny.make_tokenizer()))
    assert max(map(len, text.splitlines())) <= 80
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "limit max_sequence_length = 1024: 3 filtered: dataset rows 2, 3, 4" in lines
    assert "tokens mean min 5 % 50 % 95 % 99 % max" in lines
    wanted = np.percentile([703, 2803, 1402, 1402], [5, 50, 95, 99])
    figures = " ".join(f"{x:,.0f}" for x in (1577.5, 703, *wanted, 2803))
    assert f"longer of the two {figures}" in lines


def test_without_a_tokenizer_characters_are_counted(tiny):
    found = profile(data.load(PAIRS))
    assert (found.unit, found.over) == ("characters", [])
    assert found.lengths["longer of the two"].tolist() == [7, 11, 5, 5]
    assert "max_sequence_length" not in shown(found)
    talk = [{"messages": [{"role": "user", "content": "é"}, {"role": "assistant", "content": "\U0001f600b"}]}]
    found = profile(data.load(talk))
    assert {name: values.tolist() for name, values in found.lengths.items()} == {
        "learned": [2],
        "whole": [len("user:\né\n\nassistant:\nab")],
    }
    assert found.format == "demonstrations: messages, conversations"


def test_prompts_and_demonstrations(tiny):
    rows = [{"prompt": "a b c", "answer": 1}, {"prompt": "a"}]
    found = profile(data.load(rows), tiny.make_tokenizer(), max_length=2)
    assert (found.over, found.facts) == (["dataset row 1"], {"for rewards": "answer"})
    assert "max_prompt_length = 2: 1 filtered: dataset row 1" in shown(found)
    assert profile(data.load(rows)).limit == 512
    found = profile(data.load([{"prompt": "a b", "completion": " c"}]), tiny.make_tokenizer())
    assert found.facts == {"learned": "2 of 4 tokens, 50 %"}
    mixed = data.load(
        [[{"text": "a"}], [{"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}]]
    )
    assert profile(mixed).format == (
        "demonstrations: text, texts; demonstrations: prompt + completion, completion: conversations"
    )


def test_token_ids_need_no_tokenizer():
    found = profile(data.load([{"chosen_ids": [1, 2, 3], "rejected_ids": [1, 2]}]))
    assert (found.unit, found.format) == ("tokens", "preferences: chosen_ids + rejected_ids, token ids")
    assert found.lengths["longer of the two"].tolist() == [3]


def test_the_command(tiny, tmp_path, monkeypatch, rlhf):
    tiny.make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    tiny.write_rows(tmp_path / "pairs.jsonl", PAIRS)
    monkeypatch.chdir(tmp_path)
    ended = rlhf("data", "pairs.jsonl", "--model", "tokenizer", "--max-sequence-length", "6")
    assert ended.code == 0
    assert "max_sequence_length = 6: 1 filtered: pairs.jsonl row 2" in ended.out
    assert "characters" in rlhf("data", "pairs.jsonl").out
    assert rlhf("data", "pairs.jsonl", "--first", "1").out.startswith("the first 1 rows:")


def test_columns_under_other_names(tiny, tmp_path, monkeypatch, rlhf):
    rows = [{"question": "a", "good": " b", "bad": " c"}, {"question": "a b", "good": " c", "bad": " b"}]
    tiny.write_rows(tmp_path / "mine.jsonl", rows)
    monkeypatch.chdir(tmp_path)
    said = rlhf("data", "mine.jsonl").message
    command = said.split("look at them first: rlhf ")[1].split(". Preferences")[0]
    for more in ([], ["--first", "2"]):
        found = rlhf(*shlex.split(command), *more)
        assert "2 pairs: 2 kept" in found.out
    assert "give a table such as" in rlhf("data", "mine.jsonl", "--columns", "prompt=question").message
    prompts = [{"prompt": row["question"], "good": row["good"], "bad": row["bad"]} for row in rows]
    facts = profile(data.load(prompts)).facts
    assert facts["preferences?"] == 'columns = { chosen = "good", rejected = "bad" } reads them as pairs'


@pytest.mark.parametrize(
    ("row", "known"),
    [
        ({"question": "q", "answer_a": "x", "answer_b": "y", "id": "7"}, 'prompt = "question", '),
        ({"question": "q", "reply1": "x", "reply2": "y"}, 'prompt = "question", '),
        ({"one": TALK, "two": TALK}, ""),
        ({"question": "q", "source": "x", "level": "y"}, None),
        ({"talk": TALK, "id": "7"}, None),
    ],
)
def test_two_answers_to_one_prompt_are_asked_about(row, known):
    with pytest.raises(InputError) as caught:
        profile(data.load([row]))
    hint = str(caught.value)
    one, other = (
        [name for name in row if name not in ("question", "id")][:2] if known is not None else ("", "")
    )
    asked = f'columns = {{ {known}chosen = "{one}", rejected = "{other}" }}, or {{ {known}chosen = "{other}"'
    assert ("which answer is better" in hint) == (known is not None)
    assert known is None or asked in hint
