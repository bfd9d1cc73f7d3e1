"""Settings and rows of single trainers, and their classes called from Python."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import grain
from rlhf_dpo import DPOTrainer
from rlhf_grpo import GRPOConfig, GRPOTrainer
from rlhf_reward import RewardTrainer

from rlhf_core import load_model
from rlhf_core.mesh import make_mesh
from rlhf_core.tokenizer import load_tokenizer
from tests.mistakes.mistake import Mistake, call, setting
from tests.shared.places import FILES

PAIRS = [FILES["pairs.jsonl"]] * 4


def of(pipeline: str) -> Callable[..., Mistake]:
    """Settings of another pipeline than the reward model's."""

    def mistake(lines: str, name: str = "", options: str = "") -> Mistake:
        return setting(lines, name, f"check {pipeline}.toml{options}")

    return mistake


policy, dpo, online, distill = of("policy"), of("dpo"), of("online"), of("distill")


def python(name: str, function: Callable[[], object]) -> Mistake:
    return call(name, lambda place: function())


def scorer(**changes: Any) -> Any:
    return replace(load_model("scorer", "score"), **changes)


def other_tokenizer(name: str, change: Callable[[Any], object], taught: bool = False) -> Mistake:
    """A teacher, or a student, whose tokenizer was changed."""

    def make(place: Any) -> None:
        shutil.copytree("model", "other")
        tokenizer = load_tokenizer("model")
        change(tokenizer)
        tokenizer.save_pretrained("other")
        place.settings("distill.toml", 'model = "other"' if taught else 'teacher_model = "other"')

    return Mistake(name, make, "check distill.toml")


def labels(name: str, *given: Any, held_out: tuple[Any, ...] = (), settings: str = "") -> Mistake:
    """A check of rows with these labels, and of held-out ones, None: without one."""

    def make(place: Any) -> None:
        row, more = FILES["corpus.jsonl"], settings
        for file, found in (("labels.jsonl", given), ("held_out.jsonl", held_out)):
            rows = [row | ({} if label is None else {"label": label}) for label in found]
            place.write(file, "".join(json.dumps(row) + "\n" for row in rows))
        if held_out:
            more = 'eval_data = { easy = "labels.jsonl", hard = "held_out.jsonl" }\n' + more
        stage = place.good["dpo.toml"].decode().replace("dpo", "kto").replace("pairs.jsonl", "labels.jsonl")
        replaced = [line.partition(" = ")[0] for line in more.splitlines()]
        if "num_train_epochs" in replaced:
            replaced.append("max_training_steps")
        kept = [line for line in stage.splitlines() if line.partition(" = ")[0] not in replaced]
        place.write("kto.toml", "\n".join([*kept, more, ""]))

    return Mistake(name, make, "check kto.toml")


def until_the_epochs_end(place: Any) -> None:
    """A run of epochs, whose rollouts use up prompts."""
    text = place.good["policy.toml"].decode().replace("max_training_steps = 2", "num_train_epochs = 4")
    place.write("policy.toml", f'{text}dynamic_sampling = {{}}\nscheduler = "linear"\n')


def of_a_stranger(place: Any) -> None:
    """Options of the names of ours, and a reward of weight 0, which another advantage may read."""
    place.write(
        "plugin.py",
        "from dataclasses import dataclass\n"
        "from rlhf_core import ADVANTAGE, POLICY_LOSS, LossOutput, hookimpl\n\n"
        "@dataclass(frozen=True)\nclass Gentle:\n    epsilon: float = 0.2\n    delta: float = 1.0\n\n"
        "    def __call__(self, inputs):\n        return LossOutput(-inputs.logps)\n\n"
        "def mine(inputs):\n    return inputs.rewards\n\n@hookimpl\n"
        "def rlhf_register(registry):\n    registry.add(POLICY_LOSS, 'gentle', Gentle)\n"
        "    registry.add(ADVANTAGE, 'mine', mine)\n",
    )
    loss = 'loss = { name = "gentle", epsilon = 0.1, delta = 1.0 }\nadvantage = "mine"'
    place.settings("policy.toml", f"{loss}\nrewards = [{LENGTH}, {LOGGED}]")


def without_teacher(place: Any) -> None:
    lines = place.good["distill.toml"].decode().splitlines(keepends=True)
    place.write("distill.toml", "".join(line for line in lines if not line.startswith("teacher_model")))


def exchanged(place: Any) -> None:
    """Let two words have each other's ids in the teacher's tokenizer."""
    shutil.copytree("model", "other")
    file = Path("other/tokenizer.json")
    described = json.loads(file.read_text())
    words = described["model"]["vocab"]
    words["kite"], words["red"] = words["red"], words["kite"]
    file.write_text(json.dumps(described))
    place.settings("distill.toml", 'teacher_model = "other"')


def divergence(name: str, returned: str) -> Mistake:
    def make(place: Any) -> None:
        place.write(
            "mine.py",
            "from rlhf_core import hookimpl\nfrom rlhf_distill import DIVERGENCE\n\n"
            f"def mine(student_logps, teacher_logps):\n    return {returned}\n\n"
            "@hookimpl\ndef rlhf_register(registry):\n    registry.add(DIVERGENCE, 'mine', mine)\n",
        )
        place.settings("distill.toml", 'divergence = "mine"\nmax_training_steps = 1')

    return Mistake(name, make, "run distill.toml --plugin mine.py")


LENGTH = "{ name = 'length', target = 4 }"
LOGGED = "{ name = 'length', target = 3, label = 'b', weight = 0.0 }"
POLICIES = [
    policy("total_batch_size = 6\nnum_generations = 4"),
    policy("sampling = { temperature = 0.0 }"),
    policy("sampling = { max_completion_length = 2147483648 }"),
    policy("evaluation = { sampling = { temprature = 0.5 } }"),
    policy("evaluation = { num_generations = 4, sampling = { temperature = 0.0 } }"),
    policy('advantage = { name = "reinforce_pp", baseline = "all" }'),
    policy('model = "small"', "a model that has fewer embeddings than the prompts have tokens"),
]
TWICE = "num_iterations = 2"
WITHOUT_EFFECT = [
    policy("epsilon = 0.3"),
    policy(f"{TWICE}\nepsilon = 0.3"),
    policy("delta = 4.0"),
    policy(f"{TWICE}\ndelta = 1.1"),
    policy(f"{TWICE}\ndual_clip = 0.5"),
    policy('loss = { name = "sapo", temperature_neg = 2.0 }'),
    policy('loss = "cispo"'),
    policy(f'{TWICE}\nloss = "gspo"'),
    policy('importance_sampling_level = "sequence"'),
    policy('importance_sampling_level = "sequence"\ntop_entropy_quantile = 0.2'),
    policy('importance_sampling_level = "sequence_token"\nbeta = 0.1'),
    policy("use_bias_correction_kl = true\nbeta = 0.0"),
    policy("sync_ref_model = true\nbeta = 0.0"),
    policy("sync_ref_model = true\nref_model_sync_steps = 64"),
    policy('kl = { name = "k1", beta = 0.1 }'),
    policy('kl = { place = "reward" }'),
    policy('kl = { place = "reward" }\nadvantage = "normalize_then_sum"'),
    Mistake("dynamic sampling until the epochs end", until_the_epochs_end, "check policy.toml"),
    policy("top_k = 5\nsampler_correction = {}"),
    policy("num_completions_to_print = 9"),
    policy('rewards = [{ name = "soft_overlong", max_length = 40, cache = 5 }]'),
    policy(f"rewards = [{LENGTH}, {LOGGED}]"),
    policy(f"rewards = [{LENGTH}, {LOGGED}]\nreward_weights = [0.0, 1.0]"),
]
MENDED = [
    policy(f"{TWICE}\nepsilon = 0.3\nepsilon_high = 0.3"),
    policy(f"{TWICE}\ndelta = 4.0"),
    policy(f"{TWICE}\ndual_clip = 3.0"),
    policy('loss = { name = "cispo", epsilon_high = 5.0 }'),
    policy(f'{TWICE}\nloss = {{ name = "gspo", epsilon = 3e-4, epsilon_high = 4e-4 }}'),
    policy(f'{TWICE}\nimportance_sampling_level = "sequence"\nepsilon = 3e-4\nepsilon_high = 4e-4'),
    policy('importance_sampling_level = "sequence_token"\ntop_entropy_quantile = 0.2'),
    policy('importance_sampling_level = "sequence_token"\nbeta = 0.1\nuse_bias_correction_kl = true'),
    policy("sync_ref_model = true\nref_model_sync_steps = 1"),
    policy('kl = { name = "k1", beta = 0.1 }\nuse_bias_correction_kl = true'),
    policy('kl = { place = "reward" }\nscale_rewards = "none"'),
    policy('kl = { place = "reward" }\nadvantage = "rloo"'),
    policy('kl = { place = "reward" }\nadvantage = "reinforce_pp"'),
    policy('dynamic_sampling = {}\nscheduler = "linear"\nmax_training_steps = 2'),
    policy("num_completions_to_print = 9\nlog_completions = true"),
    policy('rewards = [{ name = "soft_overlong", max_length = 8, cache = 5 }]'),
    policy(f"rewards = [{LENGTH}, {LOGGED}]\nreward_weights = [1.0, 2.0]"),
    Mistake("a loss and an advantage of a stranger", of_a_stranger, "check policy.toml --plugin plugin.py"),
]
"""Settings like these of which nothing is said."""
PREFERENCES = [
    dpo("beta = 0.0"),
    dpo('loss = "robust"'),
    dpo('loss = { name = "robust", label_smoothing = 0.1 }'),
    dpo('loss = "orpo"'),
    dpo('loss = "orpo"\nbeta = 0.2'),
    Mistake(
        "chosen and rejected are the same in every pair",
        lambda place: place.write(
            "pairs.jsonl", json.dumps({**PAIRS[0], "rejected": PAIRS[0]["chosen"]}) + "\n"
        ),
        "check dpo.toml",
    ),
]
ONLINE = [
    online("num_generations = 1"),
    online("num_generations = 3"),
    online("rewards = []"),
    online('environment = "world.py:World"'),
    online('tools = ["tools.py:price"]'),
    online("sampling = { temperature = 0.0 }"),
    online("missing_eos_penalty = 1.0"),
]
APO = 'loss = "apo_zero_unpaired"'
LABELS = [
    labels("a label that is neither", 1, 0.5),
    labels("rows without a label", None),
    labels("one class", 1, 1, 1),
    labels("updates of one row", 1, 0, settings="total_batch_size = 1"),
    labels(
        "updates of one row, of a loss that needs no other", 1, 0, settings=f"{APO}\ntotal_batch_size = 1"
    ),
    labels("a last update of one row", 1, 0, 1, 0, 1, settings="num_train_epochs = 1"),
    labels("held-out rows with a label that is neither", 1, 0, held_out=(1, 2)),
    labels("a held-out row", 1, 0, held_out=(1,)),
    labels("labels that are not balanced", 1, 1, 1, 0),
    labels("labels that are not balanced, with a weight", 1, 1, 1, 0, settings="undesirable_weight = 2.6"),
]
STUDENTS = [
    distill("on_policy_fraction = 0.1"),
    distill("on_policy_fraction = 0.9"),
    Mistake("no teacher", without_teacher, "check distill.toml"),
    distill('teacher_model = "large.model"'),
    setting('teacher_model = "small"', "a teacher with fewer embeddings than tokens", "run distill.toml"),
    distill('divergence = { name = "jsd", beta = 2 }'),
    other_tokenizer("a token that only the teacher has", lambda tokenizer: tokenizer.add_tokens(["new"])),
    other_tokenizer(
        "a token that only the student has", lambda tokenizer: tokenizer.add_tokens(["new"]), True
    ),
    other_tokenizer("another stop token", lambda tokenizer: setattr(tokenizer, "eos_token", "kite")),
    Mistake("two tokens that have each other's ids", exchanged, "check distill.toml"),
    divergence("a divergence that is summed over the ids", "(teacher_logps - student_logps).sum(-1)"),
    divergence("a divergence that raises", "{}['temperature']"),
]
PYTHON = [
    python("GRPOTrainer(rewrds=[…])", lambda: GRPOTrainer(rewrds=[len])),
    python(
        "GRPOTrainer(args=…, arguments=…)", lambda: GRPOTrainer(args=GRPOConfig(), arguments=GRPOConfig())
    ),
    python('GRPOTrainer(args={"learning_rate": 1.0})', lambda: GRPOTrainer(args={"learning_rate": 1.0})),
    python(
        "GRPOTrainer(rewards=[…, a model])",
        lambda: GRPOTrainer(model="model", rewards=["length", scorer()], train_dataset=[{"prompt": "Mia"}]),
    ),
    python("RewardTrainer(model=…).train()", lambda: RewardTrainer(model=scorer()).train()),
    python("RewardTrainer(train_dataset=…).train()", lambda: RewardTrainer(train_dataset=PAIRS).train()),
    python("RewardTrainer(dataset=…)", lambda: RewardTrainer(model="scorer", dataset=PAIRS)),
    python(
        "RewardTrainer(tokenizer=…, processing_class=…)",
        lambda: RewardTrainer(tokenizer=1, processing_class=1),
    ),
    python(
        "RewardTrainer(train_dataset=DatasetDict(…))",
        lambda: RewardTrainer(train_dataset=datasets.DatasetDict(good=datasets.Dataset.from_list(PAIRS))),
    ),
    python(
        "RewardTrainer(eval_dataset=… .repeat(None))",
        lambda: RewardTrainer(
            train_dataset=PAIRS,
            eval_dataset={"easy": PAIRS, "hard": grain.MapDataset.source(PAIRS).repeat(None)},
        ),
    ),
    python(
        'RewardTrainer(mesh={"fsdp": 0, "tenser": 2, …})',
        lambda: RewardTrainer(
            model=scorer(), train_dataset=PAIRS, mesh={"fsdp": 0, "tenser": 2, "sp": 2, "context": 2}
        ),
    ),
    python(
        'RewardTrainer(model=one that lies on four devices, mesh={"tensor": 2}).train()',
        lambda: RewardTrainer(
            model=scorer(mesh=make_mesh(fsdp=4)), train_dataset=PAIRS, mesh={"tensor": 2}
        ).train(),
    ),
    python("RewardTrainer().predict", lambda: RewardTrainer().predict),
    python("RewardTrainer().push_to_hub", lambda: RewardTrainer().push_to_hub),
    python("RewardTrainer().evaluate()", lambda: RewardTrainer().evaluate()),
    python('RewardTrainer().save_model("copy")', lambda: RewardTrainer().save_model("copy")),
    python("DPOTrainer(reference_model=…)", lambda: DPOTrainer(model="model", reference_model="model")),
    python("model(input_ids=[[1]])", lambda: load_model("model")(input_ids=[[1]])),
    python("reward_model(input_ids=[[1]])", lambda: scorer()(input_ids=[[1]])),
    python('load_model("model", num_labels=1)', lambda: load_model("model", num_labels=1)),
]
SECTIONS = {
    "Settings of GRPO": POLICIES,
    "Settings of GRPO without effect": [*WITHOUT_EFFECT, *(each._replace(long=True) for each in MENDED)],
    "Settings and pairs of DPO": PREFERENCES,
    "Settings of online DPO": ONLINE,
    "Labels of KTO": LABELS,
    "Settings and teachers of distillation": STUDENTS,
    "Trainers and models from Python": PYTHON,
}
