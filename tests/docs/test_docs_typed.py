"""The commands of docs/tutorial/first_run.md and docs/how-to/real-data.md, typed in order, on less of everything.

Of two runs on one page the first is run, with an update a stage; what would take a second one is checked.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlhf_core.models import fresh_model
from rlhf_core.plugins import load_file
from tests.shared import documents

real_data: Any = load_file(Path(__file__).with_name("test_real_data.py"))
REPOSITORY: Path = documents.REPOSITORY
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
def test_first_run(clone: Path) -> None:
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
def test_real_data(clone: Path, tiny: ModuleType) -> None:
    prepare, check, run, generate, score, conversations = typed("docs/how-to/real-data.md")
    stories = [real_data.story(i) for i in range(40)]
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
