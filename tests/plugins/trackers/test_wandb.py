"""The real Weights & Biases, offline."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rlhf_sft import SFTConfig

from rlhf_core import LOGGER, Artifact, Stage, plugins

wandb = pytest.importorskip("wandb")
Wandb: Any = partial(plugins.load().registry.get, LOGGER, "wandb")
CONFIG = SFTConfig(learning_rate=1e-6, logger=[{"name": "wandb", "project": "demo"}])


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove keys and user settings, and write only to the test's directory."""
    for name in [name for name in os.environ if name.startswith("WANDB_")] + ["NETRC"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "home"))


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    directory = tmp_path / "first" / "policy"
    directory.mkdir(parents=True)
    return Stage("policy", directory, 3, None, True, plugins.load().registry, None)


def test_options_and_artifacts_and_the_best_evaluation(stage: Stage, tmp_path: Path) -> None:
    logger = Wandb(mode="offline", tags=["first", "second"], notes="with margins", log_model=True)
    logger.rlhf_stage_start(stage=stage, config=CONFIG)
    run = logger._run
    assert (run.tags, run.notes) == (("first", "second"), "with margins")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    logged: list[Any] = []
    run.log_artifact = logged.append
    logger.rlhf_artifact_saved(stage=stage, artifact=Artifact("model", "reward_model", model))
    (artifact,) = logged
    assert (artifact.name, artifact.type, artifact.metadata) == (
        "policy-model",
        "model",
        {"kind": "reward_model"},
    )
    assert list(artifact.manifest.entries) == ["config.json"]
    best = {"metric": "eval_accuracy", "value": 0.75, "step": 4, "bad": 1, "updates": 6, "model": 4}
    (stage.dir / "best.json").write_text(json.dumps(best))
    finish, summaries = run.finish, []
    run.finish = lambda exit_code: summaries.append((exit_code, dict(run.summary)))
    logger.rlhf_stage_end(stage=stage, error=None)
    finish()
    ((code, summary),) = summaries
    assert code == 0
    assert summary["best/eval_accuracy"] == 0.75
    assert summary["best/step"] == 4


def test_models_are_kept_here_unless_asked(stage: Stage, tmp_path: Path) -> None:
    logger = Wandb()
    logger._run = None
    logger.rlhf_artifact_saved(stage=stage, artifact=Artifact("model", "reward_model", tmp_path))
    logger._run = object()  # an attempt to log would be a warning
    logger.rlhf_artifact_saved(stage=stage, artifact=Artifact("model", "reward_model", tmp_path))


def test_a_run_of_a_sweep_has_the_agent_s_id(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SWEEP_ID", "abcd1234")
    monkeypatch.setenv("WANDB_RUN_ID", "agent0001")
    run = play(Wandb(mode="offline"), stage, range(1, 2))
    assert run.id == (stage.dir / "wandb_run_id.txt").read_text().strip() == "agent0001"
    monkeypatch.delenv("WANDB_RUN_ID")  # the same command, by hand
    monkeypatch.delenv("WANDB_SWEEP_ID")
    assert play(Wandb(mode="offline"), stage, range(2, 3)).id == "agent0001"


def play(logger: Any, stage: Stage, steps: range) -> Any:
    logger.rlhf_stage_start(stage=stage, config=CONFIG)
    run = logger._run
    for step in steps:
        logger.rlhf_step_end(step=step, metrics={"completions/mean_length": float(step), "kl": float("nan")})
    logger.rlhf_stage_end(stage=stage, error=None)
    return run


def test_offline_without_a_key_says_how_to_upload_and_is_continued(
    stage: Stage, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.warns(UserWarning, match="wandb has no login .*: logging offline") as warned:
        first = play(Wandb(project="demo"), stage, range(1, 4))
    (command,) = (str(each.message).partition("To upload the run: ")[2] for each in warned)
    assert command == f"wandb sync {Path(first.dir).parent}"
    assert list(Path(command.removeprefix("wandb sync ")).glob("*.wandb"))
    second = play(Wandb(project="demo", mode="offline"), stage, range(4, 6))
    out, err = capfd.readouterr()
    asked = f"[policy] wandb is offline, as asked. To upload the run: wandb sync {Path(second.dir).parent}\n"
    assert (out, err) == ("", asked)
    assert first.settings.mode == second.settings.mode == "offline"
    assert first.id == second.id == (stage.dir / "wandb_run_id.txt").read_text().strip()
    assert (first.name, first.group, first.project) == ("first/policy", "first", "demo")
    assert first.config["learning_rate"] == 1e-6
    assert first.config["logger"] == [{"name": "wandb", "project": "demo"}]
    files = list((stage.dir / "wandb").glob(f"offline-run-*-{first.id}/run-{first.id}.wandb"))
    assert files
    written = b"".join(path.read_bytes() for path in files)
    assert written.count(b"completions/mean_length") >= 5
    assert b"learning_rate" in written


@pytest.mark.parametrize(
    ("option", "variable", "key", "expected"),
    [
        (None, None, None, "offline"),
        ("online", None, None, "offline"),
        (None, "online", None, "offline"),
        (None, None, "a" * 40, "online"),
        (None, "offline", "a" * 40, "offline"),
        ("online", "offline", "a" * 40, "online"),
        (None, "disabled", None, "disabled"),
        ("disabled", None, "a" * 40, "disabled"),
    ],
)
def test_mode(
    monkeypatch: pytest.MonkeyPatch, option: Any, variable: str | None, key: str | None, expected: str
) -> None:
    if variable is not None:
        monkeypatch.setenv("WANDB_MODE", variable)
    if key is not None:
        monkeypatch.setenv("WANDB_API_KEY", key)
    assert Wandb(mode=option)._mode() == expected


def test_a_key_in_netrc_counts_for_its_host_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "netrc"
    path.write_text("machine api.wandb.ai login user password " + "a" * 40 + "\n")
    path.chmod(0o600)
    monkeypatch.setenv("NETRC", str(path))
    assert Wandb()._mode() == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert Wandb()._mode() == "offline"


def test_failing_to_start_is_a_warning(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise wandb.errors.CommError("no route to host")

    monkeypatch.setattr(wandb, "init", fail)
    logger = Wandb(mode="offline")
    with pytest.warns(UserWarning, match="wandb did not start, continuing without it: no route to host"):
        logger.rlhf_stage_start(stage=stage, config=CONFIG)
    logger.rlhf_step_end(step=1, metrics={"loss": 1.0})
    logger.rlhf_stage_end(stage=stage, error=None)
    unpacked = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.warns(UserWarning, match="wandb did not start"):
        unpacked.rlhf_stage_start(stage=stage, config=CONFIG)


def test_a_key_that_is_refused_goes_offline_and_says_so(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, modes = wandb.init, []

    def refuse(mode: str, **rest: Any) -> Any:
        modes.append(mode)
        if mode == "online":
            raise wandb.errors.AuthenticationError("API key verification\nfailed")
        return begin(mode=mode, **rest)

    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setattr(wandb, "init", refuse)
    said = r"could not go online \(API key verification failed\): logging offline.*wandb sync /"
    with pytest.warns(UserWarning, match=said):
        play(Wandb(), stage, range(1, 2))
    assert modes == ["online", "offline"]


def test_failing_later_is_one_warning(stage: Stage, recwarn: pytest.WarningsRecorder) -> None:
    class Broken:
        def log(self, *_: Any, **__: Any) -> None:
            raise OSError("service gone")

    logger = Wandb()
    logger._run = Broken()
    for step in (1, 2):
        logger.rlhf_step_end(step=step, metrics={"loss": 1.0})
    logger.rlhf_stage_end(stage=stage, error=None)
    assert [str(w.message) for w in recwarn] == ["wandb failed, continuing without it: service gone"]


def test_completions_are_a_table_and_weights_histograms(stage: Stage) -> None:
    weights = {
        "norm": 2.0,
        "zeros": 0.25,
        "update_ratio": 1e-3,
        "least": -1.0,
        "largest": 1.0,
        "counts": [1, 2, 1],
    }
    rows = [
        {"prompt": "a", "completion": [{"role": "assistant", "content": "b"}], "length": 3, "finished": True},
        {"prompt": "c", "completion": "d", "length": 4, "finished": False},
    ]
    logged: list[tuple[int, dict[str, Any]]] = []

    class Run:
        def log(self, values: dict[str, Any], step: int) -> None:
            logged.append((step, values))

    logger = Wandb()
    logger._run = Run()
    logger.rlhf_samples(step=4, name="preview", rows=rows)
    logger.rlhf_weights(step=5, weights={"layers.0.kernel": weights})
    pair = {"row": "p.jsonl row 1", "prompt": "a", "chosen": "b", "rejected": "c", "chosen_score": 0.5}
    logger.rlhf_samples(step=6, name="evaluation", rows=[{**pair, "rejected_score": -0.5, "margin": 0.0}])
    (at, samples), (later, histograms), (_, pairs) = logged
    assert (at, later) == (4, 5)
    table = samples["samples/preview"]
    assert table.columns == ["step", "prompt", "completion", "length", "finished"]
    assert table.data[0] == [4, "a", '[{"role": "assistant", "content": "b"}]', 3, True]
    scored = pairs["samples/evaluation"]
    assert scored.columns[:5] == ["step", "row", "prompt", "chosen", "rejected"]
    assert scored.data == [[6, "p.jsonl row 1", "a", "b", "c", 0.5, -0.5, 0.0]]
    histogram = histograms["weights/layers.0.kernel"]
    assert list(histogram.histogram) == [1, 2, 1]
    assert (histogram.bins[0], histogram.bins[-1]) == (-1.0, 1.0)
    assert histograms["weights/layers.0.kernel/update_ratio"] == 1e-3


def test_a_disabled_wandb_says_nothing(stage: Stage, capfd: pytest.CaptureFixture[str]) -> None:
    play(Wandb(mode="disabled"), stage, range(1, 2))
    assert capfd.readouterr() == ("", "")
