"""Runs of the reward trainer have the bytes of a fresh process, whichever others ran before them in theirs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

LOSS = """
import os
from dataclasses import dataclass
import jax
import optax
import knobs
from rlhf_core import OPTIMIZER, PAIRWISE_LOSS, LossOutput, hookimpl

SCALE = 1.0


@jax.jit
def scaled(x):
    return knobs.helper(x) * knobs.factor


@dataclass(frozen=True)
class Kept:
    keep: bool | int | float = 2.0

    def __call__(self, inputs):
        margin = scaled(inputs.chosen - inputs.rejected) * SCALE * float(os.environ["KEPT"])
        return LossOutput(-jax.nn.log_sigmoid(margin * (1.5 if type(self.keep) is int else 1.0)))


def reading(learning_rate):
    return optax.sgd(knobs.rate)


@hookimpl
def rlhf_register(registry):
    registry.add(PAIRWISE_LOSS, "kept", Kept)
    registry.add(OPTIMIZER, "reading", reading)
"""
SCRIPT = '''
import hashlib, json, os, sys, types
from pathlib import Path
import jax
jax.config.update("jax_num_cpu_devices", 1)
from rlhf_core import run_pipeline

knobs = types.ModuleType("knobs")
sys.modules["knobs"] = knobs


def settings(name):
    knobs.helper, knobs.factor, knobs.rate = lambda x: x, 1.0, 0.1
    os.environ["KEPT"] = "1"
    keep, seed, data, loss = "2.0", 1, "pairs.jsonl", Path("loss.txt").read_text()
    if name == "helper":
        knobs.helper = lambda x: 2.0 * x
    elif name == "global":
        knobs.factor = 3.0
    elif name == "optimizer":
        knobs.rate = 0.2
    elif name == "environment":
        os.environ["KEPT"] = "4"
    elif name == "type":
        keep = "2"
    elif name == "seed":
        seed = 2
    elif name == "data":
        data = "others.jsonl"
    elif name == "file":
        loss = loss.replace("SCALE = 1.0", "SCALE = 5.0")
    Path("loss.py").write_text(loss)
    os.utime("loss.py", (1e9, 1e9))
    Path("p.toml").write_text(f"""
seed = {seed}
[[stage]]
name = "rm"
trainer = "reward"
model = {{ {Path("model.txt").read_text()} }}
train_data = "{data}"
total_batch_size = 4
max_training_steps = 2
optimizer = "reading"
loss = {{ name = "kept", keep = {keep} }}
""")


for name in sys.argv[2:]:
    settings(name)
    run_pipeline("p.toml", plugins=["loss.py"], dir=Path(sys.argv[1], name))
'''
MODEL = """
model_type = "llama", hidden_size = 16, num_hidden_layers = 1, num_attention_heads = 2, intermediate_size = 24,
max_position_embeddings = 64, tokenizer = "tokenizer"
"""
NAMES = ["first", "helper", "global", "optimizer", "environment", "type", "seed", "data", "file"]


def of(directory: Path) -> tuple[bytes, list[str]]:
    """The weights of a run, and the messages of its events."""
    rows = map(json.loads, (directory / "events.jsonl").read_text().splitlines())
    weights = (directory / "rm" / "artifacts" / "model" / "model.safetensors").read_bytes()
    return weights, [f"{row['event']} {row.get('message')}" for row in rows]


@pytest.mark.long  # test_runs_of_one_process.py tries each on a probe
def test_eight_pairs_of_runs_have_the_bytes_of_fresh_processes(tiny: ModuleType, tmp_path: Path) -> None:
    """In two orders, so that each run has had others before it, and each pair differs in one thing."""
    tiny.make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    tiny.write_rows(tmp_path / "pairs.jsonl", tiny.pairs(8))
    tiny.write_rows(tmp_path / "others.jsonl", tiny.pairs(8, seed=1))
    (tmp_path / "loss.txt").write_text(LOSS)
    (tmp_path / "model.txt").write_text(" ".join(MODEL.split()))
    for order, names in (("there", NAMES), ("back", NAMES[::-1])):
        command = [sys.executable, "-c", SCRIPT, order, *names]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    found = {name: of(tmp_path / "there" / name) for name in NAMES}
    assert found == {name: of(tmp_path / "back" / name) for name in NAMES}
    assert len({weights for weights, _ in found.values()}) == len(NAMES)
