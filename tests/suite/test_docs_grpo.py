"""The pages on GRPO: every block runs, every option is one, every loss has its page and its picture."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
LOSS_PAGES = sorted((REPOSITORY / "docs/losses").glob("*.md"))
TUTORIAL = REPOSITORY / "docs/tutorial/grpo.md"
PAGES = [*LOSS_PAGES, TUTORIAL]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
FEW_UPDATES = ["--set", "base.max_training_steps=2", "--set", "policy.max_training_steps=2"]


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def named(text: str) -> str | None:
    """The file that a block is: its first line is `# NAME.py` or `# NAME.toml`."""
    match = re.match(r"# (\w+\.(?:py|toml))\n", text)
    return match[1] if match else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_options_of_a_page_are_grpo_s(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from rlhf_grpo import GRPOConfig

    from rlhf_core import plugins
    from rlhf_core.options import build

    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(
        next(text for _, text in blocks(TUTORIAL) if named(text) == "reward.py")
    )
    registry = plugins.load().registry
    for language, text in blocks(page):
        if language == "toml" and named(text) is None:
            build(GRPOConfig, tomllib.loads(text), where=page.name, registry=registry)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_loss_has_a_page_a_picture_and_a_row() -> None:
    from rlhf_grpo.losses import LOSSES

    directory = REPOSITORY / "docs/losses"
    rows = (directory / "index.md").read_text(encoding="utf-8").splitlines()
    for name, loss in LOSSES.items():
        page = (directory / f"{name}.md").read_text(encoding="utf-8")
        assert f"]({name}.svg)" in page
        tables = [
            tomllib.loads(text) for language, text in blocks(directory / f"{name}.md") if language == "toml"
        ]
        assert name in [table["loss"]["name"] for table in tables if "loss" in table]
        (row,) = [row for row in rows if row.startswith(f"| [`{name}`]({name}.md) |")]
        assert f"| `{loss.aggregation}` |" in row


@pytest.mark.parametrize(
    "picture", sorted((REPOSITORY / "docs/losses").glob("*.svg")), ids=lambda file: file.stem
)
def test_pictures_are_small_and_without_a_date(picture: Path) -> None:
    text = picture.read_text(encoding="utf-8")
    assert len(text) < 60_000
    assert "<dc:date>" not in text


@pytest.mark.parametrize(
    "page", [page for page in LOSS_PAGES if ("```python" in page.read_text())], ids=lambda p: p.stem
)
def test_python_of_a_loss_page_runs(page: Path) -> None:
    for language, text in blocks(page):
        if language == "python":
            run(text)


@pytest.mark.slow
def test_tutorial_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for language, text in blocks(TUTORIAL):
        if (name := named(text)) is not None:
            (tmp_path / name).write_text(text, encoding="utf-8")
        elif language == "console":
            for line in text.splitlines():
                command(line.removeprefix("$ "))
        elif language == "python":
            run(text)
    sys.modules.pop("reward", None)
    assert (tmp_path / "runs/sort/policy/artifacts/model/config.json").is_file()


def run(text: str) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "document", "exec", dont_inherit=True), names)


def command(line: str) -> None:
    """Run it as a reader would, but for the number of updates."""
    program, _, rest = line.partition(" ")
    arguments = re.findall(r'"[^"]*"|\S+', rest)
    start = [sys.executable] if program == "python" else [sys.executable, "-m", "rlhf_core.cli"]
    assert program in ("python", "rlhf"), line
    few = FEW_UPDATES if rest.startswith("run ") else []
    done = subprocess.run(
        [*start, *(argument.strip('"') for argument in arguments), *few],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
