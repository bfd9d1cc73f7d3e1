"""A run that was stopped in the middle of a rollout goes on with another number of devices.

With the same number, to the same bits: `check_trainer`, and the updates' data in `test_feed.py`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from rlhf_dpo import OnlineDPOConfig
from rlhf_grpo import GRPOConfig

from rlhf_core import hookimpl, load_model
from rlhf_core.errors import RunError
from rlhf_core.mesh import make_mesh
from tests.shared.short_runs import early

SHARED: dict[str, Any] = {
    "learning_rate": 1e-2,
    "total_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 6,
    "max_training_steps": 4,
    "steps_per_generation": 2,
    "num_iterations": 2,
    "log_steps": 1,
    "save_steps": 1,
    "num_preview_samples": 0,
}
CONFIGS: dict[str, Any] = {
    "grpo": GRPOConfig(
        **SHARED, top_entropy_quantile=0.5, entropy_coef=0.01, kl={"beta": 0.1, "place": "reward"}
    ),
    "online_dpo": OnlineDPOConfig(**SHARED, beta=0.5),
}
COMPARED = {
    "grpo": ("loss", "kl", "entropy", "reward"),
    "online_dpo": ("loss", "rewards/margins", "frac_tied", "reward"),
}


class StopError(Exception):
    pass


class StopsAt:
    """Ends a run after an update; the update before it is saved."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.rows: dict[int, dict[str, float]] = {}

    @hookimpl
    def rlhf_step_end(self, step: int, metrics: dict[str, float]) -> None:
        if step == self.step:
            raise StopError
        self.rows[step] = dict(metrics)


def trained(
    tiny: ModuleType,
    model: Any,
    directory: Path,
    trainer: str,
    devices: int,
    stop: int | None = None,
    context: int = 1,
) -> tuple[dict[str, np.ndarray], dict[int, dict[str, float]]]:
    watch = StopsAt(stop or -1)
    inputs = {"model": model, "rewards": [early], "train_dataset": tiny.prompts(6)}
    mesh = make_mesh(context=context, devices=jax.devices()[:devices])
    artifact = tiny.run(trainer, CONFIGS[trainer], directory, listeners=[watch], mesh=mesh, **inputs)
    return tiny.leaves(load_model(artifact.path, mesh=tiny.one_device()).params), watch.rows


@pytest.fixture(scope="module")
def model(tiny: ModuleType) -> Any:
    return tiny.make_model("lm", scale=4.0)


@pytest.fixture(scope="module")
def whole(tiny: ModuleType, model: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda trainer: trained(tiny, model, tmp_path_factory.mktemp("whole"), trainer, 1))


@pytest.mark.long
@pytest.mark.parametrize(
    ("trainer", "first", "then", "context"),
    [("grpo", 8, 1, 1), ("grpo", 1, 8, 1), ("grpo", 4, 4, 2), ("online_dpo", 1, 8, 1)],
)  # 2: rows that are cut
def test_a_run_resumes_within_a_rollout_on_another_mesh(
    trainer: str,
    first: int,
    then: int,
    context: int,
    whole: Any,
    tiny: ModuleType,
    model: Any,
    tmp_path: Path,
) -> None:
    with pytest.raises((StopError, RunError)) as stopped:
        trained(tiny, model, tmp_path, trainer, first, stop=2, context=context)
    assert "StopError" in repr(stopped.getrepr())
    assert [path.name for path in (tmp_path / "checkpoints").glob("*1")]
    params, rows = trained(tiny, model, tmp_path, trainer, then, context=context)
    assert sorted(rows) == [2, 3, 4]
    expected, logged = whole(trainer)
    for name in COMPARED[trainer]:
        for step, row in rows.items():
            assert row[name] == pytest.approx(logged[step][name], abs=2e-5), (name, step)
    for name, leaf in params.items():
        np.testing.assert_allclose(leaf, expected[name], rtol=0, atol=2e-4, err_msg=name)
