"""docs/reference/reward_losses.md: its tables are complete, its formulas and options the code's, its blocks run."""

import re
import tomllib

import numpy as np
import pytest
from rlhf_reward import RewardConfig, pairwise_loss
from rlhf_reward.metrics import measures

from rlhf_core import PAIRWISE_LOSS, plugins
from rlhf_core.config import build


@pytest.fixture(scope="module")
def page(repository):
    return (repository / "docs/reference/reward_losses.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def registry():
    return plugins.load().registry


def table(page, header):
    """The cells of every row under a header."""
    lines = page.split(f"{header}\n", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_tables_of_losses_are_complete_and_right(page, registry):
    rows = table(page, "| name | options | of a pair | paper | choose it when |")
    documented = {row[0].strip("` "): row[1] for row in rows}
    assert sorted(documented) == registry.names(PAIRWISE_LOSS)
    others = table(page, "| name | slope in d | lowest at | its scores |")
    assert sorted(row[0].strip("` ") for row in others) == sorted(documented)
    scores = np.random.default_rng(0).normal(size=(2, 9))
    for name, cell in documented.items():
        options = tomllib.loads("\n".join(re.findall(r"`(.*?)`", cell)))
        given = pairwise_loss(*scores, loss={"name": name, **options})[0]
        assert float(given) == float(pairwise_loss(*scores, loss=name)[0])  # its options are the defaults
        assert set(options) == set(registry._entry(PAIRWISE_LOSS, name).options)


def test_the_tables_of_metrics_are_complete(page):
    training = table(page, "| metric | meaning |")
    evaluation = table(page, "| metric | meaning | healthy |")
    names = [
        {name for row in rows for name in re.findall(r"`(.*?)`", row[0])} for rows in (training, evaluation)
    ]
    _, metrics = pairwise_loss([1.0], [0.0])
    assert names[0] == set(metrics) | {"loss"}
    over_all = measures(np.ones(2), np.zeros(2), np.ones((2, 2), int), ["SUBSET", None])
    assert names[1] == set(over_all)


def test_its_blocks_run(page, registry):
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    for language, text in blocks:
        if language == "toml":
            build(RewardConfig, tomllib.loads(text), where="page", registry=registry)
        elif language == "python":
            exec(text, {})
    assert {language for language, _ in blocks} == {"toml", "python", "console"}
