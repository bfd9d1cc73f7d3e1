"""Encoded data is arrays that agree with every row, and rows become objects only on access."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest

from rlhf_core import data


@pytest.fixture
def disk(tmp_path, kept_from, in_memory, in_parts):
    """Treat every file as large: read it in parts, from disk."""
    kept_from(1)
    in_memory(0)
    in_parts(7)
    return tmp_path


def trained(tree):
    """How many tokens of a tree are predicted and count; nothing predicts the first token of a row."""
    weights = tree.weights or [np.ones(len(own)) for own in tree.branches]
    return sum(int((own[0 if len(tree.prefix) else 1 :] != 0).sum()) for own in weights)


WAYS = [
    {"max_length": None},
    {"max_length": 8},
    {"max_length": 6, "overlong": "truncate"},
    {"max_length": 6, "overlong": "truncate", "truncation_mode": "keep_start"},
]


def same(trees):
    for name, of in (
        ("sizes", lambda tree: tree.size),
        ("trained", trained),
        ("lengths", lambda tree: len(tree.prefix) + max(map(len, tree.branches))),
        ("prefixes", lambda tree: len(tree.prefix)),
    ):
        assert getattr(trees, name).tolist() == [of(tree) for tree in trees], name
        assert getattr(trees[2:9:3], name).tolist() == [of(tree) for tree in trees][2:9:3], name
        picked = trees[np.array([5, 1, 1])]
        assert getattr(picked, name).tolist() == [of(trees[i]) for i in (5, 1, 1)] == [of(t) for t in picked]
    assert {len(tree.branches) for tree in trees} == {trees.branches}
    assert max(int(ids.max(initial=0)) for t in trees for ids in (t.prefix, *t.branches)) <= trees.largest()
    changed = trees.changed(lambda i, tree: tree._replace(sequence_values={"i": np.array([i])}))
    assert [int(tree.sequence_values["i"][0]) for tree in changed] == list(range(len(trees)))
    assert changed.sizes is trees.sizes


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("completions", [False, True])
def test_arrays_of_pairs_say_what_their_trees_are(tiny, tokenizer, way, completions):
    rows = [*tiny.pairs(60), {"chosen": "a b c", "rejected": "a c c"}, {"chosen": "a", "rejected": "a b"}]
    same(data.encode_pairs(data.load(rows[:60]), tokenizer, completions=completions, **way))
    same(data.encode_pairs(data.load(rows[60:] * 5), tokenizer, **way))


@pytest.mark.parametrize("way", WAYS)
def test_arrays_of_texts_say_what_their_trees_are(tiny, tokenizer, way):
    same(data.encode_texts(data.load(tiny.texts(60)), tokenizer, **way))


def plain(encoded):
    """Convert all contents of an encoded data set to Python objects."""
    sequences = [[ids.tolist() for ids in each] for each in encoded.sequences.values()]
    learned = [mask.tolist() for mask in encoded.learned or ()]
    values = [column.tolist() for column in encoded.values.values()]
    places = [encoded.where(i) for i in range(len(encoded))]
    return encoded.report, sequences, learned, values, places, encoded.digests.tolist()


@pytest.mark.parametrize("kind", ["pairs", "texts", "prompts"])
def test_parts_from_the_disk_are_as_all_at_once_in_memory(
    kind, tiny, tokenizer, disk, kept_from, in_memory, in_parts
):
    encode, limit = {
        "pairs": (data.encode_pairs, "max_length"),
        "texts": (data.encode_texts, "max_length"),
        "prompts": (data.encode_prompts, "max_prompt_length"),
    }[kind]
    rows = getattr(tiny, kind)(40)
    rows += [
        rows[3],
        {
            **rows[5],
            **({"chosen": rows[5]["rejected"], "rejected": rows[5]["chosen"]} if kind == "pairs" else {}),
        },
    ]
    path = tiny.write_rows(disk / "rows.jsonl", rows)
    spec = [str(path), {"path": str(path), "weight": 0.5}]
    for way in ({limit: None}, {limit: 5, "overlong": "truncate"}):
        kept_from(1)
        in_memory(0)
        in_parts(7)
        first = plain(encode(data.load(spec), tokenizer, **way))
        again = plain(encode(data.load(spec), tokenizer, **way))
        kept_from(1 << 30)
        in_memory(1 << 30)
        in_parts(1000)
        whole = plain(encode(data.load(spec), tokenizer, **way))
        assert first == again == whole
        assert whole[0].duplicates
        assert bool(whole[0].reversed) == (kind == "pairs")


def test_raw_columns_are_read_when_they_are_asked_for(tiny, tokenizer, disk):
    rows = tiny.prompts(20)
    prompts = data.encode_prompts(
        data.load(tiny.write_rows(disk / "p.jsonl", rows)), tokenizer, max_prompt_length=6
    )
    kept = prompts.rows.tolist()
    assert list(prompts.raw) == [rows[i]["prompt"] for i in kept]
    assert prompts.columns["answer"] == [rows[i]["answer"] for i in kept]
    assert prompts.columns["number"][-1] == rows[kept[-1]]["number"]
    assert prompts.columns["number"][1:3] == [rows[i]["number"] for i in kept[1:3]]


@pytest.mark.long
def test_a_warm_start_makes_no_objects_of_the_rows(tokenizer, tmp_path, in_memory):
    """Memory per row stays below 300 bytes, less than the row's text."""
    in_memory(0)
    count, path = 6000, tmp_path / "pairs.jsonl"
    words = " a b c d e" * 60
    with path.open("w") as file:
        for i in range(count):
            file.write(
                json.dumps(
                    {"prompt": f"g{words}", "chosen": f"{words} {'f ' * (1 + i % 8)}", "rejected": words}
                )
                + "\n"
            )

    def start():
        pairs = data.encode_pairs(data.load(path), tokenizer, max_length=None)
        data.require_vocabulary(pairs, pairs.where, 48)
        return pairs, [pairs[i] for i in range(8)]

    start()
    tracemalloc.start()
    held = start()
    now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(held[0]) == count
    assert now / count < 300
    assert peak / count < 2000
