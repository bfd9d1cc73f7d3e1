"""Row digests cover what a row teaches and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from rlhf_core import data


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return tiny.make_tokenizer()


def digests(kind, rows, tokenizer, **options):
    encode = {"pairs": data.encode_pairs, "texts": data.encode_texts}[kind]
    return encode(data.load(rows), tokenizer, **{"max_length": None, **options}).row_digests()


PAIRS = [
    {"prompt": "a b", "chosen": " c", "rejected": " d", "margin": 0.5},
    {"prompt": "a b", "chosen": " d", "rejected": " c", "margin": 0.5},
    {"prompt": "a", "chosen": " e f g", "rejected": " c", "margin": 0.0},
]
CASES = {
    "pairs": (PAIRS, [("chosen", " e"), ("rejected", " e"), ("margin", 0.25), ("prompt", "b b")]),
    "texts": (
        [
            {"prompt": "a", "completion": " b c", "rating": 1.0},
            {"prompt": "b", "completion": " c", "rating": 2.0},
        ],
        [("prompt", "c"), ("completion", " d")],
    ),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_changed_row_changes_its_digest_alone(kind, tokenizer):
    rows, changes = CASES[kind]
    before = digests(kind, rows, tokenizer)
    assert before.dtype == np.uint64
    assert len(set(before.tolist())) == len(rows) == len(before)
    for column, value in changes:
        after = digests(kind, [{**rows[0], column: value}, *rows[1:]], tokenizer)
        assert (after == before).tolist() == [False] + [True] * (len(rows) - 1), column


def test_what_is_not_trained_on_is_not_in_it(tokenizer):
    rows = [{**row, "source": str(i)} for i, row in enumerate(PAIRS)]
    assert (digests("pairs", rows, tokenizer) == digests("pairs", PAIRS, tokenizer)).all()
    back = digests("pairs", PAIRS[::-1], tokenizer)
    assert (back[::-1] == digests("pairs", PAIRS, tokenizer)).all()


def test_a_cut_row_is_what_is_left_of_it(tokenizer):
    cut = {"max_length": 3, "overlong": "truncate"}
    long = [{**PAIRS[2], "chosen": " x x x e f"}, *PAIRS[:2]]
    other = [{**PAIRS[2], "chosen": " y y y e f"}, *PAIRS[:2]]
    assert (digests("pairs", long, tokenizer, **cut) == digests("pairs", other, tokenizer, **cut)).all()
    assert digests("pairs", long, tokenizer)[0] != digests("pairs", other, tokenizer)[0]


def test_completions_and_values_count(tokenizer):
    plain, starts = digests("pairs", PAIRS, tokenizer), digests("pairs", PAIRS, tokenizer, completions=True)
    assert not (plain == starts).any()
    rows = CASES["texts"][0]
    one = digests("texts", rows, tokenizer, values=("rating",))
    two = digests("texts", [{**rows[0], "rating": 3.0}, rows[1]], tokenizer, values=("rating",))
    assert (one == two).tolist() == [False, True]
    moved = digests("texts", [{"text": "a b"}, {"prompt": "a", "completion": " b"}][:1], tokenizer)
    asked = digests("texts", [{"prompt": "a", "completion": " b"}], tokenizer)
    assert moved[0] != asked[0]  # the same tokens, but other ones are learned


def test_digests_are_the_same_in_every_version(tokenizer):
    """Digests are fixed values, so a later version that continues a run recognises its rows."""
    assert [f"{x:016x}" for x in digests("pairs", PAIRS[:1], tokenizer).tolist()] == ["e49cd2b897795cb5"]
    rows = [{"prompt": "a", "completion": " b c"}]
    assert [f"{x:016x}" for x in digests("texts", rows, tokenizer).tolist()] == ["a9ab81da2fb1b089"]
