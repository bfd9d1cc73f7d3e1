"""Two processes of one device each train what one process with two devices does."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from rlhf_core.runs import open_run
from tests.shared import processes

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
    + 'train_data = { path = "texts.jsonl", streaming = true }\neval_data = "texts.jsonl"\n'
    + MODEL
    + STAGE.format(name="reward")
    + 'model = "sft.model"\ntrain_data = "pairs.jsonl"\n'
    + STAGE.format(name="dpo")
    + 'model = "sft.model"\ntrain_data = "pairs.jsonl"\neval_data = "pairs.jsonl"\n'
    + STAGE.format(name="grpo")
    + 'model = "sft.model"\ntrain_data = "prompts.jsonl"\nnum_generations = 4\nnum_iterations = 2\n'
    + 'rewards = [{ name = "model", model = "reward.model" }, { name = "local.py:local", weight = 0.3 }]\n'
    + "sampling = { max_completion_length = 6 }\n"
    + STAGE.format(name="talk").replace('trainer = "talk"', 'trainer = "grpo"')
    + 'model = "sft.model"\ntrain_data = "prompts.jsonl"\nnum_generations = 4\nnum_iterations = 2\n'
    + 'environment = { name = "talk.py:Talk" }\nchat_template = "plain"\nmax_prompt_length = 40\n'
    + "sampling = { max_completion_length = 6 }\n"
)
# What another process than the first would be told differs.
TALK = """
import jax
from rlhf_core import Turn

class Talk:
    def reset(self, row, seed):
        self.turns = 0
        return [{"role": "user", "content": row["prompt"] + " z" * jax.process_index()}]

    async def step(self, completion):
        self.turns += 1
        reward = len(completion["content"]) / 9 - jax.process_index()
        answer = [{"role": "user", "content": "a b" + " c" * (len(completion["content"]) % 3 + jax.process_index())}]
        return Turn(answer, reward, done=self.turns == 3)
"""
# Another process than the first would train on the opposite of these rewards.
LOCAL = """
import jax

def local(completion_ids):
    return [sum(ids) % 7 / 7 * (-1 if jax.process_index() else 1) for ids in completion_ids]
"""


SHORT = (
    STAGE.format(name="sft").replace("max_training_steps = 2", "max_training_steps = 500")
    + 'train_data = "texts.jsonl"\nlog_steps = 1\nsave_steps = 1000\n'
    + MODEL
)
SIGNALS = """
import os, signal, threading
import jax
from rlhf_core import hookimpl

jax.numpy.ones(2).sum()  # computes when it is imported

def at(event):
    what, _, where = os.environ.get("AT", "").partition(" ")
    if where == event:
        if what == "raise":
            raise OSError("the disk is gone")
        number = getattr(signal, what)
        if what == "SIGKILL":
            os.kill(os.getpid(), number)
        signal.pthread_kill(threading.main_thread().ident, number)

@hookimpl
def rlhf_stage_start(stage):
    at("load")

@hookimpl
def rlhf_step_end(stage, step, metrics):
    at(f"step {step}")
"""


COMMAND = """
import os
import sys
import jax
jax.config.update("jax_num_cpu_devices", int(os.environ.get("JAX_NUM_CPU_DEVICES", 1)))
from rlhf_core.cli import main
main()
"""


def start(directory: Path, name: str, *arguments: str, **environment: str) -> Any:
    command = ["run", "pipeline.toml", "--dir", name, *arguments]
    return processes.Process(COMMAND, command, directory, environment)


@pytest.mark.long
@pytest.mark.parametrize(
    "mesh", [(), ("--set", "mesh.data=1", "--set", "mesh.context=2")], ids=["data", "context"]
)
def test_two_processes_train_what_two_devices_do(mesh: tuple[str, ...], tiny: ModuleType, tmp_path: Path):
    tiny.make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    for name, rows in (("texts", tiny.texts(11)), ("pairs", tiny.pairs(11)), ("prompts", tiny.prompts(11))):
        tiny.write_rows(tmp_path / f"{name}.jsonl", rows)
    (tmp_path / "pipeline.toml").write_text(PIPELINE)
    (tmp_path / "local.py").write_text(LOCAL)
    (tmp_path / "talk.py").write_text(TALK)
    job = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{processes.free_port()}", "JAX_NUM_PROCESSES": "2"}
    runs = [start(tmp_path, "many", *mesh, **job, JAX_PROCESS_ID=str(i)) for i in range(2)]
    runs.append(start(tmp_path, "one", *mesh, JAX_NUM_CPU_DEVICES="2"))
    processes.finish(runs, timeout=600)
    for stage in ("sft", "reward", "dpo", "grpo", "talk"):
        ours, theirs = (
            load_file(tmp_path / run / stage / "artifacts" / "model" / "model.safetensors")
            for run in ("many", "one")
        )
        for key, value in theirs.items():
            np.testing.assert_allclose(ours[key], value, atol=1e-6, err_msg=f"{stage} {key}")
    many, one = ({stage.name: stage for stage in open_run(tmp_path / run).stages} for run in ("many", "one"))
    for stage, value in (("sft", "loss"), ("dpo", "chosen")):
        ours, theirs = ([row[value] for row in run[stage].evaluations[2]["rows"]] for run in (many, one))
        assert len(ours) == 11
        np.testing.assert_allclose(ours, theirs, atol=1e-5, err_msg=stage)


COUNT = """
import json
import jax
from rlhf_core import fit, hookimpl

@hookimpl
def rlhf_register(registry):
    pass

put, next_update, now = fit.put_rows, fit._Run.next_update, {}

def remember(run, step, state):
    now["step"], now["update"] = step, next_update(run, step, state)
    return now["update"]

def note(mesh, batch):
    placed = put(mesh, batch)
    with open(f"rows-{jax.process_index()}.jsonl", "a") as file:
        for shard in placed.example.addressable_shards:
            for number in shard.data[shard.data >= 0].tolist():
                print(json.dumps([now["step"], now["update"].where(number)]), file=file)
    return placed

fit._Run.next_update, fit.put_rows = remember, note
"""
"""A plugin that writes down which rows of each update lie on the devices of its process."""


@pytest.mark.long
def test_each_row_lies_on_one_device_once_per_epoch(tiny: ModuleType, tmp_path: Path) -> None:
    tiny.make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    tiny.write_rows(tmp_path / "pairs.jsonl", tiny.pairs(24))
    stage = STAGE.format(name="reward").replace(
        "max_training_steps = 2", "num_train_epochs = 2\nlog_steps = 1"
    )
    (tmp_path / "pipeline.toml").write_text(
        "mesh = { data = 4 }\n" + stage + 'train_data = "pairs.jsonl"\n' + MODEL
    )
    (tmp_path / "count.py").write_text(COUNT)
    job = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{processes.free_port()}", "JAX_NUM_PROCESSES": "2"}
    counted, two = ("--plugin", "count.py"), {"JAX_NUM_CPU_DEVICES": "2"}
    runs = [start(tmp_path, "many", *counted, **job, **two, JAX_PROCESS_ID=str(i)) for i in range(2)]
    processes.finish([*runs, start(tmp_path, "one", JAX_NUM_CPU_DEVICES="4")], timeout=300)
    ours, theirs = (
        [row["loss"] for row in tiny.read_rows(tmp_path / run / "reward/metrics.jsonl") if "loss" in row]
        for run in ("many", "one")
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    found = [tiny.read_rows(tmp_path / f"rows-{process}.jsonl") for process in range(2)]
    assert all(found)
    for epoch in range(2):
        names = [name for rows in found for step, name in rows if step // 3 == epoch]
        assert sorted(names) == sorted(2 * [f"{tmp_path / 'pairs.jsonl'} row {n}" for n in range(1, 25)])


def job(
    directory: Path, names: tuple[str, str], at: tuple[str, str] = ("", ""), *arguments: str
) -> list[tuple[int, str]]:
    """Two processes of one job, each with its run directory and its event; exit code and output of each."""
    together = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{processes.free_port()}", "JAX_NUM_PROCESSES": "2"}
    runs = [
        start(
            directory, name, *arguments, "--plugin", "signals.py", **together, JAX_PROCESS_ID=str(i), AT=at[i]
        )
        for i, name in enumerate(names)
    ]
    ended = []
    began: float | None = None
    try:
        for each in runs:
            said = "".join(each.communicate(timeout=300))
            began = began or time.monotonic()
            assert time.monotonic() - began < 30
            ended.append((each.returncode, said))
    finally:
        for each in runs:
            each.kill()
    return ended


@pytest.fixture
def place(tiny: ModuleType, tmp_path: Path) -> Path:
    tiny.make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    tiny.write_rows(tmp_path / "texts.jsonl", tiny.texts(11))
    (tmp_path / "pipeline.toml").write_text(SHORT)
    (tmp_path / "signals.py").write_text(SIGNALS)
    return tmp_path


@pytest.mark.long
def test_a_signal_to_one_while_it_loads_and_then_while_it_trains(place: Path) -> None:
    ended = job(place, ("run", "run"), ("", "SIGTERM load"))
    assert [code for code, _ in ended] == [75, 75], ended
    assert "stopped by SIGTERM before the model of stage 'sft' was loaded; nothing is lost" in ended[1][1]
    assert not list((place / "run/sft").glob("checkpoints/[0-9]*"))
    ended = job(place, ("run", "run"), ("", "SIGTERM step 3"))
    assert [code for code, _ in ended] == [75, 75], ended
    assert (place / "run/sft/checkpoints/3").is_dir()
    told = "stopped after update 3 of 500, state saved; rerun the same command to resume"
    assert sum(said.count(told) for _, said in ended) == 1
    (done, said), _ = job(place, ("run", "run"), ("", ""), "--set", "sft.max_training_steps=4")
    assert done == 0, said
    assert "begun on" in said


@pytest.mark.long  # of processes that do not train: tests/packages/runtime/test_job.py
@pytest.mark.parametrize(
    ("event", "process"),
    [
        ("SIGKILL step 3", 0),  # the process that the others have joined, which cannot say anything
        ("raise step 3", 1),
    ],
)
def test_one_fails_in_training(place: Path, event: str, process: int) -> None:
    events = (event, "") if process == 0 else ("", event)
    ended = job(place, ("run", "run"), events)
    killed = event.startswith("SIGKILL")
    assert ended[process][0] == (-signal.SIGKILL if killed else 1), ended
    code, said = ended[1 - process]
    how = "has disappeared" if killed else "failed; see its output"
    assert code == 1, said
    assert f"process {1 - process} of 2 ends: process {process} {how}" in said
    assert "Traceback" not in said
    if not killed:
        assert "plugin 'signals.py' raised OSError: the disk is gone" in ended[process][1]
