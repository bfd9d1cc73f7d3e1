"""Strict tables: what is accepted, what is refused and in which words, and the way to JSON and back."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import Field, ValidationError, model_validator

from rlhf_core.contracts import ADVANTAGE, POLICY_LOSS, REWARD, Kind
from rlhf_core.errors import InputError
from rlhf_core.options import Component, FieldDoc, Options, TrainerConfig, build, fields, parse_value


class Sampling(Options):
    temperature: float = Field(1.0, gt=0, description="softmax temperature")
    top_k: int | None = None
    stops: tuple[int, ...] = ()


class KL(Options):
    name: Literal["k1", "k3"] = "k3"
    beta: float = 0.04


class WeightedReward(Component):
    weight: float = 1.0
    label: str | None = None


class PolicyConfig(TrainerConfig):
    """A trainer's config as a plugin writes it."""

    FLAT: ClassVar[dict[str, Any]] = {
        "loss_type": ("loss", "name"),
        "epsilon": ("loss", "epsilon", 0.2),
        "delta": ("loss", "delta", None),
        "beta": ("kl", "beta"),
        "temperature": ("sampling", "temperature"),
        "top_k": ("sampling", "top_k"),
    }
    ALIASES: ClassVar[dict[str, str]] = {"group_size": "num_generations"}

    loss: Annotated[Component, POLICY_LOSS] = Component(name="dapo")
    advantage: Annotated[Component, ADVANTAGE] | None = None
    rewards: list[Annotated[WeightedReward, REWARD]] = Field([])
    sampling: Sampling = Sampling()
    kl: KL = KL()
    num_generations: int = Field(8, ge=2)

    @model_validator(mode="after")
    def _fits(self) -> PolicyConfig:
        if self.total_batch_size % self.num_generations:
            raise ValueError(f"total_batch_size {self.total_batch_size} splits a group")
        return self


class FakeRegistry:
    """Knows one name of every kind, whose only option is `epsilon`."""

    def check(
        self, kind: Kind[Any], name: str, options: Mapping[str, Any], /, *, also: Any = ()
    ) -> list[tuple[str, str]]:
        if name != "known":
            return [("name", f"no {kind.name} named '{name}'")]
        return [(option, f"unknown to {kind.name}") for option in options if option != "epsilon"]


def problems(**data: Any) -> list[str]:
    """The lines of the error, each without the class's name."""
    with pytest.raises(InputError) as caught:
        PolicyConfig(**data)
    lines = str(caught.value).split("\n")
    assert tuple(lines) == caught.value.problems
    assert all(line.startswith(("PolicyConfig.", "PolicyConfig:")) for line in lines)
    return [line.removeprefix("PolicyConfig").removeprefix(".") for line in lines]


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
        ("logger", "wandb", "expected a list, got 'wandb'"),
        (
            "frozen_parameters",
            "(",
            "'(' is not a regular expression: missing ), unterminated subpattern at position 0",
        ),
        ("lora", {"rank": 8}, "adapters are not available yet; leave it out to train all parameters"),
        (
            "scheduler",
            "cosin",
            "expected 'constant', 'linear', 'cosine' or 'wsd', got 'cosin'. Did you mean 'cosine'?",
        ),
    ],
)
def test_wrong_values(field: str, value: Any, message: str) -> None:
    assert problems(**{field: value}) == [f"{field}: {message}"]


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


def test_all_problems_are_told_at_once() -> None:
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


def test_a_rule_across_fields_is_told_without_a_field() -> None:
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


def test_build_gives_what_the_constructor_gives() -> None:
    table = {
        "loss": "known",
        "optimizer": "known",
        "epsilon": 0.1,
        "rewards": [{"name": "known", "weight": 2.0}],
    }
    assert build(PolicyConfig, table, registry=FakeRegistry()) == PolicyConfig(**table)


# Flat names


def test_flat_names_merge_into_the_default() -> None:
    config = PolicyConfig(epsilon=0.1, temperature=2.0, beta=0.5)
    assert config.loss == Component(name="dapo", epsilon=0.1)
    assert (config.sampling, config.kl) == (Sampling(temperature=2.0), KL(beta=0.5))
    assert PolicyConfig(loss_type="grpo", epsilon=0.1).loss == Component(name="grpo", epsilon=0.1)
    assert PolicyConfig(loss={"name": "grpo", "delta": 1.0}, epsilon=0.1).loss.options == {
        "delta": 1.0,
        "epsilon": 0.1,
    }


def test_a_default_s_options_do_not_follow_another_name() -> None:
    class Config(TrainerConfig):
        FLAT: ClassVar[dict[str, Any]] = {"loss_type": ("loss", "name"), "epsilon": ("loss", "epsilon")}
        loss: Annotated[Component, POLICY_LOSS] = Component(name="dapo", epsilon=0.3, dual_clip=3.0)

    assert Config(loss_type="dapo").loss.options == {"epsilon": 0.3, "dual_clip": 3.0}
    assert Config(epsilon=0.1).loss.options == {"epsilon": 0.1, "dual_clip": 3.0}
    assert Config(loss_type="grpo").loss == Component(name="grpo")
    assert Config(epsilon=0.1, loss_type="grpo").loss == Component(name="grpo", epsilon=0.1)


def test_flat_names_can_be_read() -> None:
    config = PolicyConfig(loss_type="grpo", temperature=2.0)
    assert (config.loss_type, config.temperature, config.beta) == ("grpo", 2.0, 0.04)
    assert (config.epsilon, config.delta) == (0.2, None)
    assert PolicyConfig(epsilon=0.1).epsilon == 0.1
    with pytest.raises(AttributeError):
        _ = config.epsilom


def test_none_is_an_option_not_given() -> None:
    assert PolicyConfig(delta=None).loss == Component(name="dapo")
    assert PolicyConfig(top_k=None).sampling.top_k is None
    assert problems(temperature=None) == ["sampling.temperature: expected a number, got none"]


def test_flat_and_nested_together_are_an_error() -> None:
    assert problems(epsilon=0.1, loss={"name": "dapo", "epsilon": 0.1}, loss_type="dapo") == [
        "loss_type: the same as loss.name, which is given too; remove one",
        "epsilon: the same as loss.epsilon, which is given too; remove one",
    ]
    assert problems(beta=0.1, kl=KL(beta=0.1)) == [
        "beta: the same as kl.beta, which is given too; remove one"
    ]
    assert PolicyConfig(beta=0.1, kl=KL(name="k1")).kl == KL(name="k1", beta=0.1)
    assert problems(max_grad_norm=1.0, clip_grad=2.0) == [
        "clip_grad: another name of max_grad_norm, which is given too; remove one"
    ]


def test_a_flat_name_must_point_somewhere() -> None:
    with pytest.raises(TypeError, match="'epsilon' must be no field, and 'los' must be one"):

        class Wrong(TrainerConfig):
            FLAT: ClassVar[dict[str, Any]] = {"epsilon": ("los", "epsilon")}


def test_other_spellings() -> None:
    config = PolicyConfig(clip_grad=2.0, repo_id="base", dataset_name="pairs", group_size=4)
    assert (config.max_grad_norm, config.clip_grad, config.model, config.train_data) == (
        2.0,
        2.0,
        "base",
        "pairs",
    )
    assert (config.num_generations, config.group_size) == (4, 4)
    assert problems(peft_config={}) == [
        "lora: adapters are not available yet; leave it out to train all parameters"
    ]
    split = PolicyConfig(dataset_name="pairs", dataset_split="train[:1%]")
    assert split.train_data == {"name": "pairs", "split": "train[:1%]"}
    assert problems(dataset_split="train") == [
        "dataset_split: needs train_data, one dataset by name or in a table"
    ]


def test_use_wandb() -> None:
    assert PolicyConfig(use_wandb=True).logger == [Component(name="wandb")]
    config = PolicyConfig(use_wandb=True, logger=["console"])
    assert [logger.name for logger in config.logger] == ["console", "wandb"]
    assert (config.use_wandb, PolicyConfig(use_wandb=False).use_wandb) == (True, False)
    assert config.replace(use_wandb=True) == config
    assert problems(use_wandb=True, logger=[{"name": "wandb"}]) == [
        "use_wandb: logger names wandb too; remove one"
    ]
    assert problems(use_wandb="yes") == ["use_wandb: expected true or false, got 'yes'"]


# Copies


def full() -> PolicyConfig:
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


# The shared fields


def test_defaults_are_the_contract_s() -> None:
    expected = {
        "learning_rate": 5e-5,
        "learning_rate_end": None,
        "scheduler": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "optimizer": {"name": "adamw"},
        "num_train_epochs": 10,
        "max_training_steps": None,
        "total_batch_size": 32,
        "gradient_accumulation_steps": 1,
        "max_sequence_length": 1024,
        "overlong": "filter",
        "truncation_mode": "keep_end",
        "shuffle_train_dataset": True,
        "log_steps": 10,
        "progress_bar_type": "rich",
        "logger": [],
        "disable_dropout": True,
    }
    unset = """model train_data eval_data shuffle_seed_train eval_batch_size evaluation_steps save_steps
        max_evaluation_steps save_interval_minutes save_total_limit save_directory training_time_limit
        frozen_parameters dataset_num_proc seed lora chat_template"""
    assert TrainerConfig().to_dict() == expected | dict.fromkeys(unset.split())
    assert TrainerConfig().use_wandb is False


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("2h30m", 9000.0),
        ("1d", 86400.0),
        ("90m", 5400.0),
        ("45s", 45.0),
        ("1h 1.5m", 3690.0),
        (10, 10.0),
        (0.5, 0.5),
    ],
)
def test_durations(given: Any, seconds: float) -> None:
    assert TrainerConfig(training_time_limit=given).training_time_limit == seconds


@pytest.mark.parametrize("given", ["soon", "2h30", "h", "", "1w", "2h and 3m"])
def test_durations_that_are_none(given: str) -> None:
    assert problems(training_time_limit=given) == [
        f"training_time_limit: expected seconds or a duration such as '2h30m', '1d' or '45s', got {given!r}"
    ]


def test_zero_turns_clipping_off() -> None:
    assert TrainerConfig(max_grad_norm=0).max_grad_norm is None


def test_paths_are_text() -> None:
    config = TrainerConfig(model=Path("m"), train_data=Path("d.jsonl"), save_directory=Path("out"))
    assert (config.model, config.train_data, config.save_directory) == ("m", "d.jsonl", "out")


# Lists of fields and values from flags


def test_fields() -> None:
    rows = {row.name: row for row in fields(PolicyConfig)}
    assert rows["learning_rate"] == FieldDoc("learning_rate", "number", 5e-5, "peak, per update")
    assert rows["model"].type == "text | table | none"
    assert rows["scheduler"].type == '"constant" | "linear" | "cosine" | "wsd"'
    assert (rows["loss"].type, rows["loss"].default) == ("policy loss", {"name": "dapo"})
    assert (rows["rewards"].type, rows["advantage"].type) == ("list of reward", "advantage | none")
    assert rows["shuffle_train_dataset"].type == "true or false"
    assert rows["temperature"] == FieldDoc("temperature", "number", 1.0, "short for sampling.temperature")
    assert rows["epsilon"] == FieldDoc("epsilon", "option", 0.2, "short for loss.epsilon")
    assert rows["loss_type"].default == "dapo"
    assert all(row.description for row in fields(TrainerConfig))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("1e-3", 1e-3),
        ("true", True),
        ("True", "True"),
        ("none", None),
        ("None", None),
        ('"none"', "none"),
        ("[1, 2]", [1, 2]),
        ('{ name = "a", b = 1 }', {"name": "a", "b": 1}),
        ("base.model", "base.model"),
        ("runs/a b", "runs/a b"),
        ("2024-01-01", "2024-01-01"),
        ("12:30:00", "12:30:00"),
        ("1\nother = 2", "1\nother = 2"),
        ("2h30m", "2h30m"),
        ("", ""),
    ],
)
def test_parse_value(text: str, value: Any) -> None:
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)
