"""Values that an objective returns for the rows of an update: an action that asks for them gets those of its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from rlhf_core import TRAINER, InputError, Registry, TrainerConfig, fit, hookimpl
from rlhf_core.fit import Action
from rlhf_core.mesh import make_mesh
from rlhf_core.metrics import Mean
from rlhf_core.objective import trained_logps, trained_weight
from rlhf_core.step import Programs
from rlhf_core.training import Build, Context, define_trainer


def objective(model: Any, params: Any, batch: Any) -> tuple[Mean, dict[str, Any], Mapping[str, Any]]:
    """Of every trained token its id and log-probability, and of every sequence its length."""
    import jax.numpy as jnp

    logps, _ = trained_logps(model, params, batch)
    tokens = jnp.take_along_axis(batch.rows.tokens, jnp.maximum(batch.trained, 0), axis=1)
    ends = jnp.take_along_axis(batch.rows.positions, jnp.maximum(batch.last, 0), axis=1) + 1
    return Mean.of(-logps, trained_weight(batch)), {}, {"logps": logps, "tokens": tokens, "length": ends}


class Trainer:
    """A plugin with a trainer whose action keeps what it gets."""

    def __init__(self, values: dict[str, Any], every: int = 1) -> None:
        self.got: dict[int, fit.UpdateValues] = {}
        self.values, self.every = values, every

    def build(self, config: TrainerConfig, context: Context) -> Build:
        model = context.model("lm")
        self.texts = context.texts("train_data")
        model, updates = context.updates(model, self.texts, reads_tokens=True)
        action = Action(self.every, self.keep, values=self.values)
        return Build(model, updates, partial(objective, model.definition), [action] if self.values else [])

    def keep(self, at: fit.Moment) -> None:
        assert at.values is not None
        self.got[at.step] = at.values
        with pytest.raises(RuntimeError, match="one update late"):
            _ = at.state

    @hookimpl
    def rlhf_register(self, registry: Registry) -> None:
        registry.add(
            TRAINER, "valued", define_trainer(TrainerConfig, {"model": "language_model"}, self.build)
        )


def train(
    tiny: ModuleType, path: Path, trainer: Trainer, *, mesh: Any = None, rows: Any, **changes: Any
) -> None:
    options = {"total_batch_size": 6, "max_training_steps": 4, "log_steps": 1, **changes}
    model = tiny.make_model(scale=4.0)
    config = TrainerConfig(**options)
    tiny.run("valued", config, path, listeners=[trainer], mesh=mesh, model=model, train_dataset=rows)


ASKED = {"logps": "token", "tokens": "token", "length": "sequence"}


@pytest.mark.parametrize(
    ("count", "options"),
    [
        pytest.param(1, {}, id="one device"),
        pytest.param(2, {"gradient_accumulation_steps": 2}, id="two devices"),
    ],
)
def test_values_are_those_of_the_rows(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, options: dict[str, Any]
) -> None:
    micro_batches: list[int] = []
    plain = Programs.accumulate

    def accumulate(self: Programs, state: Any, batch: Any, before: Any, number: int = 0, *rest: Any) -> Any:
        micro_batches.append(number)
        return plain(self, state, batch, before, number, *rest)

    monkeypatch.setattr(Programs, "accumulate", accumulate)
    rows, trainer = tiny.texts(13), Trainer(ASKED)
    mesh = make_mesh(data=count, devices=jax.devices()[:count])
    train(tiny, tmp_path, trainer, mesh=mesh, rows=rows, **options)
    assert max(micro_batches) > 0
    assert sorted(trainer.got) == [1, 2, 3, 4]
    texts, model = trainer.texts, tiny.make_model(scale=4.0)
    seen: list[int] = []
    for step, found in trainer.got.items():
        assert found.numbers.tolist() == sorted(found.numbers.tolist())
        seen += found.numbers.tolist()
        for i, row in enumerate(found.numbers.tolist()):
            assert found.where[i] == texts.where(row)
            tree = texts.trees[row]
            ids = np.concatenate([tree.prefix, *tree.branches])
            completion = ids[len(ids) - len(found.arrays["tokens"][i]) :]
            np.testing.assert_array_equal(found.arrays["tokens"][i], completion)
            assert found.arrays["length"][i] == len(ids)
            if step == 1:  # by the model that training started from
                logits = np.asarray(model.logits(ids[None], np.ones_like(ids)[None]), np.float64)[0]
                logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
                expected = logps[np.arange(len(ids) - 1), ids[1:]][len(ids) - 1 - len(completion) :]
                np.testing.assert_allclose(found.arrays["logps"][i], expected, atol=2e-5)
    assert set(seen) == set(range(13))  # two epochs but for two rows


def test_values_change_nothing_and_cost_nothing_where_none_asks(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned: list[int] = []
    plain = Programs.accumulate

    def accumulate(self: Programs, *arguments: Any) -> Any:
        done = plain(self, *arguments)
        returned.append(len(done.values))
        return done

    monkeypatch.setattr(Programs, "accumulate", accumulate)
    rows = tiny.texts(13)
    train(tiny, tmp_path / "none", Trainer({}), rows=rows)
    assert set(returned) == {0}
    returned.clear()
    some = Trainer({"logps": "token"}, every=3)
    train(tiny, tmp_path / "some", some, rows=rows)
    assert set(returned) == {1}
    assert list(some.got) == [3]
    one, other = (tiny.read_rows(tmp_path / name / "metrics.jsonl") for name in ("none", "some"))
    assert [row["loss"] for row in one] == [row["loss"] for row in other]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"logp": "token"},
            r"asks for the values 'logp', .*Did you mean 'logps'\? It returns: length, logps, tokens",
        ),
        ({"length": "token"}, r"'length' have the shape \[\d+, \d+\]; .* for each trained token of each row"),
        ({"logps": "sequence"}, r"'logps' have the shape \[\d+, \d+\]; .* for each sequence of each row"),
    ],
)
def test_values_that_an_objective_does_not_return(
    asked: dict[str, Any], message: str, tiny: ModuleType, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        train(tiny, tmp_path, Trainer(asked), rows=tiny.texts(13))


def test_the_numbers_of_completions(short: Any, change_build: Callable[..., None]) -> None:
    """Of rollouts, values go by the number of the completion."""
    got: dict[int, fit.UpdateValues] = {}

    def keep(at: fit.Moment) -> None:
        assert at.values is not None
        got[at.step] = at.values

    def with_rewards(build: fit.Build) -> fit.Build:
        def valued(params: Any, batch: Any) -> Any:
            return *build.objective(params, batch), {"reward": batch.sequence_values["reward"]}

        action = Action(1, keep, values={"reward": "sequence"})
        return fit.replace(build, objective=valued, actions=[action])

    change_build(with_rewards)
    short.train("grpo", max_training_steps=2)
    assert [each.numbers.tolist() for each in got.values()] == [list(range(8))] * 2
    samples = short.tiny.read_rows(short.directory / "grpo/samples/update-000000.jsonl")
    np.testing.assert_allclose(got[1].arrays["reward"], [row["reward"] for row in samples], rtol=1e-6)
