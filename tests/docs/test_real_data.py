"""The examples on real input: how the stories are cut, and that the pipelines can be planned.

The commands of docs/tutorial/first_run.md and docs/how-to/real-data.md are typed in order, on less of everything: of
two runs on one page the first is run, with an update a stage; what would take a second one is checked.
"""

from __future__ import annotations

import json
import re
import runpy
import shutil
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rlhf_core.models import fresh_model
from tests.shared import documents

REPOSITORY = documents.REPOSITORY
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


SMALL = {
    "hidden_size = 128": "hidden_size = 16",
    "num_hidden_layers = 4": "num_hidden_layers = 1",
    "num_attention_heads = 4": "num_attention_heads = 2",
    "intermediate_size = 352": "intermediate_size = 24",
    "num_train_epochs = 2": "max_training_steps = 1",
    "num_train_epochs = 5": "max_training_steps = 1",
    "num_generations = 8": "num_generations = 4\nmax_training_steps = 1",
    "total_batch_size = 128": "total_batch_size = 16",
    "total_batch_size = 64": "total_batch_size = 16",
}


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the repository's examples, which is where one is."""
    monkeypatch.chdir(tmp_path)
    documents.on_one_device(monkeypatch)
    shutil.copytree(REPOSITORY / "examples", "examples", ignore=shutil.ignore_patterns("data", "__pycache__"))
    return tmp_path


def typed(page: str) -> list[str]:
    blocks = documents.blocks(REPOSITORY / page)
    return [line for language, text in blocks if language == "console" for line in documents.commands(text)]


def type_in(line: str) -> str:
    ended = documents.type_in(line)
    assert ended.code == 0, f"{line}\n{ended.said}"
    return str(ended.said)


@pytest.mark.long
def test_the_first_run(clone: Path) -> None:
    write, check, run, short, sample, score = typed("docs/tutorial/first_run.md")
    type_in(write)
    for file in Path("quickstart/data").glob("*.jsonl"):
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:16]))
    pipeline = Path("quickstart/quickstart.toml")
    text = pipeline.read_text()
    for large, small in SMALL.items():
        assert large in text
        text = text.replace(large, small)
    pipeline.write_text(text)
    assert "1 update of 16 pairs" in type_in(check)
    said = type_in(short.replace("rlhf run ", "rlhf check "))
    assert "20 updates of 16 pairs" in said
    assert "5 updates of 16 completions" in said
    type_in(run)
    type_in(sample)
    assert "of 16 pairs scored higher" in type_in(score)
    scored = [json.loads(line) for line in Path("scores.jsonl").read_text().splitlines()]
    assert all({"chosen_score", "rejected_score"} <= set(row) for row in scored)


@pytest.mark.long
def test_the_page_on_real_data(clone: Path, tiny: ModuleType) -> None:
    prepare, check, run, generate, score, conversations = typed("docs/how-to/real-data.md")
    stories = [story(i) for i in range(40)]
    Path("STORIES.txt").write_text("\n<|endoftext|>\n".join(stories))
    tokenizer = tiny.make_tokenizer()
    tokenizer.add_tokens(
        sorted({w for s in stories for w in re.findall(r"\w+|[^\w\s]+", s)} - set(tiny.WORDS))
    )
    table = tiny.SIZES | {"max_position_embeddings": 512}
    for place, head in (("MODEL", "lm"), ("policy", "lm"), ("rm", "score")):
        path = place if place == "MODEL" else f"runs/stories/{place}/artifacts/model"
        fresh_model(table, head, tokenizer=tokenizer).save(path)
    said = [{"role": "assistant", "content": text} for text in ("a b c", "d e f g")]
    row = {"prompt": [{"role": "user", "content": "a b"}], "chosen": said[:1], "rejected": said[1:]}
    for name in ("TRAIN", "EVAL"):
        tiny.write_rows(Path(f"{name}.jsonl"), [row] * 4)
    type_in(prepare)
    assert "72 pairs" in type_in(check)
    assert check == run.replace("rlhf run ", "rlhf check ")
    assert "4 pairs" in type_in(conversations.replace("rlhf run ", "rlhf check "))
    type_in(generate)
    type_in(score)
    scored = [json.loads(line) for line in Path("scored.jsonl").read_text().splitlines()]
    assert len(scored) == 2 * len(
        Path("examples/stories/data/prompts.heldout.jsonl").read_text().splitlines()
    )
    assert all(isinstance(row["score"], float) for row in scored)
