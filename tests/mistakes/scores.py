"""`rlhf score` and `rlhf chat`: rows that cannot be compared, and models that do not do."""

from __future__ import annotations

import json
from typing import Any

from tests.mistakes.mistake import Mistake, file, typed

SCORE = "score scorer rows.jsonl"
USER = {"role": "user", "content": "Mia"}
CHAT = [{"role": "assistant", "content": "a"}]


def listed(chosen: str = "a", rejected: str = "b", **columns: Any) -> dict[str, Any]:
    """A row with several completions a side; columns replace them."""
    return {"prompt": "Mia", "chosen": chosen.split(), "rejected": rejected.split(), **columns}


def second(name: str, bad: dict[str, Any], command: str = SCORE) -> Mistake:
    """The second row, and the third, are wrong."""
    rows = (listed(), bad, bad)
    return file(name, "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows), command)


ROWS = [
    second("an empty list", listed(rejected="")),
    second("text where a list should be", listed(chosen="a") | {"chosen": "a"}),
    second("a completion that is null", listed() | {"rejected": ["b", None]}),
    second("texts and conversations in one row", listed() | {"chosen": [CHAT]}),
    second("conversations that no one answers", listed() | {"chosen": [[USER]], "rejected": [[USER]]}),
    second("a row without a prompt", {"chosen": ["a"], "rejected": ["b"]}),
    second(
        "a prompt that is not the start of a completion",
        listed()
        | {"prompt": [USER], "chosen": [[USER, *CHAT]], "rejected": [[{**USER, "content": "x"}, *CHAT]]},
    ),
    second("an id of no kind in the subset Ties", listed(subset="Ties", id="t-1")),
    second("an id that is there twice in the subset Ties", listed(subset="Ties", id="ref:7")),
    second("a tied row of one answer", listed(subset="ties", id="tied:1")),
    second("a column of subsets that is not there", listed(domain="x"), f"{SCORE} --subset domian"),
    file(
        "--chat without a prompt",
        "rows.jsonl",
        json.dumps({"chosen": ["a"], "rejected": ["b"]}) + "\n",
        f"{SCORE} --chat",
    ),
]
MODELS = [
    typed("score scorer pairs.jsonl --normalize"),
    typed("chat model"),
    typed("chat scorer"),
    typed("generate http://a:b@h --prompt Mia"),
]
SECTIONS = {
    "Rows that cannot be compared": ROWS,
    "Models that do not score or chat": MODELS,
}
