"""Settings, references and directories that do not do, through the commands that read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.mistakes.mistake import Mistake, setting, typed

TRAIN = "train reward --model model --train_data pairs.jsonl --dir run"


def stages(*named: str) -> Mistake:
    """A pipeline of reward stages, "name trainer model" of each."""
    tables = []
    for each in named:
        name, trainer, model = each.split()
        tables.append(f'[[stage]]\nname = "{name}"\ntrainer = "{trainer}"\nmodel = "{model}"\n')
    text = 'dir = "run"\n' + "".join(f'{table}train_data = "pairs.jsonl"\n' for table in tables)
    return Mistake(", then ".join(named), lambda place: place.write("rm.toml", text))


def a_file(name: str) -> Callable[[Any], object]:
    def make(place: Any) -> None:
        (place.path / name).parent.mkdir(exist_ok=True)
        place.write(name, "x")

    return make


TYPES = [
    setting('learning_rate = "fast"'),
    setting("max_training_steps = 1.5"),
    setting("shuffle_train_dataset = 1"),
    setting("loss = 3"),
    setting("train_data = 3"),
    setting('training_time_limit = "two"'),
    setting('frozen_parameters = "("'),
    typed("check rm.toml --set seed=a"),
    typed(f"{TRAIN} --learning_rate"),
    typed(f"{TRAIN} 0.1"),
]
RANGES = [
    setting("learning_rate = -1"),
    setting("learning_rate = nan"),
    setting("total_batch_size = 0"),
    setting("center_rewards_coefficient = -1"),
    setting('overlong = "drop"'),
    setting('scheduler = "cosin"'),
    setting('optimizer = { name = "adamw", b1 = 2 }'),
    setting('loss = { name = "conservative", label_smoothing = 0.7 }'),
    setting('train_data = { path = "pairs.jsonl", weight = -2 }'),
    setting('train_data = { path = "pairs.jsonl", split = "test" }'),
    typed("check rm.toml --set mesh.fsdp=0"),
    typed(f"{TRAIN} --seed 4294967296"),
]
CONFLICTS = [
    setting('loss_type = "hinge"\nloss = "squared"'),
    setting("clip_grad = 1.0\nmax_grad_norm = 2.0"),
    setting("early_stopping_patience = 3"),
    setting("load_best_model_at_end = true\nevaluation_steps = 5"),
    setting('dataset_split = "train"\ntrain_data = { path = "pairs.jsonl", split = "train" }'),
    typed(f"{TRAIN} --loss_type hinge --loss.name squared"),
    typed(f"{TRAIN} --repo_id small"),
]
UNKNOWN = [
    setting("lerning_rate = 1"),
    setting("per_device_train_batch_size = 4"),
    setting('loss = "bradley_tery"'),
    setting('loss = { name = "hinge", margin = 1 }'),
    setting('trainer = "rewards"'),
    setting('optimizer = "adamww"'),
    setting('logger = ["wandbb"]'),
    setting('train_data = { path = "pairs.jsonl", wieght = 2 }'),
    typed("check rm.toml --set rm=1"),
    typed("check rm.toml --set r.x=1"),
    typed(f"{TRAIN} --learning-rat 1"),
    typed("train rewrad --dir run"),
]
REFERENCES = [
    stages("a reward b.model", "b reward model"),
    stages("a reward model", "b reward a.modle"),
    stages("base reward model", "b reward bass.model"),
    stages("a reward model", "b sft a.model"),
    stages("a reward model", "a reward a.model"),
    setting('model = "rm.model"'),
]
DIRECTORIES = [
    typed("check rm.toml", "a file where the run's directory should be", a_file("run")),
    typed("run rm.toml", "the same, when it is run", a_file("run")),
    typed("check rm.toml", "a file where the stage's directory should be", a_file("run/rm")),
    typed("check rm.toml --dir pairs.jsonl/run"),
    typed("run rm.toml --dir /proc/run"),
    typed("check rm.toml --set dir="),
    typed("score scorer pairs.jsonl -o o.jsonl.gz"),
    typed(f"{TRAIN} --plugin"),
    typed("score scorer pairs.jsonl -o words"),
    typed("score scorer pairs.jsonl -o ./pairs.jsonl"),
    typed("score scorer pairs.jsonl -o pairs.jsonl/o"),
    typed("check rn.toml"),
    typed("check model"),
]
SECTIONS = {
    "Settings of another type": TYPES,
    "Settings out of range": RANGES,
    "Settings that contradict each other": CONFLICTS,
    "Names that are not known": UNKNOWN,
    "References between stages": REFERENCES,
    "Directories and files of a run": DIRECTORIES,
}
