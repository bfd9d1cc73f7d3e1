"""The pages on DPO: what they show runs, and their tables are the losses'."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from rlhf_dpo.losses import LOSSES

from rlhf_core import cli
from tests.shared import documents

PAGES = ("docs/reference/trainers/dpo.md", "plugins/dpo/README.md")


@pytest.fixture
def place(tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with the model and the data that the pages name; one device."""
    monkeypatch.chdir(tmp_path)
    documents.on_one_device(monkeypatch)
    tiny.make_model(scale=4.0).save("base")
    tiny.write_rows(tmp_path / "pairs.jsonl", tiny.pairs(16))
    tiny.write_rows(tmp_path / "heldout.jsonl", tiny.pairs(6, seed=1))
    return tmp_path


def blocks(repository: Path, page: str) -> list[tuple[str, str]]:
    return re.findall(r"^```(\w+)\n(.*?)^```", (repository / page).read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.long
def test_the_page_can_be_followed(
    repository: Path, place: Path, tiny: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for language, text in blocks(repository, PAGES[0]):
        if name := re.match(r"# (\w+\.\w+)\n", text):
            (place / name[1]).write_text(text)
        elif language == "python":
            exec(text, {})
        for command in re.findall(r"^\$ (.*)$", text, re.MULTILINE):
            monkeypatch.setattr(sys, "argv", command.split())
            with pytest.raises(SystemExit) as stop:
                cli.main()
            assert not stop.value.code, command
    logged = {
        run: tiny.read_rows(place / f"runs/{run}/policy/metrics.jsonl") for run in ("pairs", "anchored")
    }
    assert [row["step"] for row in logged["pairs"] if "eval_loss" in row] == [2, 4]
    assert "anchored/likelihood" not in logged["pairs"][-1]
    assert np.isfinite(logged["anchored"][-1]["eval_anchored/likelihood"])


@pytest.mark.long
def test_the_readme_runs(
    repository: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "path/to").mkdir(parents=True)
    (place / "base").rename(place / "path/to/model")
    (python,) = (text for language, text in blocks(repository, PAGES[1]) if language == "python")
    scope: dict = {}
    exec(python, scope)
    assert scope["result"].metrics["loss"] < 0.7
    (toml,) = (text for language, text in blocks(repository, PAGES[1]) if language == "toml")
    (place / "pairs.heldout.jsonl").write_bytes((place / "heldout.jsonl").read_bytes())
    (place / "p.toml").write_text(f'dir = "runs"\n{toml}')
    said = []
    for more in ([], ["--set", "policy.loss=robust"]):
        monkeypatch.setattr(sys, "argv", ["rlhf", "check", "p.toml", *more])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert not stop.value.code
        said.append(" ".join("".join(capsys.readouterr()).split()))  # lines break where the path ends them
    assert ["which makes 'robust' the same as 'sigmoid'" in each for each in said] == [False, True]
    assert "16 pairs" in said[0]


@pytest.mark.parametrize("page", PAGES)
def test_every_loss_is_in_the_table(repository: Path, page: str) -> None:
    text = (repository / page).read_text(encoding="utf-8")
    named = re.findall(r"^\| (?:dpo loss \| `|\[`)(\w+)`(?:\]\(#\w+\))? \|", text, re.MULTILINE)
    assert set(LOSSES) <= set(named)


def test_every_loss_has_a_section_and_its_options(repository: Path) -> None:
    from rlhf_dpo import DPO_LOSS, DPOConfig

    from rlhf_core import plugins
    from rlhf_core.config import build

    text, registry = (repository / PAGES[0]).read_text(encoding="utf-8"), plugins.load().registry
    text = text.partition("\n## Losses\n")[2].partition("\n## Metrics\n")[0]
    for name, cell in re.findall(r"^\| \[`(\w+)`\]\(#\1\) \| (.*?) \|", text, re.MULTILINE):
        assert f"\n### {name}\n" in text
        options = tomllib.loads("\n".join(re.findall(r"`(.*?)`", cell)))
        fields = registry._entry(DPO_LOSS, name).options
        assert set(options) == set(fields), name
        assert registry.get(DPO_LOSS, name, **options) == registry.get(DPO_LOSS, name)
    for block in re.findall(r"^```toml\n(.*?)^```", text, re.M | re.S):
        build(DPOConfig, tomllib.loads(block), where=PAGES[0], registry=registry)
