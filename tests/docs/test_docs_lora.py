"""docs/how-to/lora.md: its pipeline, commands and Python run, and its table is the options'."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rlhf_core import load_model
from rlhf_core.config.trainer import LoraOptions


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    return (repository / "docs/how-to/lora.md").read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


@pytest.mark.long
def test_the_page_runs(
    page: str, rlhf: Any, tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.make_model().save("base")
    tiny.write_rows(tmp_path / "corpus.jsonl", tiny.texts(12))
    tiny.write_rows(tmp_path / "prompts.jsonl", tiny.prompts(8))
    (tmp_path / "adapters.toml").write_text(blocks(page, "toml")[0])
    for command in "".join(blocks(page, "console")).splitlines():
        program, *arguments = command.removeprefix("$ ").split()
        assert program == "rlhf"
        assert rlhf(*arguments).code == 0, command
    exec(blocks(page, "python")[0], {})
    ids, mask = np.array([[3, 9, 4, 7]]), np.ones((1, 4), int)
    names = ["runs/adapters/policy/artifacts/model", "policy", "merged"]
    first, *others = (np.asarray(load_model(name).logits(ids, mask)) for name in names)
    for other in others:
        np.testing.assert_allclose(other, first, atol=1e-5)


def test_the_table_is_of_the_options(page: str) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \|", page, re.MULTILINE)
    defaults = LoraOptions().to_dict()
    assert {name for name, _ in rows} == set(defaults)
    for name, shown in rows:
        value = defaults[name]
        assert shown == (
            f'"{value}"' if isinstance(value, str) else f"{value:g}" if value is not False else "false"
        )
