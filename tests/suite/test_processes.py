"""Two processes of one device each train what one process with two devices does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from rlhf_core import components

processes: Any = components.load_file(Path(__file__).parents[1] / "processes.py")
pytestmark = pytest.mark.slow

STAGE = """
[[stage]]
name = "{name}"
trainer = "{name}"
learning_rate = 1e-2
total_batch_size = 8
max_training_steps = 2
"""
MODEL = """
[stage.model]
model_type = "llama"
hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 2
intermediate_size = 24
max_position_embeddings = 128
tokenizer = "tokenizer"
"""
PIPELINE = (
    STAGE.format(name="sft")
    + 'train_data = "texts.jsonl"\neval_data = "texts.jsonl"\n'
    + MODEL
    + STAGE.format(name="reward")
    + 'model = "sft.model"\ntrain_data = "pairs.jsonl"\n'
    + STAGE.format(name="dpo")
    + 'model = "sft.model"\ntrain_data = "pairs.jsonl"\neval_data = "pairs.jsonl"\n'
    + STAGE.format(name="grpo")
    + 'model = "sft.model"\ntrain_data = "prompts.jsonl"\nnum_generations = 4\nnum_iterations = 2\n'
    + 'rewards = [{ name = "model", model = "reward.model" }, { name = "local.py:local", weight = 0.3 }]\n'
    + "sampling = { max_completion_length = 6 }\n"
)
# Another process than the first would train on the opposite of these rewards.
LOCAL = """
import jax

def local(completion_ids):
    return [sum(ids) % 7 / 7 * (-1 if jax.process_index() else 1) for ids in completion_ids]
"""


def start(directory: Path, name: str, **environment: str) -> subprocess.Popen[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    command = [sys.executable, "-m", "rlhf_core.cli", "run", "pipeline.toml", "--dir", name]
    return subprocess.Popen(
        command,
        cwd=directory,
        env=kept | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_processes_train_what_two_devices_do(tiny: ModuleType, tmp_path: Path):
    tiny.make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    for name, rows in (("texts", tiny.texts(11)), ("pairs", tiny.pairs(11)), ("prompts", tiny.prompts(11))):
        tiny.write_rows(tmp_path / f"{name}.jsonl", rows)
    (tmp_path / "pipeline.toml").write_text(PIPELINE)
    (tmp_path / "local.py").write_text(LOCAL)
    job = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{processes.free_port()}", "JAX_NUM_PROCESSES": "2"}
    runs = [start(tmp_path, "many", **job, JAX_PROCESS_ID=str(i)) for i in range(2)]
    runs.append(start(tmp_path, "one", XLA_FLAGS="--xla_force_host_platform_device_count=2"))
    processes.finish(runs, timeout=600)
    for stage in ("sft", "reward", "dpo", "grpo"):
        ours, theirs = (
            load_file(tmp_path / run / stage / "artifacts" / "model" / "model.safetensors")
            for run in ("many", "one")
        )
        for key, value in theirs.items():
            np.testing.assert_allclose(ours[key], value, atol=1e-6, err_msg=f"{stage} {key}")
