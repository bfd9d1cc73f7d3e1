"""An option says whether completions repeat their prompt; it is never guessed from other rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlhf_core import data
from rlhf_core.errors import InputError
from rlhf_core.tokenizer import Encoder, TextOptions

PAIR = {"prompt": "a b ", "chosen": "a b c", "rejected": "a b d"}
OTHER = {"prompt": "e ", "chosen": "f", "rejected": "g"}
TEXT = {"prompt": "a b ", "completion": "a b c"}


def encode(kind: str, rows: list[dict[str, Any]], tokenizer: Any, repeated: bool | None) -> Any:
    options = TextOptions(prompt_repeated=repeated)
    records = data.load(rows)
    if kind == "whole":
        [whole] = data.whole_parts(records, Encoder(tokenizer, options))
        return whole.sequences
    if kind == "pairs":
        found = data.encode_pairs(records, tokenizer, max_length=None, chat_template=options)
        return list(map(list, zip(*found.sequences.values(), strict=True)))
    texts = data.encode_texts(records, tokenizer, max_length=None, chat_template=options)
    return [[ids] for ids in texts.sequences["tokens"]]


@pytest.mark.parametrize(
    ("kind", "row"), [("pairs", PAIR), ("whole", PAIR), ("texts", TEXT), ("whole", TEXT)]
)
def test_a_row_reads_alike_whatever_the_other_rows(
    kind: str, row: dict[str, Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {name: value for name, value in {**OTHER, "completion": "f"}.items() if name in row}
    for repeated, words in ((False, "a b a b c"), (True, "a b c"), (None, "a b a b c")):
        beside = {name: "e " + text if repeated else text for name, text in other.items()}
        beside["prompt"] = "e "
        found = encode(kind, [beside, row, beside, beside], tokenizer, repeated)
        assert tokenizer.decode(found[1][0]) == f"{words} </s>", repeated
    # Most rows repeat the prompt, so the option is required. The file counts as a whole, not part by part.
    monkeypatch.setattr(
        "rlhf_core.data.table.Table.parts",
        lambda self: map(self.part, range(len(self.rows)), range(1, len(self.rows) + 1)),
    )
    encode(kind, [row, other, other], tokenizer, None)
    for rows in ([row], [row, row, other]):
        with pytest.raises(
            InputError, match=r"set prompt_repeated = true to take it off, or prompt_repeated = false"
        ):
            encode(kind, rows, tokenizer, None)
        assert tokenizer.decode(encode(kind, rows, tokenizer, False)[0][0]) == "a b a b c </s>"
    with pytest.raises(
        InputError, match=r"row 2: 'prompt' is not the start of '(chosen|completion)', as prompt_rep"
    ):
        encode(kind, [row, other], tokenizer, True)


def test_every_row_is_read_for_scores(tokenizer: Any) -> None:
    """Rows that teach nothing are dropped in training but still scored."""
    encoder = Encoder(tokenizer)
    rows = [{"prompt": "a", "completion": text} for text in (" b", "", "  ", None)]
    [whole] = data.whole_parts(data.load(rows), encoder)
    said = [row and tokenizer.decode(row[0]) for row in whole.sequences]
    assert said == ["a b </s>", "a </s>", "a </s>", None]
    assert whole.places[3].endswith("row 4")
    again = encoder.whole(["a"] * 3, [" b", "", "  "])
    for row, ids in zip(whole.sequences, again, strict=False):
        assert row is not None
        np.testing.assert_array_equal(row[0], ids)
    [pairs] = data.whole_parts(data.load([{**OTHER, "chosen": ""}, {**OTHER, "rejected": None}]), encoder)
    assert pairs.sides == ("chosen_score", "rejected_score")
    assert [row and [tokenizer.decode(ids) for ids in row] for row in pairs.sequences] == [
        ["e </s>", "e g </s>"],
        None,
    ]
    [texts] = data.whole_parts(data.load([{"text": "a b"}, {"text": ""}]), encoder)
    assert [row and tokenizer.decode(row[0]) for row in texts.sequences] == ["a b </s>", "</s>"]
    [ids] = data.whole_parts(data.load([{"chosen_ids": [4, 5], "rejected_ids": [6]}]), encoder)
    assert [each.tolist() for each in ids.sequences[0] or []] == [[4, 5], [6]]
