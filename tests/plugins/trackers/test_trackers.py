"""What the trackers will show: a run that was killed, read back from each, and what TensorBoard's files hold."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rlhf_trackers import MLflow, TensorBoard, Trackio, Wandb

from rlhf_core import InputError
from rlhf_core.config import TrainerConfig
from rlhf_core.testing import check_logger

PIPELINE = """
dir = "run"
[[stage]]
name = "base"
trainer = "sft"
model = "MODEL"
train_data = "texts.jsonl"
total_batch_size = 4
max_training_steps = 7
log_steps = 1
save_steps = 3
eval_data = "texts.jsonl"
evaluation_steps = 2
previews = { prompts = ["a b"], every = 4, max_new_tokens = 4 }
logger = ["tensorboard", { name = "trackio", project = "tried" }, { name = "mlflow", experiment = "tried" }, "wandb"]
"""
KILL = """
import os, signal
from rlhf_core import hookimpl

@hookimpl(trylast=True)
def rlhf_step_end(stage, step):
    if step == 5 and not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
"""


def events(directory: Path) -> list[tuple[int, str, Any]]:
    """(step, name, value or text) as TensorBoard shows them: a session replaces what came after its first step.

    An event is its length in 8 bytes, 4 of check sum, itself, and 4 more.
    """
    from tensorboardX.proto import event_pb2

    found: list[tuple[int, str, Any]] = []
    for file in sorted(directory.iterdir()):
        content, at = file.read_bytes(), 0
        while at < len(content):
            (size,) = struct.unpack_from("<Q", content, at)
            event = event_pb2.Event.FromString(content[at + 12 : at + 12 + size])
            at += size + 16
            if event.session_log.status == event_pb2.SessionLog.START:
                found = [each for each in found if each[0] < event.step]
            for value in event.summary.value:
                texts = [text.decode() for text in value.tensor.string_val]
                found.append((event.step, value.tag, texts[0] if texts else value.simple_value))
    return found


def test_tensorboard_files(tmp_path: Path) -> None:
    check_logger(TensorBoard)
    stage: Any = SimpleNamespace(dir=tmp_path, is_main=True)
    for values in ({1: 0.5, 2: float("inf"), 3: 0.25}, {3: 0.25, 4: 0.125}):
        logger = TensorBoard()
        logger.rlhf_stage_start(stage, TrainerConfig())
        for step, value in values.items():
            logger.rlhf_samples(
                step, "update", [{"prompt": "a | b", "completion": f"*{step}*\nc", "reward": value}]
            )
            logger.rlhf_step_end(step, {"loss": value, "rewards/length/mean": -1.0})
        logger.rlhf_stage_end(None)
    found = events(tmp_path / "tensorboard")
    assert [each for each in found if each[1] == "loss"] == [
        (1, "loss", 0.5),
        (3, "loss", 0.25),
        (4, "loss", 0.125),
    ]
    assert [step for step, name, _ in found if name == "rewards/length/mean"] == [1, 2, 3, 4]
    tables = {step: text for step, name, text in found if name.startswith("samples/update")}
    assert list(tables) == [1, 2, 3, 4]
    head, line, row = tables[4].splitlines()
    assert (head, line) == ("| step | prompt | completion | reward |", "| --- | --- | --- | --- |")
    assert row == r"| 4 | a \| b | \*4\* ⏎ c | 0.125 |"


@pytest.mark.parametrize(
    ("logger", "name"),
    [(TensorBoard, "tensorboard"), (Trackio, "trackio"), (MLflow, "mlflow"), (Wandb, "wandb")],
)
def test_a_missing_package_is_named_with_its_extra(
    logger: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_trackers.trackers.find_spec", lambda package: None)
    with pytest.raises(InputError, match=rf"pip install 'rlhf-trackers\[{name}\]'"):
        logger()


def test_an_error_in_a_tracker_is_a_warning(tmp_path: Path) -> None:
    stage: Any = SimpleNamespace(dir=tmp_path / "no directory", is_main=True)
    (tmp_path / "no directory").write_text("a file")
    logger = TensorBoard()
    logger.rlhf_stage_start(stage, TrainerConfig())
    with pytest.warns(UserWarning, match="TensorBoard failed, continuing without it"):
        logger.rlhf_step_end(1, {"loss": 0.5})
    logger.rlhf_step_end(2, {"loss": 0.5})
    logger.rlhf_stage_end(None)


@pytest.mark.long
def test_a_killed_run_has_each_step_once_in_every_tracker(tmp_path: Path, tiny: ModuleType) -> None:
    """Killed after update 5, resumed from the checkpoint of update 3: updates 4 and 5 are computed twice."""
    tiny.make_model().save(tmp_path / "MODEL")
    tiny.write_rows(tmp_path / "texts.jsonl", tiny.texts(32))
    (tmp_path / "pipeline.toml").write_text(PIPELINE)
    (tmp_path / "kill.py").write_text(KILL)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "MLFLOW_"))},
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "MLFLOW_TRACKING_URI": (tmp_path / "mlflow").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",  # what the light package has without a server
        "WANDB_MODE": "offline",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-m", "rlhf_core.cli", "run", "pipeline.toml", "--plugin", "kill.py"]
    for expected in (-signal.SIGKILL, 0):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == expected, done.stderr
        assert "continuing without it" not in done.stderr
    losses = {row["step"]: row["loss"] for row in tiny.read_rows(tmp_path / "run/base/metrics.jsonl")}
    assert list(losses) == [1, 2, 3, 4, 5, 6, 7]
    read = {
        "tensorboard": [(s, v) for s, name, v in events(tmp_path / "run/base/tensorboard") if name == "loss"],
        "trackio": trackio_losses(tmp_path, environment),
        "mlflow": mlflow_losses(environment["MLFLOW_TRACKING_URI"]),
        "wandb": list(wandb_losses(tmp_path / "run/base/wandb")),
    }
    (table, *_) = sorted((tmp_path / "mlflow").rglob("samples/preview-*.json"))
    shown = json.loads(table.read_text())
    assert (shown["columns"][:2], shown["data"][0][1]) == (["step", "prompt"], "a b")
    texts = [value for _, name, value in events(tmp_path / "run/base/tensorboard") if "preview" in name]
    assert texts
    assert all("a b" in each for each in texts)
    for tracker, found in read.items():
        assert [step for step, _ in found] == list(losses), tracker
        assert dict(found) == pytest.approx(losses, rel=1e-6), tracker


def trackio_losses(place: Path, environment: dict[str, str]) -> list[tuple[int, float]]:
    """Read in a process of its own: the package decides where its files are when it is imported."""
    code = (
        "import json; from trackio.sqlite_storage import SQLiteStorage\n"
        "rows = SQLiteStorage.get_logs('tried', 'run/base')\n"
        "(table, *_) = [row['samples/preview'] for row in rows if 'samples/preview' in row]\n"
        "assert table['_value'][0]['prompt'] == 'a b', table\n"
        "print(json.dumps([(row['step'], row['loss']) for row in rows if 'loss' in row]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=place, env=environment, capture_output=True, text=True, check=True
    )
    return [(step, loss) for step, loss in json.loads(done.stdout.splitlines()[-1])]


def mlflow_losses(address: str) -> list[tuple[int, float]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient

        client = MlflowClient(address)
        experiment = client.get_experiment_by_name("tried")
        (run,) = client.search_runs([experiment.experiment_id])
        assert run.info.status == "FINISHED"
        assert run.data.params["learning_rate"] == "5e-05"
        return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "loss")]


def wandb_losses(directory: Path) -> Iterator[tuple[int, float]]:
    """Read the files that `wandb sync` would send, of one id, in order."""
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted(directory.glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1
    for data in [data for file in files for data in log_records(file.read_bytes())]:
        items = Record.FromString(data).history.item
        values = {item.key or ".".join(item.nested_key): item.value_json for item in items}
        if "loss" in values:
            yield int(values["_step"]), float(values["loss"])


def log_records(content: bytes) -> Iterator[bytes]:
    """Read a LevelDB log behind 7 bytes of wandb's: blocks of 2**15 bytes, of parts of records.

    A part is 4 bytes of check sum, its length in 2, its kind in 1 (1 whole, 2 first, 3 middle, 4 last), and itself.
    """
    at, record = 7, b""
    while at + 7 <= len(content):
        if (room := -at % 2**15) and room < 7:  # the rest of a block is empty
            at += room
            continue
        size, kind = struct.unpack_from("<HB", content, at + 4)
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield record
            record = b""
