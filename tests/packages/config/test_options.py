"""Strict tables: accepted values, messages for refused ones, and round trips through JSON."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.config import Component, FieldDoc, Options, TrainerConfig, build, fields
from rlhf_core.contracts import Kind
from rlhf_core.errors import InputError
from tests.shared import option_tables as tables

PolicyConfig, Sampling, WeightedReward = tables.PolicyConfig, tables.Sampling, tables.WeightedReward
problems = tables.problems


class FakeRegistry:
    """Knows the name "known" of every kind, whose only option is `epsilon`, and the attention "auto"."""

    def check(
        self, kind: Kind[Any], name: str, options: Mapping[str, Any], /, *, also: Any = ()
    ) -> list[tuple[str, str]]:
        if name not in ("known", "auto"):
            return [("name", f"no {kind.name} named '{name}'")]
        return [(option, f"unknown to {kind.name}") for option in options if option != "epsilon"]


# Strictness


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("learning_rate", "1e-3", "expected a number, got '1e-3'"),
        ("learning_rate", True, "expected a number, got true"),
        ("learning_rate", float("nan"), "expected a finite number, got nan"),
        ("learning_rate", -1, "expected a number of at least 0, got -1"),
        ("warmup_steps", 1.5, "expected a whole number, got 1.5"),
        ("warmup_steps", True, "expected a whole number, got true"),
        ("warmup_steps", "3", "expected a whole number, got '3'"),
        ("num_train_epochs", "two", "expected a number, got 'two'"),
        ("num_train_epochs", 0, "expected a number above 0, got 0"),
        ("shuffle_train_dataset", 1, "expected true or false, got 1"),
        ("model", 3, "expected text or a table, got 3"),
        ("loss", 3, "expected a name or a table, got 3"),
        ("kl", "k1", "expected a table, got 'k1'"),
        ("logger", 3, "expected a list, got 3"),
        ("progress_metrics", "loss", "expected a list, got 'loss'; write ['loss']"),
        (
            "frozen_parameters",
            "(",
            "'(' is not a regular expression: missing ), unterminated subpattern at position 0",
        ),
        ("lora", 8, "expected a table, got 8"),
        (
            "scheduler",
            "cosin",
            "expected 'constant', 'linear', 'cosine' or 'wsd', or module:function, got 'cosin'. Did you mean 'cosine'?",
        ),
    ],
)
def test_wrong_values(field: str, value: Any, message: str) -> None:
    assert problems(**{field: value}) == [f"{field}: {message}"]


@pytest.mark.parametrize(
    ("data", "place", "number"),
    [(["rows", math.inf], "[1]", "inf"), ({"path": "rows", "weight": math.nan}, ".weight", "nan")],
)
def test_a_number_that_is_not_finite_is_refused_where_a_field_takes_any_value(
    data: Any, place: str, number: str
) -> None:
    """A record of a run would hold null in its place."""
    assert problems(train_data=data) == [f"train_data{place}: expected a finite number, got {number}"]


def test_a_whole_number_is_a_number_and_a_list_is_a_tuple() -> None:
    config = PolicyConfig(learning_rate=1, sampling={"temperature": 2, "stops": [1, 2]}, num_train_epochs=3)
    assert (config.learning_rate, type(config.learning_rate)) == (1.0, float)
    assert config.sampling == Sampling(temperature=2.0, stops=(1, 2))
    assert (config.num_train_epochs, type(config.num_train_epochs)) == (3, int)
    assert PolicyConfig(num_train_epochs=0.5).num_train_epochs == 0.5
    assert problems(sampling={"stops": ["1"]}) == ["sampling.stops[0]: expected a whole number, got '1'"]


def test_unknown_fields_suggest_the_nearest_at_every_depth() -> None:
    assert problems(learning_rat=1.0, sampling={"temprature": 1.0}, epsilom=0.1) == [
        "sampling.temprature: unknown field. Did you mean 'temperature'?",
        "learning_rat: unknown field. Did you mean 'learning_rate'?",
        "epsilom: unknown field. Did you mean 'epsilon'?",
    ]
    assert problems(sampling={"zzz": 1}) == ["sampling.zzz: unknown field. Known: stops, temperature, top_k."]


def test_all_problems_are_reported_together() -> None:
    found = problems(
        learning_rate="x",
        zzz=1,
        epsilon=0.1,
        loss={"name": "dapo", "epsilon": 0.1},
        rewards=["a", {"weight": 1}],
    )
    assert sorted(line.split(":")[0] for line in found) == [
        "epsilon",
        "learning_rate",
        "rewards[1].name",
        "zzz",
    ]


def test_a_rule_across_fields_is_reported_without_a_field() -> None:
    assert problems(num_generations=5) == [": total_batch_size 32 splits a group"]


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
    with pytest.raises(InputError, match="Did you mean 'learning_rate'"):
        config.replace(learning_rat=1.0)
    with pytest.raises(InputError, match=r"the same as loss\.epsilon"):
        config.replace(epsilon=0.1, loss={"name": "x", "epsilon": 0.2})


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON"), ("[]", "expected a JSON object, got list")])
def test_broken_json(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        PolicyConfig.from_json(text)


# Lists of fields


def test_fields() -> None:
    rows = {row.name: row for row in fields(PolicyConfig)}
    assert rows["learning_rate"] == FieldDoc("learning_rate", "number", 5e-5, "peak learning rate", ", ≥ 0")
    assert rows["model"].type == "text | table | none"
    assert rows["scheduler"].type == "text | function"
    assert rows["overlong"].type == '"filter" | "truncate"'
    assert (rows["loss"].type, rows["loss"].default) == ("policy loss", {"name": "dapo"})
    assert (rows["rewards"].type, rows["advantage"].type) == ("list of reward", "advantage | none")
    assert rows["shuffle_train_dataset"].type == "true or false"
    short = FieldDoc("temperature", "number", 1.0, "short for sampling.temperature", ", > 0")
    assert rows["temperature"] == short
    assert rows["epsilon"] == FieldDoc("epsilon", "option", 0.2, "short for loss.epsilon")
    assert rows["loss_type"].default == "dapo"
    assert all(row.description for row in fields(TrainerConfig))


def test_abstract_types_are_described() -> None:
    class Called(Options):
        tools: Sequence[str | Callable[..., Any]] = ()

    (row,) = fields(Called)
    assert row.type == "list of text | function"
