"""The state is saved, then evaluated, then made a model of, then recorded: what fails or is killed loses nothing."""

from __future__ import annotations

import functools
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import rlhf_core.training.define
from rlhf_core import artifacts, checkpoint, fit
from rlhf_core.errors import RunError, Stopped
from rlhf_core.runtime import files
from rlhf_core.step import Programs
from rlhf_core.training import HeldOut
from tests.shared.interrupts import At, interrupt

HELD_OUT = 3


def asked_to_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def monkeypatch() -> Iterator[pytest.MonkeyPatch]:
    """Nothing that is patched here is traced: unlike other tests, these share their programs."""
    with pytest.MonkeyPatch.context() as patches:
        yield patches


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every update that is computed."""
    computed: list[int] = []
    plain = Programs.apply

    def apply(self: Programs, *arguments: Any) -> Any:
        computed.append(len(computed))
        return plain(self, *arguments)

    monkeypatch.setattr(Programs, "apply", apply)
    return computed


@pytest.fixture(scope="module")
def whole(shared_short: Any) -> Any:
    """The parameters of a run that nothing happened to."""
    return shared_short.train(
        "sft", at="whole", inputs={"eval_dataset": shared_short.rows["sft"][:HELD_OUT]}
    )[0]


@pytest.fixture
def train(short: Any) -> Any:
    return functools.partial(short.train, "sft", inputs={"eval_dataset": short.rows["sft"][:HELD_OUT]})


def rows(directory: Path, name: str = "loss") -> list[int]:
    lines = (directory / "sft" / "metrics.jsonl").read_text().splitlines()
    return [row["step"] for row in map(json.loads, lines) if name in row]


def saved(directory: Path) -> list[int]:
    found = checkpoint.Checkpoints(directory / "sft" / "checkpoints", keep=None)
    found.close()
    return found.steps()


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, leaf in found.items():
        assert leaf.tobytes() == expected[name].tobytes(), name


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception, *, at: Callable[[int], bool]) -> None:
    """Let evaluations after some updates raise."""
    plain = HeldOut.evaluator

    def evaluator(*arguments: Any) -> Any:
        evaluate = plain(*arguments)

        def checked(state: Any) -> dict[str, float]:
            if not at(int(state.step)):
                return evaluate(state)
            raise error

        return checked

    monkeypatch.setattr(HeldOut, "evaluator", evaluator)


def test_an_evaluation_that_fails_is_left_out_and_costs_nothing(
    train: Any, whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, ZeroDivisionError("division by zero"), at=lambda step: step in (2, 6))
    with pytest.warns(UserWarning, match="evaluation after update") as warned:
        found, _ = train(evaluation_steps=2)
    said = [str(each.message) for each in warned if "evaluation after update" in str(each.message)]
    assert [line.partition(" failed and is skipped; training continues: ")[0] for line in said] == [
        "stage 'sft': the evaluation after update 2",
        "stage 'sft': the evaluation after update 6",
    ]
    assert all("division by zero" in line for line in said)
    assert_same(found, whole)
    assert (rows(tmp_path), rows(tmp_path, "eval_loss")) == ([1, 2, 3, 4, 5, 6], [4])


def test_one_that_fails_is_no_better(train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, RunError("the judge is away"), at=lambda step: step > 2)
    with pytest.warns(UserWarning, match="the judge is away"):
        train(evaluation_steps=2, load_best_model_at_end=True, early_stopping_patience=1)
    best = json.loads((tmp_path / "sft" / "best.json").read_text())
    assert (best["step"], best["model"], best["updates"]) == (2, 2, 6)


def test_the_start_is_kept_where_every_update_is_for_the_worse(
    train: Any, tiny: ModuleType, short: Any, tmp_path: Path
) -> None:
    given = {"eval_on_start": True, "load_best_model_at_end": True, "greater_is_better": True}
    found, _ = train(evaluation_steps=2, save_total_limit=1, **given)
    best = json.loads((tmp_path / "sft" / "best.json").read_text())
    assert (best["step"], best["model"], best["updates"]) == (0, 0, 6)
    assert_same(found, tiny.leaves(short.models["sft"].params))


def test_before_the_first_update_it_is_an_error(
    train: Any, monkeypatch: pytest.MonkeyPatch, updates: list[int]
) -> None:
    failing(monkeypatch, ZeroDivisionError(), at=lambda step: step == 0)
    with pytest.raises(ZeroDivisionError):
        train(eval_on_start=True)
    assert updates == []


def test_the_state_is_saved_before_the_last_evaluation(
    train: Any, whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updates: list[int]
) -> None:
    """It may end in ways that nothing can catch; the run that goes on then only evaluates."""
    plain = HeldOut.evaluator
    there: list[list[int]] = []

    def evaluator(*_: Any, **__: Any) -> Any:
        def evaluate(_: Any) -> dict[str, float]:
            there.append(saved(tmp_path))
            raise KeyboardInterrupt

        return evaluate

    monkeypatch.setattr(HeldOut, "evaluator", evaluator)
    with pytest.raises(KeyboardInterrupt):
        train(save_total_limit=1)
    assert there == [[6]]
    monkeypatch.setattr(HeldOut, "evaluator", plain)
    updates.clear()
    found, watch = train(save_total_limit=1)
    assert updates == []
    assert_same(found, whole)
    assert rows(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert rows(tmp_path, "eval_loss") == [6]
    assert watch.rows[-1]["num_tokens"] > 0


def test_a_disk_that_is_full_at_the_artifact_costs_no_update(
    train: Any, whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updates: list[int]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(artifacts, "replace_directory", full)
        with pytest.raises(
            RunError, match=r"artifact 'sft\.model' could not be written .*rerun the same command"
        ):
            train(save_steps=4)
    assert saved(tmp_path) == [4, 6]
    assert len(updates) == 6
    found, _ = train(save_steps=4)
    assert len(updates) == 6
    assert_same(found, whole)
    assert (rows(tmp_path), rows(tmp_path, "eval_loss")) == ([1, 2, 3, 4, 5, 6], [6])


@pytest.mark.parametrize("moment", ["the last update", "its evaluation"])
def test_a_signal_after_the_last_update_trains_nothing_again(
    train: Any, whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updates: list[int], moment: str
) -> None:
    with monkeypatch.context() as patched:
        if moment == "the last update":
            plain = checkpoint.Checkpoints.save

            def save(self: Any, step: int, *arguments: Any, **options: Any) -> None:
                asked_to_stop()
                plain(self, step, *arguments, **options)

            patched.setattr(checkpoint.Checkpoints, "save", save)
        listeners = () if moment == "the last update" else (At(6, asked_to_stop),)
        with pytest.raises(Stopped, match="stopped after update 6 of 6, state saved"):
            train(listeners=listeners)
    assert not (tmp_path / "sft" / "artifacts").exists()
    found, _ = train()
    assert len(updates) == 6
    assert_same(found, whole)
    assert (rows(tmp_path), rows(tmp_path, "eval_loss")) == ([1, 2, 3, 4, 5, 6], [6])


def test_what_ended_by_its_time_limit_ends_there_again_or_goes_on_with_a_longer_one(
    train: Any, whole: Any, tmp_path: Path, updates: list[int]
) -> None:
    def ended(limit: Any) -> dict[str, np.ndarray]:
        (tmp_path / "sft" / "stage.json").unlink(missing_ok=True)
        found: dict[str, np.ndarray] = train(training_time_limit=limit, log_steps=2)[0]
        return found

    with pytest.warns(UserWarning, match="reached after update 1 of 6"):
        ended(1e-3)
    with pytest.warns(UserWarning, match="reached after update 1 of 6"):
        ended(1e-3)
    assert len(updates) == 1
    assert rows(tmp_path) == [1]
    assert_same(ended(None), whole)
    assert len(updates) == 6
    assert (rows(tmp_path), rows(tmp_path, "eval_loss")) == ([2, 4, 6], [6])


def test_no_step_twice_after_a_kill_before_anything_was_saved(train: Any, tmp_path: Path) -> None:
    samples = tmp_path / "sft" / "samples"
    samples.mkdir(parents=True)
    for name in ("update-000000.jsonl", "evaluation-000001.jsonl", "notes.jsonl"):
        (samples / name).write_text("{}\n")
    with pytest.raises(KeyboardInterrupt):
        train(listeners=(interrupt(1),), eval_on_start=True)
    assert rows(tmp_path, "step") == [0, 1]
    train(eval_on_start=True, log_steps=3)
    assert rows(tmp_path, "step") == [0, 3, 6]
    assert [path.name for path in samples.iterdir()] == ["notes.jsonl"]


def test_rows_are_on_the_disk_before_the_checkpoint_of_their_step(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "sft" / "metrics.jsonl"
    durable: list[int] = []
    renamed: dict[int, list[int]] = {}
    plain, rename = files.flush, checkpoint.replace_directory

    def flush(path: Path) -> None:
        plain(path)
        if Path(path) == log:
            durable[:] = rows(tmp_path)

    def replace(new: Path, final: Path) -> None:
        renamed[int(final.name)] = list(durable)
        rename(new, final)

    monkeypatch.setattr(files, "flush", flush)
    monkeypatch.setattr(checkpoint, "replace_directory", replace)
    train(save_steps=2)
    # The last one is saved before its step is logged, and its row comes with the record.
    assert renamed.keys() == {2, 4, 6}
    assert all(set(range(1, step + (step < 6))) <= set(found) for step, found in renamed.items())
    assert durable == [1, 2, 3, 4, 5, 6]


def test_evaluation_data_that_nothing_reads_is_a_warning(
    train: Any, monkeypatch: pytest.MonkeyPatch, updates: list[int]
) -> None:
    seen: list[int] = []

    def without(stage: Any, config: Any, build: fit.Build) -> Any:
        seen.append(len(updates))
        return fit.fit(stage, config, fit.replace(build, actions=[]))

    monkeypatch.setattr(rlhf_core.training.define, "fit", without)
    with pytest.warns(UserWarning, match=r"stage 'sft'\.eval_data: given, but the trainer does not evaluate"):
        train(max_training_steps=1)
    assert seen == [0]


def test_an_action_is_not_called_for_a_skipped_update(
    tiny: ModuleType, short: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An action is called when the guard of its update was read, with the state that it left."""
    called: list[tuple[int, int]] = []
    guards: list[int] = []
    plain = Programs.apply

    def apply(self: Programs, state: Any, done: Any) -> Any:
        after, metrics = plain(self, state, done)
        if int(after.step) == 4:  # as where the gradient is not finite: the state stays, but for the guard
            guards.append(3)
            after = fit.replace(after, guard=after.guard * 0 + 3)
        return after, metrics

    monkeypatch.setattr(Programs, "apply", apply)

    def with_hook(stage: Any, config: Any, build: fit.Build) -> Any:
        def note(at: fit.Moment) -> None:
            called.append((at.step, int(at.state.step)))

        return fit.fit(stage, config, fit.replace(build, actions=[fit.Action(2, note, "move")]))

    monkeypatch.setattr(rlhf_core.training.define, "fit", with_hook)
    with pytest.raises(RunError, match="gradient of update 4 is not finite"):
        short.train("sft")
    assert guards
    assert called == [(2, 2)]
