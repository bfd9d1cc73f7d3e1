"""The examples on real input: how the stories are cut, and that the pipelines can be planned. Running them takes
minutes and the user's own files: docs/how-to/real-data.md.
"""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

NAMES = ("Tom", "Lily", "Ben", "Sue", "Max", "Amy", "Tim", "Mia", "Sam", "Ann")


@pytest.fixture(scope="module")
def stories(repository: Path) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(repository / "examples/stories/prepare.py")))


@pytest.fixture(scope="module")
def rewards(repository: Path) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(repository / "examples/stories/rewards.py")))


def story(number: int) -> str:
    name = f"{NAMES[number % 10]}{'a' * (number // 10)}"
    said = f'"I am {name}!" said {name}.\n'
    return said + " ".join(f"{name} saw thing {i}." for i in range(10))


@pytest.fixture(scope="module")
def prepared(stories: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("stories")
    text = "\n<|endoftext|>\n".join([*map(story, range(40)), story(0), "This one is cut off in the mid"])
    stories.prepare(text, directory)
    return directory


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_sentences_are_the_story(stories: SimpleNamespace) -> None:
    text = '"Stop! Come here," said Mr. fox. Ben asked, "Why?" Then “No.” It was 3.5 o\'clock.'
    parts = stories.sentences(text)
    assert "".join(parts) == text
    assert parts == [
        '"Stop!',
        ' Come here," said Mr. fox.',
        ' Ben asked, "Why?"',
        " Then “No.”",
        " It was 3.5 o'clock.",
    ]


def test_a_continuation_is_cut_from_its_story(prepared: Path) -> None:
    whole = [" ".join(story(i).split()) for i in range(40)]
    corpus = rows(prepared / "corpus.jsonl") + rows(prepared / "corpus.heldout.jsonl")
    assert len(corpus) == 40  # the repeated story once, the unfinished one not at all
    assert all(any(s.startswith(r["prompt"] + r["completion"]) for s in whole) for r in corpus)
    for pair in rows(prepared / "pairs.jsonl"):
        own = [s for s in whole if pair["prompt"] in s]
        assert len(own) == 1
        assert pair["prompt"] + pair["chosen"] in own[0]
        assert pair["rejected"] not in own[0]


def test_neither_length_nor_style_tells_the_sides_apart(prepared: Path) -> None:
    for suffix in ("", ".heldout"):
        pairs = rows(prepared / f"pairs{suffix}.jsonl")
        assert sorted(p["chosen"] for p in pairs) == sorted(p["rejected"] for p in pairs)


def test_no_story_is_in_both_splits(prepared: Path) -> None:
    def seen(name: str) -> set[str]:
        return {row["prompt"] for row in rows(prepared / name)}

    for kind in ("corpus", "pairs", "prompts"):
        assert not seen(f"{kind}.jsonl") & seen(f"{kind}.heldout.jsonl")
    assert len(seen("prompts.heldout.jsonl")) == 4


def test_rewards_of_degenerate_texts_are_low(rewards: SimpleNamespace) -> None:
    texts = [" Tom was happy.", " happy happy happy happy", "", " Unhappy Tom."]
    assert rewards.mentions_once(texts) == [1.0, 0.0, 0.0, 0.0]
    assert rewards.mentions_once(texts, word="Tom") == [1.0, 0.0, 0.0, 1.0]
    assert rewards.variety(texts) == [1.0, pytest.approx(1 / 3), 0.0, 1.0]


@pytest.mark.data
@pytest.mark.long
def test_the_conversations_pipeline_can_be_planned(
    repository: Path, shared: Path, tmp_path: Path, rlhf: Any
) -> None:
    data = shared / "data"
    sets = [f"{stage}.model={data / 'models/stories260K'}" for stage in ("rm", "policy")]
    sets += [f"{stage}.train_data={data / 'prefs/hh_harmless.train.jsonl'}" for stage in ("rm", "policy")]
    sets += [f"{stage}.eval_data={data / 'prefs/hh_harmless.eval.jsonl'}" for stage in ("rm", "policy")]
    assert "1,843 pairs: 1,289 kept, " in checked(rlhf, repository / "examples/hh_rlhf.toml", sets, tmp_path)


def test_the_reward_in_the_document_works(repository: Path) -> None:
    text = (repository / "docs/how-to/real-data.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(compile(block, "document", "exec", dont_inherit=True), names)
    said = [[{"role": "assistant", "content": reply}] for reply in ("No.", "It depends.")]
    preferred = [[{"role": "assistant", "content": "Never."}]] * 2
    assert names["short"](said, preferred, rejected=preferred) == [1.0, 0.0]


def checked(rlhf: Any, path: Path, sets: list[str], directory: Path) -> str:
    given = [word for each in sets for word in ("--set", each)]
    ended = rlhf("check", str(path), "--dir", str(directory / "run"), *given)
    assert ended.code == 0, ended.message
    return " ".join(ended.out.split())
