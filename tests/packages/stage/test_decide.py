"""The one decision about a stage: a table of what was begun and what is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_core.stage import decide, record, spec
from tests.shared.specs import recorded_as

JUDGE = {
    "name": "/project/judge.py:judge",
    "label": "judge",
    "timeout": None,
    "on_error": "stop",
    "retries": 1,
}
GAME = {"name": "/project/game.py:Game", "max_turns": 4, "timeout": 3.0, "on_error": "skip", "lives": 1}


def recorded(code: str = "a", data: str | None = "a", **changes: Any) -> dict[str, Any]:
    """What a stage computes. code: of its rewards and environment. data: what its training data hold."""
    config = {"scheduler": "constant", "max_training_steps": 100, "rewards": [JUDGE], "environment": None}
    config |= {key: value for key, value in changes.items() if key not in ("trainer", "seed", "versions")}
    file = {"path": "/project/judge.py", "reference": None, "identity": code}
    inputs = {"train_data": {"path": "/project/rows.jsonl", "reference": None, "identity": data}}
    inputs |= {"rewards[0].name": file} if config["rewards"] else {}
    inputs |= {"environment.name": {**file, "path": "/project/game.py"}} if config["environment"] else {}
    named = [f"rewards[{i}]" for i, reward in enumerate(config["rewards"]) if isinstance(reward, str)]
    return {
        "trainer": changes.get("trainer", "grpo"),
        "seed": changes.get("seed", 0),
        "config": config,
        "inputs": inputs,
        "code": {field: {"name": "length", "owner": "rlhf-mine", "hash": code} for field in named},
        "versions": changes.get("versions", {}),
    }


def decided(then: decide.Begun | None, now: dict[str, Any], *accept: str, total: int | None = None) -> Any:
    return decide.decide(then, recorded_as(now), accept, total)


def begun(then: dict[str, Any] | None = None, made: int | None = 64, **about: Any) -> decide.Begun:
    """A stage after `made` of 100 updates, 50 to an epoch."""
    return decide.Begun(then or recorded(), made=made, **{"total": 100, "per_epoch": 50.0, **about})


def done(then: dict[str, Any] | None = None, **about: Any) -> decide.Begun:
    return begun(then, done=True, **{"made": 100, **about})


NEWER = {"versions": {"jax": "2"}}
LONGER = recorded(max_training_steps=200)
TABLE = [
    # what was begun, what is asked for, the action, a part of each reason or warning
    (None, recorded(), "begin", []),
    (begun(), recorded(), "continue", []),
    (begun(made=None), recorded(), "continue", []),
    (done(), recorded(), "skip", []),
    # what is computed
    (begun(), recorded(trainer="sft"), "refuse", ["'policy'.trainer: then grpo, now sft"]),
    (begun(), recorded(seed=1), "refuse", ["'policy'.seed: then 0, now 1"]),
    (begun(), recorded(loss={"name": "cispo"}), "refuse", ['loss.name: then not given, now "cispo"']),
    (done(), recorded(learning_rate=0.1), "refuse", ["learning_rate: then not given, now 0.1"]),
    (begun(), recorded(rewards=[]), "refuse", [f"rewards[0].{each}: then" for each in ("label", "retries", "name")]),
    # what is not
    (begun(), recorded(log_steps=3), "continue", ["continues with other settings: log_steps: then not given, now 3"]),
    (done(), recorded(log_steps=3), "skip", []),
    (done(), recorded(logger=[{"name": "wandb"}], save_directory="/else"), "skip", []),
    (begun(), recorded(judge_key={"env": "KEY"}), "continue", []),
    (begun(recorded(versions={"jax": "1"})), recorded(**NEWER), "continue", ["begun with jax 1, now 2"]),
    (begun(), recorded(**NEWER), "continue", []),  # installed since
    # inputs
    (begun(), recorded(data="b"), "refuse", ["train_data: the contents of /project/rows.jsonl have changed since"]),
    (done(), recorded(data="b"), "refuse", ["train_data: the contents of"]),
    (begun(made=None), recorded(data="b"), "continue", ["nothing has been trained on it yet"]),
    (begun(), recorded(data=None), "continue", []),  # an earlier stage makes it
    (begun(), recorded("b"), "refuse", ["rewards[0].name: the contents of /project/judge.py have changed since"]),
    # length
    (begun(), recorded(max_training_steps=63), "refuse", ["it has made 64 updates, more than the requested 63"]),
    (begun(), recorded(max_training_steps=64), "continue", ["max_training_steps: then 100, now 64"]),
    (begun(), LONGER, "continue", ["max_training_steps: then 100, now 200"]),
    (
        begun(),
        recorded(max_training_steps=None, num_train_epochs=1),
        "refuse",
        ["made 64 updates, more than the requested 50", "made 64 updates, more than the requested 50"],
    ),
    (done(), LONGER, "extend", ["max_training_steps: then 100, now 200"]),
    (done(), recorded(max_training_steps=99), "refuse",
     ["the stage has made its 100 updates; it can only be extended"]),
    (done(), recorded(num_train_epochs=9), "skip", []),  # `max_training_steps` decides
    (done(total=None), LONGER, "refuse", ["its trainer does not support extension"]),
    (begun(total=None), LONGER, "continue", ["other settings"]),  # the checkpoint will tell
    (begun(recorded(scheduler="linear")), {**LONGER, "config": {**LONGER["config"], "scheduler": "linear"}}, "refuse",
     ['scheduler = "linear" spreads the decay over the whole run']),
    (begun(recorded(scheduler="linear"), made=None), recorded(scheduler="linear", max_training_steps=200), "continue",
     ["other settings"]),
]  # fmt: skip


@pytest.mark.parametrize("line", range(len(TABLE)))
def test_the_decision_is_that_of_the_table(line: int) -> None:
    then, now, action, said = TABLE[line]
    decision = decided(then, now)
    assert decision.action == action
    found = [*decision.reasons, *decision.warnings]
    if action == "refuse" and "with other settings: restore them, use another --dir" in found[-1]:
        assert then is not None
        assert found.pop().startswith(f"stage 'policy' was {'finished' if then.done else 'begun'} with")
    assert len(found) == len(said), found
    for part, whole in zip(said, found, strict=True):
        assert whole.startswith("stage 'policy'")
        assert part in whole


@pytest.mark.parametrize(
    ("made", "asked", "refused"),
    [(91, 200, False), (92, 200, True), (100, 200, True), (64, 70, False), (65, 70, True)],
)
@pytest.mark.parametrize("known", [False, True])
def test_a_wsd_run_changes_its_length_until_its_rate_falls(
    made: int, asked: int, refused: bool, known: bool
) -> None:
    """The same answer as the learning rates give, to `rlhf check` and to a loop that knows its updates."""
    from rlhf_core.optimizers import schedule

    before, now = (schedule("wsd", 1.0, total) for total in (100, asked))
    assert any(abs(float(before(i)) - float(now(i))) > 1e-5 for i in range(made)) == refused
    then, longer = recorded(scheduler="wsd"), recorded(scheduler="wsd", max_training_steps=asked)
    finished = made == 100 and not known
    decision = decided(begun(then, made, done=finished), longer, total=asked if known else None)
    assert decision.action == ("refuse" if refused else "continue")
    if refused:
        assert 'scheduler = "wsd" had begun to fall' in decision.reasons[0]


def test_a_loop_of_another_length_is_refused_where_no_field_says_so() -> None:
    """As where the data are fewer."""
    decision = decided(begun(), recorded(), total=50)
    assert decision.reasons == (
        "stage 'policy': it has made 64 updates, more than the requested 50; request at least as many",
    )


def test_how_rewards_and_environments_are_called_may_change() -> None:
    calls = {"timeout": 60.0, "on_error": "skip", "processes": 2}
    then = recorded(environment=GAME)
    now = recorded(rewards=[{**JUDGE, **calls}], environment={**GAME, **calls, "on_error": "stop"})
    decision = decided(begun(then), now)
    assert decision.action == "continue"
    assert "rewards[0].timeout: then not given, now 60.0" in decision.warnings[0]
    longer = recorded(environment={**GAME, "max_turns": 5})
    assert decided(begun(then), longer, "environment").reasons[0].endswith("max_turns: then 4, now 5")


@pytest.mark.parametrize("name", ["rewards.judge", "policy.rewards.judge", "rewards[0]"])
def test_a_changed_reward_is_accepted_by_name(name: str) -> None:
    changed = "rewards[0].name: the contents of /project/judge.py have changed since"
    assert decided(begun(), recorded("b")).reasons[0] == (
        f"stage 'policy'.{changed}; to continue with it: --accept rewards.judge, in Python "
        'accept=["rewards.judge"]'
    )
    decision = decided(begun(), recorded("b"), name, "rewards.other")
    assert decision.action == "continue"
    assert decision.warnings == (
        f"stage 'policy' continues after update 64 with what was accepted: {changed}",
    )
    assert [change.field for change in decision.accepted] == ["rewards[0].name"]
    assert decision.used == {name}


def test_what_was_accepted_is_recorded_and_needs_no_flag_again(tmp_path: Path) -> None:
    stage = record.StageRecord(tmp_path, "policy")
    stage.write_running(recorded_as(recorded()))
    (tmp_path / "checkpoints" / "64").mkdir(parents=True)
    now = recorded("b")
    decision = decided(stage.begun, now, "rewards.judge")
    accepted = stage.with_accepted(recorded_as(now), decision.accepted)
    stage.write_running(accepted)
    (entry,) = record.StageRecord(tmp_path, "policy").then["accepted"]
    assert (entry["field"], entry["after_update"]) == ("rewards[0].name", 64)
    again = record.StageRecord(tmp_path, "policy")
    assert decided(again.begun, now) == decide.Decision("continue")
    assert again.with_accepted(recorded_as(now), ()).record["accepted"] == [entry]
    assert decided(again.begun, recorded("c")).action == "refuse"
    # The checkpoint still has the earlier reward.
    assert decided(begun(), dict(accepted.record)).action == "continue"
    assert decided(begun(), now).action == "refuse"


def test_options_environments_and_data_are_accepted_too() -> None:
    then = recorded("a", "a", rewards=[JUDGE, "length"], environment=GAME)
    now = recorded("b", "b", rewards=[{**JUDGE, "retries": 5}, "length"], environment={**GAME, "lives": 3})
    names = ("rewards.judge", "rewards.length", "environment", "train_data")
    assert decided(begun(then), now, *names).action == "continue"
    for left in names:
        reasons = decided(begun(then), now, *(name for name in names if name != left)).reasons
        assert all(f"--accept {left}" in reason for reason in reasons[:-1])


@pytest.mark.parametrize("rewards", [[{**JUDGE, "label": "other"}], [JUDGE, "length"], []], ids=str)
def test_another_reward_is_not_a_changed_one(rewards: Any) -> None:
    accept = ("rewards.judge", "rewards.other", "rewards[0]", "rewards[1]")
    decision = decided(begun(), recorded(rewards=rewards), *accept)
    assert decision.action == "refuse"
    assert not any("--accept" in reason for reason in decision.reasons)


def test_another_function_of_the_same_file_is_another_reward() -> None:
    now = recorded(rewards=[{**JUDGE, "name": "/project/judge.py:strict"}])
    assert 'judge", now "/project/judge.py:strict"' in decided(begun(), now).reasons[0]


def test_a_finished_stage_is_kept_where_a_change_is_accepted() -> None:
    assert (
        "; to keep the stage, which was trained before that: --accept"
        in decided(done(), recorded("b")).reasons[0]
    )
    assert decided(done(), recorded("b"), "rewards.judge").action == "skip"


def test_a_stage_that_read_what_would_be_trained_further_is_refused() -> None:
    def stages(*later: decide.Begun | None) -> dict[str, decide.Decision]:
        specs = [recorded_as(LONGER), recorded_as(recorded(), "next", reads="policy.model")]
        return decide.decide_all(specs, {"policy": done(), "next": later[0]})

    assert [each.action for each in stages(None).values()] == ["extend", "begin"]
    decision = stages(done())["next"]
    assert decision.action == "refuse"
    assert decision.reasons[0].startswith("stage 'next' was begun with the previous 'policy'")


def test_code_that_changed_is_named_with_its_owner() -> None:
    """Of another owner, or of a component that was not there, it is a difference that the fields tell."""

    def of(**code: tuple[str, str]) -> dict[str, Any]:
        named = {field: {"name": "mine", "owner": by, "hash": x * 64} for field, (by, x) in code.items()}
        return {**recorded(), "code": named}

    before = of(loss=("rlhf-mine", "a"), sampler=("", "a"), trainer=("rlhf-mine", "a"))
    now = of(loss=("rlhf-mine", "b"), sampler=("", "b"), trainer=("rlhf-other", "b"), more=("", "a"))
    found = recorded_as(now).diff(before)
    assert [str(each) for each in found.refused] == [
        "loss: the code of 'mine' (rlhf-mine) has changed since",
        "sampler: the code of 'mine' has changed since",
    ]
    assert (found.warned, found.data) == ([], [])


def test_deciding_reads_no_file_and_no_device() -> None:
    import ast

    found = set()
    for module in (decide, spec):
        tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
        found |= {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert {name for name in found if name and name.startswith("rlhf")} == {
        "rlhf_core.contracts.trainers",
        "rlhf_core.errors",
        "rlhf_core.hidden",
        "rlhf_core.stage.spec",
    }
