"""Encoding texts and prompts: learned tokens, columns kept with a prompt, and invalid rows."""

from __future__ import annotations

import numpy as np
import pytest

from rlhf_core import data
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


@pytest.mark.parametrize("template", ["plain", CHATML])
def test_completions_are_learned_without_their_prompts(template, tokenizer):
    assert learned(texts([{"prompt": "ask ", "completion": "good"}], tokenizer), tokenizer) == ["good</s>"]
    rows = [{"prompt": [user("ask")], "completion": [assistant("good")]}]
    assert learned(texts(rows, tokenizer, chat_template=template), tokenizer) == ["good</s>"]
    rows = [{"prompt": "ask", "completion": [assistant("good")]}]
    assert learned(texts(rows, tokenizer, chat_template=template), tokenizer) == ["good</s>"]


def test_every_reply_of_a_conversation_is_learned(tokenizer):
    rows = [
        {"messages": [user("a"), assistant("b"), user("c"), assistant("d"), user("left out")]},
        {"messages": [user("nobody answers")]},
    ]
    plain = texts(rows, tokenizer, chat_template="plain")
    assert learned(plain, tokenizer) == ["b</s>d</s>"]
    assert plain.report.empty == ["dataset row 2"]
    assert "left out" not in tokenizer.decode(plain.sequences["tokens"][0])
    assert plain.report.after_reply == ["dataset row 1"]
    assert learned(texts(rows, tokenizer, chat_template=CHATML), tokenizer) == ["b</s>d</s>"]


def test_the_chosen_side_of_preferences_is_learned(tokenizer):
    assert learned(texts([FINE], tokenizer), tokenizer) == ["good</s>"]
    assert learned(texts([TALK], tokenizer, chat_template=CHATML), tokenizer) == ["good</s>"]
    assert learned(texts([{"chosen": "ask good", "rejected": "ask bad"}], tokenizer), tokenizer) == [
        "good</s>"
    ]
    whole = {"chosen": [user("a"), assistant("good")], "rejected": [user("a"), assistant("bad")]}
    assert learned(texts([whole], tokenizer, chat_template=CHATML), tokenizer) == ["good</s>"]


def test_over_long_texts(tokenizer):
    rows = [{"prompt": "p" * 20, "completion": "good"}, {"prompt": "p", "completion": "x"}]
    assert texts(rows, tokenizer, max_length=10).report.filtered == ["dataset row 1"]
    cut = texts(rows, tokenizer, max_length=7, overlong="truncate")
    assert learned(cut, tokenizer) == ["good</s>", "x</s>"]
    assert cut.lengths.tolist() == [7, 4]
    # A row cut down to its prompt has nothing left to learn.
    start = texts(rows, tokenizer, max_length=7, overlong="truncate", truncation_mode="keep_start")
    assert start.report.filtered == ["dataset row 1"]


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
