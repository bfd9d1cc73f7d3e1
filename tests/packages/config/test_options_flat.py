"""Flat names for parts of a table, other spellings, and values from flags."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import pytest

from rlhf_core.config import Component, TrainerConfig, parse_value
from rlhf_core.contracts import POLICY_LOSS
from tests.shared import option_tables as tables

PolicyConfig, Sampling, KL = tables.PolicyConfig, tables.Sampling, tables.KL


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
        ALIASES: ClassVar[dict[str, Any]] = {"loss_type": "loss.name", "epsilon": "loss.epsilon"}
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


def test_flat_and_nested_options_of_different_names_are_taken_together() -> None:
    assert PolicyConfig(beta=0.1, kl=KL(name="k1")).kl == KL(name="k1", beta=0.1)


def test_a_flat_name_must_point_somewhere() -> None:
    with pytest.raises(TypeError, match="'epsilon' must be no field, and 'los' must be one"):

        class Wrong(TrainerConfig):
            ALIASES: ClassVar[dict[str, Any]] = {"epsilon": "los.epsilon"}


def test_other_spellings() -> None:
    config = PolicyConfig(clip_grad=2.0, repo_id="base", dataset_name="pairs", group_size=4)
    assert (config.max_grad_norm, config.clip_grad, config.model, config.train_data) == (
        2.0,
        2.0,
        "base",
        "pairs",
    )
    assert (config.num_generations, config.group_size) == (4, 4)
    assert PolicyConfig(peft_config={"rank": 4}).lora.rank == 4
    split = PolicyConfig(dataset_name="pairs", dataset_split="train[:1%]")
    assert split.train_data == {"name": "pairs", "split": "train[:1%]"}


def test_one_component_is_a_list_of_one() -> None:
    assert PolicyConfig(logger="wandb").logger == [Component(name="wandb")]
    assert PolicyConfig(logger={"name": "wandb", "project": "p"}) == PolicyConfig(
        logger=[{"name": "wandb", "project": "p"}]
    )
    assert PolicyConfig(rewards="length").to_dict() == PolicyConfig(rewards=["length"]).to_dict()
    assert PolicyConfig().replace(logger=Component(name="console")).logger == [Component(name="console")]
    assert PolicyConfig(logger="console", use_wandb=True) == PolicyConfig(logger=["console", "wandb"])


def test_use_wandb() -> None:
    assert PolicyConfig(use_wandb=True).logger == [Component(name="wandb")]
    config = PolicyConfig(use_wandb=True, logger=["console"])
    assert [logger.name for logger in config.logger] == ["console", "wandb"]
    assert (config.use_wandb, PolicyConfig(use_wandb=False).use_wandb) == (True, False)
    assert config.replace(use_wandb=True) == config


def test_none_is_a_word_where_it_is_a_value() -> None:
    config = PolicyConfig(remat=parse_value("none"), progress_bar_type=parse_value("none"))
    assert (config.remat, config.progress_bar_type) == ("none", "none")


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
