"""Sampling, previews, logged weights and environments that cannot be."""

from __future__ import annotations

from typing import Any

from rlhf_core.config import TrainerConfig
from rlhf_core.sampling import token_bytes
from tests.mistakes.mistake import Mistake, call, setting, typed

POLICY, BASE = "check policy.toml", "check base.toml"
TOOLS = '''
import datetime


def add(x: int) -> int:
    """Add.

    Args:
        x: It.
    """
    return x


def silent(x: int) -> int:
    return x


def untyped(x) -> None:
    """Do.

    Args:
        x: It.
    """


def undescribed(x: int) -> None:
    """Do."""


def several(*words: str) -> None:
    """Do.

    Args:
        words: Them.
    """


def odd(when: datetime.datetime) -> None:
    """Do.

    Args:
        when: Then.
    """


nameless = lambda x: x
'''


def sampling(command: str = POLICY, **options: str) -> Mistake:
    table = ", ".join(f"{name} = {value}" for name, value in options.items())
    return setting(f"sampling = {{ max_completion_length = 4, {table} }}", f"sampling.{table}", command)


def tools(*names: str) -> Mistake:
    """An environment of tools in tools.py."""
    listed = ", ".join(f'"tools.py:{name}"' for name in names)

    def make(place: Any) -> None:
        place.write("tools.py", TOOLS)
        place.settings("policy.toml", f'environment = {{ name = "tools", tools = [{listed}] }}')

    return Mistake(f"tools = [{listed}]", make, POLICY)


def without_prompts(place: Any) -> None:
    place.write("corpus.jsonl", '{"text": "Mia wants"}\n' * 4)
    place.settings("base.toml", "previews = { every = 2 }")


SECTIONS = {
    "Sampling": [
        sampling(temperature="-1.0"),
        sampling(top_p="0.0"),
        sampling(top_k="0"),
        sampling(min_p="2.0"),
        sampling(repetition_penalty="0.0"),
        sampling(stop_strings='["a", ""]'),
        sampling(stop_strings='"a"'),
        sampling(stop_strings='["a", "wants</s>", "wants<eos>"]'),
        sampling(stop_token_ids="[-1]"),
        sampling("run policy.toml", stop_token_ids="[30, 998, 999]"),
    ],
    "Previews and logged weights": [
        setting("previews = { from_data = false }", command=BASE),
        setting("previews = { sampling = { min_q = 0.1 } }", command=BASE),
        typed(BASE, "previews of rows without a prompt", without_prompts),
        call("generation_temperature alone", lambda place: TrainerConfig(generation_temperature=0.5)),
        setting('log_weights = { pattern = "mpl", every = 1 }'),
        call("log_weights = {pattern: '['}", lambda place: TrainerConfig(log_weights={"pattern": "["})),
        call(
            "weight_distribution_pattern alone",
            lambda place: TrainerConfig(weight_distribution_pattern="mlp"),
        ),
    ],
    "Tokenizers that cannot sample": [
        call("token_bytes of what is no fast tokenizer", lambda place: token_bytes(object())),
    ],
    "Tools of an environment": [
        tools("silent"),
        tools("untyped"),
        tools("undescribed"),
        tools("several"),
        tools("odd"),
        tools("nameless"),
        tools("silent", "add", "add", "undescribed"),
        tools("ad"),
    ],
}
