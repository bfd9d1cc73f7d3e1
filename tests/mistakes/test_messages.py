"""What users are told of their mistakes: every message is the one in messages.txt, which is read as a text.

`RECORD=1 .venv/bin/python -m pytest tests/mistakes/test_messages.py -m ""` writes the file anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.mistakes.mistake import Mistake, met
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
    section: str, mistake: Mistake, place: Any, rlhf: Callable[..., Any]
) -> None:
    told[section, mistake.name] = text = met(mistake, place, rlhf)
    assert len(text.splitlines()) > 1, "nothing was said"
    if not RECORDS:
        assert text == recorded().get((section, mistake.name))


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
