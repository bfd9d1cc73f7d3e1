"""A second equal run in the same process traces and compiles nothing; one with another option does."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from rlhf_core.mesh import make_mesh
from tests.shared.compiled import LOWERED, compilations

OTHER: dict[str, dict[str, Any]] = {
    "sft": {"max_grad_norm": 0.5},
    "reward": {"center_rewards_coefficient": 0.03},
    "dpo": {"beta": 0.2},
    "online_dpo": {"beta": 0.2},
    "kto": {"desirable_weight": 0.9},
    "grpo": {"loss": {"name": "dapo", "epsilon": 0.3}},
}
"""Options that are constants of the programs."""


@pytest.mark.parametrize(
    ("trainer", "mesh"),
    [
        ("grpo", {}),
        pytest.param("sft", {"data": 2, "fsdp": 2}, marks=pytest.mark.long),
        *(
            pytest.param(name, {}, marks=pytest.mark.long)
            for name in ("sft", "reward", "dpo", "online_dpo", "kto")
        ),
    ],
)
def test_an_equal_run_lowers_and_compiles_nothing(short: Any, trainer: str, mesh: dict[str, int]) -> None:
    def inputs() -> dict[str, Any]:
        return {"mesh": make_mesh(**mesh, devices=jax.devices()[:4])} if mesh else {}

    first, _ = short.train(trainer, at="first", inputs=inputs(), max_training_steps=4)
    with compilations(LOWERED) as work:
        second, _ = short.train(trainer, at="second", inputs=inputs(), max_training_steps=4)
    assert not work
    assert {name: leaf.tobytes() for name, leaf in second.items()} == {
        name: leaf.tobytes() for name, leaf in first.items()
    }
    with compilations(LOWERED) as work:
        short.train(trainer, at="third", inputs=inputs(), max_training_steps=4, **OTHER[trainer])
    updates = "apply" if trainer == "sft" else "accumulate"
    assert any(updates in name for name in work)
