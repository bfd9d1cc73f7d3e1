"""docs/reference/rewards.md: its functions run, its lists are made, its tables are true."""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from rlhf_core import REWARD, Registry, RewardInputs, plugins
from rlhf_core.config import build


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    return (repository / "docs/reference/rewards.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def registry() -> Registry:
    return plugins.load().registry


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def table(page: str, header: str) -> dict[str, str]:
    """{first cell: second cell} of the table under a header."""
    lines = page.split(header, 1)[1].split("\n\n", 1)[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*?) ?\|", lines, re.MULTILINE))


def test_the_table_of_built_in_rewards_is_complete_and_right(page: str, registry: Registry) -> None:
    documented = table(page, "| name | options | value of a completion |")
    assert sorted(documented) == registry.names(REWARD)
    for name, cell in documented.items():
        options = {}
        for option in re.findall(r"`(.*?)`", cell):
            key, _, default = option.partition(" = ")
            options[key] = tomllib.loads(f"x = {default}")["x"] if default else None
        entry = registry._entry(REWARD, name)
        if cell == f"[its own table](#{name})":
            own = page.split("Both take:\n")[1].partition("\n\n| metric")[0]
            own += page.split(f"### `{name}`")[1].partition("\n```")[0]
            named = set(re.findall(r"^\| `(\w+)` \|", own, re.MULTILINE))
            assert named == set(entry.options or {}) - {"on_error"}, name
            continue
        assert set(options) == set(entry.options or {}), name
        assert {key for key, default in options.items() if default is None} == entry.required, name
        for key, parameter in inspect.signature(entry.thing).parameters.items():
            if options.get(key) is not None:
                assert options[key] == parameter.default, f"{name}: {key}"


def test_the_keys_of_every_reward_are_the_trainers(page: str) -> None:
    from rlhf_core.rollouts import WeightedReward

    assert set(table(page, "| key | default | meaning |")) == set(WeightedReward.model_fields) - {"name"}


def test_its_functions_run_and_its_lists_are_made(
    page: str, registry: Registry, tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlhf_grpo import GRPOConfig

    from rlhf_core.rollouts import open_rewards, score

    monkeypatch.chdir(tmp_path)
    tiny.make_model("score", scale=4.0).save("path/to/reward_model")
    Path("my_rewards.py").write_text("\n".join(blocks(page, "python")))
    stage = SimpleNamespace(
        name="policy", devices=tiny.one_device, mesh=None, is_main=True, registry=registry, inputs={}
    )
    inputs = RewardInputs(
        prompts=["a b", "a b"],
        completions=["<think>3</think> #### 4", "5"],
        completion_ids=[[5, 6, 7, 8], [5] * 900],
        columns={"answer": ["4", None]},
    )
    tables = []
    for block in blocks(page, "toml"):
        if "url =" in block:  # tests/plugins/remote asks services
            continue
        config = build(GRPOConfig, tomllib.loads(block), registry=registry)
        rewards = open_rewards(config.rewards, stage)
        for reward in rewards:
            if hasattr(reward.function, "setup"):
                reward.function.setup(stage)
        tables.append(score(rewards, inputs))
    first, second = tables
    np.testing.assert_allclose(first, [[1, 1, 0, 1], [np.nan, 0, -132 / 256, 1 / 898]])
    plain = registry.get(REWARD, "model", model="path/to/reward_model")
    plain.setup(stage)
    scores = plain(inputs.prompts, inputs.completions)
    np.testing.assert_allclose(second, np.stack([[1, 0], np.array(scores) / 2], -1), rtol=1e-6)
