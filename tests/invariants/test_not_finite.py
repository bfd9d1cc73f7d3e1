"""A loss that is not finite ends the run, names the example, and leaves the last good state."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_core import PAIRWISE_LOSS, POLICY_LOSS, LossOutput, create_state, hookimpl, optimizers, plugins
from rlhf_core.checkpoint import Checkpoints
from rlhf_core.errors import RunError
from rlhf_core.state import abstract_state


class Poison:
    """Registers losses that are not a number for one example."""

    @hookimpl
    def rlhf_register(self, registry: Any) -> None:
        registry.add(PAIRWISE_LOSS, "poisoned", poisoned_pair)
        registry.add(POLICY_LOSS, "poisoned", poisoned_token)


def poisoned_pair(inputs: Any) -> LossOutput:
    loss = -jax.nn.log_sigmoid(inputs.chosen - inputs.rejected)
    return LossOutput(jnp.where(inputs.margin == 13.0, jnp.nan, loss))


def poisoned_token(inputs: Any) -> LossOutput:
    loss = -jnp.exp(inputs.logps - inputs.old_logps) * inputs.advantages
    return LossOutput(jnp.where(inputs.advantages > 100.0, jnp.nan, loss))


def last_state(model: Any, config: Any, directory: Path) -> tuple[int, Any]:
    """The newest checkpoint of a run, its step and state."""
    tx, _ = optimizers.make_optimizer(config, plugins.load().registry, 6)
    checkpoints = Checkpoints(directory / "checkpoints", keep=None)
    found = checkpoints.restore(abstract_state(create_state(model, tx)))
    checkpoints.close()
    assert found is not None
    return found.step, found.state


def assert_good_state_kept(model: Any, config: Any, directory: Path, update: int) -> None:
    step, state = last_state(model, config, directory)
    assert step == update - 1 == int(state.step)
    assert int(state.guard) == -1
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state.params, state.opt_state)))
    moved = [
        not np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(model.params), strict=True)
    ]
    assert any(moved)


@pytest.mark.parametrize("log_steps", [pytest.param(1, marks=pytest.mark.exhaustive), 10])
def test_a_loss_that_is_not_finite_names_update_row_and_example(
    tiny: ModuleType, short_runs: ModuleType, short: Any, tmp_path: Path, log_steps: int
) -> None:
    data = [dict(row, margin=13.0 if i == 9 else 0.0) for i, row in enumerate(short.rows["reward"])]
    file = tiny.write_rows(tmp_path / "pairs.jsonl", data)
    options = {"loss": "poisoned", "shuffle_train_dataset": False, "log_steps": log_steps}
    with pytest.raises(RunError) as caught:
        short.train("reward", listeners=(Poison(),), inputs={"train_dataset": str(file)}, **options)
    message = str(caught.value)
    assert "stage 'reward': loss or gradient of update 3 is not finite" in message
    assert re.search(r"row \d of micro-batch \d \(\S*pairs\.jsonl row 10\)\.", message)
    assert str(tmp_path / "reward" / "checkpoints") in message
    assert_good_state_kept(short.models["reward"], short_runs.CONFIGS["reward"], tmp_path / "reward", 3)
    logged = tiny.read_rows(tmp_path / "reward" / "metrics.jsonl") if log_steps == 1 else []
    assert all(math.isfinite(row["loss"]) for row in logged)
    with pytest.raises(RunError, match="update 3 is not finite"):  # and again from there
        short.train("reward", listeners=(Poison(),), inputs={"train_dataset": str(file)}, **options)


@pytest.mark.long  # the places of a rollout: tests/plugins/grpo/test_updates.py
def test_a_policy_loss_that_is_not_finite_names_the_prompt(
    tiny: ModuleType, short_runs: ModuleType, short: Any, tmp_path: Path
) -> None:
    file = tiny.write_rows(tmp_path / "prompts.jsonl", short.rows["grpo"])

    def huge(number: list[int], completions: list[str]) -> list[float]:
        """One completion of prompt number 4 is worth thousands."""
        first = number.index(4) if 4 in number else -1
        return [5000.0 if i == first else float(len(c)) for i, c in enumerate(completions)]

    options = {
        "loss": "poisoned",
        "advantage": {"name": "group", "scale": "none"},
        "shuffle_train_dataset": False,
        "num_iterations": 1,
    }
    inputs = {"train_dataset": str(file), "rewards": [huge]}
    with pytest.raises(RunError) as caught:
        short.train("grpo", listeners=(Poison(),), inputs=inputs, **options)
    message = str(caught.value)
    assert "loss or gradient of update 3 is not finite" in message
    assert "prompts.jsonl row 5" in message
    assert not any(f"row {n})" in message for n in (1, 2, 3, 4, 7))
    assert_good_state_kept(short.models["grpo"], short_runs.CONFIGS["grpo"], tmp_path / "grpo", 3)
