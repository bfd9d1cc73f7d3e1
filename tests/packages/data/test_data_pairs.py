"""Encoding preferences: every layout gives the same pairs, and errors name every invalid row."""

from __future__ import annotations

import numpy as np
import pytest

from rlhf_core import data
from rlhf_core.tokenizer import Encoder, TextOptions, load_tokenizer
from tests.shared import data_rows as made

CHATML, FINE, TALK = made.CHATML, made.FINE, made.TALK
user, assistant = made.user, made.assistant


def encode_full(tokenizer, prompt, completion, *, chat_template=None):
    return Encoder(tokenizer, chat_template).whole([prompt], [completion])[0]


@pytest.fixture(scope="module")
def tokenizer():
    return made.make_tokenizer()


def pairs(rows, tokenizer, **options):
    return data.encode_pairs(data.load(rows), tokenizer, **{"max_length": None, **options})


def decoded(encoded, tokenizer):
    return [
        (tokenizer.decode(chosen), tokenizer.decode(rejected))
        for chosen, rejected in zip(*encoded.sequences.values(), strict=True)
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "ask ", "chosen": "good", "rejected": "bad"},
        {"chosen": "ask good", "rejected": "ask bad"},
        # Whole texts next to their prompt.
        {"prompt": "ask ", "chosen": "ask good", "rejected": "ask bad", "prompt_repeated": True},
        {"chosen": "ask good</s>", "rejected": "ask bad"},
    ],
)
def test_text_layouts(row, tokenizer):
    repeated = TextOptions(prompt_repeated=row.get("prompt_repeated"))
    encoded = pairs([row], tokenizer, chat_template=repeated)
    assert decoded(encoded, tokenizer) == [("<s>ask good</s>", "<s>ask bad</s>")]
    (tree,) = encoded
    assert tokenizer.decode(tree.prefix) == "<s>ask "
    assert [tokenizer.decode(branch) for branch in tree.branches] == ["good</s>", "bad</s>"]
    assert encoded.sequences["chosen"][0].dtype == np.int32


def test_a_prompt_inside_a_longer_conversation(tokenizer):
    before = [{"role": "system", "content": "be kind"}, user("ask")]
    row = {"prompt": "ask", "chosen": [*before, assistant("good")], "rejected": [*before, assistant("bad")]}
    whole = {"chosen": row["chosen"], "rejected": row["rejected"]}
    one, other = (pairs([each], tokenizer, chat_template="plain") for each in (row, whole))
    assert one.digests.tolist() == other.digests.tolist()


@pytest.mark.parametrize(
    ("chosen", "rejected", "mask"),
    [
        ("input_ids_chosen", "input_ids_rejected", "attention_mask_{}"),
        ("chosen_ids", "rejected_ids", "{}_mask"),
        ("chosen_input_ids", "rejected_input_ids", "{}_attention_mask"),
    ],
)
def test_pretokenised_layouts(chosen, rejected, mask):
    row = {chosen: [5, 6, 7, 0], rejected: [0, 0, 5, 8], "margin": 0.5}
    masks = {mask.format("chosen"): [1, 1, 1, 0], mask.format("rejected"): [0, 0, 1, 1]}
    encoded = pairs([{**row, **masks}, {**row, **masks}], None)  # no tokenizer needed
    assert [ids.tolist() for ids in encoded.sequences["chosen"]] == [[5, 6, 7]] * 2
    assert [ids.tolist() for ids in encoded.sequences["rejected"]] == [[5, 8]] * 2
    assert encoded.values["margin"].tolist() == [0.5] * 2
    assert [ids.tolist() for ids in pairs([row], None).sequences["chosen"]] == [[5, 6, 7, 0]]
    prompted = pairs([{**row, "prompt_input_ids": [9]}], None)
    assert [ids.tolist() for ids in prompted.sequences["rejected"]] == [[9, 0, 0, 5, 8]]


def test_margins_reach_both_sequences(tokenizer):
    rows = [{"chosen": "a", "rejected": "b", "margin": m} for m in (1.5, None, "2")]
    values = [tree.sequence_values["margin"] for tree in pairs(rows, tokenizer)]
    assert [(v.dtype, v.tolist()) for v in values] == [(np.float32, [m, m]) for m in (1.5, 0.0, 2.0)]


def test_over_long_pairs(tokenizer):
    rows = [{"prompt": "p" * n, "chosen": "good", "rejected": "bad"} for n in (1, 20, 2)]
    encoded = pairs(rows, tokenizer, max_length=10)
    assert str(encoded.report) == "3 pairs: 2 kept, 1 over 10 tokens filtered (33 %)"
    assert encoded.report.filtered == ["dataset row 2"]
    assert [encoded.where(i) for i in range(2)] == ["dataset row 1", "dataset row 3"]
    cut = pairs(rows, tokenizer, max_length=8, overlong="truncate")
    assert decoded(cut, tokenizer)[1] == ("pppgood</s>", "ppppbad</s>")
    assert cut.report.truncated == ["dataset row 2"]
    start = pairs(rows, tokenizer, max_length=8, overlong="truncate", truncation_mode="keep_start")
    assert len(start) == 2
    assert (start.report.identical, start.report.alike_once_cut) == ([], ["dataset row 2"])


def test_several_files_may_have_several_layouts(tokenizer, tmp_path):
    (tmp_path / "a.csv").write_text("prompt,chosen,rejected\np,good,bad\n")
    (tmp_path / "b.jsonl").write_text('{"chosen": "pgood", "rejected": "pbad"}\n')
    encoded = pairs([str(tmp_path / "a.csv"), str(tmp_path / "b.jsonl")], tokenizer)
    assert decoded(encoded, tokenizer) == [("<s>pgood</s>", "<s>pbad</s>")] * 2
    assert encoded.where(1).endswith("b.jsonl row 1")


@pytest.mark.data
@pytest.mark.parametrize(
    ("folder", "template", "name"),
    [
        ("models/stories260K", "plain", "hh_harmless.eval"),
        ("tokenizers/chatml_bpe_2k", None, "gsm8k_solutions"),
        pytest.param("models/stories260K", "plain", "gsm8k_solutions", marks=pytest.mark.long),
        pytest.param("tokenizers/chatml_bpe_2k", None, "hh_harmless.eval", marks=pytest.mark.long),
    ],
)
def test_real_preferences(shared, name, folder, template):
    tokenizer = load_tokenizer(shared / "data" / folder)
    records = data.load(shared / "data" / "prefs" / f"{name}.jsonl")
    encoded = data.encode_pairs(records, tokenizer, max_length=512, chat_template=template)
    report = encoded.report
    assert report.total == len(records) == report.kept + len(report.filtered) + len(report.empty)
    assert report.kept == len(encoded) > 0.6 * len(records)
    for tree in encoded:  # the prompt is shared except perhaps its last tokens
        assert len(tree.prefix) >= 8
    row = int(encoded.where(7).rsplit(" ", 1)[1]) - 1
    alone = encode_full(tokenizer, records[row]["prompt"], records[row]["chosen"], chat_template=template)
    assert alone.tolist() == encoded.sequences["chosen"][7].tolist()
    opened = Encoder(tokenizer, template).prompts([records[row]["prompt"]])[0]
    assert alone[: len(opened)].tolist() == opened.tolist()
