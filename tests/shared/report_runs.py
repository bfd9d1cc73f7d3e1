"""Run directories as a pipeline leaves them, made in a moment; and a page taken apart."""

from __future__ import annotations

import base64
import gzip
import json
import shutil
from collections.abc import Iterable, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import rlhf_report as reporting
from rlhf_report.run_reader import read_run

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


class Page(HTMLParser):
    """Every element with its attributes; the text of all but scripts and styles; what scripts hold, by id."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text, self.scripts, self.inside = "", dict[str, str](), ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        self.inside = (dict(attrs).get("id") or tag) if tag in ("script", "style") else ""

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.scripts[self.inside] = self.scripts.get(self.inside, "") + data
        else:
            self.text += data

    def ids(self) -> list[str]:
        return [a["id"] for _, a in self.elements if "id" in a]

    def of(self, kind: str) -> list[dict[str, str]]:
        return [attributes for tag, attributes in self.elements if tag == kind]

    def charts(self) -> dict[str, Any]:
        return json.loads(gzip.decompress(base64.b64decode(self.scripts["data"])))


def page(run: Path) -> Page:
    """Write the report of a run and read it."""
    return Page(reporting.report(run).read_text(encoding="utf-8"))


def words(run: Path) -> str:
    """Return what the report of a run says, with single spaces."""
    return " ".join(page(run).text.split())


def stages(run: Path) -> dict[str, Any]:
    """Read the stages of a run as the report does, by name."""
    return {stage.name: stage for stage in read_run(run).stages}


def problems(run: Path) -> list[str]:
    """Return what the report could not read of a run."""
    return list(read_run(run).problems)


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def arrays(value: Any, name: str = "") -> Iterable[tuple[str, np.ndarray]]:
    """Yield (column, array) of every array in a Bokeh document."""
    if isinstance(value, dict) and value.get("type") == "ndarray":
        raw = base64.b64decode(value["array"]["data"])
        raw = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        yield name, np.frombuffer(raw, value["dtype"])
    elif isinstance(value, dict):
        for inside in value.values():
            yield from arrays(inside, name)
    elif isinstance(value, list):
        pair = len(value) == 2 and isinstance(value[0], str)
        for inside in value[1:] if pair else value:
            yield from arrays(inside, value[0] if pair else name)


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
    pair = {"prompt": "p", "chosen": "good", "rejected": "bad", "chosen_score": 1.5, "rejected_score": -0.5}
    write(directory / "rm/samples/evaluation-000020.jsonl", [pair])
    found = {
        "step": 20,
        "scores": {"edges": [0, 1, 2], "chosen": [1, 3], "rejected": [4, 0]},
        "calibration": [{"pairs": 4, "confidence": 0.7, "right": 0.75}],
    }
    write(directory / "rm/evaluations/000020.json", [found])
    return directory
