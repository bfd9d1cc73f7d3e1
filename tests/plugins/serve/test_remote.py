"""The suite's own clients: with a URL, commands say what they say of the directory that is served."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rlhf_remote import Http

from rlhf_core import RewardInputs, installed_registry
from rlhf_core.rollouts import Reward, score, set_up
from rlhf_core.scoring import Scorer
from rlhf_core.workers.pool import close as close_workers
from tests.shared import commands

GREEDY = ("--temperature", 0, "--max_completion_length", 12)
TEXTS = [{"prompt": "a b c"}, {"prompt": "d"}]
CHATS = [{"messages": [{"role": "user", "content": word}], "id": i} for i, word in enumerate(("a b", "c"))]


def say(*arguments: Any, typed: str = "") -> str:
    return str(commands.rlhf(*arguments, typed=typed).stdout)


def address(running: Any) -> str:
    return str(running.client.base_url).rstrip("/")


@pytest.mark.parametrize(
    ("rows", "flags"),
    [
        (TEXTS, ()),
        (CHATS, ("--system", "e f")),
        (None, ("--prompt", "a b", "--prompt", "c d")),
        (None, ("--prompt", "a b", "--raw")),
    ],
)
def test_generate_writes_the_same(
    rows: Any, flags: tuple[str, ...], running: Any, directory: Path, tmp_path: Path
) -> None:
    given: tuple[Any, ...] = flags
    if rows:
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = (tmp_path / "in.jsonl", *flags)
    texts = []
    for model in (directory / "policy", address(running)):
        say("generate", model, *given, *GREEDY, "-o", tmp_path / "out.jsonl")
        texts.append((tmp_path / "out.jsonl").read_text())
    assert texts[0] == texts[1]
    assert len({json.loads(line)["completion"] for line in texts[0].splitlines()}) == len(
        texts[0].splitlines()
    )


def test_chat_says_the_same(running: Any, directory: Path) -> None:
    typed = "a b\nc d\n"
    local, remote = (
        say("chat", model, *GREEDY, typed=typed) for model in (directory / "policy", address(running))
    )
    assert local == remote
    assert len(local.split()) > 4


SCORED = {
    "texts": [{"prompt": "a b", "completion": " c d"}, {"prompt": "f", "completion": ""}],
    "chats": [
        {"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": f"{word} d"}]}
        for word in "efghi"
    ],
    "pairs": [{"prompt": "a b", "chosen": f" {x} c", "rejected": f" {x}"} for x in "defgh"],
}


@pytest.mark.parametrize("kind", SCORED)
def test_score_writes_the_same_bits(kind: str, running: Any, directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in SCORED[kind]))
    said, written = [], []
    for model in (directory / "rm", address(running)):
        said.append(say("score", model, file, "-o", tmp_path / "out.jsonl").splitlines())
        written.append((tmp_path / "out.jsonl").read_text())
    assert written[0] == written[1]
    assert said[0] == said[1]
    assert any(line.startswith("accuracy") for line in said[0]) == (kind == "pairs")


def test_the_reward_http_asks_for_the_same_scores(
    running: Any, directory: Path, tmp_path: Path, tiny: Any
) -> None:
    chat = [{"role": "user", "content": "a b"}]
    inputs = RewardInputs(
        [chat] * 3,
        [[{"role": "assistant", "content": text}] for text in ("c d", "e", "f g h")],
        [[1]] * 3,
        {},
    )
    stage = SimpleNamespace(
        name="policy",
        registry=installed_registry(),
        mesh=None,
        is_main=True,
        dir=tmp_path,
        devices=tiny.one_device,
    )
    rewards = [Reward("http", 1.0, Http(f"{address(running)}/score", model="rm"))]
    set_up(rewards, SimpleNamespace(columns={}, where=str), stage)  # type: ignore[arg-type]
    try:
        table = score(rewards, inputs)
    finally:
        close_workers()
    scorer = Scorer.load(directory / "rm")
    scorer.reuses_shapes = True
    expected = scorer.score_ids(scorer.encoder.whole(inputs.prompts, inputs.completions))
    np.testing.assert_array_equal(table[:, 0], expected)
    assert len(set(table[:, 0])) == 3
