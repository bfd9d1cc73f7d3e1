"""Values that a model gives examples: of whole data and of streams, also after a kill."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_core import TRAINER, Registry, TrainerConfig, hookimpl
from rlhf_core.data import with_values
from rlhf_core.errors import InputError
from rlhf_core.fit import Action, Build, Moment, UpdateValues
from rlhf_core.metrics import Mean
from rlhf_core.objective import sequence_sums, trained_logps
from rlhf_core.training import Context, define_trainer
from tests.shared.interrupts import interrupt


def of_tokens(model: Any, params: Any, batch: Any) -> jax.Array:
    logps, _ = trained_logps(model, params, batch)
    return logps


def of_sequences(model: Any, params: Any, batch: Any) -> jax.Array:
    return sequence_sums(of_tokens(model, params, batch), batch)


def objective(model: Any, per: str, params: Any, batch: Any) -> Any:
    """The loss moves the model; the values are what was added, beside what the model says now."""
    now = of_tokens(model, params, batch)
    if per == "token":
        return Mean.of(-now, batch.trained >= 0), {}, {"now": now, "added": batch.token_values["added"]}
    sums = sequence_sums(now, batch)
    found = {"now": sums, "added": batch.sequence_values["added"]}
    return Mean.of(-now, batch.trained >= 0), {}, found


class Trainer:
    """A plugin with a trainer that keeps the values of its updates and of its evaluations."""

    def __init__(self, per: str = "sequence", both: bool = True, **options: Any) -> None:
        self.per, self.options, self.both = per, options, both
        self.got: dict[int, UpdateValues] = {}

    def build(self, config: TrainerConfig, context: Context) -> Build:
        model = context.model("lm")
        read = of_tokens if self.per == "token" else of_sequences

        def texts(field: str) -> Any:
            source = context.texts(field)
            given: Any = {"per": self.per, **self.options}
            return source and with_values(source, "added", read, **given)

        opened = texts("train_data") if self.both else context.texts("train_data")
        model, updates = context.updates(model, opened, reads_tokens=True)
        loss = partial(objective, model.definition, self.per)

        def held_out(field: str) -> Any:
            source = texts(field)
            if source is None:
                return None
            rows = context.held_out(model, source, reads_tokens=True)
            return rows.evaluator(loss, {"now": self.per, "added": self.per})  # type: ignore[dict-item]

        per: Any = {"now": self.per, "added": self.per}
        actions = [Action(1, self.keep, values=per), *context.evaluations(held_out)]
        return Build(model, updates, loss, actions, held=updates.held)

    def keep(self, at: Moment) -> None:
        assert at.values is not None
        self.got[at.step] = at.values

    @hookimpl
    def rlhf_register(self, registry: Registry) -> None:
        made = define_trainer(TrainerConfig, {"model": "language_model"}, self.build)
        registry.add(TRAINER, "added", made)


def train(tiny: ModuleType, path: Path, trainer: Trainer, *listeners: Any, **given: Any) -> Any:
    config = TrainerConfig(
        total_batch_size=4,
        learning_rate=1e-2,
        max_training_steps=4,
        log_steps=1,
        save_steps=1,
        **given.pop("settings", {}),
    )
    model = tiny.make_model(scale=4.0)
    return tiny.run("added", config, path, listeners=[trainer, *listeners], model=model, **given)


def arrays(found: UpdateValues, name: str) -> list[Any]:
    return [np.asarray(each) for each in found.arrays[name]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("per", ["sequence", "token"])
@pytest.mark.parametrize("reads", ["frozen", "state"])
def test_values_are_those_of_the_parameters_that_are_asked_for(
    reads: str, per: str, stream: bool, tiny: ModuleType, tmp_path: Path
) -> None:
    rows = tiny.texts(13)
    trainer = Trainer(per, reads=reads)
    given = {"train_dataset": (lambda: iter(rows)) if stream else rows}
    train(tiny, tmp_path, trainer, **given)
    first = dict(zip(trainer.got[1].where, arrays(trainer.got[1], "now"), strict=True))
    moved = False
    for step, found in trainer.got.items():
        for where, now, added in zip(found.where, arrays(found, "now"), arrays(found, "added"), strict=True):
            if reads == "state" or step == 1:
                np.testing.assert_allclose(added, now, atol=2e-5)
            elif where in first:
                np.testing.assert_allclose(added, first[where], atol=2e-5)
                moved = moved or bool(np.abs(added - now).max() > 1e-2)
            else:
                assert np.abs(added - now).max() > 1e-4
    assert sorted(trainer.got) == [1, 2, 3, 4]
    if reads == "frozen" and not stream:
        assert moved


@pytest.mark.parametrize("per", ["sequence", "token"])
def test_a_run_that_was_killed_has_the_values_of_its_start(
    per: str, tiny: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"train_dataset": tiny.texts(13), "eval_dataset": tiny.texts(5, seed=3)}
    straight, parts = (Trainer(per, reads="frozen", what="likelihoods") for _ in range(2))
    train(tiny, tmp_path / "a", straight, **given)
    assert "reading the likelihoods of 18 demonstrations under the starting" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        train(tiny, tmp_path / "b", parts, interrupt(2), **given)
    capsys.readouterr()
    train(tiny, tmp_path / "b", parts, **given)
    assert "reading the likelihoods" not in capsys.readouterr().err
    for one, other in zip(arrays(straight.got[4], "added"), arrays(parts.got[4], "added"), strict=True):
        np.testing.assert_array_equal(one, other)
    logged = [
        [row for row in tiny.read_rows(tmp_path / name / "metrics.jsonl") if "eval_loss" in row][-1][
            "eval_loss"
        ]
        for name in "ab"
    ]
    assert logged[0] == logged[1]


def test_an_estimate_over_an_update(tiny: ModuleType, tmp_path: Path) -> None:
    """Each example gets the mean of all, also where micro-batches are several."""

    def mean(values: np.ndarray) -> np.ndarray:
        assert values.shape == (4, 1)
        return np.full_like(values, values.mean())

    trainer = Trainer(reads="state", over_update=mean)
    settings = {"gradient_accumulation_steps": 2}
    train(tiny, tmp_path, trainer, train_dataset=tiny.texts(13), settings=settings)
    for found in trainer.got.values():
        added, now = (np.stack(arrays(found, name)) for name in ("added", "now"))
        np.testing.assert_allclose(added, np.full(4, now.mean()), rtol=1e-5)


def test_what_cannot_be_added_says_why(tiny: ModuleType, tmp_path: Path) -> None:
    given = {"train_dataset": tiny.texts(13), "eval_dataset": tiny.texts(5, seed=3)}
    with pytest.raises(InputError, match="over_update is for values that each update computes"):
        train(tiny, tmp_path / "a", Trainer(reads="frozen", over_update=jnp.ravel), **given)
    with pytest.raises(InputError, match=r"values of eval_data: give them to train_data, too"):
        train(tiny, tmp_path / "b", Trainer(reads="frozen", both=False), **given)
