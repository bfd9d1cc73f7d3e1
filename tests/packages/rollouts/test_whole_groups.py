"""An update holds whole groups of completions: what would split one is refused, by forecasts and by runs."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from rlhf_core import Stage, TrainerConfig, hookimpl, plugins
from rlhf_core.errors import InputError
from rlhf_core.mesh import make_mesh
from rlhf_core.packing import MICRO_BATCH_TOKENS, Layout, choose_layout, pack
from rlhf_core.plugins import load_file
from rlhf_core.rollouts import EnvironmentOptions, RolloutOptions
from rlhf_core.rollouts import rollout_rows as layouts
from rlhf_core.sampling import SamplingOptions
from rlhf_core.training import OnShapes, forecast

ppo: Any = load_file(Path(__file__).parents[3] / "examples/plugins/rlhf-ppo/rlhf_ppo.py")
MESSAGE = (
    r"total_batch_size={size} \(completions of an update\) is not a multiple of num_generations=4: "
    "a group would be split"
)


def reward(completions: list[str]) -> list[float]:
    return [0.0] * len(completions)


@pytest.mark.parametrize("size", [2, 6])
def test_a_group_is_never_split(size: int, tiny: ModuleType, tmp_path: Path) -> None:
    config = ppo.PPOConfig(total_batch_size=size, num_generations=4, max_training_steps=1)
    message = rf"^stage 'ppo'\.{MESSAGE.format(size=size)}$"
    given = {"tokenizer": tiny.make_tokenizer(), "rewards": [reward], "train_dataset": tiny.prompts(4)}
    host = plugins.load()
    stage = Stage("ppo", tmp_path / "check", 0, None, True, host.registry, host.hook, inputs=given)
    with pytest.raises(InputError, match=message):
        forecast(ppo.build, OnShapes(config.replace(model=tiny.SIZES), stage))
    inputs = {"model": tiny.make_model(scale=4.0), "rewards": [reward], "train_dataset": tiny.prompts(4)}
    with pytest.raises(InputError, match=message):
        tiny.run("ppo", config, tmp_path, listeners=[Registers()], **inputs)


class Registers:
    @hookimpl
    def rlhf_register(self, registry: Any) -> None:
        ppo.rlhf_register(registry)


@pytest.mark.parametrize(
    ("prompt", "hidden_size", "devices", "together"),
    [(10, 16, 2, 1), (300, 16, 2, 2), (10, 4096, 2, 4), (10, 16, 1, 4)],
)
def test_a_row_holds_as_many_completions_of_a_group_as_pay(
    prompt: int, hidden_size: int, devices: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where attention is dense and most of the work, it repeats the prompt instead."""
    mesh = make_mesh(devices=jax.devices()[:devices])
    config = TrainerConfig(total_batch_size=4, max_training_steps=1)
    asked: list[Any] = []

    def choose(sizes: Any, branches: int, **options: Any) -> Layout:
        asked.append((branches, options["longest"]))
        return choose_layout(sizes, branches, **options)

    monkeypatch.setattr(layouts, "choose_layout", choose)
    layout = layouts.group_layout(config, np.full(3, prompt), hidden_size, mesh, group=4, length=200)
    assert asked == [(together, prompt + together * 200)]
    assert layout.time[-1] >= prompt + together * 200


@pytest.mark.parametrize(
    ("given", "length", "devices", "expected"),
    [
        ({}, 20, 1, (4, 2, 200, 3)),
        ({"gradient_accumulation_steps": 2}, 20, 1, (4, 2, 100, 3)),
        ({"gradient_accumulation_steps": 500}, 20, 1, (4, 2, 1, 3)),
        ({"total_batch_size": 4 * 163}, 20, 1, (4, 163, 16300, 1)),
        ({"total_batch_size": 4 * 164}, 20, 1, (4, 164, MICRO_BATCH_TOKENS, 1)),  # not 16400
        ({"max_training_steps": 5}, 20, 1, (4, 2, 200, 5)),
        ({}, 200, 2, (1, 8, 1760, 3)),  # each completion with a prompt of its own
    ],
)
def test_rows_are_chosen_for_the_tokens_and_updates_of_a_run(
    given: dict[str, int],
    length: int,
    devices: int,
    expected: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(layouts, "choose_layout", lambda *sizes, **options: asked.append((*sizes, options)))
    mesh = make_mesh(devices=jax.devices()[:devices])
    options: dict[str, Any] = {"total_batch_size": 8, "num_train_epochs": 1, **given}
    config = TrainerConfig(**options)
    prompts = np.array([5, 10, 20, 30, 35])
    layouts.group_layout(config, prompts, 16, mesh, group=4, length=length)
    ((_, together, chosen),) = asked
    names = ("trees_per_update", "max_tokens", "updates")
    assert (together, *(chosen[name] for name in names)) == expected
    assert chosen["longest"] == 35 + together * length


def test_the_largest_groups_of_an_update_are_as_many_as_it_has() -> None:
    config = TrainerConfig(total_batch_size=8)
    groups = layouts.longest_groups(config, np.array([5, 6, 7]), group=4, length=3)
    assert [(len(tree.prefix), [len(x) for x in tree.branches]) for tree in groups] == [
        (5, [3] * 4),
        (6, [3] * 4),
    ]


def test_rows_of_turns_have_room_for_all_that_is_said_before_the_last() -> None:
    sizes, sampling = np.array([3, 8]), SamplingOptions(max_completion_length=4)

    def options(**environment: Any) -> RolloutOptions:
        return RolloutOptions(8, 2, sampling, 2, environment=EnvironmentOptions(max_tokens=20, **environment))

    kept = layouts.tree_sizes(sizes, options())
    assert (kept[0].tolist(), *kept[1:]) == ([3, 8], 2, 20)
    again = layouts.tree_sizes(sizes, options(history="encoded_again"))
    assert (again[0].tolist(), *again[1:]) == ([19, 24], 1, 4)


@pytest.mark.parametrize(
    ("prompt", "length", "per_update", "updates"),
    [
        (200, 1024, 4, 16),
        (60, 32, 8, 2000),
        pytest.param(60, 256, 32, 2000, marks=pytest.mark.long),
        pytest.param(128, 208, 8, 16, marks=pytest.mark.long),
    ],
)
def test_rows_are_full_whether_completions_are_short_or_long(
    prompt: int, length: int, per_update: int, updates: int
) -> None:
    """Rows are compiled before it is known how much of their length completions will use."""
    mesh, prompts = make_mesh(devices=jax.devices()[:1]), np.full(64, prompt)
    config = TrainerConfig(total_batch_size=8 * per_update, max_training_steps=updates)
    layout = layouts.group_layout(config, prompts, 576, mesh, group=8, length=length)
    tokens, slots = [], []
    for part in np.linspace(0.2, 1, 9):
        groups = layouts.full_groups(prompts[:per_update], group=8, length=int(part * length))
        tokens.append(sum(group.size for group in groups))
        slots.append(sum(batch.rows.tokens.size for batch in pack(groups, layout)))
    assert slots == sorted(slots)
    assert sum(tokens) >= 0.83 * sum(slots)
    assert tokens[-1] >= 0.9 * slots[-1]
