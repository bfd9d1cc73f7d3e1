"""The example with a tool: its data, and its pipeline at a small size."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from rlhf_core import run_pipeline
from rlhf_core.plugins import load_file


@pytest.fixture
def generate(repository: Path) -> ModuleType:
    return load_file(repository / "examples" / "tools" / "generate.py")


def test_the_same_seed_writes_the_same_rows(generate: ModuleType, tmp_path: Path) -> None:
    sizes = generate.Sizes(shown=40, sums=20, heldout=10)
    for name in ("a", "b"):
        generate.generate(tmp_path / name, sizes=sizes)
    names = ("shown.jsonl", "told.jsonl", "sums.jsonl", "sums.heldout.jsonl", "tokenizer/tokenizer.json")
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    rows = {
        name: [json.loads(line) for line in (tmp_path / "a" / name).read_text().splitlines()]
        for name in names[:4]
    }
    asked = [row["prompt"][0]["content"] for name in names[2:4] for row in rows[name]]
    shown = [row["messages"][0]["content"] for row in rows["shown.jsonl"]]
    assert len({*asked, *shown}) == 70
    calls = [row["messages"][1]["tool_calls"][0]["function"]["arguments"] for row in rows["shown.jsonl"]]
    right = [f"What is {call['a']} + {call['b']}?" == text for call, text in zip(calls, shown, strict=True)]
    assert 0 < sum(right) < 10
    for row in rows["shown.jsonl"]:
        call = row["messages"][1]["tool_calls"][0]["function"]["arguments"]
        assert row["messages"][2]["content"] == str(call["a"] + call["b"])


@pytest.mark.long
def test_the_pipeline_runs(generate: ModuleType, repository: Path, tmp_path: Path) -> None:
    for name in ("tools.toml", "calc.py"):
        (tmp_path / name).write_text((repository / "examples" / "tools" / name).read_text())
    generate.generate(tmp_path / "data", sizes=generate.Sizes(shown=64, sums=16, heldout=8))
    small = ["base.model.num_hidden_layers=1", "policy.max_training_steps=1", "policy.total_batch_size=16"]
    result = run_pipeline(tmp_path / "tools.toml", sets=small, dir=tmp_path / "run")
    metrics = result.stages["policy"].metrics
    assert metrics["episodes/failed"] == 0
    assert 0 <= metrics["rewards/numeric_answer/mean"] <= 1
