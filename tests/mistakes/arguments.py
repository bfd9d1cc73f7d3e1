"""Functions, optimizers, sets and streams that trainers are given and that do not do; tokenizers that end nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
from rlhf_distill import DistillConfig, DistillTrainer
from rlhf_reward import RewardConfig, RewardTrainer
from rlhf_sft import SFTConfig, SFTTrainer
from transformers import HfArgumentParser

from rlhf_core.plugins import load_file
from rlhf_core.tokenizer import load_tokenizer
from tests.mistakes.mistake import Mistake, call, setting, typed
from tests.shared.places import FILES

SHORT: dict[str, Any] = {"max_training_steps": 6, "total_batch_size": 4, "save_directory": "made"}
TEXTS, PAIRS = [FILES["corpus.jsonl"]] * 4, [FILES["pairs.jsonl"]] * 4
OWN = """
def count(given):
    return {"pairs": len(given.label_ids)}

def words(given):
    return {"x": "y"}

def number(given):
    return 0.5

def fails(given):
    return 1 / 0

def accuracy(given):
    return {"accuracy": 0.25}
"""


def sft(name: str, given: dict[str, Any] | None = None, **fields: Any) -> Mistake:
    """A run of texts. given: arguments of the trainer."""

    def train(place: Any) -> None:
        config = SFTConfig(**{**SHORT, **fields})
        SFTTrainer(config, model="model", train_dataset=TEXTS, **(given or {})).train()

    return call(name, train)


def rate(name: str, schedule: Callable[[Any], Any]) -> Mistake:
    return sft(name, scheduler=lambda total: schedule)


def measured(name: str, function: Any, **fields: Any) -> Mistake:
    """A reward model's run with a function of own.py as `compute_metrics`."""

    def train(place: Any) -> None:
        config = RewardConfig(**{**SHORT, "max_training_steps": 0}, **fields)
        compute = getattr(load_file(Path("own.py")), function) if isinstance(function, str) else function
        given = {"train_dataset": PAIRS, "eval_dataset": PAIRS, "compute_metrics": compute}
        RewardTrainer(config, model="scorer", **given).train()

    return call(name, train, lambda place: place.write("own.py", OWN))


def two_sets(place: Any) -> None:
    config = DistillConfig(teacher_model="model", on_policy_fraction=0.0, **SHORT)
    sets = {"a": TEXTS, "b": TEXTS}
    DistillTrainer(config, model="model", train_dataset=TEXTS, eval_dataset=sets).train()


def endless(pipeline: str, data: str) -> Mistake:
    """A stage of a stream whose length nothing says."""

    def make(place: Any) -> None:
        place.settings(pipeline, f'train_data = {{ path = "{data}", streaming = true }}')
        text = (place.path / pipeline).read_text()
        place.write(pipeline, text.replace("max_training_steps = 2\n", ""))

    return typed(f"check {pipeline}", f"a stream in {pipeline}", make)


def other_end(token: str | None) -> Callable[[Any], None]:
    """Let the model's tokenizer name another end-of-sequence token, or none."""

    def make(place: Any) -> None:
        tokenizer = load_tokenizer("model")
        tokenizer.eos_token = token
        tokenizer.save_pretrained("model")
        Path("model/generation_config.json").unlink(missing_ok=True)

    return make


TEACHES = "check distill.toml --set distill.on_policy_fraction=0 --set distill.train_data=corpus.jsonl"
NO_END = ("check base.toml", "check rm.toml", "check dpo.toml", TEACHES, "check policy.toml")
SECTIONS = {
    "Learning rates from Python": [
        rate("one that falls below 0", lambda step: 1.0 - step),
        rate("one that is divided by 0", lambda step: 0.1 / (2 - step)),
        rate("no number", lambda step: jnp.float32("nan")),
        rate("three for each update", lambda step: jnp.ones(3)),
        sft("optimizers: a rate below 0", {"optimizers": (None, lambda step: 0.01 - 0.02 * step)}),
        sft("optimizers: two rates", {"optimizers": (None, lambda step: jnp.zeros(2))}),
        sft("optimizers: a name", {"optimizers": "adamw"}),
        sft(
            "optimizers: weight_decay beside a transformation",
            {"optimizers": (optax.sgd(1e-2), None)},
            weight_decay=0.5,
            max_training_steps=0,
        ),
        sft("a start after the end", step_start_point=6),
        sft("an optimizer that there is not", optimizer="rmsprop"),
        call("a parser of dataclasses", lambda place: HfArgumentParser(RewardConfig)),
    ],
    "Functions of metrics": [
        measured("text for a number", "words"),
        measured("a number alone", "number"),
        measured("one that raises", "fails"),
        measured("a number for a function", 5),
        measured("a metric that is there", "accuracy"),
        measured("two of one name", None, metrics=["own.py:count", "own.py:count"]),
        measured("one that is in no file", None, metrics=["nowhere.py:count"]),
        measured("one without its file", None, metrics=["count"]),
        sft("a function that nothing calls", {"compute_metrics": len}),
        sft("a name that nothing calls", metrics=["own.py:count"]),
    ],
    "Data that evaluate or end nothing": [
        call("several sets for a trainer of one", two_sets),
        setting("evaluation_steps = 2"),
        setting("disable_dropout = false"),
        setting("max_length = 64", command="check policy.toml"),
        endless("base.toml", "corpus.jsonl"),
        endless("policy.toml", "prompts.jsonl"),
        *(typed(command, f"no end-of-sequence token: {command}", other_end(None)) for command in NO_END),
        typed(
            "check policy.toml --set policy.sampling.stop_token_ids=[3]",
            "a stop token in place of one",
            other_end(None),
        ),
        typed("check base.toml", "an end that is unknown text, too", other_end("<unk>")),
    ],
}
