"""The tutorial on reward models: every block runs as a reader would type it, and prints about what the page says."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs/tutorial/reward.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
NUMBER = r"[+-]?\d+\.\d+(?:e-\d+)?"
SCORES = {"margin", "mean_reward", "reward", ":"}
"""Names of numbers in reward units, which differ more from machine to machine than shares of pairs do."""


def named(text: str) -> str | None:
    """The file that a block is: its first line is `# NAME.py` or `# NAME.toml`."""
    match = re.match(r"# (\w+\.(?:py|toml))\n", text)
    return match[1] if match else None


def test_options_of_the_page_are_the_trainer_s() -> None:
    from rlhf_reward import RewardConfig

    from rlhf_core import plugins
    from rlhf_core.options import build

    tables = [tomllib.loads(text) for language, text in BLOCKS if language == "toml" and not named(text)]
    for table in tables:
        build(RewardConfig, table, where=PAGE.name, registry=plugins.load().registry)
    assert tables


def test_links_of_the_page_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", PAGE.read_text(encoding="utf-8")):
        assert (PAGE.parent / target).exists(), target


@pytest.mark.slow
def test_the_page_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    said, shown = "", 0
    for language, text in BLOCKS:
        if (name := named(text)) is not None:
            (tmp_path / name).write_text(text, encoding="utf-8")
        elif language == "console":
            said = "".join(command(line.removeprefix("$ ")) for line in text.splitlines())
        elif language == "python":
            said = run(text)
        elif language == "text":
            shown += compare(text, said)
    sys.modules.pop("forum", None)
    assert shown > 30  # numbers that the page shows and the run confirms
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


def run(text: str) -> str:
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(text, "document", "exec", dont_inherit=True), names)
    return out.getvalue()


def command(line: str) -> str:
    """What the command says; runs whose output the page does not show stop early."""
    program, *arguments = line.split()
    if "runs/bounded" in arguments:
        arguments += ["--set", "rm.max_training_steps=2"]
    start = {"python": [sys.executable], "rlhf": [sys.executable, "-m", "rlhf_core.cli"]}[program]
    done = subprocess.run(
        [*start, *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr
