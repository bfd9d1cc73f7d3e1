"""What may change in a stage that was begun: its length, how rewards are called, and what is accepted by name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_core.errors import InputError
from rlhf_core.fit.continuation import Continuation
from rlhf_core.stage import differences
from rlhf_core.stage.record import StageRecord


def experiment(
    hashed: str = "a", rewards: Any = None, environment: Any = None, **config: Any
) -> dict[str, Any]:
    judge = {
        "name": "/project/judge.py:judge",
        "label": "judge",
        "timeout": None,
        "on_error": "stop",
        "retries": 1,
    }
    config = {"scheduler": "constant", "max_training_steps": 100, **config}
    config |= {"rewards": [judge] if rewards is None else rewards, "environment": environment}
    file = {"path": "/project/judge.py", "reference": None, "identity": hashed}
    code = (
        {"rewards[1]": {"name": "length", "owner": "rlhf-mine", "hash": hashed}}
        if len(config["rewards"]) > 1
        else {}
    )
    inputs = {"rewards[0].name": file}
    if environment is not None:
        inputs["environment.name"] = {**file, "path": "/project/game.py"}
    return {"trainer": "grpo", "seed": 0, "config": config, "inputs": inputs, "code": code, "versions": {}}


def stage(
    directory: Path, then: Any, *accept: str, made: int = 64, done: bool = False, total: int = 100
) -> StageRecord:
    """A stage after `made` updates."""
    before = StageRecord(directory, "policy", fix="use another --dir")
    before.write_running(then)
    (directory / "checkpoints" / str(made)).mkdir(parents=True, exist_ok=True)
    (directory / "plan.json").write_text(json.dumps({"updates": total, "updates_per_epoch": 50.0}))
    if done:
        before.write_done({}, {})
    return StageRecord(directory, "policy", fix="use another --dir", accept=accept)


def refusal(record: StageRecord, now: Any) -> list[str]:
    with pytest.raises(InputError) as caught:
        record.settle(now)
    return list(caught.value.problems)


@pytest.mark.parametrize(
    "shorter",
    [{"max_training_steps": 63}, {"max_training_steps": None, "num_train_epochs": 1}],
    ids=["updates", "epochs"],
)
def test_a_run_that_is_shortened_below_what_it_has_made_is_one_message(tmp_path: Path, shorter: Any) -> None:
    problems = refusal(stage(tmp_path, experiment()), experiment(**shorter))
    asked = shorter["max_training_steps"] or 50
    for problem in problems:
        assert problem.endswith(
            f": it has made 64 updates, more than the {asked} that are asked for; give at least as many"
        )


@pytest.mark.parametrize("updates", [64, 80, 1000])
def test_a_run_may_get_any_length_from_what_it_has_made(tmp_path: Path, updates: int) -> None:
    record = stage(tmp_path, experiment())
    assert record.settle(experiment(max_training_steps=updates)) == "running"


@pytest.mark.parametrize(
    ("made", "asked", "refused"),
    [(91, 200, False), (92, 200, True), (100, 200, True), (64, 70, False), (65, 70, True)],
)
def test_a_wsd_run_changes_its_length_until_its_rate_falls(
    tmp_path: Path, made: int, asked: int, refused: bool
) -> None:
    """The same answer as the learning rates give."""
    from rlhf_core.optimizers import schedule

    before, now = (schedule("wsd", 1.0, total) for total in (100, asked))
    assert any(abs(float(before(i)) - float(now(i))) > 1e-5 for i in range(made)) == refused
    done = made == 100
    record = stage(tmp_path, experiment(scheduler="wsd"), made=made, done=done)
    longer = experiment(scheduler="wsd", max_training_steps=asked)
    if refused:
        assert 'scheduler = "wsd" had begun to fall' in refusal(record, longer)[0]
    else:
        assert record.settle(longer) == "running"


def test_how_rewards_and_environments_are_called_may_change(tmp_path: Path) -> None:
    game = {"name": "/project/game.py:Game", "max_turns": 4, "timeout": 3.0, "on_error": "skip"}
    then = experiment(environment=game)
    calls = {"timeout": 60.0, "on_error": "skip", "processes": 2}
    now = experiment(
        rewards=[{**then["config"]["rewards"][0], **calls}], environment={**game, **calls, "on_error": "stop"}
    )
    record = stage(tmp_path, then)
    assert record.settle(now) == "running"
    assert differences.digest(now) == differences.digest(then)
    assert "rewards[0].timeout: then not given, now 60.0" in record.warnings(now)[0]
    longer = experiment(environment={**game, "max_turns": 5})
    assert refusal(stage(tmp_path, then, "environment"), longer)[0].endswith("max_turns: then 4, now 5")


@pytest.mark.parametrize("name", ["rewards.judge", "policy.rewards.judge", "rewards[0]"])
def test_a_changed_reward_is_accepted_by_name_and_recorded(tmp_path: Path, name: str) -> None:
    then, now = experiment("a"), experiment("b")
    changed = "rewards[0].name: the contents of /project/judge.py have changed since"
    problems = refusal(stage(tmp_path, then), now)
    assert problems[0] == (
        f"stage 'policy'.{changed}; to continue with it: --accept rewards.judge, in Python "
        'accept=["rewards.judge"]'
    )
    record = stage(tmp_path, then, name)
    assert record.settle(now) == "running"
    assert record.warnings(now) == [
        f"stage 'policy' continues after update 64 with what was accepted: {changed}"
    ]
    accepted = record.with_accepted(now)
    record.write_running(accepted)
    (entry,) = StageRecord(tmp_path, "policy", fix="").then["accepted"]
    assert (entry["field"], entry["change"], entry["after_update"]) == ("rewards[0].name", changed, 64)
    # The next command needs no flag, and keeps what was accepted; a further change does need one.
    again = StageRecord(tmp_path, "policy", fix="use another --dir")
    assert again.settle(now) == "running"
    assert again.with_accepted(now)["accepted"] == [entry]
    assert refusal(again, experiment("c"))
    checkpoint: Any = SimpleNamespace(step=64, host={"experiment": {"digest": "", **then}})
    place: Any = SimpleNamespace(name="policy", dir=tmp_path, experiment=accepted)
    Continuation(place, None, None, None)._require_experiment(checkpoint)  # type: ignore[arg-type]
    place.experiment = now
    with pytest.raises(InputError, match="belongs to another run"):
        Continuation(place, None, None, None)._require_experiment(checkpoint)  # type: ignore[arg-type]


def test_options_code_of_packages_and_environments_are_accepted_too(tmp_path: Path) -> None:
    judge, game = experiment()["config"]["rewards"][0], {"name": "/project/game.py:Game", "lives": 1}
    then = experiment("a", [judge, "length"], game)
    now = experiment("b", [{**judge, "retries": 5}, "length"], {**game, "lives": 3})
    names = ("rewards.judge", "rewards.length", "environment")
    assert stage(tmp_path, then, *names).settle(now) == "running"
    for left in names:
        problems = refusal(stage(tmp_path, then, *(name for name in names if name != left)), now)
        assert all(f"--accept {left}" in problem for problem in problems[:-1])


def test_another_reward_is_not_a_changed_one(tmp_path: Path) -> None:
    judge = experiment()["config"]["rewards"][0]
    accept = ("rewards.judge", "rewards.other", "rewards[0]", "rewards[1]")
    for rewards in ([{**judge, "label": "other"}], [judge, "length"], []):
        problems = refusal(stage(tmp_path, experiment(), *accept), experiment(rewards=rewards))
        assert not any("--accept" in problem for problem in problems)


def test_a_finished_stage_is_kept_where_a_change_of_its_reward_is_accepted(tmp_path: Path) -> None:
    then, now = experiment("a"), experiment("b")
    assert (
        "; to keep the stage, which was trained before that: --accept"
        in refusal(stage(tmp_path, then, made=100, done=True), now)[0]
    )
    record = stage(tmp_path, then, "rewards.judge", made=100, done=True)
    assert record.settle(now) == "done"
    record.keep_done(record.with_accepted(now))
    assert StageRecord(tmp_path, "policy", fix="").settle(now) == "done"


def test_another_function_of_the_same_file_is_another_reward(tmp_path: Path) -> None:
    judge = experiment()["config"]["rewards"][0]
    now = experiment(rewards=[{**judge, "name": "/project/judge.py:strict"}])
    assert 'judge", now "/project/judge.py:strict"' in refusal(stage(tmp_path, experiment()), now)[0]
    assert differences.digest(now) != differences.digest(experiment())
