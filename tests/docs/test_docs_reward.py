"""The tutorial on reward models: every block runs as a reader would type it, and prints about what the page says."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.shared import documents

PAGE = documents.REPOSITORY / "docs/tutorial/reward.md"
NUMBER = r"[+-]?\d+\.\d+(?:e-\d+)?"
SCORES = {"margin", "mean_reward", "reward", ":"}
"""Names of numbers in reward units, which differ more from machine to machine than shares of pairs do."""


@pytest.mark.long
def test_the_page_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copy(documents.REPOSITORY / "examples/make_data.py", tmp_path)
    documents.on_one_device(monkeypatch)
    shown: list[int] = []
    documents.follow(PAGE, edit=str, compare=lambda text, said: shown.append(compare(text, said)))
    assert sum(shown) > 30  # numbers that the page shows and the run confirms
    manifest = tmp_path / "runs/policy/policy/artifacts/model/rlhf_artifact.json"
    assert manifest.is_file()


def compare(shown: str, said: str) -> int:
    """Every line of the page is one of the output, whose numbers are about the same; returns how many numbers.

    A line is found by its words up to the first number that has a name, and may leave parts out at "…".
    """
    count = 0
    shown_lines, lines = ([" ".join(line.split()) for line in text.splitlines()] for text in (shown, said))
    for line in shown_lines:
        pairs = re.findall(rf"(\S+) ({NUMBER})", line)
        start = f"{line[: line.index(' '.join(pairs[0]))]}{pairs[0][0]} "
        matching = [each for each in lines if each.startswith(start)]
        assert len(matching) == 1, f"{start!r} does not begin one line of\n{said}"
        for name, value in pairs:
            (found,) = re.findall(rf"(?<!\S){re.escape(name)} ({NUMBER})", matching[0])
            near = pytest.approx(float(value), abs=0.6 if name in SCORES else 0.15)
            assert float(found) == near, f"{line}\n{matching[0]}"
            count += 1
    return count
