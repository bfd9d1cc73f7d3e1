"""The kit for trainers finds each defect, and only that; our trainers have none."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import Field
from rlhf_dpo import DPOConfig, OnlineDPOConfig
from rlhf_grpo import GRPOConfig
from rlhf_sft import SFTConfig
from safetensors.numpy import save_file

from rlhf_core import TRAINER, Stage, Trainer, TrainerConfig, artifacts, plugins
from rlhf_core.errors import RunError, Stopped
from rlhf_core.runtime import stop_signals
from rlhf_core.testing import check_trainer, pairs, prompts, texts
from rlhf_core.training import Build, Context, define_trainer
from tests.shared.short_runs import early


class Config(TrainerConfig):
    """The state of a trainer without a model: x moves to 1."""


@dataclass
class Weights:
    x: np.ndarray
    tokenizer: None = None

    def save(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        save_file({"x": self.x}, path / "model.safetensors")


def train(
    config: TrainerConfig,
    stage: Stage,
    *,
    measure: Callable[[np.ndarray], Mapping[str, Any]] = lambda x: {"loss": float((x - 1).sum() ** 2)},
    stops: bool = True,
    remembers: Sequence[str] = ("step", "x", "speed", "anchor"),
    every: int = 1,
    rate: Callable[[Stage], float] = lambda stage: 0.1,
    spoil: float = 1.0,
    announces: bool = True,
    kind: str = "point",
    weights: Any = None,
) -> None:
    file = stage.dir / "state.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    known = {name: known[name] for name in remembers if name in known}
    x, speed = np.array(known.get("x", [3.0, 5.0])), np.array(known.get("speed", [0.0, 0.0]))
    anchor = np.array(known.get("anchor", x))  # what the next `every` updates start from
    with stop_signals() as stop:
        for step in range(known.get("step", 0), config.max_training_steps or 1):
            anchor = x if step % every == 0 else anchor
            speed = 0.9 * speed - rate(stage) * (anchor - 1)
            x = x + speed
            stage.hook.rlhf_step_end(stage=stage, step=step + 1, metrics=measure(x))
            kept = {"x": x.tolist(), "speed": speed.tolist(), "anchor": anchor.tolist()}
            file.write_text(json.dumps({"step": step + 1, **kept}))
            if stops and stop.is_set():
                raise Stopped("stopped, state saved")
    hook = stage.hook if announces else Silent()
    artifacts.save_model(replace(stage, hook=hook), "model", kind, weights or Weights(x * spoil))  # type: ignore[arg-type]


class Silent:
    def rlhf_artifact_saved(self, **_: Any) -> None: ...


def variant(**changes: Any) -> Trainer:
    return Trainer(Config, {"model": "point"}, lambda config, stage: train(config, stage, **changes))


class Forgetful(Config):
    size: Any = Field(np.float32(1), description="which JSON cannot hold")


def writes(config: Any, context: Context) -> Build:
    context.stage.dir.mkdir(parents=True, exist_ok=True)
    (context.stage.dir / "forecast.txt").write_text("?")
    built: Build = plugins.load().registry.get(TRAINER, "sft").build(config, context)
    return built


def evaluates_in_vain(config: Any, context: Context) -> Build:
    built: Build = plugins.load().registry.get(TRAINER, "sft").build(config, context)
    return replace(built, actions=context.evaluations(lambda _: evaluate))


def evaluate(state: Any) -> dict[str, float]:
    raise RunError("of no use")


def fails(config: TrainerConfig, stage: Stage) -> None:
    raise RunError("no")


good = variant()
MUTANTS: dict[str, tuple[str, Trainer]] = {
    "a config that is none": ("component", replace(good, config=dict)),  # type: ignore[arg-type]
    # A run records its config, too.
    "a config that JSON cannot hold": ("config finishes", replace(good, config=Forgetful)),
    "a build that writes": ("forecast", replace(good, config=SFTConfig, build=writes)),
    "a build that fails": ("forecast", replace(good, build=fails)),
    "a run that fails": ("finishes", replace(good, run=fails)),
    "an output that is not saved": ("finishes", replace(good, outputs={"model": "point", "more": "point"})),
    "no outputs": ("outputs", replace(good, outputs={})),
    "weights that are NaN": ("outputs", variant(spoil=np.nan)),
    "an output nobody hears of": ("outputs", variant(announces=False)),
    "a reward model without a contract": (
        "outputs",
        replace(variant(kind="reward_model"), outputs={"model": "reward_model"}),
    ),
    "a metric that is NaN": ("metrics", variant(measure=lambda x: {"loss": 0.0, "kl": float("nan")})),
    "an array as a metric": ("metrics", variant(measure=lambda x: {"loss": jnp.float32(0.5)})),
    "an evaluation that fails": (
        "evaluation",
        define_trainer(SFTConfig, {"model": "language_model"}, evaluates_in_vain),
    ),
    "no loss": ("metrics", variant(measure=lambda x: {"x": 1.0})),
    "a signal that is ignored": ("stop", variant(stops=False)),
    "a run that begins again": ("resume", variant(remembers=())),
    "a checkpoint without the momentum": ("resume", variant(remembers=("step", "x"))),
    "a rollout of two updates that is not kept": (
        "resume",
        variant(every=2, remembers=("step", "x", "speed")),
    ),
    "a rollout of three updates that is not kept": (
        "resume",
        variant(every=3, remembers=("step", "x", "speed")),
    ),
    "a step that counts devices": ("mesh", variant(rate=lambda stage: 0.1 * stage.devices().size)),
}


@pytest.mark.parametrize("case", MUTANTS)
def test_the_defect_is_found(case: str, failures: Any) -> None:
    names, trainer = MUTANTS[case]
    found = failures(check_trainer, trainer, rows=texts(4))
    assert set(found) == set(names.split()), found


def test_the_trainer_that_they_are_made_of_has_none() -> None:
    check_trainer(good, Config(max_training_steps=8), rows=texts(4))


@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_a_language_model_is_opened_and_read(scale: float, tiny: ModuleType, failures: Any) -> None:
    """Its weights may be finite and its outputs not."""
    model = tiny.make_model()
    for part in ("norm", "lm_head"):
        model.params[part] = jax.tree.map(lambda x: x * scale, model.params[part])
    trainer = replace(variant(kind="language_model", weights=model), outputs={"model": "language_model"})
    found = failures(check_trainer, trainer, rows=texts(4))
    assert set(found) == (set() if scale == 1 else {"outputs"}), found
    assert scale == 1 or re.search(r"'model': its outputs: .* not finite", found["outputs"])


def test_what_is_said(failures: Any) -> None:
    said = failures(check_trainer, MUTANTS["a run that begins again"][1], rows=texts(4))["resume"]
    assert "interrupted after update 3 and starts over at update 1" in said
    said = failures(check_trainer, MUTANTS["a checkpoint without the momentum"][1], rows=texts(4))["resume"]
    assert "'model' of an interrupted run differs in model.safetensors" in said
    said = failures(check_trainer, MUTANTS["a reward model without a contract"][1], rows=texts(4))["outputs"]
    assert "contract=Scorer.contract_of(context, model)" in said


OURS: dict[str, dict[str, Any]] = {
    "sft": {"rows": texts()},
    "reward": {"rows": pairs()},
    "kto": {"rows": [row | {"label": i % 2 == 0} for i, row in enumerate(texts())]},
    "grpo": {
        "config": GRPOConfig(total_batch_size=8, num_generations=4, max_completion_length=6),
        "rows": prompts(),
        "rewards": [early],
    },
    "dpo": {"config": DPOConfig(loss="simpo"), "rows": pairs()},
    "online_dpo": {
        # An update is stopped in the middle of a rollout of four.
        "config": OnlineDPOConfig(
            total_batch_size=8, steps_per_generation=2, num_iterations=2, max_completion_length=6
        ),
        "rows": prompts(),
        "rewards": [early],
    },
}


@pytest.mark.long
@pytest.mark.parametrize("name", OURS)
def test_built_in_components_pass(name: str) -> None:
    check_trainer(name, **OURS[name])
