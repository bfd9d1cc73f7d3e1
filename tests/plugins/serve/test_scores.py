"""Scores: those of `rlhf score`, for rows, and for what vLLM's clients send."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jax
import pytest

TEXTS = [
    {"prompt": "a b", "completion": " c d"},
    {"prompt": "a b c d", "completion": " e"},
    {"prompt": "f", "completion": ""},
]
CHATS = [
    {"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": f"{word} d"}]}
    for word in "efghi"
]
PAIRS = [{"prompt": f"a {word}", "chosen": " b c", "rejected": f" {word}"} for word in "xyz"]


@pytest.mark.parametrize("rows", [TEXTS, CHATS, PAIRS], ids=["texts", "chats", "pairs"])
def test_to_the_last_bit_what_the_command_writes(
    rows: list[dict[str, Any]], running: Any, directory: Path, rlhf: Any, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ran = rlhf(
        "score", str(directory / "rm"), str(tmp_path / "rows.jsonl"), "-o", str(tmp_path / "out.jsonl")
    )
    assert ran.code == 0, ran.message
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    names = ("chosen_score", "rejected_score") if rows is PAIRS else ("score",)
    answer = running.post("/score", {"model": "rm", "rows": rows})
    assert [each["index"] for each in answer["data"]] == list(range(len(rows)))
    assert [[each[name] for name in names] for each in answer["data"]] == [
        [row[name] for name in names] for row in written
    ]


def test_nothing_compiles_after_requests_of_every_size(running: Any, opened: dict[str, Any]) -> None:
    rng, words = random.Random(0), "abcdef"

    def ask(count: int) -> list[float]:
        texts = [" ".join(rng.choices(words, k=rng.randrange(1, 30))) for _ in range(count)]
        body = {"model": "rm", "rows": [{"prompt": "a", "completion": text} for text in texts]}
        return [each["score"] for each in running.post("/score", body)["data"]]

    for count in (1, 28, 40, 300):
        ask(count)
    known, compiled = list(opened["rm"].layouts), list[str]()

    def note(name: str, *_: Any, **__: Any) -> None:
        compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(note)
    for count in (3, 17, 270, 29, 2, 38, 9):
        assert len(ask(count)) == count
    jax.monitoring.unregister_event_duration_listener(note)
    assert opened["rm"].layouts == known
    assert not [name for name in compiled if "backend_compile" in name]


def test_forms_of_vllm(running: Any) -> None:
    rows = [{"prompt": "a b", "completion": word} for word in ("c", "d e")]
    expected = [each["score"] for each in running.post("/score", {"model": "rm", "rows": rows})["data"]]
    for first, second in (("text_1", "text_2"), ("queries", "documents")):
        answer = running.post("/score", {"model": "rm", first: "a b", second: ["c", "d e"]})
        assert [each["score"] for each in answer["data"]] == expected
    chat = running.post("/score", {"rows": [{"prompt": "a b", "completion": "e d"}], "chat": True})
    asked = {"messages": CHATS[0]["messages"]}
    for body in (asked, {"input": [CHATS[0]["messages"]]}):
        answer = running.post("/classify", {"model": "rm", **body})
        assert answer["data"][0]["probs"] == [chat["data"][0]["score"]]
    ids = running.post("/tokenize", {"model": "rm", "prompt": "a b c"})["tokens"]
    text = running.post("/classify", {"model": "rm", "input": "a b c"})["data"][0]["probs"]
    assert running.post("/classify", {"model": "rm", "input": [*ids, 1]})["data"][0]["probs"] == text
