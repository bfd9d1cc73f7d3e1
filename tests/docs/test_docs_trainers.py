"""docs/reference/trainers: the stage on each page runs as it stands, with one small update."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.shared import documents

PAGES = {
    "sft": "docs/reference/trainers/sft.md",
    "reward": "docs/reference/trainers/reward.md",
    "grpo": "docs/reference/trainers/grpo.md",
}
"""The page on dpo is followed in test_docs_dpo.py."""
SMALL = {
    "total_batch_size = 128": "total_batch_size = 8",
    "max_completion_length = 256": "max_completion_length = 4",
}


@pytest.mark.long
@pytest.mark.parametrize("name", PAGES)
def test_the_stage_of_the_page_runs(
    name: str, tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    documents.on_one_device(monkeypatch)
    tiny.make_model().save(tmp_path / "path/to/model")
    makers = {"corpus": tiny.texts, "pairs": tiny.pairs, "pairs.heldout": tiny.pairs, "prompts": tiny.prompts}
    for file, rows in makers.items():
        tiny.write_rows(tmp_path / f"{file}.jsonl", rows(8))
    (tmp_path / "my_rewards.py").write_text(
        "def brevity(completions, **columns):\n    return [-len(text) / 9 for text in completions]\n"
    )
    blocks = documents.blocks(documents.REPOSITORY / PAGES[name])
    text = next(text for language, text in blocks if language == "toml")
    for large, small in SMALL.items():
        text = text.replace(large, small)
    (tmp_path / "pipeline.toml").write_text(f'dir = "runs"\n{text}max_training_steps = 1\n')
    ended = documents.rlhf(["run", "pipeline.toml"])
    assert ended.code == 0, ended.said
