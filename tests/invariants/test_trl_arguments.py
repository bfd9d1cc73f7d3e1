"""Arguments of TRL's trainers, from Python: compute_metrics, model_init, optimizers, and several evaluation sets."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import optax
import pytest
from rlhf_dpo import DPOConfig, DPOTrainer
from rlhf_grpo import GRPOConfig, GRPOTrainer
from rlhf_reward import RewardConfig, RewardTrainer
from rlhf_sft import SFTConfig, SFTTrainer

from rlhf_core import load_model
from rlhf_core.errors import InputError

SHORT = {"total_batch_size": 4, "max_training_steps": 2, "log_steps": 1, "learning_rate": 1e-2}


def compute_metrics(prediction: Any) -> dict[str, float]:
    """As TRL's reward trainer did: it unpacks like a pair."""
    predictions, labels = prediction
    right = np.argmax(predictions, axis=1) == labels
    return {
        "own_accuracy": right.mean(),
        "gap": float((prediction.predictions[:, 0] - predictions[:, 1]).mean()),
    }


def rows_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_metrics_of_one_s_own(tiny: ModuleType, tmp_path: Path) -> None:
    result = RewardTrainer(
        args=RewardConfig(save_directory=tmp_path, **SHORT),
        model=tiny.make_model("score", scale=4.0),
        train_dataset=tiny.pairs(8),
        eval_dataset=tiny.pairs(6, seed=3),
        compute_metrics=compute_metrics,
    ).train()
    assert result.metrics["eval_own_accuracy"] == pytest.approx(result.metrics["eval_accuracy"])
    assert result.metrics["eval_gap"] == pytest.approx(result.metrics["eval_margin"], rel=1e-5)


def test_metrics_of_implicit_rewards(tiny: ModuleType) -> None:
    result = DPOTrainer(
        DPOConfig(beta=0.5, **SHORT),
        model=tiny.make_model("lm", scale=4.0),
        train_dataset=tiny.pairs(8),
        eval_dataset=tiny.pairs(6, seed=3),
        compute_metrics=compute_metrics,
    ).train()
    assert result.metrics["eval_gap"] == pytest.approx(result.metrics["eval_rewards/margins"], rel=1e-4)


def test_metrics_that_fail_cost_nothing_and_names_are_kept(tiny: ModuleType, tmp_path: Path) -> None:
    """What is said of them: tests/mistakes/arguments.py."""

    def run(compute: Any) -> Any:
        return RewardTrainer(
            RewardConfig(save_directory=tmp_path, **SHORT),
            model=tiny.make_model("score"),
            train_dataset=tiny.pairs(8),
            eval_dataset=tiny.pairs(6),
            compute_metrics=compute,
        ).train()

    with pytest.raises(
        InputError, match=rf"'reward'\.compute_metrics raised ZeroDivisionError: .*{__file__}"
    ):
        run(lambda prediction: 1 / 0)
    assert not (tmp_path / "metrics.jsonl").exists()
    with pytest.warns(UserWarning, match="the evaluation has accuracy too"):
        result = run(lambda prediction: {"eval_gap": np.float32(2), "accuracy": 0.25})
    assert (result.metrics["eval_gap"], result.metrics["eval_accuracy"]) == (2, 0.25)
    assert "eval_eval_gap" not in result.metrics


def test_metrics_of_a_file(tiny: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "def count(given):\n    return {'pairs': len(given.label_ids)}\n"
        "def twice(given):\n    return {'twice': 2 * len(given.label_ids), 'accuracy': 0.25}\n"
    )
    config = RewardConfig(
        save_directory=tmp_path / "run", **SHORT, metrics=[f"{file}:count", f"{file}:twice"]
    )
    rows = {"train_dataset": tiny.pairs(8), "eval_dataset": tiny.pairs(6)}
    with pytest.warns(UserWarning, match=r"metrics\[1\]: the evaluation has accuracy too; logged is what"):
        metrics = RewardTrainer(config, model=tiny.make_model("score"), **rows).train().metrics
    assert (metrics["eval_pairs"], metrics["eval_twice"], metrics["eval_accuracy"]) == (6, 12, 0.25)
    file.write_text(file.read_text() + "# measured alike\n")
    again = RewardTrainer(config, model=tiny.make_model("score"), **rows).train()
    assert again.metrics["eval_pairs"] == 6  # finished: what measures is not compared


@pytest.mark.parametrize("trainer", ["reward", pytest.param("dpo", marks=pytest.mark.long)])
def test_a_function_of_metrics_that_fails_later_does_not_lose_the_model(short: Any, trainer: str) -> None:
    calls: list[int] = []

    def fails(prediction: Any) -> dict[str, float]:
        calls.append(len(prediction.label_ids))
        if len(calls) > 1:
            raise ValueError("too late")
        return {}

    given = {"eval_dataset": short.rows[trainer][:5], "compute_metrics": fails}
    with pytest.warns(
        UserWarning, match=r"evaluation after update 2 failed .*compute_metrics raised ValueError"
    ):
        found, _ = short.train(trainer, max_training_steps=2, inputs=given)
    assert found
    assert calls == [5, 5]


def test_a_model_is_made_and_an_optimizer_is_given(tiny: ModuleType, tmp_path: Path) -> None:
    def trained(at: str, optimizers: Any, **fields: Any) -> dict[str, np.ndarray]:
        trainer = SFTTrainer(
            SFTConfig(save_directory=tmp_path / at, max_grad_norm=None, **{**SHORT, **fields}),
            model_init=lambda: tiny.make_model("lm", scale=4.0),
            train_dataset=tiny.texts(8),
            optimizers=optimizers,
        )
        return tiny.leaves(load_model(trainer.train().artifact.path, "lm", mesh=tiny.one_device()).params)

    def equal(left: Any, right: Any) -> bool:
        return all(np.array_equal(left[path], right[path]) for path in left)

    plain = trained("plain", (None, None), optimizer={"name": "sgd", "momentum": 0.5}, weight_decay=0.0)
    given = trained("given", (optax.sgd(1e-2, momentum=0.5), None))
    for path, leaf in plain.items():
        np.testing.assert_allclose(given[path], leaf, rtol=1e-6, atol=1e-8)
    assert rows_of(tmp_path / "given")[0]["learning_rate"] is None
    rates = trained("rates", (None, lambda step: 1e-2 / (step + 1)), optimizer="sgd")
    assert [row["learning_rate"] for row in rows_of(tmp_path / "rates")] == pytest.approx([1e-2, 5e-3])
    assert not equal(rates, plain)
    assert trained("given", (optax.sgd(1e-2, momentum=0.5), None), max_training_steps=3)


@pytest.mark.parametrize(
    "trainer", ["reward", "grpo", *(pytest.param(each, marks=pytest.mark.long) for each in ("sft", "dpo"))]
)
def test_several_evaluation_sets(short: Any, tiny: ModuleType, tmp_path: Path, trainer: str) -> None:
    rows = {"sft": tiny.texts, "reward": tiny.pairs, "dpo": tiny.pairs, "grpo": tiny.prompts}[trainer]
    easy, hard = rows(4, seed=5), rows(5, seed=6)
    given = {"max_training_steps": 2, "max_evaluation_steps": None}
    _, both = short.train(trainer, at="both", inputs={"eval_dataset": {"easy": easy, "hard": hard}}, **given)
    _, alone = short.train(trainer, at="alone", inputs={"eval_dataset": hard}, **given)
    found = {name: x for name, x in both.rows[-1].items() if name.startswith("eval_")}
    wanted = {
        name: x for name, x in alone.rows[-1].items() if name.startswith("eval_") and "time" not in name
    }
    for name, value in wanted.items():
        np.testing.assert_allclose(
            found[f"eval_hard_{name.removeprefix('eval_')}"], value, rtol=1e-5, err_msg=name
        )
    assert {name.split("_")[1] for name in found} == {"easy", "hard"}


def test_sets_of_rows_may_have_any_name(short: Any, tiny: ModuleType) -> None:
    rows = tiny.texts(4, seed=5)
    sets = {"name": rows, "path": rows, "text": rows, "my-set 2": rows}
    _, found = short.train("sft", max_training_steps=1, inputs={"eval_dataset": sets})
    assert {f"eval_{name}_loss" for name in sets} <= set(found.rows[-1])


def test_a_finished_run_is_compared_with_its_sets(tiny: ModuleType, tmp_path: Path) -> None:
    def run(**sets: Any) -> None:
        config = GRPOConfig(
            save_directory=tmp_path,
            num_generations=2,
            max_completion_length=4,
            total_batch_size=4,
            max_training_steps=1,
        )
        GRPOTrainer(
            config,
            model=tiny.make_model("lm"),
            rewards=[lambda completions: [float(len(text)) for text in completions]],
            train_dataset=tiny.prompts(4),
            eval_dataset=sets,
        ).train()

    run(a=tiny.prompts(2), b=tiny.prompts(2, seed=1))
    with pytest.raises(InputError, match=r"eval_data\.b: .*contents differ|eval_data\.b.*changed"):
        run(a=tiny.prompts(2), b=tiny.prompts(2, seed=2))
