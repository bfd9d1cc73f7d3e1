"""Small honest runs of all trainers, each audited: every check must pass.

    python tests/recipes/honest.py [--only NAME]… [--dir DIRECTORY]

Ends with exit code 1 where a check fails. The last columns are what the limits of `rlhf audit` stand on: by how much
sampler and trainer are apart in the first rollout and, at the median, in later ones, in nats per token.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rlhf_audit import Check, audit
from rlhf_audit.sampling import first_and_later
from rlhf_audit.subject import Subject

from rlhf_core import run_pipeline
from rlhf_core.errors import RunError
from rlhf_core.runs import open_run

REPOSITORY = Path(__file__).resolve().parents[2]
ALL = """
dir = "run"
seed = {seed}
[[stage]]
name = "only"
trainer = "{trainer}"
model = "lm"
train_data = "{data}.jsonl"
log_steps = 1
save_steps = 1
weight_decay = 0.0
learning_rate = 1e-2
"""
SHORT = "total_batch_size = 8\nmax_training_steps = 6\n"
SAMPLED = """
rewards = ["here.py:early"]
total_batch_size = 64
num_generations = 8
max_completion_length = 8
max_training_steps = 5
num_preview_samples = 0
"""
HERE = """
from pathlib import Path

from rlhf_core import ENVIRONMENT, hookimpl
from rlhf_core.contracts import Turn


def early(completions):
    return [sum("a" <= word <= "m" for word in text.split()) / 6 for text in completions]


def interrupted(completions):
    \"\"\"Fails at the third call, once.\"\"\"
    calls = Path(__file__).with_name("calls.txt")
    said = calls.read_text() if calls.exists() else ""
    calls.write_text(said + ".")
    if len(said) == 2:
        raise RuntimeError("interrupted")
    return early(completions)


class Talk:
    said = 0

    def reset(self, row, seed):
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, completion):
        self.said += 1
        reward = float(len(set(completion["content"].split())))
        return Turn([{"role": "user", "content": "a b c"}], reward, done=self.said == 3)


@hookimpl
def rlhf_register(registry):
    registry.add(ENVIRONMENT, "talk", Talk)
"""
SAMPLING: Mapping[str, str] = {
    "grpo": "",
    "another seed": "seed = 1\n",
    "a third seed": "seed = 2\n",
    "fast": "learning_rate = 5e-2\n",
    "tempered": "temperature = 0.7\n",
    "filtered": "top_k = 5\n",
    "several updates": "num_iterations = 2\n",
    "minibatches": "steps_per_generation = 2\n",
    "resumed": 'rewards = ["here.py:interrupted"]\n',
    "one ahead": "rollouts_ahead = 1\n",
    "two ahead": "rollouts_ahead = 2\n",
    "adapters": "lora = { rank = 4 }\n",
    "adapters ahead": "lora = { rank = 4 }\nrollouts_ahead = 1\n",
    "bfloat16": 'dtype = "bfloat16"\n',
    "dynamic": "dynamic_sampling = { max_rounds = 2 }\n",
    "episodes": 'rewards = []\nenvironment = { name = "talk", max_turns = 3 }\nchat_template = "plain"\n',
}
"""GRPO, and by what each run differs."""
TRAINERS = {"sft": "texts", "reward": "pairs", "dpo": "pairs", "kto": "labels", "online_dpo": "prompts"}
"""The other trainers, and their data."""


def pipelines() -> Iterator[tuple[str, str]]:
    """Yield every run's name and pipeline."""
    for trainer, data in TRAINERS.items():
        text = ALL.format(trainer=trainer, data=data, seed=0)
        yield trainer, with_lines(text, SHORT if data != "prompts" else SHORT + SAMPLED, "")
    for name, lines in SAMPLING.items():
        yield name, with_lines(ALL.format(trainer="grpo", data="prompts", seed=0), SAMPLED, lines)


def with_lines(*parts: str) -> str:
    """Join the lines of a pipeline; the last of those with the same name stays."""
    lines = [line for part in parts for line in part.splitlines() if line]
    last = {line.partition(" =")[0]: i for i, line in enumerate(lines)}
    return "".join(f"{line}\n" for i, line in enumerate(lines) if last[line.partition(" =")[0]] == i)


def run(place: Path, name: str, pipeline: str) -> list[Check]:
    """Run a pipeline to its end; return its checks."""
    path, directory = place / "pipeline.toml", place / name.replace(" ", "_")
    path.write_text(pipeline)
    try:
        run_pipeline(path, dir=directory, plugins=[place / "here.py"])
    except RunError as error:
        if "interrupted" not in str(error):
            raise
        run_pipeline(path, dir=directory, plugins=[place / "here.py"])
    return audit(directory, exact=True, plugins=[place / "here.py"])["only"]


def apart(directory: Path) -> tuple[float, float]:
    """Return how far sampler and trainer are apart in the first rollout, and at the median in later ones; or NaN."""
    run = open_run(directory)
    return first_and_later(Subject(run, run.stages[0]))


def prepare(place: Path) -> None:
    """Write the model and the data."""
    sys.path.insert(0, str(REPOSITORY))
    from tests.shared import tiny

    tiny.make_model(scale=4.0).save(place / "lm")
    texts = tiny.texts(64)
    rows: dict[str, list[dict[str, Any]]] = {
        "texts": texts,
        "pairs": tiny.pairs(64),
        "labels": [{**row, "label": i % 3 > 0} for i, row in enumerate(texts)],
        "prompts": tiny.prompts(48),
    }
    for name, each in rows.items():
        tiny.write_rows(place / f"{name}.jsonl", each)
    (place / "here.py").write_text(HERE)


def main() -> int:
    """Run and audit; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--dir", type=Path)
    given = parser.parse_args()
    # Programs this small run for milliseconds: what counts is the time to compile.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    jax.config.update("jax_compilation_cache_dir", str(Path(tempfile.gettempdir()) / "rlhf-honest-cache"))
    place = given.dir or Path(tempfile.mkdtemp(prefix="rlhf-honest-"))
    place.mkdir(parents=True, exist_ok=True)
    prepare(place)
    failed = 0
    for name, pipeline in pipelines():
        if given.only and name not in given.only:
            continue
        checks = run(place, name, pipeline)
        wrong = [check for check in checks if check.verdict == "FAIL"]
        failed += bool(wrong)
        counts = [sum(check.verdict == verdict for check in checks) for verdict in ("pass", "not applicable")]
        tests = [check.values["z"] for check in checks if "z" in check.values]
        evidence = [check.values["log10_evidence"] for check in checks if "z" in check.values]
        first, later = apart(place / name.replace(" ", "_"))
        line = (
            f"{name:16} {counts[0]:2} pass {counts[1]:2} n/a  z {max(map(abs, tests), default=np.nan):5.2f}"
        )
        print(
            f"{line}  log10 M {max(evidence, default=np.nan):6.2f}  apart {first:.2g}, {later:.2g}",
            flush=True,
        )
        for check in wrong:
            print(f"  FAIL {check.name}: {check.number}; {check.why} {check.where}", flush=True)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
