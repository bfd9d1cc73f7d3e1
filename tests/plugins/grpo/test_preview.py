"""The same few prompts before and after training: which they are, what is written, what it does to training."""

import numpy as np
import pytest
from rlhf_grpo import GRPOConfig

from rlhf_core import hookimpl
from rlhf_core.errors import RunError
from tests.shared.short_runs import early

BASE = {
    "learning_rate": 0.05,
    "weight_decay": 0.0,
    "total_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 6,
    "max_training_steps": 3,
    "log_steps": 1,
    "beta": 0.0,
}
BEFORE, AFTER = "evaluation-000000.jsonl", "evaluation-000003.jsonl"
CLOCK = {
    "step_time",
    "tokens_per_second",
    "time/rollout",
    "time/reward",
    "time/update",
    "rollout/tokens_per_second",
}


def even(completions, number):
    return [float(len(text)) if n % 2 == 0 else None for text, n in zip(completions, number, strict=True)]


@pytest.fixture
def train(tiny, model, tmp_path):
    """(name, rewards, changes) → the directory and the logged metrics, without what a clock says."""

    def train(name, rewards=(early, even), stop_at=None, **changes):
        rows = []

        class Watch:
            @hookimpl
            def rlhf_step_end(self, step, metrics):
                rows.append({k: v for k, v in metrics.items() if k not in CLOCK})
                if step == stop_at:
                    raise KeyboardInterrupt

        held_out = tiny.prompts(5, seed=4) if changes.pop("evaluates", False) else None
        tiny.run(
            "grpo",
            GRPOConfig(**{**BASE, **changes}),
            tmp_path / name,
            listeners=[Watch()],
            model=model,
            rewards=list(rewards),
            train_dataset=tiny.prompts(20),
            eval_dataset=held_out,
        )
        return tmp_path / name, rows

    return train


def evaluations(directory):
    return {path.name: path.read_text() for path in sorted((directory / "samples").glob("evaluation-*"))}


def test_without_evaluation_data_prompts_of_the_training_data_are_answered(tiny, train):
    directory, _ = train("run")
    assert list(evaluations(directory)) == [BEFORE, AFTER]
    before, after = (tiny.read_rows(directory / "samples" / name) for name in (BEFORE, AFTER))
    prompts = [tiny.prompts(20)[i] for i in (0, 2, 5, 8, 10, 13, 16, 19)]  # evenly spread
    expected = [row["prompt"] for row in prompts for _ in range(4)]
    assert [row["prompt"] for row in before] == [row["prompt"] for row in after] == expected
    assert [row["completion"] for row in before] != [row["completion"] for row in after]
    for row in [*before, *after]:
        number = next(p["number"] for p in prompts if p["prompt"] == row["prompt"])
        scores = {"early": early([row["completion"]])[0], "even": even([row["completion"]], [number])[0]}
        assert row["rewards"] == pytest.approx(scores)
        assert row["reward"] == pytest.approx(scores["early"] + (scores["even"] or 0))
        assert set(row) == {"prompt", "columns", "completion", "reward", "rewards", "length", "finished"}
        assert row["columns"]["number"] == number


def test_a_policy_that_does_not_move_answers_the_same(train):
    directory, _ = train("still", [lambda completions: [1.0] * len(completions)])
    files = evaluations(directory)
    assert files[BEFORE] == files[AFTER]


def test_training_does_not_notice(tiny, train):
    (shown, rows), (hidden, others) = train("shown"), train("hidden", num_preview_samples=0)
    assert evaluations(hidden) == {}
    np.testing.assert_equal(rows, others)
    names = [path.name for path in (hidden / "samples").iterdir()]
    for name in names:
        assert (shown / "samples" / name).read_bytes() == (hidden / "samples" / name).read_bytes()


def test_completions_are_printed_on_demand(tiny, train, capfd):
    quiet, _ = train("quiet", max_training_steps=2, log_steps=2)
    assert "│" not in capfd.readouterr().err
    settings = {"log_completions": True, "num_completions_to_print": 2}
    directory, _ = train("loud", max_training_steps=2, log_steps=2, **settings)
    printed = capfd.readouterr()
    assert "│" not in printed.out
    headers = [line for line in printed.err.splitlines() if "completion " in line and " of 8 " in line]
    assert [line.partition("  reward")[0] for line in headers] == [
        f"[grpo] update {update}, completion {i} of 8" for update in (1, 2) for i in (1, 8)
    ]  # of the first and of logged rollouts; how they look: tests/packages/rollouts/test_shown.py
    last = tiny.read_rows(directory / "samples" / "update-000001.jsonl")[-1]
    assert f"advantage {last['advantage']:.4g}  {last['length']} tokens" in headers[-1]
    assert (directory / "samples" / "update-000001.jsonl").read_bytes() == (
        quiet / "samples" / "update-000001.jsonl"
    ).read_bytes()


def test_every_evaluation_keeps_what_a_preview_of_its_state_would(tiny, train):
    """The prompts that are read are answered as among all of them: with the same keys, whichever are asked."""
    settings = {"evaluates": True, "evaluation_steps": 2, "num_preview_samples": 3}
    settings["evaluation"] = {"num_generations": 4}  # as in training, so that both sample with one program
    directory, rows = train("first", **settings)
    files = evaluations(directory)
    assert list(files) == [BEFORE, "evaluation-000002.jsonl", AFTER]
    asked, whole = train("start", eval_on_start=True, **settings)
    assert evaluations(asked) == files  # the first one now by an evaluation of all prompts
    np.testing.assert_equal(whole[1:], rows)
    prompts = [tiny.prompts(5, seed=4)[i]["prompt"] for i in (0, 2, 4) for _ in range(4)]
    assert [row["prompt"] for row in tiny.read_rows(directory / "samples" / AFTER)] == prompts


@pytest.mark.long
@pytest.mark.parametrize(("evaluates", "stop_at"), [(False, 1), (True, 2)])
def test_a_run_that_was_interrupted_leaves_the_same_files(train, evaluates, stop_at):
    settings = {"evaluates": evaluates, "evaluation_steps": 1 if evaluates else None, "num_iterations": 2}
    settings["save_steps"] = 1
    whole, rows = train("whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        train("parts", stop_at=stop_at, **settings)
    parts, rest = train("parts", **settings)
    files = evaluations(whole)
    assert len(files) == (4 if evaluates else 2)
    assert evaluations(parts) == files
    np.testing.assert_equal(rest[-1], rows[-1])


def test_a_reward_that_fails_at_the_end_does_not_cost_the_model(train):
    calls = []

    def tired(completions):
        calls.append(len(completions))
        if len(calls) > 4:
            raise ConnectionError("the judge has left")
        return [float(len(text)) for text in completions]

    message = "the previews after update 3 are skipped: reward 'tired' raised ConnectionError"
    with pytest.warns(UserWarning, match=message):
        directory, _ = train("tired", [tired])
    assert calls[:5] == [8, 32, 8, 8, 32]
    assert set(calls[5:]) == {1}  # to name the row of the failure, completions are tried alone
    assert list(evaluations(directory)) == [BEFORE]
    assert (directory / "artifacts" / "model").is_dir()


def test_a_reward_may_apply_to_none_of_the_prompts_that_are_read(tiny, train):
    def others(completions, number):
        return [float(len(text)) if n else None for text, n in zip(completions, number, strict=True)]

    directory, _ = train("rare", [others], num_preview_samples=1)  # of the first prompt
    assert {row["reward"] for row in tiny.read_rows(directory / "samples" / BEFORE)} == {None}
    with pytest.raises(RunError, match="no reward function applies to any completion"):
        train("never", [lambda completions: [None] * len(completions)])


def test_evaluations_in_the_shapes_of_rollouts_sample_with_their_program(short, short_runs):
    """Though updates attend in blocks, which are chosen for their rows alone."""
    before = len(short_runs.COMPILED)
    _, watch = short.train(
        "grpo",
        inputs={"eval_dataset": short.rows["grpo"][:2]},
        attention="blocks",
        max_completion_length=5,  # which no other test has
        max_training_steps=1,
        evaluation_steps=1,
        evaluation={"num_generations": 4},
        sync_ref_model=False,
    )
    assert watch.steps("eval_reward") == [1]
    assert sum("generate" in name for name in short_runs.COMPILED[before:]) == 1
