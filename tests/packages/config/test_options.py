"""Strict tables: accepted values, messages for refused ones, and round trips through JSON."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.config import Component, Options, build, fields
from rlhf_core.contracts import Kind
from rlhf_core.errors import InputError
from tests.shared import option_tables as tables

PolicyConfig, Sampling, WeightedReward = tables.PolicyConfig, tables.Sampling, tables.WeightedReward


class FakeRegistry:
    """Knows the name "known" of every kind, whose only option is `epsilon`, and the attention "auto"."""

    def check(
        self, kind: Kind[Any], name: str, options: Mapping[str, Any], /, *, also: Any = ()
    ) -> list[tuple[str, str]]:
        if name not in ("known", "auto"):
            return [("name", f"no {kind.name} named '{name}'")]
        return [(option, f"unknown to {kind.name}") for option in options if option != "epsilon"]


def test_a_whole_number_is_a_number_and_a_list_is_a_tuple() -> None:
    config = PolicyConfig(learning_rate=1, sampling={"temperature": 2, "stops": [1, 2]}, num_train_epochs=3)
    assert (config.learning_rate, type(config.learning_rate)) == (1.0, float)
    assert config.sampling == Sampling(temperature=2.0, stops=(1, 2))
    assert (config.num_train_epochs, type(config.num_train_epochs)) == (3, int)
    assert PolicyConfig(num_train_epochs=0.5).num_train_epochs == 0.5


def test_nested_options_raise_the_same_error() -> None:
    with pytest.raises(InputError, match=r"^Sampling\.temperature: expected a number above 0, got 0\.0$"):
        Sampling(temperature=0.0)
    with pytest.raises(InputError, match=r"^Component\.name: missing; it has no default$"):
        Component()


def test_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        PolicyConfig().learning_rate = 1.0


# Components


def test_a_component_is_a_name_with_options() -> None:
    assert Component(name="a", b=(1, 2), path=Path("x")).options == {"b": [1, 2], "path": "x"}
    config = PolicyConfig(loss="grpo", rewards=["a", {"name": "b", "weight": 2, "target": 4}])
    assert config.loss == Component(name="grpo")
    assert [(r.name, r.weight, r.options) for r in config.rewards] == [
        ("a", 1.0, {}),
        ("b", 2.0, {"target": 4}),
    ]
    assert config.rewards[1].replace(weight=3.0) == WeightedReward(name="b", weight=3.0, target=4)


def test_build_checks_every_component_and_keeps_the_place() -> None:
    table = {
        "loss": {"name": "known", "epsilom": 1},
        "rewards": ["known", {"name": "tan", "weight": 2.0}],
        "advantage": {"name": "known", "x": 1},
        "learning_rate": "x",
    }
    with pytest.raises(InputError) as caught:
        build(PolicyConfig, table, where="stage 'policy'", registry=FakeRegistry())
    assert caught.value.problems == (
        "stage 'policy'.learning_rate: expected a number, got 'x'",
        "stage 'policy'.optimizer.name: no optimizer named 'adamw'",
        "stage 'policy'.loss.epsilom: unknown to policy loss",
        "stage 'policy'.advantage.x: unknown to advantage",
        "stage 'policy'.rewards[1].name: no reward named 'tan'",
    )
    with pytest.raises(InputError, match=r"logger\[0\]\.name: no logger named 'wandbb'"):
        build(PolicyConfig, {"logger": "wandbb"}, registry=FakeRegistry())


def test_build_gives_what_the_constructor_gives() -> None:
    table = {
        "loss": "known",
        "optimizer": "known",
        "epsilon": 0.1,
        "rewards": [{"name": "known", "weight": 2.0}],
    }
    assert build(PolicyConfig, table, registry=FakeRegistry()) == PolicyConfig(**table)


# Copies


def full() -> Any:
    return PolicyConfig(
        model={"model_type": "llama", "tokenizer": "t/"},
        train_data=["a.jsonl", {"name": "b", "weight": 2.0}],
        loss={"name": "x", "betas": (0.9, 0.95), "inner": {"a": (1,)}},
        rewards=[{"name": "r", "weight": 2, "target": 3}],
        sampling={"stops": [1, 2]},
        training_time_limit="2h30m",
        use_wandb=True,
    )


def test_round_trips() -> None:
    config = full()
    assert PolicyConfig.from_dict(config.to_dict()) == config
    assert PolicyConfig.from_json(config.to_json()) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert set(config.to_dict()) == set(PolicyConfig.model_fields)
    assert config.to_dict()["rewards"] == [{"name": "r", "weight": 2.0, "label": None, "target": 3}]


def test_replace() -> None:
    config = full()
    assert config.replace() == config
    changed = config.replace(epsilon=0.5, clip_grad=None, temperature=3.0)
    assert changed.loss == Component(name="x", betas=[0.9, 0.95], inner={"a": [1]}, epsilon=0.5)
    assert (changed.max_grad_norm, changed.sampling) == (None, Sampling(temperature=3.0, stops=(1, 2)))
    assert changed.replace(epsilon=0.6).epsilon == 0.6
    assert changed.replace(loss_type="y").loss == Component(name="y")


def test_abstract_types_are_described() -> None:
    class Called(Options):
        tools: Sequence[str | Callable[..., Any]] = ()

    (row,) = fields(Called)
    assert row.type == "list of text | function"
