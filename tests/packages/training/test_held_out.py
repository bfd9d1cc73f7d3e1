"""Held-out rows: the first batches, once each; ids that the model lacks are an error before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from rlhf_core import TrainerConfig, data
from rlhf_core.errors import InputError
from rlhf_core.fit import ExampleUpdates, choose_row_layout
from rlhf_core.metrics import Mean
from rlhf_core.models import Model
from rlhf_core.training import HeldOut

Make = Callable[..., HeldOut]


@pytest.fixture(scope="module")
def model(tiny: ModuleType) -> Model:
    made: Model = tiny.make_model("score", scale=4.0)
    return made


@pytest.fixture(scope="module")
def pairs(tiny: ModuleType) -> data.Examples:
    return data.encode_pairs(data.load(tiny.pairs(13)), tiny.make_tokenizer(), max_length=64)


def context(config: TrainerConfig, mesh: Any) -> Any:
    return SimpleNamespace(config=config, mesh=mesh, on_mesh=lambda choose: choose(), say=print)


@pytest.fixture
def make(tiny: ModuleType, model: Model, pairs: data.Examples) -> Make:
    def make(**fields: Any) -> HeldOut:
        config = TrainerConfig(eval_batch_size=5, **fields)
        rows = data.Source.of(pairs)
        return HeldOut(context(config, tiny.one_device()), model, rows, reads_tokens=False, group=2)

    return make


def test_evaluations_read_what_would_be_saved(make: Make, model: Model, monkeypatch: Any) -> None:
    def objective(params: Any, batch: Any) -> Any:
        return Mean.of(params["one"]), {}

    held_out = make()
    monkeypatch.setattr(held_out, "_stored", lambda params: {"one": 2 * params["one"]})
    assert held_out.evaluator(objective)(SimpleNamespace(params={"one": jnp.ones(3)})) == {"loss": 2.0}  # type: ignore[arg-type]


def test_ids_that_the_model_lacks_name_their_row(tiny: ModuleType, model: Model) -> None:
    rows = [{"chosen_ids": [3, 4], "rejected_ids": [3, n]} for n in (5, 900)]
    pairs = data.encode_pairs(data.load(rows), None, max_length=64)
    with pytest.raises(InputError, match=r"dataset row 2: token id 900 is out of range"):
        HeldOut(context(TrainerConfig(), tiny.one_device()), model, data.Source.of(pairs), reads_tokens=False)


@pytest.mark.parametrize("limits", [{"max_training_steps": 2}, {"num_train_epochs": 0.5}, {}], ids=str)
def test_rows_that_updates_reach(
    tiny: ModuleType, model: Model, pairs: data.Examples, limits: dict[str, Any]
) -> None:
    config = TrainerConfig(total_batch_size=4, **limits)
    layout = choose_row_layout(pairs, config, tiny.one_device(), 16, reads_tokens=False)
    updates = ExampleUpdates(data.Source.of(pairs, seed=3), config, layout)
    names = [
        update.where(i)
        for update in map(updates.update, range(updates.total))
        for batch in update.batches
        for i in batch.example[batch.example >= 0].tolist()
    ]
    assert set(names) == {pairs.where(i) for i in updates.rows_reached().tolist()}
    assert (
        len(updates.rows_reached()) == len(set(names)) == (13 if not limits else 8 if len(names) > 12 else 6)
    )
