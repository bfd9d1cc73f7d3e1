"""Runs of one process share nothing: each computes what a fresh process would."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlhf_core import TRAINER, LossOutput, RunError, installed_registry, run_pipeline
from rlhf_core.contracts import PairInputs
from rlhf_core.metrics import Mean
from rlhf_core.models import Decoder
from rlhf_core.plugins import load_file
from rlhf_core.runtime import caches
from rlhf_core.state import TrainState
from rlhf_core.training import PaddedObjective, saved_bytes
from tests.shared.plans import planned_for

PROBE = """
import os
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from pydantic import Field

import knobs
from rlhf_core import (
    OPTIMIZER, PAIRWISE_LOSS, TRAINER, LossOutput, Trainer, TrainerConfig, artifacts, hookimpl
)
from rlhf_core.config import Component
from rlhf_core.contracts import PairInputs
from rlhf_core.errors import RunError
from rlhf_core.mesh import replicated_sharding
from rlhf_core.metrics import Mean
from rlhf_core.optimizers import make_optimizer
from rlhf_core.state import TrainState
from rlhf_core.step import Programs

runs = 0


@jax.jit
def own_program(x):
    return knobs.in_jit * x


def body(x, _):
    return knobs.in_scan * x, None


@dataclass(frozen=True)
class Kept:
    keep: bool | int | float = 1.0

    def __call__(self, inputs):
        x = own_program(knobs.helper(inputs.chosen)) * knobs.in_loss * float(os.environ.get("PROBE", "1"))
        x = jax.lax.scan(body, x, None, length=1)[0]
        return LossOutput(x * {bool: 17.0, int: 13.0, float: 1.0}[type(self.keep)])


def reading(learning_rate):
    return optax.scale(-knobs.in_optimizer)


class Config(TrainerConfig):
    loss: Annotated[Component, PAIRWISE_LOSS] = Field(Component(name="kept"), description="a loss")
    fail: bool = Field(False, description="whether it ends by an error")


def objective(loss, params, batch):
    x = params["w"] * batch["x"]
    return Mean.of(loss(PairInputs(x, x, x)).loss), {}


class Weights:
    tokenizer = None

    def save(self, path):
        path.mkdir(parents=True, exist_ok=True)
        (path / "weights.txt").write_text("")


def run(config, stage):
    global runs
    runs += 1
    warnings.warn("the probe runs", stacklevel=1)
    tx, _ = make_optimizer(config, stage.registry, 1)
    place = partial(jax.device_put, device=replicated_sharding(stage.devices()))
    params = place({"w": np.float32(0)})
    state = TrainState(
        place(np.int32(0)), params, place(tx.init(params)), place(jax.random.key(0)), place(np.int32(-1)), None, tx
    )
    losses = stage.registry.get(PAIRWISE_LOSS, config.loss.name, **config.loss.options)
    programs = Programs(partial(objective, losses), state)
    done = programs.accumulate(state, {"x": np.ones(8, np.float32)}, None)
    state, _ = programs.apply(state, done)
    if config.fail:
        raise RunError("told to fail")
    stage.hook.rlhf_step_end(
        stage=stage, step=1, metrics={"moved": -float(state.params["w"]), "runs": float(runs)}
    )
    artifacts.save_model(stage, "model", "reward_model", Weights())


@hookimpl
def rlhf_register(registry):
    registry.add(TRAINER, "probe", Trainer(Config, {"model": "reward_model"}, run))
    registry.add(PAIRWISE_LOSS, "kept", Kept)
    registry.add(OPTIMIZER, "reading", reading)
"""
PIPELINE = """
[[stage]]
name = "probe"
trainer = "probe"
model = {{ model_type = "llama" }}
train_data = "train.jsonl"
optimizer = "reading"
max_grad_norm = 0
loss = {{ name = "kept", keep = {keep} }}
fail = {fail}
"""


@pytest.fixture
def knobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """What the probe reads besides its arguments, in a directory with its files."""
    module: Any = types.ModuleType("knobs")
    module.helper = lambda x: x
    module.in_jit = module.in_scan = module.in_loss = module.in_optimizer = 1.0
    monkeypatch.setitem(sys.modules, "knobs", module)
    monkeypatch.chdir(tmp_path)
    Path("probe.py").write_text(PROBE)
    Path("train.jsonl").write_text("{}\n")
    return module


def run_probe(directory: str, keep: str = "1.0", fail: str = "false") -> Any:
    """The metrics of the probe: `moved` is the product of everything that it reads."""
    Path("p.toml").write_text(PIPELINE.format(keep=keep, fail=fail))
    return run_pipeline("p.toml", plugins=["probe.py"], dir=directory).stages["probe"].metrics


@pytest.mark.filterwarnings("ignore:the probe runs")
@pytest.mark.usefixtures("nothing_shared")
def test_a_run_reads_what_holds_when_it_runs(knobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss's global, helper, environment and option's type; the global of its own jitted function and of its scan's
    body; what an optimizer reads.
    """
    load_file(Path("probe.py"))  # from before the runs, so that all of them have the same functions
    found = [run_probe("first")["moved"]]
    with monkeypatch.context() as patches:
        patches.setenv("PROBE", "13")
        patches.setattr(knobs, "helper", lambda x: 11.0 * x)
        for name, value in (("in_loss", 2.0), ("in_jit", 3.0), ("in_scan", 5.0), ("in_optimizer", 7.0)):
            patches.setattr(knobs, name, value)
        found.append(run_probe("changed")["moved"])
    found += [run_probe(keep, keep)["moved"] for keep in ("1", "true")]
    assert found == [1, 2 * 3 * 5 * 7 * 11 * 13, 13, 17]


@pytest.mark.usefixtures("nothing_shared", "knobs")
def test_a_run_leaves_nothing_of_its_files_and_warns_as_the_first_one_did() -> None:
    """The first run ends by an error; each counts the runs of its own module, and its warnings are in its events."""
    before = set(sys.modules)
    with pytest.raises(RunError, match="told to fail"):
        run_probe("first", fail="true")
    assert run_probe("second")["runs"] == 1
    for run in ("first", "second"):
        events = map(json.loads, Path(run, "events.jsonl").read_text().splitlines())
        assert "the probe runs" in [event.get("message") for event in events], run
    assert not [name for name in {*sys.modules} - before if name.startswith("rlhf_file")]


def test_a_run_within_a_run_is_part_of_it() -> None:
    ended: list[str] = []
    caches.at_run_end(lambda: ended.append("outside"))
    with caches.own_run():
        with caches.own_run():
            caches.at_run_end(lambda: ended.append("inside"))
        assert not ended
    assert ended == ["inside"]


@dataclass(frozen=True)
class Options:
    keep: Any
    rest: tuple[Any, ...] = ()
    note: Any = field(default=None, compare=False)


NUMBERS = (1, 1.0, True, np.float32(1), 0.0, -0.0)


@pytest.mark.parametrize(
    "made", [lambda x: x, Options, lambda x: Options(None, (x,)), lambda x: (Options(x), 2)]
)
def test_values_that_compare_equal_are_told_apart_by_type_and_sign(made: Callable[[Any], Any]) -> None:
    calls: list[Any] = []
    recall = caches.cached(lambda value: calls.append(value) or len(calls))
    assert [recall(made(number)) for number in NUMBERS] == [1, 2, 3, 4, 5, 6]
    assert [recall(made(number)) for number in NUMBERS] == [1, 2, 3, 4, 5, 6]
    assert caches.Exact(Options(1, note=[])) == caches.Exact(Options(1, note={}))


def test_definitions_of_models_are_told_apart_by_type(tiny: Any) -> None:
    """They are static arguments of programs, and keys of the sampler's and the scorer's."""
    config = tiny.make_model().definition.config
    eps = (config.norm_eps, 1, 1.0, 1)
    _, one, other, same = (Decoder(config=dataclasses.replace(config, norm_eps=x)) for x in eps)
    assert one != other
    assert one != dataclasses.replace(one, absent=((3, 5),))
    assert one == same
    assert hash(one) == hash(same)


@dataclass(frozen=True)
class Typed:
    """A pairwise loss whose size shows the type of its option."""

    keep: Any

    def __call__(self, inputs: PairInputs) -> LossOutput:
        size = {bool: 2.0, int: 3.0, float: 5.0}[type(self.keep)]
        return LossOutput(size + 0.0 * (inputs.chosen - inputs.rejected))


@dataclass(frozen=True)
class Plain(PaddedObjective):
    numbers = ("x",)
    loss: Typed

    def compute(self, model: Any, params: Any, batch: Any) -> Any:
        x = params["w"] * batch["x"]
        return Mean.of(self.loss(PairInputs(x, x, x)).loss), {}


def test_losses_of_functional_updates_are_told_apart_by_type() -> None:
    tx = optax.identity()
    params = {"w": jnp.float32(1)}
    zero, key, guard = jnp.int32(0), jax.random.key(0), jnp.int32(-1)
    state = TrainState(zero, params, tx.init(params), key, guard, None, tx)
    losses = [
        float(step(state, {"x": np.ones(2)})["loss"])
        for keep in (1, 1.0, True)
        for step in (Plain(Typed(keep)).evaluate, lambda *given, k=keep: Plain(Typed(k)).update(*given)[1])
    ]
    assert losses == [3, 3, 5, 5, 2, 2]


def test_files_and_environments_that_change_are_read_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time stamp and its size are those that Python's bytecode was kept for."""
    file = tmp_path / "quick.py"
    found = []
    for value in (1, 2):
        file.write_text(f"VALUE = {value}\n")
        os.utime(file, (1e9, 1e9))
        found.append(load_file(file).VALUE)
    assert found == [1, 2]

    assert "sft" in installed_registry().names(TRAINER)
    monkeypatch.setenv("RLHF_DISABLE_PLUGINS", "sft")
    assert "sft" not in installed_registry().names(TRAINER)


def test_forecasts_for_planned_devices_do_not_take_the_bytes_of_these(tiny: Any) -> None:
    """Layers compute in bfloat16 there."""
    definition = tiny.make_model().definition
    estimate = partial(saved_bytes, definition, (4, 64))
    here = estimate()
    with planned_for("gpu", 1):
        assert estimate() < here
    assert estimate() == here
