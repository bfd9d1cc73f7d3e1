"""Pipelines: skip, refuse, continue, events, outputs, the lock. The trainers are fake."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlhf_core.errors import InputError, RunError
from rlhf_core.stage.record import StageRecord
from tests.shared import pipelines


@pytest.fixture(autouse=True)
def freed(monkeypatch: pytest.MonkeyPatch, fake: ModuleType) -> None:
    """That memory is freed between stages is an event, and nothing more."""
    monkeypatch.setattr("rlhf_core.runtime.machine.free_memory", lambda: fake.EVENTS.append(("freed", None)))


def go(pipeline: Path, fake: ModuleType, *sets: str, dir: str | None = "runs/a") -> Any:
    return pipelines.ran(pipeline, *sets, dir=dir, objects=[fake])


def test_chain_runs_in_order_with_its_events(pipeline: Path, fake: ModuleType) -> None:
    results = go(pipeline, fake)
    events: list[Any] = []
    for name in ("base", "rm", "policy"):
        events += [("start", name), ("run", name), ("saved", f"{name}.model"), ("end", None), ("freed", None)]
    assert events[:-1] == fake.EVENTS  # before each stage but the first
    assert results.dir == Path("runs/a").absolute()
    assert list(results.stages) == ["base", "rm", "policy"]
    policy = results.stages["policy"]
    assert not policy.skipped
    assert policy.metrics["size"] == 3
    # The seed is the pipeline's or the stage's own; the input is the referenced artifact.
    assert (policy.artifacts["model"].path / "weights.txt").read_text() == "xxx7xxx3"
    assert results.stages["rm"].artifacts["model"].kind == "reward_model"


def test_resolved_file_runs_the_same_stages(pipeline: Path, fake: ModuleType) -> None:
    go(pipeline, fake)
    fake.EVENTS.clear()
    resolved = Path("runs/a/pipeline.resolved.toml")
    table = tomllib.loads(resolved.read_text())
    assert table["stage"][2]["rewards"] == [{"name": "fake_model", "model": "rm.model"}]
    assert table["stage"][0]["train_data"] == str(pipeline.parent / "train.jsonl")
    again = go(resolved, fake, dir=None)
    assert all(stage.skipped for stage in again.stages.values())
    assert fake.EVENTS == []


def test_a_changed_stage_is_refused_before_anything_runs(pipeline: Path, fake: ModuleType) -> None:
    """Data that have moved are no change."""
    go(pipeline, fake)
    (pipeline.parent / "train.jsonl").rename("moved.jsonl")
    moved = "base.train_data=moved.jsonl"
    assert go(pipeline, fake, moved).stages["base"].skipped
    fake.EVENTS.clear()
    for change, shown in (
        (
            "policy.size=5",
            r"(?s)stage 'policy'.size: then 3, now 5.*use another --dir, or delete .*runs/a/policy",
        ),
        ("policy.model=rm.model", "stage 'policy'.model"),
        ("seed=8", "stage 'base'.seed: then 7, now 8"),
    ):
        with pytest.raises(InputError, match=shown):
            go(pipeline, fake, moved, change)
    Path("moved.jsonl").write_text('{"text": "b"}\n')
    with pytest.raises(InputError, match=r"stage 'base'.train_data: .*contents differ"):
        go(pipeline, fake, moved)
    assert fake.EVENTS == []


def test_the_same_artifact_made_by_other_versions_is_the_same(pipeline: Path, fake: ModuleType) -> None:
    go(pipeline, fake)
    (path,) = Path("runs/a/base").rglob("rlhf_artifact.json")
    made_by = json.loads(path.read_text())["versions"]
    pipelines.change_record(path, versions={**made_by, "rlhf-gentle": "0.1.0"})
    assert go(pipeline, fake).stages["rm"].skipped
    pipelines.change_record(path, contract={"other": 1})
    with pytest.raises(InputError, match=r"stage 'rm'.model: the contents of base.model have changed"):
        go(pipeline, fake)


def test_a_failed_stage_ends_last_and_continues(pipeline: Path, fake: ModuleType) -> None:
    Path("runs/a/rm/checkpoints/1").mkdir(parents=True)  # a checkpoint to continue from
    with pytest.raises(RunError, match="told to fail"):
        go(pipeline, fake, "rm.fail=error")
    assert fake.EVENTS[-3:] == [("start", "rm"), ("run", "rm"), ("end", "RunError")]
    assert json.loads(Path("runs/a/rm/stage.json").read_text())["state"] == "running"
    # An unfinished stage with another config is refused too.
    with pytest.raises(InputError, match=r"stage 'rm'.fail: then \"error\", now not given"):
        go(pipeline, fake)
    fake.EVENTS.clear()
    with pytest.raises(RunError):
        go(pipeline, fake, "rm.fail=error")
    assert ("run", "base") not in fake.EVENTS


def test_a_stage_that_failed_before_it_saved_anything_is_not_begun(
    pipeline: Path, fake: ModuleType, rlhf: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunError, match="told to fail"):
        go(pipeline, fake, "rm.fail=error")
    assert not Path("runs/a/rm/stage.json").exists()
    line = (
        "stage 'rm': begins again, since nothing is kept of the run before, with other settings: "
        'fail: then "error", now not given'
    )
    monkeypatch.setenv("COLUMNS", "1000")
    for command in ("check", "run"):
        ended = rlhf(command, str(pipeline), "--dir", "runs/a", "--plugin", str(fake.__file__))
        assert ended.code == 0
        assert line in ended.out
    assert not Path("runs/a/rm/before.json").exists()


def test_a_disk_that_fails_at_the_record_hides_no_error(
    pipeline: Path, fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put_back(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(StageRecord, "put_back", put_back)
    with pytest.raises(RunError, match="told to fail"):
        go(pipeline, fake, "rm.fail=error")


def test_events_that_cannot_be_written_are_one_warning(pipeline: Path, fake: ModuleType) -> None:
    Path("runs/a/events.jsonl").mkdir(parents=True)
    with pytest.warns(UserWarning, match="events") as warned:
        go(pipeline, fake)
    said = [str(warning.message) for warning in warned if "events.jsonl" in str(warning.message)]
    assert len(said) == 3  # one per stage
    assert "events.jsonl could not be written: Is a directory; it lacks events of this run" in said[0]


@pytest.mark.parametrize("left", ["an output", "a checkpoint", "a checkpoint that was being replaced"])
def test_a_stage_that_saved_anything_keeps_its_record(pipeline: Path, fake: ModuleType, left: str) -> None:
    if left != "an output":
        name = ".4.replaced" if "replaced" in left else "4"
        Path("runs/a/rm/checkpoints", name).mkdir(parents=True)
    with pytest.raises(RunError, match="told to fail"):
        go(pipeline, fake, f"rm.fail={'after' if left == 'an output' else 'error'}")
    assert json.loads(Path("runs/a/rm/stage.json").read_text())["state"] == "running"


def test_a_damaged_output_of_a_finished_stage_is_reported(pipeline: Path, fake: ModuleType) -> None:
    go(pipeline, fake)
    Path("runs/a/policy/artifacts/model/weights.txt").write_text("yyyy")
    with pytest.raises(InputError, match=r"stage 'policy': output 'model'.*delete .*runs/a/policy"):
        go(pipeline, fake)
    shutil.rmtree("runs/a/policy/artifacts")
    with pytest.raises(
        InputError, match=r"stage 'policy': there is no output 'model'.*delete .*runs/a/policy"
    ):
        go(pipeline, fake)
    go(pipeline, fake, "policy.size=4", dir="runs/b")
    shutil.copytree("runs/b/policy/artifacts", "runs/a/policy/artifacts")
    with pytest.raises(InputError, match=r"output 'model' in .* is not what the stage wrote"):
        go(pipeline, fake)


def test_a_record_that_is_damaged_is_reported(pipeline: Path, fake: ModuleType) -> None:
    go(pipeline, fake)
    path = Path("runs/a/rm/stage.json")
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 37):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"stage.json is damaged"):
            StageRecord(path.parent, "rm")


@pytest.mark.parametrize(
    ("other", "how"), [(2, "that of commit"), (4, "the version that wrote it continues")]
)
@pytest.mark.parametrize("reuse", [False, True])
def test_a_run_of_another_format_is_left_as_it_is(
    pipeline: Path, fake: ModuleType, other: int, how: str, reuse: bool
) -> None:
    go(pipeline, fake)
    pipelines.change_record(Path("runs/a/rm/stage.json"), format=other)
    Path("runs/a/.lock").unlink()

    def content() -> dict[str, bytes | None]:
        paths = sorted(Path("runs/a").rglob("*"))
        return {str(path): path.read_bytes() if path.is_file() else None for path in paths}

    before = content()
    options: dict[str, Any] = {"dir": "runs/b", "reuse": "runs/a"} if reuse else {}
    with pytest.raises(InputError, match=rf"rm/stage.json has format {other}, .* reads 3. .*{how}") as told:
        pipelines.ran(pipeline, objects=[fake], **options)
    assert "elete" not in str(told.value)
    assert content() == before


def test_two_processes_do_not_run_one_directory(pipeline: Path, fake: ModuleType) -> None:
    Path("runs/a").mkdir(parents=True)
    with open("runs/a/.lock", "w+") as other:
        other.write(f"{os.getppid()}\nnode7\n")
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(InputError, match=rf"in use by another run \(process {os.getppid()} on node7\)"):
            go(pipeline, fake)
    go(pipeline, fake)
    assert Path("runs/a/.lock").read_text().splitlines() == [str(os.getpid()), socket.gethostname()]


def test_loggers_listen_for_one_stage_only(pipeline: Path, fake: ModuleType) -> None:
    made, host = pipelines.planned(pipeline, objects=[fake])
    before = host.pm.get_plugins()
    pipelines.run(made, host)
    assert host.pm.get_plugins() == before
    for name in ("base", "rm", "policy"):
        lines = Path(f"runs/a/{name}/metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [1]


def test_the_results_of_a_finished_stage_do_not_depend_on_its_log(pipeline: Path, fake: ModuleType) -> None:
    first = go(pipeline, fake)
    log = Path("runs/a/policy/metrics.jsonl")
    log.write_text(log.read_text().replace("0.5", "0.7"))
    assert go(pipeline, fake).stages["policy"].metrics == first.stages["policy"].metrics
    log.write_bytes(b"{\xff\n")
    assert go(pipeline, fake).stages["policy"].metrics == first.stages["policy"].metrics


def test_a_version_change_is_said_and_no_reason_to_refuse(pipeline: Path, fake: ModuleType) -> None:
    go(pipeline, fake)
    path = Path("runs/a/rm/stage.json")
    versions = {**json.loads(path.read_text())["versions"], "rlhf-core": "0.0.1"}
    del versions["rlhf-sft"]  # installed since: the stage ran without it
    pipelines.change_record(path, versions=versions)
    with pytest.warns(UserWarning, match=r"stage 'rm' was begun with rlhf-core 0\.0\.1, now [^;]*$"):
        assert go(pipeline, fake).stages["rm"].skipped


def test_a_finished_stage_is_extended_unless_later_ones_have_read_it(
    pipeline: Path, fake: ModuleType
) -> None:
    go(pipeline, fake, "base.max_training_steps=3")
    with pytest.raises(
        InputError, match=r"max_training_steps: then 3, now 5: its trainer does not support extension"
    ):
        go(pipeline, fake, "base.max_training_steps=5")
    Path("runs/a/base/plan.json").write_text("[" * 5000 + "]" * 5000)
    with pytest.raises(
        InputError, match=r"max_training_steps: then 3, now 5: its trainer does not support extension"
    ):
        go(pipeline, fake, "base.max_training_steps=5")
    Path("runs/a/base/plan.json").write_text('{"updates": 3, "start": 0, "updates_per_epoch": 2.0}')
    fake.EVENTS.clear()
    with pytest.raises(InputError) as caught:
        go(pipeline, fake, "base.max_training_steps=5")
    assert "stage 'rm' was begun with the previous 'base'" in str(caught.value)
    assert "stage 'policy' was begun with the previous 'base'" in str(caught.value)
    assert fake.EVENTS == []
    for name in ("rm", "policy"):
        shutil.rmtree(f"runs/a/{name}")
    results = go(pipeline, fake, "base.max_training_steps=5")
    assert not any(stage.skipped for stage in results.stages.values())
    with pytest.raises(InputError, match=r"max_training_steps: then 5, now 3: the stage has made its 3"):
        go(pipeline, fake, "base.max_training_steps=3")


def test_a_stage_that_runs_again_before_one_that_is_done(
    pipeline: Path, fake: ModuleType, rlhf: Callable[..., Any]
) -> None:
    """It may end with the same model, so that it is not refused."""
    go(pipeline, fake)
    shutil.rmtree("runs/a/base")
    said = (
        "stage 'base' runs again, and stage 'rm' used its previous output: if the output changes, 'rm' "
        "will be refused"
    )
    ended = rlhf("check", str(pipeline), "--dir", "runs/a", "--plugin", str(fake.__file__))
    assert said in ended.warned
    with pytest.warns(UserWarning, match=said):
        assert go(pipeline, fake).stages["policy"].skipped


@pytest.mark.parametrize("field", ["train_data", "model", "teacher_model", "replay_data", "words_file"])
def test_the_fields_that_hold_paths_are_relative_to_the_file(field: str, tmp_path: Path) -> None:
    """Core's, and a trainer's own, which are known by their names; other texts are left alone."""
    for name in ("here", "linear"):
        (tmp_path / name).mkdir()
    path = tmp_path / "p.toml"
    stage = '[[stage]]\nname = "a"\ntrainer = "fake"\nlr_scheduler_type = "linear"\n'
    path.write_text(f'{stage}{field} = "here"\n')
    assert pipelines.read(path).stages[0] == {
        "name": "a",
        "trainer": "fake",
        field: str(tmp_path / "here"),
        "lr_scheduler_type": "linear",
    }
    path.write_text(f'{stage}{field} = "./gone.jsonl"\n')
    assert any(said.startswith(f"stage 'a'.{field}: no such file") for said in pipelines.read(path).problems)


def test_the_file_of_a_reward_is_an_input_below_a_directory_with_a_colon(
    fake: ModuleType, tmp_path: Path
) -> None:
    base = tmp_path / "run:1"
    base.mkdir()
    (base / "judge.py").write_text("def score(completions):\n    return [0.0] * len(completions)\n")
    (base / "p.toml").write_text(
        '[[stage]]\nname = "a"\ntrainer = "fake"\nrewards = ["judge.py:score"]\nmodel = { model_type = "llama" }\n'
    )
    go(base / "p.toml", fake)
    record = json.loads(Path("runs/a/a/stage.json").read_text())
    assert record["inputs"]["rewards[0].name"]["path"] == str(base / "judge.py")
