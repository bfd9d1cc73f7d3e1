"""Losses in docs/reference/trainers/reward.md: their table is complete, its options are the code's, its blocks run."""

import re
import tomllib

import numpy as np
import pytest
from rlhf_reward import RewardConfig, pairwise_loss

from rlhf_core import PAIRWISE_LOSS, plugins
from rlhf_core.config import build


@pytest.fixture(scope="module")
def page(repository):
    text = (repository / "docs/reference/trainers/reward.md").read_text(encoding="utf-8")
    return text.partition("\n## Losses\n")[2].partition("\n## ")[0]


@pytest.fixture(scope="module")
def registry():
    return plugins.load().registry


def table(page, header):
    """The cells of every row under a header."""
    lines = page.split(f"{header}\n", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_table_of_losses_is_complete_and_right(page, registry):
    rows = table(page, "| name | options | of a pair | use it when |")
    documented = {re.match(r"\[`(\w+)`\]\(#\1\)", row[0].strip())[1]: row[1] for row in rows}
    assert sorted(documented) == registry.names(PAIRWISE_LOSS)
    assert set(documented) <= set(re.findall(r"^### (\w+)$", page, re.MULTILINE))
    scores = np.random.default_rng(0).normal(size=(2, 9))
    for name, cell in documented.items():
        options = tomllib.loads("\n".join(re.findall(r"`(.*?)`", cell)))
        given = pairwise_loss(*scores, loss={"name": name, **options})[0]
        assert float(given) == float(pairwise_loss(*scores, loss=name)[0])  # its options are the defaults
        assert set(options) == set(registry._entry(PAIRWISE_LOSS, name).options)


@pytest.mark.long
def test_its_blocks_run(page, registry):
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    for language, text in blocks:
        if language == "toml":
            build(RewardConfig, tomllib.loads(text), where="page", registry=registry)
        elif language == "python":
            exec(text, {})
    assert {language for language, _ in blocks} == {"toml", "python"}
