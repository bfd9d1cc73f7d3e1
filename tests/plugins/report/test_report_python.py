"""rlhf report on the files of a trainer called from Python."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rlhf_grpo import GRPOConfig, GRPOTrainer

from rlhf_core.errors import RunError
from tests.shared import report_runs as runs


def test_the_page_has_what_that_of_a_pipeline_has(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "rlhf_core.stage.alone.make_mesh", tiny.one_device
    )  # its programs take less time to compile
    directory = tmp_path / "mine"
    calls: list[int] = []

    def length(completions: list[str]) -> list[float]:
        calls.append(len(completions))
        if len(calls) == 4:  # two rollouts and the fixed prompts before
            raise ConnectionError("no route")
        return [float(len(text)) for text in completions]

    def train() -> Any:
        config = GRPOConfig(
            total_batch_size=8,
            num_generations=4,
            max_completion_length=6,
            max_training_steps=3,
            log_steps=1,
            save_steps=1,
            seed=5,
            save_directory=directory,
        )
        model = tiny.make_model(scale=4.0)
        return GRPOTrainer(config, model=model, rewards=[length], train_dataset=tiny.prompts(6)).train()

    with pytest.raises(RunError):
        train()
    (stage,) = runs.stages(directory).values()
    assert (stage.name, stage.state, stage.updates) == ("grpo", "failed", 2)
    assert stage.message.startswith("reward 'length' raised ConnectionError: no route (")
    train()
    (stage,) = runs.stages(directory).values()
    assert (stage.name, stage.trainer, stage.state, stage.planned) == ("grpo", "grpo", "done", 3)
    assert [each.how for each in stage.sessions] == ["failed", "done"]
    events = [json.loads(line)["event"] for line in (directory / "events.jsonl").read_text().splitlines()]
    assert [event for event in events if event != "warning"] == ["begun", "failed", "continued", "done"]
    page = runs.page(directory)
    facts = page.stages["grpo"]["facts"]
    assert "in 2 sessions" in facts
    assert facts[-1].endswith("from the cache")
    for told in ("× cpu", "rlhf-grpo", "total_batch_size = 8"):
        assert told in page.text, told
    assert page.answers["grpo/results"]["completions"][0]["fixed"]
