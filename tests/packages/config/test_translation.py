"""Keys that a class does not know: who is asked, and what is said where nobody answers."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Mapping
from typing import Any

import pytest

from rlhf_core import Alias, InputError, NoEffect, Refused, Registry, TrainerConfig, hookimpl
from rlhf_core.config import build, fields
from rlhf_core.plugins import load
from tests.shared.option_tables import PolicyConfig

INSTALL = "Names of TRL and EasyDeL come with `pip install rlhf-compat`"


def translator(answers: Mapping[str, Any]) -> Registry:
    """Load nothing but a plugin that gives these answers."""
    plugin = types.ModuleType("other_names")
    asked: list[dict[str, Any]] = []

    @hookimpl
    def rlhf_translate(config_class: type, unknown: Mapping[str, Any]) -> dict[str, Any]:
        asked.append({config_class.__name__: dict(unknown)})
        return {key: answers[key] for key in unknown if key in answers}

    plugin.rlhf_translate = rlhf_translate  # type: ignore[attr-defined]
    plugin.asked = asked  # type: ignore[attr-defined]
    registry = load(objects=[plugin]).registry
    registry.asked = asked  # type: ignore[attr-defined]
    return registry


def problem(registry: Registry, **table: Any) -> str:
    with pytest.raises(InputError) as caught:
        build(PolicyConfig, table, where="stage 'a'", registry=registry)
    (line,) = caught.value.problems
    return line


def test_every_kind_of_answer() -> None:
    registry = translator(
        {
            "rate": Alias("learning_rate", 0.5),
            "clip": Alias("loss.epsilon", 0.3),
            "both": [Alias("log_steps", 7), Alias("seed", 3)],
            "tracked": Alias("logger.wandb.entity", "us"),
            "steps": Alias("max_training_steps", 0, wins=True),
            "quiet": NoEffect(),
            "loud": NoEffect("it is done anyway"),
        }
    )
    table = {
        "rate": 1,
        "clip": 1,
        "both": 1,
        "tracked": 1,
        "steps": 1,
        "quiet": 1,
        "loud": 1,
        "max_training_steps": 9,
    }
    with pytest.warns(UserWarning, match=r"^stage 'a'\.loud: has no effect here: it is done anyway$"):
        config = build(PolicyConfig, table, where="stage 'a'", registry=registry)
    assert (config.learning_rate, config.log_steps, config.seed, config.max_training_steps) == (0.5, 7, 3, 0)
    assert config.loss.to_dict() == {"name": "dapo", "epsilon": 0.3}
    assert [logger.to_dict() for logger in config.logger] == [{"name": "wandb", "entity": "us"}]


def test_an_error_names_the_key_that_was_typed() -> None:
    registry = translator(
        {
            "rate": Alias("learning_rate", "fast"),
            "heat": Alias("sampling.temperature", 0),
            "old": Refused("learning_rate"),
            "gone": Refused("unknown field. Here nothing does that"),
        }
    )
    assert problem(registry, rate=1) == "stage 'a'.rate (here learning_rate): expected a number, got 'fast'"
    assert (
        problem(registry, heat=1)
        == "stage 'a'.heat (here sampling.temperature): expected a number above 0, got 0"
    )
    assert problem(registry, old=1) == "stage 'a'.old: unknown field. Here it is learning_rate"
    assert problem(registry, gone=1) == "stage 'a'.gone: unknown field. Here nothing does that"
    twice = problem(registry, rate=1, learning_rate=0.1)
    assert twice == "stage 'a'.rate: another name for learning_rate, which is also given; remove one"
    assert problem(registry, kl={"old": 1}) == "stage 'a'.kl.old: unknown field. Here it is learning_rate"


def test_only_keys_that_a_class_does_not_know_are_asked_for() -> None:
    registry = translator({"epsilon": Alias("seed", 1), "rate": Alias("learning_rate", 0.5)})
    config = build(PolicyConfig, {"epsilon": 0.3, "rate": 1, "use_wandb": True}, registry=registry)
    assert (config.seed, config.epsilon) == (None, 0.3)
    assert registry.asked == [{"PolicyConfig": {"rate": 1}}]  # type: ignore[attr-defined]


def test_two_distributions_that_answer_for_one_key_are_an_error() -> None:
    registry = translator({"max_length": Alias("learning_rate", 1.0)})
    line = problem(registry, max_length=3)
    assert line.startswith("max_length: rlhf-compat ")
    assert line.endswith(" and other_names both translate it; uninstall one")


def test_a_plugin_that_raises_is_named() -> None:
    class Broken:
        @hookimpl
        def rlhf_translate(self, unknown: Mapping[str, Any]) -> None:
            raise KeyError("table")

    line = problem(load(objects=[Broken()]).registry, rate=1)
    assert line.startswith("plugin Broken: rlhf_translate raised KeyError: 'table'")


def test_without_translators_the_nearest_name_and_where_others_come_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RLHF_DISABLE_PLUGINS", "compat")
    registry = load().registry
    assert problem(registry, lerning_rate=1) == (
        f"stage 'a'.lerning_rate: unknown field. Did you mean 'learning_rate'? {INSTALL}"
    )
    assert INSTALL not in problem(registry, kl={"betta": 1})
    with pytest.raises(InputError, match=r"TrainerConfig\.max_steps: unknown field") as caught:
        TrainerConfig(max_steps=3)
    assert str(caught.value).endswith(INSTALL)
    monkeypatch.undo()
    with pytest.raises(InputError) as caught:
        TrainerConfig(lerning_rate=1)
    assert caught.value.problems == (
        "TrainerConfig.lerning_rate: unknown field. Did you mean 'learning_rate'?",
    )


def test_fields_document_no_other_library_s_names() -> None:
    assert {"max_length", "max_steps"}.isdisjoint(field.name for field in fields(PolicyConfig))


FRESH = """
import sys
from importlib.metadata import EntryPoint
def load(point): raise SystemExit(f"loaded {point.name}")
real, EntryPoint.load = EntryPoint.load, load
from rlhf_core.config import TrainerConfig
config = TrainerConfig(clip_grad=2.0, use_wandb=True, log_steps=3, logger=["console"], peft_config={"rank": 4})
config.replace(log_steps=4).to_json()
assert "rlhf_compat" not in sys.modules
EntryPoint.load = real
assert TrainerConfig(max_length=300).max_sequence_length == 300
assert "rlhf_compat" in sys.modules
"""


def test_known_fields_load_no_entry_points() -> None:
    subprocess.run([sys.executable, "-c", FRESH], check=True, timeout=120)
