"""Run directories as a pipeline leaves them, made in a moment; and a report taken apart."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import rlhf_report as reporting
from rlhf_report.watch.run_view import read_run

BEGAN = 1_700_000_000.0
PIPELINE = """dir = "{dir}"
seed = 3
[[stage]]
name = "rm"
trainer = "reward"
model = "some/base"
train_data = "/data/pairs.jsonl"
[[stage]]
name = "policy"
trainer = "grpo"
model = "some/base"
train_data = "/data/prompts.jsonl"
learning_rate = {rate}
rewards = [{{ name = "model", model = "rm.model" }}]
"""
EVIL = "</script><script>alert(1)</script><img src=http://x.invalid/y.png onerror=alert(2)>&amp;"


def answers_in(page: str) -> dict[str, Any]:
    """Return the answers of routes that a report has inside."""
    packed = re.search(r'<script type="text/plain" id="frozen">([^<]*)</script>', page)
    assert packed is not None
    found: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    return found


class Report:
    """A report, its answers {route after api/runs/ID/: answer} of its first run, and every text in them."""

    def __init__(self, path: Path) -> None:
        self.html = path.read_text(encoding="utf-8")
        self.all = answers_in(self.html)
        self.id = self.all["api/runs"]["runs"][0]["id"]
        front = f"api/runs/{self.id}"
        self.run = self.all[front]
        self.stages = {stage["name"]: stage for stage in self.run["stages"]}
        self.answers = {
            route.removeprefix(f"{front}/"): answer
            for route, answer in self.all.items()
            if route.startswith(f"{front}/")
        }
        self.text = "\n".join(texts(self.all))


def texts(value: Any) -> Iterator[str]:
    """Yield every text in a value that JSON can hold."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from texts(each)


def page(run: Path) -> Report:
    """Write the report of a run and read it."""
    return Report(reporting.report(run))


def results(run: Path, stage: str = "policy") -> dict[str, Any]:
    """Return what a stage of a run came to, as the page has it."""
    found: dict[str, Any] = page(run).answers[f"{stage}/results"]
    return found


def completions(run: Path, title: str = "Completions") -> dict[str, Any]:
    """Return the policy's completions before and after."""
    found: dict[str, Any] = next(each for each in results(run)["completions"] if each["title"] == title)
    return found


def words(run: Path) -> str:
    """Return what the report of a run says."""
    return page(run).text


def stages(run: Path) -> dict[str, Any]:
    """Read the stages of a run as the report does, by name."""
    return {stage.name: stage for stage in read_run(run).stages}


def problems(run: Path) -> list[str]:
    """Return what the report could not read of a run."""
    return list(page(run).run["problems"])


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_policy_run(directory: Path) -> Path:
    """A run of the GRPO stage alone, without curves: they take most of a page's time."""
    run = make_run(directory)
    shutil.rmtree(run / "rm")
    (run / "policy/metrics.jsonl").unlink()
    return run


def make_run(directory: Path, *, steps: int = 20, rate: float = 1e-4, offset: float = 0.0) -> Path:
    """A run of a reward and a GRPO stage, both done."""
    directory.mkdir(parents=True)
    (directory / "pipeline.resolved.toml").write_text(PIPELINE.format(dir=directory, rate=rate))
    every = np.random.default_rng(0).normal(size=(steps, 2))
    rm = [
        {
            "step": i + 1,
            "time": BEGAN + 10 + i,
            "loss": 0.7 - i / 2 / steps + offset,
            "accuracy": 0.9,
            "step_time": 1.0,
        }
        for i in range(steps)
    ]
    rm[-1] |= {"eval_loss": 0.25, "eval_accuracy": 0.875, "epoch": 1.0}
    write(directory / "rm/metrics.jsonl", rm)
    policy = [
        {
            "step": i + 1,
            "time": BEGAN + 200 + 2 * i,
            "reward": float(every[i, 0]),
            "rewards/model/mean": float(every[i, 0]),
            "kl": float(abs(every[i, 1])),
            "completions/mean_length": 12.0,
            "step_time": 2.0,
        }
        for i in range(steps)
    ]
    write(directory / "policy/metrics.jsonl", policy)
    events = []
    for name, trainer, start in (("rm", "reward", 0.0), ("policy", "grpo", 190.0)):
        record = {"trainer": trainer, "state": "done", "seed": 3, "versions": {"rlhf-core": "0.1.0"}}
        record["config"] = {"model": "some/base", "learning_rate": rate}
        if name == "policy":
            record["config"]["rewards"] = [{"name": "model", "model": "rm.model"}]
        (directory / name / "stage.json").write_text(json.dumps(record))
        machine = {"device": "cpu", "devices": 2, "jax": "0.10.2", "python": "3.11.7", "processes": 1}
        events += [
            {"time": BEGAN + start, "stage": name, "event": "begun", "machine": machine},
            {"time": BEGAN + start + 1, "stage": name, "event": "warning", "message": f"careful with {EVIL}"},
            {"time": BEGAN + start + 60, "stage": name, "event": "done"},
        ]
    write(directory / "events.jsonl", events)
    for step in (0, steps - 1):
        sample = [
            {
                "prompt": f"prompt {step} {i} {EVIL}",
                "completion": f"completion {step} {i} {EVIL}",
                "reward": i + step / steps,
                "rewards": {"model": float(i), "brevity": None},
                "length": 3 + i,
                "finished": i != 0,
            }
            for i in range(8)
        ]
        write(directory / f"policy/samples/update-{step:06d}.jsonl", sample)
    pair = {"row": "/far/away/pairs.jsonl row 7", "prompt": "p", "chosen": "good", "rejected": "bad"}
    pair |= {"chosen_score": 1.5, "rejected_score": -0.5}
    write(directory / "rm/samples/evaluation-000020.jsonl", [pair])
    found = {
        "step": 20,
        "scores": {"edges": [0, 1, 2], "chosen": [1, 3], "rejected": [4, 0]},
        "calibration": [{"pairs": 4, "confidence": 0.7, "right": 0.75}],
    }
    write(directory / "rm/evaluations/000020.json", [found])
    return directory
