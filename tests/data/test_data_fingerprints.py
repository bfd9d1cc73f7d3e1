"""The fingerprint of encoded data covers what it teaches and nothing else."""

from __future__ import annotations

import pytest

from rlhf_core import data

PAIRS = [
    {"prompt": "a b", "chosen": " c", "rejected": " d", "margin": 0.5},
    {"prompt": "a", "chosen": " e f g", "rejected": " c", "margin": 0.0},
]
TEXTS = [
    {"prompt": "a", "completion": " b c", "rating": 1.0},
    {"prompt": "b", "completion": " c", "rating": 2.0},
]
CASES = {
    "pairs": (PAIRS, [("chosen", " e"), ("rejected", " e"), ("margin", 0.25), ("prompt", "b b")]),
    "texts": (TEXTS, [("prompt", "c"), ("completion", " d"), ("rating", 3.0)]),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_fingerprint_changes_with_what_is_trained_on(kind, tiny):
    def fingerprint(rows, **options):
        if kind == "texts":
            options["values"] = ("rating",)
        encode = {"pairs": data.encode_pairs, "texts": data.encode_texts}[kind]
        return encode(data.load(rows), tokenizer, **{"max_length": None, **options}).fingerprint

    tokenizer, (rows, changes) = tiny.make_tokenizer(), CASES[kind]
    before = fingerprint(rows)
    assert fingerprint([{**row, "source": str(i)} for i, row in enumerate(rows)]) == before
    assert fingerprint(rows[::-1]) != before
    for column, value in changes:
        assert fingerprint([{**rows[0], column: value}, *rows[1:]]) != before, column
    cut = {"max_length": 3, "overlong": "truncate"}
    assert fingerprint(rows, **cut) != before


def test_where_completions_start_counts(tiny):
    tokenizer, records = tiny.make_tokenizer(), data.load(PAIRS)
    plain, starts = (
        data.encode_pairs(records, tokenizer, max_length=None, completions=each) for each in (False, True)
    )
    assert plain.fingerprint != starts.fingerprint
    learned = data.encode_texts(data.load([{"text": "a b"}]), tokenizer, max_length=None)
    asked = data.encode_texts(data.load([{"prompt": "a", "completion": " b"}]), tokenizer, max_length=None)
    assert learned.fingerprint != asked.fingerprint  # the same tokens, but other ones are learned
