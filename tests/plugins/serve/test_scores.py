"""Scores for what vLLM's clients send, and of any number of rows; those of `rlhf score`: test_remote.py."""

from __future__ import annotations

import random
from typing import Any

from tests.shared.compiled import compilations

CHAT = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "e d"}]


def test_nothing_compiles_after_requests_of_every_size(running: Any, opened: dict[str, Any]) -> None:
    rng, words = random.Random(0), "abcdef"

    def ask(count: int) -> list[float]:
        texts = [" ".join(rng.choices(words, k=rng.randrange(1, 30))) for _ in range(count)]
        body = {"model": "rm", "rows": [{"prompt": "a", "completion": text} for text in texts]}
        return [each["score"] for each in running.post("/score", body)["data"]]

    for count in (1, 28, 40, 300):
        ask(count)
    known = list(opened["rm"].layouts)
    with compilations() as compiled:
        for count in (3, 17, 270, 29, 2, 38, 9):
            assert len(ask(count)) == count
    assert opened["rm"].layouts == known
    assert not compiled


def test_forms_of_vllm(running: Any) -> None:
    rows = [{"prompt": "a b", "completion": word} for word in ("c", "d e")]
    expected = [each["score"] for each in running.post("/score", {"model": "rm", "rows": rows})["data"]]
    for first, second in (("text_1", "text_2"), ("queries", "documents")):
        answer = running.post("/score", {"model": "rm", first: "a b", second: ["c", "d e"]})
        assert [each["score"] for each in answer["data"]] == expected
    chat = running.post("/score", {"rows": [{"prompt": "a b", "completion": "e d"}], "chat": True})
    for body in ({"messages": CHAT}, {"input": [CHAT]}):
        answer = running.post("/classify", {"model": "rm", **body})
        assert answer["data"][0]["probs"] == [chat["data"][0]["score"]]
    ids = running.post("/tokenize", {"model": "rm", "prompt": "a b c"})["tokens"]
    text = running.post("/classify", {"model": "rm", "input": "a b c"})["data"][0]["probs"]
    assert running.post("/classify", {"model": "rm", "input": [*ids, 1]})["data"][0]["probs"] == text
