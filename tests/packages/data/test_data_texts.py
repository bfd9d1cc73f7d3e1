"""Encoding texts and prompts: learned tokens, columns kept with a prompt, and invalid rows."""

from __future__ import annotations

import numpy as np
import pytest

from rlhf_core import data
from rlhf_core.packing import Layout, pack
from rlhf_core.tokenizer import Encoder
from tests.shared import data_rows as made

CHATML, FINE, TALK = made.CHATML, made.FINE, made.TALK
user, assistant = made.user, made.assistant


@pytest.fixture(scope="module")
def tokenizer():
    return made.make_tokenizer()


def texts(rows, tokenizer, **options):
    return data.encode_texts(data.load(rows), tokenizer, **{"max_length": None, **options})


def learned(encoded, tokenizer):
    tokens, learned = encoded.sequences["tokens"], encoded.learned
    return [tokenizer.decode(ids[mask]) for ids, mask in zip(tokens, learned, strict=True)]


def test_texts_are_learned_whole(tokenizer):
    encoded = texts([{"text": "abc"}, {"text": " "}], tokenizer)
    assert learned(encoded, tokenizer) == ["<s>abc</s>"]
    assert encoded.report.empty == ["dataset row 2"]
    (tree,) = encoded
    assert (len(tree.prefix), len(tree.branches), tree.weights[0].dtype) == (0, 1, np.float32)


@pytest.mark.parametrize(
    ("row", "template"),
    [
        ({"prompt": "ask ", "completion": "good"}, None),
        ({"prompt": [user("ask")], "completion": [assistant("good")]}, "plain"),
        ({"prompt": [user("ask")], "completion": [assistant("good")]}, CHATML),
        ({"prompt": "ask", "completion": [assistant("good")]}, CHATML),
        (FINE, None),
        (TALK, CHATML),
        ({"chosen": "ask good", "rejected": "ask bad"}, None),
        (
            {"chosen": [user("a"), assistant("good")], "rejected": [user("a"), assistant("bad")]},
            CHATML,
        ),
    ],
)
def test_the_completion_and_the_chosen_side_are_learned_without_the_prompt(row, template, tokenizer):
    """Which tokens of conversations are learned, with all templates: tests/packages/tokenizer/test_replies.py."""
    assert learned(texts([row], tokenizer, chat_template=template), tokenizer) == ["good</s>"]


def test_what_has_no_reply_is_empty_and_what_follows_the_last_is_left_out(tokenizer):
    messages = [user("a"), assistant("b"), user("c"), assistant("d"), user("left out")]
    plain = texts(
        [{"messages": messages}, {"messages": [user("nobody answers")]}], tokenizer, chat_template="plain"
    )
    assert learned(plain, tokenizer) == ["b</s>d</s>"]
    assert "left out" not in tokenizer.decode(plain.sequences["tokens"][0])
    assert (plain.report.after_reply, plain.report.empty) == (["dataset row 1"], ["dataset row 2"])


def test_over_long_texts(tokenizer):
    rows = [{"prompt": "p" * 20, "completion": "good"}, {"prompt": "p", "completion": "x"}]
    assert texts(rows, tokenizer, max_length=10).report.filtered == ["dataset row 1"]
    cut = texts(rows, tokenizer, max_length=7, overlong="truncate")
    assert learned(cut, tokenizer) == ["good</s>", "x</s>"]
    assert cut.lengths.tolist() == [7, 4]
    # A row cut down to its prompt has nothing left to learn.
    start = texts(rows, tokenizer, max_length=7, overlong="truncate", truncation_mode="keep_start")
    assert start.report.filtered == ["dataset row 1"]


def test_values_stay_with_the_rows_that_are_kept_and_reach_the_batch(tokenizer):
    rows = [
        {"prompt": "a", "completion": "b", "rating": 0.25},
        {"prompt": "a", "completion": "too long", "rating": 9.0},
        {"prompt": "a", "completion": " ", "rating": None},  # empty, so its number is not checked
        {"prompt": "c", "completion": "d", "rating": "-1.5"},
    ]
    found = texts(rows, tokenizer, max_length=5, values=("rating",))
    assert found.values["rating"].dtype == np.float64
    assert found[0].sequence_values["rating"].dtype == np.float32
    np.testing.assert_array_equal(found.values["rating"], [0.25, -1.5])
    (batch,) = pack(found, Layout((32,), (1,), (4,), (32,)), sequence_names=("rating",))
    assert sorted(batch.sequence_values["rating"][batch.last >= 0]) == [-1.5, 0.25]


def test_prompts_keep_the_other_columns(tokenizer):
    rows = [{"prompt": "ask", "answer": 4}, {"prompt": "p" * 30}, {"prompt": "b", "tag": "x"}]
    encoded = data.encode_prompts(data.load(rows), tokenizer, max_prompt_length=8)
    assert [tokenizer.decode(ids) for ids in encoded.ids] == ["<s>ask", "<s>b"]
    assert encoded.raw == ["ask", "b"]
    assert encoded.columns == {"answer": [4, None], "tag": [None, "x"]}
    assert not encoded.chat
    assert encoded.where(1) == "dataset row 3"
    assert str(encoded.report) == "3 prompts: 2 kept, 1 over 8 tokens filtered (33 %)"
    cut = data.encode_prompts(data.load(rows), tokenizer, max_prompt_length=8, overlong="truncate")
    assert tokenizer.decode(cut.ids[1]) == "p" * 8

    rows = [{"prompt": [user("ask")], "answer": "4"}]
    encoded = data.encode_prompts(data.load(rows), tokenizer, max_prompt_length=None, chat_template="plain")
    assert encoded.chat
    assert encoded.raw == [[user("ask")]]
    assert encoded.ids[0].tolist() == Encoder(tokenizer, "plain").prompts([[user("ask")]])[0].tolist()


def test_prompts_are_trees_without_branches(tokenizer):
    encoded = data.encode_prompts(
        data.load([{"prompt": "ask"}, {"prompt": "b"}]), tokenizer, max_prompt_length=9
    )
    assert [(tokenizer.decode(tree.prefix), tree.branches) for tree in encoded] == [
        ("<s>ask", ()),
        ("<s>b", ()),
    ]
    lengths = encoded.sizes.tolist()
    assert lengths == encoded.prefixes.tolist() == encoded.lengths.tolist() == list(map(len, encoded.ids))
    assert encoded.trained.tolist() == [0, 0]
    assert encoded.row(1) == {"prompt": "b"}


def test_digests_tell_the_same_tokens_with_other_learned_ones_apart(tokenizer):
    rows = [{"prompt": "a", "completion": "bc"}, {"prompt": "ab", "completion": "c"}]
    first, second = texts(rows, tokenizer).digests.tolist()
    assert first != second
    assert texts(rows[1:], tokenizer).digests.tolist() == [second]
