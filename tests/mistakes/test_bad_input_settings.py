"""Settings, references and directories that do not do, through the commands that read them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.shared import cases

Case, setting = cases.Case, cases.setting


def given(*arguments: str, expected: tuple[str, ...], command: str = "check") -> Any:
    """More arguments of the command."""
    return Case(lambda p: None, expected, (command, "rm.toml", *arguments))


def flags(*arguments: str, expected: tuple[str, ...]) -> Any:
    start = ("train", "reward", "--model", "model", "--train_data", "pairs.jsonl", "--dir", "run")
    return Case(lambda p: None, expected, (*start, *arguments))


def score(*arguments: str, expected: tuple[str, ...], make: Callable[[Any], object] = lambda p: None) -> Any:
    return Case(make, expected, ("score", *arguments))


def stages(text: str, *expected: str) -> Any:
    """A pipeline of two reward stages; `text` is "name trainer model" of each, with a slash between."""
    tables = "".join(
        '[[stage]]\nname = "{}"\ntrainer = "{}"\nmodel = "{}"\ntrain_data = "pairs.jsonl"\n'.format(
            *each.split()
        )
        for each in text.split(" / ")
    )
    return Case(lambda p: p.write("rm.toml", 'dir = "run"\n' + tables), expected)


def a_file(name: str) -> Callable[[Any], object]:
    def make(place: Any) -> None:
        (place.path / name).parent.mkdir(exist_ok=True)
        place.write(name, "x")

    return make


CASES = {
    "types": [
        setting('learning_rate = "fast"', ".learning_rate: expected a number, got 'fast'"),
        setting("max_training_steps = 1.5", ".max_training_steps: expected a whole number, got 1.5"),
        setting("shuffle_train_dataset = 1", ".shuffle_train_dataset: expected true or false, got 1"),
        setting("loss = 3", ".loss: expected a name or a table, got 3"),
        setting("train_data = 3", ".train_data: expected text or a table or a list, got 3"),
        setting(
            'training_time_limit = "two"',
            ".training_time_limit: expected seconds or a duration such as '2h30m'",
        ),
        setting('frozen_parameters = "("', ".frozen_parameters: '(' is not a regular expression"),
        given("--set", "seed=a", expected=("seed: a whole number from 0", "got 'a'")),
        flags("--learning_rate", expected=("--learning_rate: needs a value",)),
        flags("0.1", expected=("0.1: not a flag; write --FIELD 0.1",)),
    ],
    "ranges": [
        setting("learning_rate = -1", ".learning_rate: expected a number of at least 0, got -1"),
        setting("learning_rate = nan", ".learning_rate: expected a finite number, got nan"),
        setting("total_batch_size = 0", ".total_batch_size: expected a number of at least 1, got 0"),
        setting(
            "center_rewards_coefficient = -1", ".center_rewards_coefficient: expected a number of at least 0"
        ),
        setting('overlong = "drop"', ".overlong: expected 'filter' or 'truncate', got 'drop'"),
        setting('scheduler = "cosin"', ".scheduler: expected ", "Did you mean 'cosine'?"),
        setting('optimizer = { name = "adamw", b1 = 2 }', ".optimizer.b1: expected a number below 1, got 2"),
        setting(
            'loss = { name = "conservative", label_smoothing = 0.7 }',
            ".loss.label_smoothing: expected a number below 0.5",
        ),
        setting(
            'train_data = { path = "pairs.jsonl", weight = -2 }',
            ".train_data: weight of ",
            "give a number above 0",
        ),
        setting(
            'train_data = { path = "pairs.jsonl", split = "test" }',
            ".train_data: split 'test'",
            "train[:90%]",
        ),
        given("--set", "mesh.fsdp=0", expected=("mesh.fsdp: a positive number of devices, or -1",)),
    ],
    "conflicts": [
        setting(
            'loss_type = "hinge"\nloss = "squared"',
            ".loss_type: the same as loss.name, which is also given; remove one",
        ),
        setting(
            "clip_grad = 1.0\nmax_grad_norm = 2.0", ".clip_grad: another name for max_grad_norm", "remove one"
        ),
        setting("early_stopping_patience = 3", ": early_stopping_patience needs evaluation_steps"),
        setting(
            "load_best_model_at_end = true\nevaluation_steps = 5",
            ".eval_data: missing; load_best_model_at_end",
        ),
        setting(
            'dataset_split = "train"\ntrain_data = { path = "pairs.jsonl", split = "train" }',
            ".dataset_split: the same as",
            "remove one",
        ),
        flags(
            "--loss_type",
            "hinge",
            "--loss.name",
            "squared",
            expected=("stage 'reward'.loss_type: the same as loss.name",),
        ),
        flags(
            "--repo_id", "small", expected=("stage 'reward'.repo_id: another name for model", "remove one")
        ),
    ],
    "unknown": [
        setting("lerning_rate = 1", ".lerning_rate: unknown field. Did you mean 'learning_rate'?"),
        setting(
            "per_device_train_batch_size = 4",
            ".per_device_train_batch_size: unknown field. Here it is total_batch",
        ),
        setting(
            'loss = "bradley_tery"',
            ".loss.name: no pairwise loss named 'bradley_tery'. Did you mean 'bradley_terry'?",
        ),
        setting(
            'loss = { name = "hinge", margin = 1 }', ".loss.margin: unknown option for pairwise loss 'hinge'"
        ),
        setting('trainer = "rewards"', ".trainer: no trainer named 'rewards'. Did you mean 'reward'?"),
        setting(
            'optimizer = "adamww"', ".optimizer.name: no optimizer named 'adamww'. Did you mean 'adamw'?"
        ),
        setting('logger = ["wandbb"]', ".logger[0].name: no logger named 'wandbb'. Did you mean 'wandb'?"),
        setting(
            'train_data = { path = "pairs.jsonl", wieght = 2 }',
            ".train_data: ",
            "no option 'wieght'. Did you mean 'weight'?",
        ),
        given("--set", "rm=1", expected=("--set rm=1: 'rm' is a stage: write rm.field=value",)),
        given("--set", "r.x=1", expected=("--set r.x=1: no stage 'r'. Did you mean 'rm'?",)),
        flags(
            "--learning-rat",
            "1",
            expected=("stage 'reward'.learning_rat: unknown field. Did you mean 'learning_rate'?",),
        ),
        Case(
            lambda p: None,
            ("no trainer named 'rewrad'. Did you mean 'reward'?",),
            ("train", "rewrad", "--dir", "run"),
        ),
    ],
    "references": [
        stages(
            "a reward b.model / b reward model",
            "stage 'a'.model: 'b.model': stage 'b' is not before this one; move it up",
        ),
        stages(
            "a reward model / b reward a.modle",
            "stage 'b'.model: stage 'a' has no output 'modle'. Did you mean 'model'?",
        ),
        stages(
            "base reward model / b reward bass.model",
            "stage 'b'.model: no artifact 'bass.model' before",
            "Did you mean 'base.model'?",
        ),
        stages(
            "a reward model / b sft a.model",
            "stage 'b'.model: a.model is a reward_model; a trainer that makes a language_model",
        ),
        stages("a reward model / a reward a.model", "stage 'a': two stages have this name; rename one"),
        setting('model = "rm.model"', ".model: 'rm.model': stage 'rm' is not before this one"),
    ],
    "directories": [
        Case(a_file("run"), ("dir: ", "run is not a directory; give another --dir")),
        Case(a_file("run"), ("dir: ", "run is not a directory; give another --dir"), ("run", "rm.toml")),
        Case(a_file("run/rm"), ("run/rm is not a directory; move it away, or give another directory",)),
        given(
            "--dir",
            "pairs.jsonl/run",
            expected=("dir: ", "pairs.jsonl is not a directory; give another --dir"),
        ),
        given(
            "--dir",
            "/proc/run",
            command="run",
            expected=("dir: /proc/run cannot be made (", "give another --dir"),
        ),
        given("--set", "dir=", expected=('dir: missing; add dir = "runs/first"',)),
        score("scorer", "pairs.jsonl", "-o", "o.jsonl.gz", expected=("is not compressed; leave out .gz",)),
        flags("--plugin", expected=("--plugin: needs a value",)),
        flags("--seed", "4294967296", expected=("seed: expected a number of at most 4,294,967,295",)),
        score("scorer", "pairs.jsonl", "-o", "words", expected=("-o words: is a directory; give a file",)),
        score(
            "scorer",
            "pairs.jsonl",
            "-o",
            "./pairs.jsonl",
            expected=("is the input file; give another file",),
        ),
        score(
            "scorer",
            "pairs.jsonl",
            "-o",
            "pairs.jsonl/o",
            expected=("-o pairs.jsonl/o: not a directory: ", "give another file"),
        ),
        Case(lambda p: None, ("rn.toml: no such file. Did you mean 'rm.toml'?",), ("check", "rn.toml")),
        Case(lambda p: None, ("model is a directory; give the pipeline file in it",), ("check", "model")),
    ],
}


@pytest.mark.parametrize("category", CASES)
def test_one_message_with_place_and_remedy(category: str, place: Any, rlhf: Callable[..., Any]) -> None:
    wrong = cases.wrong_among(CASES[category], place, rlhf)
    assert not wrong, "\n".join(wrong)


def test_a_directory_that_may_not_be_written_to(
    place: Any, rlhf: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = place.path / "locked"
    locked.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != locked)  # root may write everywhere
    for command in ("check", "run"):
        ended = rlhf(command, "rm.toml", "--dir", "locked/run")
        assert ended.code == 2
        assert ended.message == f"dir: no permission to write to {locked}; give another --dir"
    ended = rlhf("score", "scorer", "pairs.jsonl", "-o", "locked/scores.jsonl")
    assert ended.code == 2
    assert ended.message == f"-o locked/scores.jsonl: no permission to write to {locked}; give another file"
