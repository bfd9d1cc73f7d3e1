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

from rlhf_core import PAIRWISE_LOSS, LossOutput, create_state, hookimpl, optimizers, plugins
from rlhf_core.checkpoint import Checkpoints
from rlhf_core.errors import RunError
from rlhf_core.state import abstract_state


class Poison:
    """Registers a loss that is not a number for one example."""

    @hookimpl
    def rlhf_register(self, registry: Any) -> None:
        registry.add(PAIRWISE_LOSS, "poisoned", poisoned_pair)


def poisoned_pair(inputs: Any) -> LossOutput:
    loss = -jax.nn.log_sigmoid(inputs.chosen - inputs.rejected)
    return LossOutput(jnp.where(inputs.margin == 13.0, jnp.nan, loss))


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
