"""Texts, prompts and rewards that do not do, and what is told of settings that do not do what they seem to."""

from __future__ import annotations

import json
from typing import Any

from tests.mistakes.mistake import Mistake, file, setting, typed
from tests.shared import places

BASE, POLICY = "check base.toml", "check policy.toml"
RATES = "learning_rate = 1.0\nnum_train_epochs = 2"
FRESH = (
    ", ".join(f"{key} = {json.dumps(value)}" for key, value in places.MODEL.items()) + ', tokenizer = "words"'
)
FIVE = """
dir = "run"
[[stage]]
name = "base"
trainer = "sft"
model = "model"
train_data = "corpas.jsonl"
[[stage]]
name = "rm"
trainer = "rewrad"
model = "base.model"
train_data = "pairs.jsonl"
[[stage]]
name = "policy"
trainer = "grpo"
model = "bass.model"
train_data = "prompts.jsonl"
rewards = ["rewards.py:brevity"]
learning_rat = 1e-6
loss = { name = "dapo", epsilon_hihg = 0.3 }
"""


def long(name: str, data: str, command: str) -> Mistake:
    row = {**places.FILES[data], "prompt": " ".join([places.ASK] * 9)}
    return file(name, data, json.dumps(row) + "\n", command)


def row(name: str, data: str, command: str, **cells: Any) -> Mistake:
    """A second row that differs from the good one in `cells`."""
    return Mistake(name, lambda place: place.row(data, **cells), command)


def returns(name: str, body: str, command: str = POLICY) -> Mistake:
    """A reward function with another body."""
    return file(name, "rewards.py", f"def brevity(completions, size):\n    {body}\n", command)


def rm(lines: str, name: str = "") -> Mistake:
    """Settings of a run of as many updates as its data have."""

    def make(place: Any) -> None:
        place.settings("rm.toml", lines)
        path = place.path / "rm.toml"
        if "max_training_steps" not in lines:
            path.write_text(path.read_text().replace("max_training_steps = 2\n", ""))

    return Mistake(name or lines.replace("\n", "; "), make)


def policy(lines: str, name: str = "") -> Mistake:
    return setting(lines, name, POLICY)


def a_prompt_as_long_as_the_context(place: Any) -> None:
    place.settings("policy.toml", "max_prompt_length = 100\nsampling = { max_completion_length = 60 }")
    place.write("prompts.jsonl", json.dumps({"prompt": " ".join([places.ASK] * 12), "size": 3}) + "\n")


def argument(name: str) -> Mistake:
    """An argument that nothing gives a reward function."""
    return file(name, "rewards.py", f"def brevity({name}):\n    return [0.0] * 3\n", POLICY)


def metric(arguments: str) -> Mistake:
    """A call of log_metric."""
    body = f"def brevity(completions, log_metric):\n    log_metric({arguments})\n    return [0.0] * len(completions)\n"
    return file(f"log_metric({arguments})", "rewards.py", body, POLICY)


def texts_for_messages(place: Any) -> None:
    place.write(
        "rewards.py", "def brevity(completions):\n    return [len(text.split()) for text in completions]\n"
    )
    place.settings("policy.toml", 'chat_template = "plain"')
    place.write(
        "prompts.jsonl", json.dumps({"prompt": [{"role": "user", "content": "who"}], "size": 3}) + "\n"
    )


def nothing_in_time(place: Any) -> None:
    place.write("rewards.py", "def brevity(completions, size):\n    while True:\n        pass\n")
    place.settings("policy.toml", 'rewards = [{ name = "rewards.py:brevity", timeout = 0.5 }]')


def a_default(place: Any) -> None:
    place.write(
        "rewards.py", "def brevity(completions, sise=1):\n    return [float(sise)] * len(completions)\n"
    )


def two_wrong(place: Any) -> None:
    place.write(
        "rewards.py", "def one(completions):\n    return 1.0\n\ndef two(completions):\n    return nothing\n"
    )
    place.settings("policy.toml", 'rewards = ["rewards.py:one", "rewards.py:two"]')


NOT_THERE = {
    "in no file": "nowhere.py:f",
    "a constant": "rlhf_core.cli:DONE",
    "in no module": "no_such_module:f",
}
SECTIONS = {
    "Texts": [
        file("blank lines alone", "corpus.jsonl", "\n", BASE),
        file("promt for prompt", "corpus.jsonl", '{"promt": "a", "completion": "b"}\n', BASE),
        row("a completion that is null", "corpus.jsonl", BASE, completion=None),
        long("the only text is too long", "corpus.jsonl", BASE),
    ],
    "Pipeline files": [
        file("a quote that is not closed", "base.toml", 'dir = "run\n', BASE),
        file("five different mistakes", "five.toml", FIVE, "check five.toml"),
    ],
    "Prompts": [
        file("nothing", "prompts.jsonl", "", POLICY),
        file("promt for prompt", "prompts.jsonl", '{"promt": "a", "size": 3}\n', POLICY),
        row("a prompt that is null", "prompts.jsonl", POLICY, prompt=None),
        long("the only prompt is too long", "prompts.jsonl", POLICY),
        typed(POLICY, "the only prompt fills the model's context", a_prompt_as_long_as_the_context),
        policy("max_prompt_length = 100\nsampling = { max_completion_length = 60 }"),
    ],
    "Reward functions": [
        file("sise for size", "prompts.jsonl", json.dumps({"prompt": places.ASK, "sise": 3}), POLICY),
        file("brevety for brevity", "rewards.py", "def brevety(completions): ...\n", POLICY),
        file("a file that is not Python", "rewards.py", "def brevity(completions:\n", POLICY),
        returns("one value for all", "return [1.0]"),
        returns("two values for three", "return [0.0] * (len(completions) - 1)"),
        returns("None", "return None"),
        returns("a dictionary", "return dict.fromkeys(range(len(completions)), 1.0)"),
        returns("words for the last", "return [*range(len(completions) - 1), 'good']"),
        *(argument(name) for name in ("completion", "trainer_state", "log_extra", "environments")),
        metric("'mean', 1.0"),
        metric("'a/unscored', 1.0"),
        metric("'', 1.0"),
        metric("'x', '3'"),
        metric("'x', [1.0]"),
        metric("'x', float('nan')"),
        returns("minus infinity", "return [0.0, *[-float('inf')] * (len(completions) - 1)]"),
        returns("a name that is not defined", "return [lenght(text) for text in completions]"),
        returns("an error for texts without an x", "return [float(text.index('x')) for text in completions]"),
        returns("lists of messages", "return [len(text[-1]['content']) for text in completions]"),
        Mistake("texts, where there are messages", texts_for_messages, POLICY),
        Mistake("nothing in time", nothing_in_time, POLICY),
        Mistake("scale for a column that is misspelt", a_default, POLICY),
        Mistake("two functions that are wrong", two_wrong, POLICY),
        policy('rewards = ["rewards.py:brevity", "rewards.py:brevity"]', "two of one name"),
        policy("rewards = []", "none"),
        policy("reward_weights = [1.0, 2.0]", "two weights for one"),
        *(policy(f'rewards = ["{name}"]', f"one that is {how}") for how, name in NOT_THERE.items()),
        returns("words", "return ['good' for _ in completions]"),
        returns("a number", "return 1.0"),
        returns("an infinite value", "return [float('inf') for _ in completions]"),
        returns("an error", "return [1 / 0 for _ in completions]", "run policy.toml"),
        returns("NaN alone", "return [float('nan') for _ in completions]", "run policy.toml"),
    ],
    "Settings of a policy": [
        policy('trainer = "gpro"'),
        policy('loss = "dpao"'),
        policy("num_generation = 4"),
        policy("kl = { beta = -1 }"),
        policy("total_batch_size = 3"),
        policy("num_generations = 1"),
        policy('rewards = ["lenght"]'),
        policy("epsilon = 0.1\nloss = { epsilon = 0.2 }"),
    ],
    "Settings that do not do what they seem to": [
        rm(f"{RATES}\nwarmup_steps = 4\nmax_training_steps = 4"),
        rm(f"{RATES}\nwarmup_steps = 5\nmax_training_steps = 4"),
        rm(f"{RATES}\nwarmup_steps = 2\nmax_training_steps = 1"),
        rm(f"{RATES}\nlearning_rate_end = 0.0"),
        rm(f'{RATES}\nlearning_rate_end = 0.1\nscheduler = "wsd"'),
        rm(f'{RATES}\noffload = ["optimizer"]'),
        rm("learning_rate = 1.0\ntotal_batch_size = 4\nnum_train_epochs = 3"),
        rm("learning_rate = 1.0\ntotal_batch_size = 5\nnum_train_epochs = 3"),
        rm("learning_rate = 1.0\ntotal_batch_size = 64\nnum_train_epochs = 3"),
        rm("learning_rate = 1.0\ntotal_batch_size = 64\nmax_training_steps = 2"),
        rm("learning_rate = 1.0\ntotal_batch_size = 64\nnum_train_epochs = 1"),
        policy("total_batch_size = 8"),
        policy("total_batch_size = 64\nnum_generations = 4"),
        policy("total_batch_size = 64\nsteps_per_generation = 4"),
        policy("sampling = { top_p = 0.9, max_completion_length = 4 }"),
        policy("dataloader_num_workers = 2"),
    ],
    "Defaults that are too much for a pretrained model": [
        rm("total_batch_size = 4"),
        rm("max_training_steps = 3"),
        rm("learning_rate = 1e-4"),
        rm("learning_rate = 5e-5\nnum_train_epochs = 10"),
        rm("lora = { rank = 2 }"),
        rm('frozen_parameters = "embed"'),
        rm(f"model = {{ {FRESH} }}", "a fresh model"),
    ],
}
