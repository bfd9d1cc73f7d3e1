"""GRPO with a judge that is slow, fails, talks nonsense and never answers twice alike: killed, resumed, learning."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.plugins import load_file

SHARED = Path(__file__).parents[2] / "shared"
services: Any = load_file(SHARED / "services.py")
PIPELINE = """
dir = "run"

[[stage]]
name = "policy"
trainer = "grpo"
model = "model"
train_data = "prompts.jsonl"
num_generations = 4
total_batch_size = 16
learning_rate = 1e-2
max_training_steps = 24
save_steps = 8
log_steps = 1
sampling = {{ max_completion_length = 6 }}
kl = {{ name = "k3", beta = 0.0 }}

[[stage.rewards]]
name = "judge"
url = "{url}"
model = "gpt-9.5"
rubric_file = "rubric.txt"
temperature = 1.0
on_error = "skip"
retries = 1
"""
PASSING = ("time", "tokens_per_second", "step_time", "rollout/")


class Script:
    """Likes words that begin early in the alphabet. answered: how often each question got a number."""

    def __init__(self) -> None:
        self.random, self.lock = random.Random(0), threading.Lock()
        self.answered: Counter[str] = Counter()
        self.kill_at: tuple[int, subprocess.Popen[str]] | None = None

    def __call__(self, body: Any) -> Any:
        question = body["messages"][0]["content"]
        words = re.search(r"<<<(.*)>>>", question, re.DOTALL)[1].split()  # type: ignore[index]
        with self.lock:
            luck, noise = self.random.random(), self.random.gauss(0, 0.05)
            self.answered[question] += luck >= 0.1
            if self.kill_at is not None and sum(self.answered.values()) == self.kill_at[0]:
                self.kill_at[1].kill()
        time.sleep(0.002)
        if luck < 0.05:
            return 503, {"error": {"message": "overloaded"}}, {}
        score = sum(word < "i" for word in words) / 6 + noise
        text = "As an AI, I cannot." if luck < 0.1 else f"Score: {score:.4f}"
        return {"choices": [{"message": {"content": text}}]}


def questions_kept(run: Path) -> Counter[str]:
    """Read which questions have an answer on disk."""
    records = [json.loads(path.read_text()) for path in run.rglob("??/*.json")]
    return Counter(record["request"]["messages"][0]["content"] for record in records if "request" in record)


@pytest.mark.long
def test_a_judged_run_learns_and_resumes_to_the_same_bits(tiny: Any, tmp_path: Path) -> None:
    tiny.make_model().save(tmp_path / "model")
    tiny.write_rows(tmp_path / "prompts.jsonl", tiny.prompts(16))
    (tmp_path / "rubric.txt").write_text("{prompt} <<<{completion}>>>")
    script = Script()

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "rlhf_core.cli", "run", "pipeline.toml"]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
        return subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)

    def metrics() -> dict[int, dict[str, Any]]:
        lines = (tmp_path / "run/policy/metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return {
            row["step"]: {name: value for name, value in row.items() if not name.startswith(PASSING)}
            for row in rows
            if "loss" in row
        }

    with services.serve(script) as service:
        (tmp_path / "pipeline.toml").write_text(PIPELINE.format(url=service.url))
        process = start()
        script.kill_at = (13 * 16 + 9, process)  # in the middle of a rollout
        assert process.wait() == -9, process.stderr.read()  # type: ignore[union-attr]
        before, asked = metrics(), script.answered.copy()
        assert max(before) > 8
        kept = questions_kept(tmp_path / "run")
        assert kept
        assert len(asked - kept) <= 16  # those of the rollout that was interrupted
        shutil.rmtree(tmp_path / "run/policy/journal")  # which has the rewards of whole rollouts
        process = start()
        errors = process.communicate()[1]
        assert process.returncode == 0, errors
    after = metrics()
    assert {step: after[step] for step in before} == before  # those after update 8 were made again
    assert [question for question in kept if script.answered[question] > 1] == []
    counts = [row["rewards/judge/failed_requests"] for row in after.values()]
    assert sum(counts) > 0
    rewards = [after[step]["rewards/judge/mean"] for step in sorted(after)]
    assert sum(rewards[-6:]) / 6 > sum(rewards[:6]) / 6 + 0.15
