"""Kill a trainer that samples, and its engine, at random moments: the same bits, and every group is used once.

Reads the journal with a reader of its own, and trains again from it.
"""

from __future__ import annotations

import io
import itertools
import json
import shutil
import signal
import socket
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.torture import runs
from tests.torture.children import Child, rlhf
from tests.torture.experiment import Case, Trial

SHARE = 3.0
DISTURBANCES = 8
"""Kills of a run, unless it ends before."""
PROMPTS, UPDATES = 2, 2
"""Of a rollout: its prompts, and the updates it serves."""
CODE = '''"""A reward with a state, and an environment that answers when it likes."""

import asyncio
import random
from dataclasses import dataclass

from rlhf_core import Turn


@dataclass
class Running:
    """Depends on all that it has scored before."""

    total: int = 0

    def __call__(self, completion_ids, **_):
        values = []
        for ids in completion_ids:
            values.append(float((sum(ids) + self.total) % 3))
        self.total += sum(map(len, completion_ids))
        return values

    def snapshot(self):
        return {"total": self.total}

    def restore(self, kept):
        self.total = kept["total"]


class Talk:
    said = 0

    def reset(self, row, seed):
        self.turns = 1 + seed % 3
        return [{"role": "user", "content": row["prompt"]}]

    async def step(self, completion):
        await asyncio.sleep(random.random() * 0.03)
        self.said += 1
        if self.said == self.turns:
            return Turn(reward=float(len(completion["content"]) % 2), done=True)
        return Turn([{"role": "user", "content": "say kite two :"}], 0.0)
'''
BASE = runs.SFT.replace("max_position_embeddings = 32", "max_position_embeddings = 96")
POLICY = """
[[stage]]
name = "policy"
trainer = "grpo"
model = "base.model"
train_data = "data/prompts.jsonl"
eval_data = "data/prompts.heldout.jsonl"
eval_on_start = true
evaluation_steps = 3
rewards = ["code.py:Running"]
num_generations = 2
total_batch_size = 4
num_iterations = 2
learning_rate = 1e-2
save_steps = 3
save_total_limit = 2
log_steps = 1
max_prompt_length = 24
sampling = { max_completion_length = 4 }
kl = { name = "k3", beta = 0.02 }
num_preview_samples = 2
previews = { prompts = ["please say kite two :"], every = 4, max_new_tokens = 4 }
"""
FORMS = {
    "texts": "max_training_steps = 12\n",
    "turns": 'max_training_steps = 12\nchat_template = "plain"\n'
    'environment = { name = "code.py:Talk", max_turns = 3, max_tokens = 48 }\n',
    "rounds": "dynamic_sampling = { max_rounds = 3 }\n",
}
"""The last one until its prompts are used up, the others for a number of updates."""
SAMPLERS = {"here": "", "adapters": "lora = { rank = 2, alpha = 4 }\n", "whole": ""}


def run(trial: Trial) -> None:
    with tempfile.TemporaryDirectory(prefix="torture-") as directory:
        before = Path(directory) / "before"
        runs.write(before, BASE)
        ended = rlhf("run", "p.toml", cwd=before).wait(240)
        if ended.code:
            raise RuntimeError(f"the stage that all begin with {ended}")
        names = [f"{sampler} {form} {k}" for sampler, form, k in itertools.product(SAMPLERS, FORMS, range(3))]
        trial.random("order").shuffle(names)
        trial.each(names, lambda case: judge(case, before), seconds=900)


class Engine:
    """`rlhf serve` of the base model, which is started again after a kill; none for a sampler in the trainer."""

    def __init__(self, work: Path, sampler: str) -> None:
        self.work, self.process = work, None
        if sampler != "here":
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.port = free.getsockname()[1]
            self.start()

    def start(self) -> None:
        model = "run/base/artifacts/model"
        options = ("--port", str(self.port), "--control", "--adapters", ".")
        self.process: Child | None = rlhf("serve", model, *options, cwd=self.work)

    def kill(self) -> None:
        assert self.process is not None
        self.process.signal(signal.SIGKILL, group=True)
        self.process.wait(10)


def judge(case: Case, before: Path) -> None:
    sampler, form, ahead = case.name.split()
    work = case.directory / "work"
    shutil.copytree(before, work, symlinks=True)
    (work / "code.py").write_text(CODE)
    engine = Engine(work, sampler)
    began = time.monotonic()
    start(work, "whole", engine, f"{SAMPLERS[sampler]}{FORMS[form]}rollouts_ahead = {ahead}\n")
    ended = rlhf("run", "whole.toml", cwd=work).wait(300)
    case.require(ended.code == 0, f"the undisturbed run {ended}")
    seconds = time.monotonic() - began
    start(work, "killed", engine, f"{SAMPLERS[sampler]}{FORMS[form]}rollouts_ahead = {ahead}\n")
    disturb(case, work, engine, seconds)
    for line in runs.differences(work / "whole", work / "killed"):
        case.fail(line)
    for line in miscounted(work / "killed" / "policy", form):
        case.fail(line)
    updates = len((work / "whole" / "policy" / "metrics.jsonl").read_text().splitlines()) - 1
    for arguments, made in ((("whole", "--stage", "policy", "--to", "5"), 5), (("killed",), updates)):
        ended = rlhf("replay", *arguments, cwd=work).wait(200)
        told = f"{made} updates trained again from the journal: every logged metric"
        case.require(ended.code == 0 and told in ended.out, f"replay {' '.join(arguments)} {ended}")
        case.count("replays")
    if engine.process is not None:
        engine.kill()


def start(work: Path, name: str, engine: Engine, options: str) -> None:
    """Write the pipeline file of a run whose first stage is done."""
    shutil.copytree(work / "run", work / name)
    if engine.process is not None:
        weights = "adapter" if "lora" in options else "disk"
        options += (
            f'sampler = {{ name = "rlhf", urls = ["http://127.0.0.1:{engine.port}"], weights = "{weights}", '
            f'directory = "policies-{name}", probe_tolerance = 1e-3, timeout = 60.0 }}\n'
        )
    (work / f"{name}.toml").write_text(f'dir = "{name}"\nseed = 0\n{BASE}{POLICY}{options}')


def disturb(case: Case, work: Path, engine: Engine, seconds: float) -> None:
    """Run to the end, killing trainer and engine on the way. seconds: that an undisturbed run takes."""
    trainer = rlhf("run", "killed.toml", cwd=work)
    for _ in range(DISTURBANCES):
        kills_engine = engine.process is not None and case.random.random() < 0.4
        until = time.monotonic() + case.random.uniform(0.0, 0.3 * seconds)
        while trainer.running() and time.monotonic() < until:
            time.sleep(0.01)
        if not trainer.running():
            break
        if kills_engine:
            engine.kill()
            time.sleep(case.random.uniform(0.0, 1.0))
            engine.start()
            case.count("kills of the engine")
        else:
            trainer.signal(signal.SIGKILL)
            killed = trainer.wait(10)
            case.require(not killed.traceback, f"before the kill: {killed}")
            case.count("kills of the trainer")
            trainer = rlhf("run", "killed.toml", cwd=work)
    ended = trainer.wait(400)
    case.require(ended.code == 0 and not ended.traceback, f"after the last kill: {ended}")


def miscounted(stage: Path, form: str) -> list[str]:
    """Count the groups of a finished stage from its files alone: say which were lost, or used twice."""
    rows = [json.loads(line) for line in (stage / "metrics.jsonl").read_text().splitlines()]
    made = [read(path) for path in sorted((stage / "journal").glob("rollout-*.zip"))]
    updates, lines = rows[-1]["step"], []
    if len(made) != -(-updates // UPDATES):
        lines.append(f"{updates} updates have {len(made)} rollouts in the journal")
    rounds = [number for each in made for number in each["taken"][: each["rounds"]]]
    rows_of_data = len((stage.parents[1] / "data" / "prompts.jsonl").read_text().splitlines())
    due = rows_of_data // PROMPTS if form == "rounds" else len(made)
    # Where prompts are used up, the last rollout may take rounds of the epoch that would follow.
    if (
        len({*rounds}) < len(rounds)
        or {*range(due)} - {*rounds}
        or {*rounds[: -made[-1]["rounds"]]} >= {*range(due)}
    ):
        lines.append(f"rounds of prompts were lost or used twice: {sorted(rounds)}")
    for number, each in enumerate(made):
        dropped = sum(each["metrics"].get(f"dynamic_sampling/{why}", 0) for why in ("dropped", "surplus"))
        if each["rounds"] * PROMPTS != len(each["prompts"]) + dropped or len(each["prompts"]) != PROMPTS:
            lines.append(
                f"rollout {number}: {len(each['prompts'])} groups used and {dropped} dropped, of "
                f"{each['rounds'] * PROMPTS}"
            )
    return lines


def read(path: Path) -> dict[str, Any]:
    """Read a rollout's file: its facts, and which prompts it has."""
    with zipfile.ZipFile(path) as file:
        return {
            **json.loads(file.read("rollout.json")),
            "prompts": np.load(io.BytesIO(file.read("prompts.npy"))).tolist(),
        }
