"""What importing the trainer can reach: a stage opens samplers for its previews, by their name in the registry."""

from __future__ import annotations

from pathlib import Path

from tests.walk.source import imports, product, reach

REPOSITORY = Path(__file__).parents[3]


def test_sft_reaches_neither_samplers_nor_rewards_nor_rollouts() -> None:
    modules = product(REPOSITORY)
    graph = {name: set(imports(module, modules)) for name, module in modules.items()}
    rooms = {".".join(name.split(".")[:2]) for name in reach("rlhf_sft.train", graph)}
    assert "rlhf_core.training" in rooms
    apart = {f"rlhf_core.{room}" for room in ("sampling", "rewards", "rollouts", "environments")}
    assert not rooms & apart
