"""The pages about writing components: every block runs, and the properties they list are the kits'."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlhf_core import testing
from tests.shared import documents

KITS = {
    "docs/how-to/write_a_loss.md": testing.check_policy_loss,
    "docs/how-to/write_a_reward.md": testing.check_reward,
    "docs/how-to/write_a_trainer.md": testing.check_trainer,
    "docs/how-to/write_an_environment.md": testing.check_environment,
}


@pytest.fixture
def workplace(tmp_path: Path, tiny: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The directory with the model and the data that the pages name; what they import is forgotten again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    documents.on_one_device(monkeypatch)
    tiny.make_model().save(tmp_path / "MODEL")
    tiny.write_rows(tmp_path / "corpus.jsonl", tiny.texts(12))
    tiny.write_rows(tmp_path / "prompts.jsonl", tiny.prompts(8))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


TABLES = {
    **{(page, "property"): kit for page, kit in KITS.items()},
    ("docs/how-to/write_a_loss.md", "property of a pairwise loss"): testing.check_pairwise_loss,
    ("docs/how-to/write_a_loss.md", "property of an advantage"): testing.check_advantage,
    ("docs/how-to/write_a_reward.md", "property of a logger"): testing.check_logger,
}
PAGES = [*KITS, "docs/how-to/write_a_trainer_that_samples.md"]


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES, ids=lambda page: Path(page).stem)
def test_a_page_can_be_followed(page: str, workplace: Path) -> None:
    misspelt = "rlhf check pipeline.toml --plugin bounded.py --set policy.loss.kk=2.0"
    documents.follow(documents.REPOSITORY / page, fails=[misspelt])


@pytest.mark.parametrize(("page", "heading"), TABLES, ids=lambda x: Path(x).stem)
def test_the_properties_are_the_kits(page: str, heading: str) -> None:
    text = (documents.REPOSITORY / page).read_text(encoding="utf-8")
    table = text.partition(f"| {heading} | what is tried |\n")[2].partition("\n\n")[0]
    listed = re.findall(r"`([a-z ]+)`", "".join(row.split("|")[1] for row in table.splitlines()))
    said = (TABLES[page, heading].__doc__ or "").partition("\n\n")[2].rpartition("\n\n")[2]
    told = [
        name
        for part in re.findall(r"(?:^|\. )\s*([a-z ,]+): ", said, re.MULTILINE)
        for name in part.split(", ")
    ]
    assert sorted(listed) == sorted(told)
