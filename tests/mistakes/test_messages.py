"""What users are told of their mistakes: every message is the one in messages.txt, which is read as a text.

`RECORD=1 .venv/bin/python -m pytest tests/mistakes/test_messages.py -m ""` writes the file anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core import artifacts
from tests.mistakes.mistake import Mistake, masked, met
from tests.mistakes.table import SECTIONS

SNAPSHOT = Path(__file__).with_name("messages.txt")
RECORDS = "RECORD" in os.environ
ALL = [(section, mistake) for section, mistakes in SECTIONS.items() for mistake in mistakes]
told: dict[tuple[str, str], str] = {}


def recorded() -> dict[tuple[str, str], str]:
    """Return what messages.txt has, by the section and the name of the mistake."""
    found = {}
    for section in SNAPSHOT.read_text(encoding="utf-8").split("\n# ")[1:]:
        title, *entries = section.split("\n## ")
        for entry in entries:
            found[title.strip(), entry.partition("\n")[0]] = f"## {entry.strip()}"
    return found


@pytest.mark.parametrize(
    ("section", "mistake"),
    [
        pytest.param(
            section, mistake, id=f"{section}-{mistake.name}"[:100], marks=[pytest.mark.long] * mistake.long
        )
        for section, mistake in ALL
    ],
)
def test_a_mistake_is_told_as_the_snapshot_has_it(
    section: str, mistake: Mistake, place: Any, rlhf: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # a plan's warnings stand in one line
    told[section, mistake.name] = text = met(mistake, place, rlhf)
    assert len(text.splitlines()) > 1, "nothing was said"
    if not RECORDS:
        assert text == recorded().get((section, mistake.name))


IN_ONE_DIRECTORY = {
    "base": ("Texts", "Devices"),
    "rm": ("Preferences that are not JSON", "Preferences in other columns", "Tokenizers", "Checkpoints"),
    "policy": ("Prompts", "Reward functions"),
}
"""By stage, sections whose mistakes are made one after another."""


@pytest.mark.long
@pytest.mark.parametrize(
    "stage", ["policy", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("base", "rm"))]
)
def test_mistakes_one_after_another_in_one_run_directory(
    stage: str, place: Any, rlhf: Callable[..., Any]
) -> None:
    """Each is told as in a directory of its own, and the repaired command completes."""
    for section in IN_ONE_DIRECTORY[stage]:
        for mistake in SECTIONS[section]:
            text = recorded()[section, mistake.name]
            if "exit code 0" in text or not isinstance(mistake.command, str) or stage not in mistake.command:
                continue
            mistake.make(place)
            ended = rlhf("run", f"{stage}.toml")
            *_, last = [line for line in text.splitlines() if not line.startswith("exit code")]
            assert masked(ended.message.splitlines()[-1], place.path) == last
            place.restore()
    assert rlhf("run", f"{stage}.toml").code == 0
    assert_whole(place.path / "run" / stage)


def assert_whole(directory: Path) -> None:
    """A finished stage: its artifact verifies, its metrics are those of one run, nothing temporary is left."""
    assert json.loads((directory / "stage.json").read_text())["state"] == "done"
    artifacts.open_artifact(directory / "artifacts/model")
    steps = [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))
    assert not [path for path in directory.rglob(".*") if path.suffix in (".tmp", ".replaced")]


def test_the_snapshot_has_the_mistakes_of_the_table_alone() -> None:
    names = [(section, mistake.name) for section, mistake in ALL]
    assert len(set(names)) == len(names)
    if RECORDS:
        SNAPSHOT.write_text(written(recorded() | told, names), encoding="utf-8")
    assert list(recorded()) == names


def written(texts: dict[tuple[str, str], str], names: list[tuple[str, str]]) -> str:
    """Return the text of messages.txt."""
    lines = ["What users are told of their mistakes, as tests/mistakes/table.py makes them."]
    for section in SECTIONS:
        lines += ["", f"# {section}"]
        for each, name in names:
            if each == section:
                lines += ["", texts[each, name]]
    return "\n".join(lines) + "\n"
