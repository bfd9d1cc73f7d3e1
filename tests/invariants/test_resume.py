"""A pipeline that is killed or stopped anywhere goes on with the same command, to the same bytes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

INTERRUPTER = Path(__file__).parents[1] / "shared" / "interrupter.py"
STAGES = ("base", "rm", "policy")
PIPELINE = """
seed = 3

[[stage]]
name = "base"
trainer = "sft"
model.model_type = "llama"
model.hidden_size = 16
model.num_hidden_layers = 2
model.num_attention_heads = 2
model.intermediate_size = 24
model.max_position_embeddings = 128
model.tokenizer = "tokenizer"
train_data = "texts.jsonl"
eval_data = "texts.jsonl"
evaluation_steps = 2
learning_rate = 1e-2
total_batch_size = 4
max_training_steps = 5
save_steps = 2
log_steps = 1

[[stage]]
name = "rm"
trainer = "reward"
model = "base.model"
train_data = [
    { name = "jsonl", path = "pairs.jsonl", weight = 2.0 },
    { name = "jsonl", path = "more.jsonl", weight = 1.0 },
]
eval_data = "swapped.jsonl"     # the better the model learns, the worse it gets: the start stays the best
evaluation_steps = 2
metric_for_best_model = "loss"
early_stopping_patience = 4
load_best_model_at_end = true
learning_rate = 1e-2
total_batch_size = 4
max_training_steps = 12
save_steps = 3
save_total_limit = 1
log_steps = 7

[[stage]]
name = "policy"
trainer = "grpo"
model = "base.model"
train_data = "prompts.jsonl"
rewards = [{ name = "model", model = "rm.model", weight = 0.0 }, { name = "length", target = 4 }]
dynamic_sampling = { max_rounds = 2 }
kl = { beta = 0.1 }
sync_ref_model = true
ref_model_sync_steps = 3
num_generations = 4
total_batch_size = 8
num_iterations = 2
rollouts_ahead = 1
top_entropy_quantile = 0.8
learning_rate = 1e-2
max_training_steps = 7
save_steps = 2
log_steps = 1
sampling = { max_completion_length = 6 }
"""
CLOCK = {
    "time",
    "step_time",
    "tokens_per_second",
    "time/rollout",
    "time/reward",
    "time/update",
    "rollout/tokens_per_second",
}

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def pipeline(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("chain")
    tiny.make_tokenizer().save_pretrained(directory / "tokenizer")
    tiny.write_rows(directory / "texts.jsonl", tiny.texts(11))
    rows = [{**row, "chosen": " a", "rejected": " b"} for row in tiny.pairs(18)]
    tiny.write_rows(directory / "pairs.jsonl", rows[:11])
    tiny.write_rows(directory / "more.jsonl", rows[11:])
    swapped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows[:11]]
    tiny.write_rows(directory / "swapped.jsonl", swapped)
    tiny.write_rows(directory / "prompts.jsonl", tiny.prompts(7))
    (directory / "chain.toml").write_text(PIPELINE)
    return directory / "chain.toml"


def run(pipeline: Path, directory: Path, interrupt: str = "none") -> subprocess.CompletedProcess[str]:
    """`rlhf run`, signalled at an event of `interrupter.py`."""
    return rlhf(
        "run", str(pipeline), "--dir", str(directory), "--plugin", str(INTERRUPTER), interrupt=interrupt
    )


def rlhf(*arguments: str, interrupt: str = "none") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from rlhf_core.cli import main; main()", *arguments]
    # Programs are compiled once for all these processes, those that compile quickly too.
    environment = {**os.environ, "INTERRUPT": interrupt, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)


def weights(directory: Path, stage: str) -> dict[str, bytes]:
    files = sorted((directory / stage / "artifacts" / "model").glob("*.safetensors"))
    assert files
    return {file.name: file.read_bytes() for file in files}


def logged(directory: Path, stage: str) -> list[dict]:
    """The rows of metrics.jsonl without what a clock says."""
    lines = (directory / stage / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in CLOCK} for line in lines]


def best(directory: Path) -> dict:
    return json.loads((directory / "rm" / "best.json").read_text())


def assert_same(directory: Path, other: Path) -> None:
    for stage in STAGES:
        assert weights(directory, stage) == weights(other, stage), stage
        assert logged(directory, stage) == logged(other, stage), stage
    assert best(directory) == best(other)
    samples = sorted(path.name for path in (other / "policy" / "samples").iterdir())
    assert samples
    for name in samples:
        ours, theirs = (d / "policy" / "samples" / name for d in (directory, other))
        assert ours.read_text() == theirs.read_text()


@pytest.fixture(scope="module")
def whole(pipeline: Path) -> Path:
    """The run directory of an uninterrupted run."""
    directory = pipeline.parent / "whole"
    done = run(pipeline, directory)
    assert done.returncode == 0, done.stderr
    return directory


def test_an_uninterrupted_run_logs_every_step_once(whole: Path) -> None:
    steps = {stage: [row["step"] for row in logged(whole, stage) if "loss" in row] for stage in STAGES}
    assert steps == {"base": [1, 2, 3, 4, 5], "rm": [2, 4, 6, 7, 8], "policy": [1, 2, 3, 4, 5, 6, 7]}
    assert [row["step"] for row in logged(whole, "base") if "eval_loss" in row] == [2, 4, 5]
    assert weights(whole, "base") != weights(whole, "policy")


@pytest.mark.parametrize(
    "events",
    [
        # Each kind of moment once, and after the best evaluation; within a rollout's updates SIGTERM comes, below.
        ("base step 3", "base saved", "rm step 7", "rm end", "policy step 6"),
        *(
            pytest.param(events, marks=pytest.mark.exhaustive)
            for events in (
                ("base end", "rm step 4", "policy saved"),
                ("rm saved", "policy step 3"),
            )
        ),
    ],
    ids=", ".join,
)
def test_killed_in_each_stage(pipeline: Path, whole: Path, tmp_path: Path, events: tuple[str, ...]) -> None:
    for event in events:
        killed = run(pipeline, tmp_path, f"SIGKILL {event}")
        assert killed.returncode == -9, killed.stderr
    done = run(pipeline, tmp_path)
    assert done.returncode == 0, done.stderr
    assert_same(tmp_path, whole)


def unfinished(whole: Path, directory: Path, *stages: str) -> None:
    """A copy of the finished run in which some stages were not begun."""
    shutil.copytree(whole, directory, dirs_exist_ok=True)
    for stage in stages:
        shutil.rmtree(directory / stage)


def test_sigterm_saves_the_state_and_the_same_command_goes_on(
    pipeline: Path, whole: Path, tmp_path: Path
) -> None:
    unfinished(whole, tmp_path, "policy")
    stopped = run(pipeline, tmp_path, "SIGTERM policy step 5")
    assert stopped.returncode == 75, stopped.stderr
    assert "stopped after update 5 of 7, state saved; rerun the same command" in " ".join(
        stopped.stderr.split()
    )
    assert "Traceback" not in stopped.stderr
    assert (tmp_path / "policy" / "checkpoints" / "5").is_dir()
    assert json.loads((tmp_path / "policy" / "stage.json").read_text())["state"] == "running"
    done = run(pipeline, tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "policy" / "plan.json").read_text())["start"] == 5
    assert_same(tmp_path, whole)
