"""The schema of pipeline files: what it accepts, rlhf check accepts, and what it refuses is wrong."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from rlhf_core import InputError, plugins
from rlhf_core.config import build
from rlhf_core.contracts import TRAINER
from tests.shared import commands

REPOSITORY = Path(__file__).parents[3]
FILES = [
    path
    for folder in ("examples", "tests/recipes", "plugins")
    for path in sorted((REPOSITORY / folder).rglob("*.toml"))
    if "\ntrainer = " in path.read_text(encoding="utf-8")
]
PIPELINE = """
dir = "runs/first"
seed = 0
mesh = { data = -1, fsdp = 1, tensor = 1 }

[[stage]]
name = "base"
trainer = "sft"
model = { model_type = "llama", hidden_size = 128, tokenizer = "tokenizer/" }
train_data = ["corpus.jsonl", { name = "jsonl", path = "more.jsonl", weight = 2.0 }]
eval_data = { easy = "easy.jsonl", hard = "hard.jsonl" }
learning_rate = 1
training_time_limit = "2h30m"
clip_grad = 0.5
optimizer = { name = "adamw", b2 = 0.95 }
lora = { rank = 4, targets = ["q_proj"] }
logger = "wandb"
use_wandb = false

[[stage]]
name = "rm"
trainer = "reward"
model = "base.model"
train_data = "pairs.jsonl"
loss = { name = "bradley_terry" }
logger = [{ name = "wandb", project = "demo" }, "trackio"]

[[stage]]
name = "policy"
trainer = "grpo"
model = "base.model"
train_data = "prompts.jsonl"
rewards = [{ name = "model", model = "rm.model", weight = 1.0 }, { name = "length", target = 40 }, "repetition"]
advantage = "group"
loss = { name = "dapo", epsilon = 0.2, epsilon_high = 0.28 }
kl = { beta = 0.02 }
sampling = { temperature = 1.0, max_completion_length = 64 }
"""
WRONG: dict[str, tuple[str | int, ...]] = {
    # {what is wrong: its place}; the last part is the key that is set
    '"fsdp"': ("mesh", "fsdp"),
    "0": ("mesh", "data"),
    "true": ("seed",),
    "1": ("meshes",),
    '"a b"': ("stage", 0, "name"),
    '"sftt"': ("stage", 0, "trainer"),
    '"1e-3"': ("stage", 0, "learning_rate"),
    "-1.0": ("stage", 0, "learning_rate"),
    "1.5": ("stage", 0, "total_batch_size"),
    '"max"': ("stage", 0, "overlong"),
    "0.1": ("stage", 0, "learning_rat"),
    "3": ("stage", 0, "optimizer", "b3"),
    '"adam"': ("stage", 0, "optimizer", "name"),
    "[]": ("stage", 0, "lora", "rank"),
    "2": ("stage", 0, "lora", "r"),
    '"wb"': ("stage", 0, "logger"),
    '"hinge2"': ("stage", 1, "loss", "name"),
    '"many"': ("stage", 1, "logger", 0, "projct"),
    '"far"': ("stage", 2, "rewards", 0, "weight"),
    "0.5": ("stage", 2, "loss", "epsilon_hi"),
    "0.25": ("stage", 2, "kl", "betta"),
    '"warm"': ("stage", 2, "sampling", "temperature"),
    '"lengths"': ("stage", 2, "rewards", 1),
}


@pytest.fixture(scope="module")
def validator() -> Draft7Validator:
    schema = json.loads(commands.rlhf("schema").stdout)
    Draft7Validator.check_schema(schema)
    # taplo refuses a schema in which a reference is no address, such as one with a space.
    assert all(
        map(re.compile(r"#/definitions/\w+").fullmatch, re.findall(r'"\$ref": "(.*?)"', json.dumps(schema)))
    )
    return Draft7Validator(schema)


def found(validator: Draft7Validator, table: Any) -> list[str]:
    return [f"{list(error.absolute_path)}: {error.message}" for error in validator.iter_errors(table)]


@pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_pipelines_of_the_repository_fit(file: Path, validator: Draft7Validator) -> None:
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    assert found(validator, table) == []


def configure(stage: dict[str, Any]) -> None:
    """Build a stage's config. Raises InputError."""
    registry = plugins.installed_registry()
    options = {key: value for key, value in stage.items() if key not in ("name", "trainer")}
    build(registry.get(TRAINER, stage["trainer"]).config, options, registry=registry)


@pytest.mark.filterwarnings("ignore")
def test_every_way_to_write_a_field_fits(validator: Draft7Validator) -> None:
    table = tomllib.loads(PIPELINE)
    assert found(validator, table) == []
    for stage in table["stage"]:
        configure(stage)
    by_path = {"name": "package.module:brevity", "target": 3}
    over_http = {"name": "http", "url": {"env": "ADDRESS"}}
    flat: dict[str, Any] = {
        "epsilon_high": 0.3,
        "temperature": 0.9,
        "loss_type": "grpo",
        "beta": 0.1,
        "clip_grad": 0.5,
    }
    flat["rewards"] = ["mine.py:other", by_path, over_http]
    table["stage"][2] = {"name": "policy", "trainer": "grpo", **flat}
    assert found(validator, table) == []


@pytest.mark.parametrize(("value", "place"), WRONG.items(), ids=str)
def test_what_is_refused_is_wrong(
    value: str, place: tuple[str | int, ...], validator: Draft7Validator
) -> None:
    """The error is in the right stage, whose config cannot be built either."""
    table = tomllib.loads(PIPELINE)
    inner: Any = table
    for part in place[:-1]:
        inner = inner[part]
    inner[place[-1]] = json.loads(value)
    errors = list(validator.iter_errors(table))
    assert errors
    where = list(errors[0].absolute_path)
    assert where == list(place)[: len(where)]
    if place[0] == "stage" and place[2] not in ("name", "trainer"):
        with pytest.raises(InputError):
            configure(table["stage"][place[1]])
