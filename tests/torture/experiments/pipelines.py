"""Kill a stage of every trainer at a file call, kill the run that resumes it, and resume again: the same bits."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from tests.torture import runs, shim
from tests.torture.children import rlhf
from tests.torture.experiment import Case, Trial

SHARE = 4.0
REWARDS = '''"""Rewards that differ within almost every group."""


def letters(completions, **_):
    return [sum(map(ord, text)) % 7 / 7 for text in completions]
'''
COMMON = """
total_batch_size = 4
learning_rate = 1e-2
max_training_steps = 4
save_steps = 1
save_total_limit = 2
log_steps = 1
eval_on_start = true
evaluation_steps = 2
"""
BEST = "load_best_model_at_end = true\n"
STAGES = {
    "base": f"""
[[stage]]
name = "base"
trainer = "sft"
model = {runs.MODEL}
train_data = "data/corpus.jsonl"
eval_data = "data/corpus.jsonl"
max_sequence_length = 32
{BEST}{COMMON}""",
    "rm": f"""
[[stage]]
name = "rm"
trainer = "reward"
model = "base.model"
train_data = "data/pairs.jsonl"
eval_data = "data/pairs.heldout.jsonl"
max_sequence_length = 32
{BEST}{COMMON}""",
    "preferred": f"""
[[stage]]
name = "preferred"
trainer = "dpo"
model = "base.model"
lora = {{ rank = 2, alpha = 4, dropout = 0.2 }}
disable_dropout = false
train_data = "data/pairs.jsonl"
eval_data = "data/pairs.heldout.jsonl"
max_sequence_length = 32
{COMMON}""",
    "policy": f"""
[[stage]]
name = "policy"
trainer = "grpo"
model = "base.model"
lora = {{ rank = 2, alpha = 4, dropout = 0.2 }}
disable_dropout = false
train_data = "data/prompts.jsonl"
eval_data = "data/prompts.heldout.jsonl"
rewards = ["data/rewards.py:letters", {{ name = "model", model = "rm.model" }}, "math_verify"]
num_generations = 2
steps_per_generation = 2
num_iterations = 2
dynamic_sampling = {{ max_rounds = 3 }}
max_prompt_length = 16
sampling = {{ max_completion_length = 4 }}
kl = {{ name = "k3", beta = 0.02 }}
{COMMON}""",
    "distilled": f"""
[[stage]]
name = "distilled"
trainer = "distill"
model = "base.model"
teacher_model = "preferred.model"
train_data = "data/prompts.jsonl"
eval_data = "data/prompts.heldout.jsonl"
max_prompt_length = 16
sampling = {{ max_completion_length = 4 }}
{COMMON}""",
}


def run(trial: Trial) -> None:
    shim.require()
    with tempfile.TemporaryDirectory(prefix="torture-") as directory:
        before, calls = undisturbed(Path(directory))
        names = [f"{stage}: {call}" for stage in STAGES for call in calls[stage]]
        trial.random("order").shuffle(names)
        trial.each(names, lambda case: judge(case, before, calls), seconds=300)


def undisturbed(directory: Path) -> tuple[dict[str, Path], dict[str, list[shim.Call]]]:
    """Run stage after stage; return the directory as it was before each of them, and the calls of each.

    The directory after the last stage goes by the name "end".
    """
    work = directory / "work"
    runs.write(work)
    write_answers(work / "data")
    before, calls, so_far = {}, {}, ""
    for stage, text in STAGES.items():
        before[stage] = copy(work, directory / stage)
        so_far += text
        (work / "p.toml").write_text('dir = "run"\nseed = 0\n' + so_far)
        log = directory / f"{stage}.log"
        ended = rlhf("run", "p.toml", cwd=work, env=shim.environment(work, log=log)).wait(240)
        if ended.code:
            raise RuntimeError(f"the undisturbed run of '{stage}' {ended}")
        calls[stage] = [call for call in dict.fromkeys(shim.calls(log)) if call.path.startswith("run")]
        shutil.copy(work / "p.toml", before[stage])
    before["end"] = copy(work, directory / "end")
    return before, calls


def write_answers(data: Path) -> None:
    """Give the prompts an answer for math_verify, and the rewards a file."""
    for path in data.glob("prompts*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({**row, "answer": str(row["count"])}) + "\n" for row in rows))
    (data / "rewards.py").write_text(REWARDS)


def copy(source: Path, target: Path) -> Path:
    shutil.copytree(source, target, symlinks=True)
    return target


def judge(case: Case, before: dict[str, Path], calls: dict[str, list[shim.Call]]) -> None:
    stage, text = case.name.split(": ", 1)
    work = copy(before[stage], case.directory / "work")
    for at in (shim.Call.parse(text), case.random.choice(calls[stage])):
        action = case.random.choice(["kill", "killed"])
        plan = shim.environment(work, at=at, action=action)
        ended = rlhf("run", "p.toml", cwd=work, env=plan).wait(100)
        case.require(ended.code in (-9, 0), f"{action} at {at}: {ended}")
        case.count("kills", int(ended.code == -9))
        case.require(not ended.traceback, f"before {action} at {at}: {ended}")
    ended = rlhf("run", "p.toml", cwd=work).wait(100)
    case.require(ended.code == 0 and not ended.traceback, f"resumed: {ended}")
    case.require("damaged" not in ended.err, f"a kill leaves nothing damaged: {ended}")
    names = list(STAGES)
    after = before[[*names, "end"][names.index(stage) + 1]]
    for line in runs.differences(after / "run", work / "run"):
        case.fail(line)
