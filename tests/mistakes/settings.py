"""Settings, references and directories that do not do, through the commands that read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhf_core.config import TrainerConfig
from tests.mistakes.mistake import Mistake, call, setting, typed

RATES = "learning_rate = 1e-5\nnum_train_epochs = 2"
NO_DURATIONS = ("soon", "2h30", "h", "", "1w", "2h and 3m", "5 minuets")
TRAIN = "train reward --model model --train_data pairs.jsonl --dir run"


def policy(lines: str) -> Mistake:
    return setting(lines, command="check policy.toml")


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
    setting("learning_rate = true"),
    setting("warmup_steps = true"),
    setting('warmup_steps = "3"'),
    setting('num_train_epochs = "two"'),
    setting("model = 3"),
    setting("logger = 3"),
    setting('progress_metrics = "loss"'),
    setting("lora = 8"),
    setting('max_grad_norm = "x"'),
    setting('clip_grad = "x"'),
    setting('use_wandb = "yes"'),
    setting("extra_optimizer_kwargs = 3"),
    setting('do_train = "no"'),
    setting('verbose = "no"'),
    setting("do_eval = 0"),
    setting('train_data = ["pairs.jsonl", inf]'),
    policy('kl = "k1"'),
    policy('sampling = { temperature = "hot" }'),
    call("TrainerConfig.from_json of no JSON", lambda place: TrainerConfig.from_json("{")),
    call("TrainerConfig.from_json of a list", lambda place: TrainerConfig.from_json("[]")),
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
    setting("num_train_epochs = 0"),
    setting("evaluation_steps = 5\nearly_stopping_patience = 0"),
    setting("save_total_limit = 0"),
    setting("save_interval_minutes = 0"),
    setting("log_steps = 0"),
    setting('train_data = { path = "pairs.jsonl", weight = nan }'),
    setting("per_epoch_evaluation_steps = -1"),
    setting("per_epoch_training_steps = 0"),
    setting('backend = "xpu"'),
    setting("previews = { top_p = 2.0 }"),
    setting("generation_top_p = 2.0\ngeneration_interval = 5"),
    setting("chat_template_kwargs = { messages = 1 }"),
    setting('template_date = "yesterday"'),
    policy("sampling = { temperature = 0.0 }"),
    *(setting(f'training_time_limit = "{text}"') for text in NO_DURATIONS),
]
CONFLICTS = [
    setting('loss_type = "hinge"\nloss = "squared"'),
    setting("clip_grad = 1.0\nmax_grad_norm = 2.0"),
    setting("early_stopping_patience = 3"),
    setting("load_best_model_at_end = true\nevaluation_steps = 5"),
    setting('dataset_split = "train"\ntrain_data = { path = "pairs.jsonl", split = "train" }'),
    typed(f"{TRAIN} --loss_type hinge --loss.name squared"),
    typed(f"{TRAIN} --repo_id small"),
    setting("max_length = 300\nmax_sequence_length = 301"),
    setting('use_wandb = true\nlogger = ["wandb"]'),
    setting('logger = [{ name = "wandb", run_name = "a" }]\nwandb_name = "b"'),
    setting('optimizer = { name = "lion", b1 = 0.9 }\nextra_optimizer_kwargs = { b1 = 0.8 }'),
    setting("do_last_save = false\ncheckpoints = { last = false }"),
    setting("generation_interval = 0\npreviews = { every = 5 }"),
    setting("load_best_model_at_end = true"),
    setting('metric_for_best_model = "accuracy"'),
    setting("evaluation_steps = 5\ngreater_is_better = true"),
    setting('dataset_split = "train"\ntrain_data = ["pairs.jsonl", "pairs.jsonl"]'),
    policy("beta = 0.1\nkl = { beta = 0.1 }"),
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
    setting("peft_config = { r = 4 }"),
    setting("peft_config = { lora_alpha = 8 }"),
    setting("lora = { r = 8 }"),
    setting("use_vllm = true"),
    setting("fsdp_config = {}"),
    setting("logging_first_step = true"),
    policy("vllm_server_host = 'here'"),
    policy("sampling = { temprature = 1.0 }"),
    policy("sampling = { zzz = 1 }"),
    policy("rewards = { weight = 2.0 }"),
]
NO_EFFECT = [
    setting(f'{RATES}\npruning_module = "x"'),
    setting(f'{RATES}\nwandb_name = "first"\nwandb_entity = "us"'),
    setting(f"{RATES}\ngeneration_use_train_prompts = false\ngeneration_interval = 5"),
    setting(f'{RATES}\ntrainer_config_class = "GRPOConfig"'),
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
COMMANDS = [
    typed("train nobody"),
    typed(f"{TRAIN} --loss hinge --loss.x 3"),
    typed(f"{TRAIN} --max_training_steps 3 --max_training_steps.x 3"),
    typed(f"{TRAIN} --clip_grad 1 --clip_grad 2 --drop_columns a --drop_columns b"),
    typed("generate model --prompt Mia --stop_token_ids 999"),
    typed("generate model --prompt Mia --stop_strings ''"),
    typed("generate model words.jsonl"),
    typed("generate model"),
    typed("generate model pairs.jsonl --prompt Mia"),
    typed("export model"),
    typed("export model out --private"),
    typed("check rm.toml --devices 8 --set mesh.tensor=3"),
]
SECTIONS = {
    "Settings of another type": TYPES,
    "Settings out of range": RANGES,
    "Settings that contradict each other": CONFLICTS,
    "Names that are not known": UNKNOWN,
    "Settings without effect": NO_EFFECT,
    "References between stages": REFERENCES,
    "Directories and files of a run": DIRECTORIES,
    "Arguments of commands": COMMANDS,
}
