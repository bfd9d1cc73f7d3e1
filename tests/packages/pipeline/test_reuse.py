"""Finished stages of another run are taken over where they match; one stage can be run alone. The trainers are fake."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlhf_core.errors import InputError, RunError
from tests.shared import pipelines

STAGES = ("base", "rm", "policy")


@pytest.fixture
def go(pipeline: Path, fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.chdir(pipeline.parent)

    def call(dir: str, *sets: str, **options: Any) -> Any:
        return pipelines.ran(pipeline, *sets, dir=dir, objects=[fake], **options)

    return call


def skipped(results: Any) -> list[str]:
    return [name for name, stage in results.stages.items() if stage.skipped]


def content(directory: str) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path(directory).rglob("*") if path.is_file()}


def test_stages_that_match_are_taken_over_and_the_others_train(
    go: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    go("runs/a")
    before = content("runs/a")
    second = go("runs/b", "policy.size=5", reuse="runs/a")
    assert skipped(second) == ["base", "rm"]
    said = capsys.readouterr().out
    assert f"stage 'base': reused from {Path('runs/a/base').absolute()}" in said
    assert "stage 'policy'.size: then 3, now 5" in said
    assert content("runs/a") == before
    record = json.loads(Path("runs/b/rm/stage.json").read_text())
    assert record["inputs"]["model"]["path"] == str(Path("runs/b/base/artifacts/model").absolute())
    assert record["reused"]["run"] == str(Path("runs/a").absolute())
    kept = Path("runs/b/rm/artifacts/model/weights.txt")
    assert os.path.samefile(kept, "runs/a/rm/artifacts/model/weights.txt")
    assert not os.path.samefile("runs/b/rm/metrics.jsonl", "runs/a/rm/metrics.jsonl")  # it may grow
    events = [json.loads(line) for line in Path("runs/b/events.jsonl").read_text().splitlines()]
    assert [each["stage"] for each in events if each["event"] == "reused"] == ["base", "rm"]
    # The second run stands alone, and has nothing left to do.
    shutil.rmtree("runs/a")
    assert skipped(go("runs/b", "policy.size=5")) == list(STAGES)


def test_what_reads_a_stage_that_trains_here_trains_too(go: Any, capsys: pytest.CaptureFixture[str]) -> None:
    go("runs/a")
    assert skipped(go("runs/b", "base.size=4", reuse="runs/a")) == []
    assert "stage 'rm' reads 'base', which trains here" in capsys.readouterr().out


def test_stages_that_this_run_has_begun_are_its_own(go: Any, fake: ModuleType) -> None:
    go("runs/a")
    go("runs/b", "base.size=4", only=["base"])
    own = content("runs/b/base")
    assert skipped(go("runs/b", "base.size=4", reuse="runs/a")) == ["base"]
    assert content("runs/b/base") == own


def test_a_stage_with_changed_data_is_not_taken_over(go: Any) -> None:
    go("runs/a")
    Path("train.jsonl").write_text('{"text": "b"}\n')
    assert skipped(go("runs/b", reuse="runs/a")) == []


@pytest.mark.parametrize("change", ["cut", "same length"])
def test_a_stage_whose_artifact_is_damaged_is_not_taken_over(
    go: Any, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    go("runs/a")
    weights = Path("runs/a/rm/artifacts/model/weights.txt")
    damaged = "4" if change == "cut" else "4" * weights.stat().st_size
    weights.unlink()
    weights.write_text(damaged)
    assert skipped(go("runs/b", reuse="runs/a")) == ["base"]
    assert "not reused from" in (said := capsys.readouterr().out)
    assert f"stage 'rm': {weights.absolute()} " in said
    assert weights.read_text() == damaged


def test_a_directory_that_is_no_run_is_refused(go: Any) -> None:
    with pytest.raises(InputError, match=r"^--reuse .*runs/none: not a run directory"):
        go("runs/b", reuse="runs/none")
    go("runs/a")
    with pytest.raises(InputError, match=r"^--reuse .*runs/a: this is the run's own directory"):
        go("runs/a", reuse="runs/a")


def test_one_stage_runs_alone_where_its_inputs_are_finished(go: Any) -> None:
    with pytest.raises(
        InputError, match=r"^--only policy: it reads 'base', which is not finished in .*runs/a"
    ):
        go("runs/a", only=["policy"])
    assert list(go("runs/a", only=["base"]).stages) == ["base"]
    assert not Path("runs/a/rm").exists()
    results = go("runs/a", only=["rm"])
    assert (list(results.stages), skipped(results)) == (["base", "rm"], ["base"])
    with pytest.raises(InputError, match=r"^--only bse: no such stage. Did you mean 'base'\?"):
        go("runs/a", only=["bse"])
    with pytest.raises(InputError, match=r"size: then 3, now 9\n.* --dir NEW --reuse .*runs/a takes over"):
        go("runs/a", "rm.size=9", only=["rm"])
    # Only what the stage reads is compared.
    assert skipped(go("runs/a", "policy.size=9", only=["rm"])) == ["base", "rm"]


def test_check_says_what_run_would_do(go: Any, pipeline: Path, fake: ModuleType, rlhf: Any) -> None:
    go("runs/a")
    flags = ("--plugin", str(fake.__file__), "--dir", "runs/b", "--reuse", "runs/a")
    ended = rlhf("check", str(pipeline), "--set", "policy.size=5", *flags)
    assert ended.code == 0
    assert "taken over from runs/a/base" in ended.out
    assert "not reused from" in ended.out
    assert not Path("runs/b").exists()
    ended = rlhf(
        "check", str(pipeline), "--only", "policy", "--plugin", str(fake.__file__), "--dir", "runs/b"
    )
    assert (ended.code, ended.message.splitlines()[0].split(",")[0]) == (2, "--only policy: it reads 'base'")
    ended = rlhf("run", str(pipeline), "--set", "policy.size=5", "--only", "policy", *flags)
    assert ended.code == 0, ended.message
    assert json.loads(Path("runs/b/policy/stage.json").read_text())["state"] == "done"
    ended = rlhf("check", str(pipeline), "--set", "policy.size=5", *flags)
    assert (ended.code, ended.out.count("done, skipped")) == (0, 3)


def test_check_says_what_a_run_would_continue_with(
    go: Any, pipeline: Path, fake: ModuleType, rlhf: Any
) -> None:
    Path("runs/a/base/checkpoints/1").mkdir(parents=True)
    with pytest.raises(RunError, match="told to fail"):
        go("runs/a", "base.fail=error")
    given = ("--plugin", str(fake.__file__), "--dir", "runs/a", "--set", "base.fail=error")
    ended = rlhf("check", str(pipeline), *given, "--set", "base.log_steps=3")
    assert ended.code == 0
    assert "continues, seed" in ended.out
    assert "stage 'base' continues with other settings: log_steps: then 10, now 3" in ended.out
