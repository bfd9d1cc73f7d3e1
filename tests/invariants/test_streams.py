"""A stage whose data are a stream is checked, trained, stopped and continued like any other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlhf_dpo import DPOConfig
from rlhf_grpo import GRPOConfig
from rlhf_reward import RewardConfig, RewardTrainer
from rlhf_sft import SFTConfig, SFTTrainer

from rlhf_core import InputError, load_model
from rlhf_core.sampling import Sampler
from tests.shared.interrupts import interrupt

SETTINGS: dict[str, Any] = {
    "total_batch_size": 4,
    "learning_rate": 1e-2,
    "save_steps": 1,
    "log_steps": 1,
    "shuffle_buffer": 8,
}


@pytest.mark.parametrize("kind", ["stream", pytest.param("large file", marks=pytest.mark.long)])
def test_an_interrupted_stage_ends_as_one_that_was_not(
    kind: str, tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.write_rows(tmp_path / "texts.jsonl", tiny.texts(24))
    spec: Any = [{"path": str(path), "streaming": True}, {"path": str(path), "weight": 0.5}]
    evaluated = {"eval_data": spec[0], "max_evaluation_steps": 2}
    if kind == "large file":
        monkeypatch.setattr("rlhf_core.training.rows.WHOLE", 8)
        spec = str(path)
    config = SFTConfig(train_data=spec, max_training_steps=6, **evaluated, **SETTINGS)
    straight = tiny.run("sft", config, tmp_path / "a", model=tiny.make_model())
    with pytest.raises(KeyboardInterrupt):
        tiny.run("sft", config, tmp_path / "b", model=tiny.make_model(), listeners=[interrupt(3)])
    found = tiny.run("sft", config, tmp_path / "b", model=tiny.make_model())
    one, other = (tiny.leaves(load_model(each.path).params) for each in (straight, found))
    assert all(np.array_equal(one[name], other[name]) for name in one)
    steps = [json.loads(line) for line in (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()]
    assert [(each["step"], round(each["epoch"], 3)) for each in steps if "loss" in each] == [
        (n, round(n / 6, 3)) for n in range(1, 7)
    ]
    assert "eval_loss" in steps[-1]


@pytest.mark.parametrize("loss", ["sigmoid", pytest.param("simpo", marks=pytest.mark.long)])
def test_dpo_on_a_stream_is_dpo_on_the_rows(loss: str, tiny: ModuleType, tmp_path: Path) -> None:
    """The references of an update are computed when it is made, under the model that training started from."""
    path = tiny.write_rows(tmp_path / "pairs.jsonl", tiny.pairs(13))
    held_out = {"eval_data": str(tiny.write_rows(tmp_path / "eval.jsonl", tiny.pairs(5, seed=3)))}
    options = {"max_training_steps": 5, "shuffle_train_dataset": False, "loss": loss}

    tiny.make_model(scale=4.0).save(tmp_path / "model")

    def run(at: str, spec: Any, *listeners: Any, **changes: Any) -> dict[str, Any]:
        config = DPOConfig(train_data=spec, **{**SETTINGS, **options, **held_out, **changes})
        found = tiny.run("dpo", config, tmp_path / at, model=tmp_path / "model", listeners=listeners)
        return dict(tiny.leaves(load_model(found.path).params))

    stream = {"path": str(path), "streaming": True}
    whole, straight = run("whole", str(path)), run("straight", stream)
    for name, leaf in whole.items():
        np.testing.assert_allclose(straight[name], leaf, rtol=1e-5, atol=1e-7, err_msg=name)
    with pytest.raises(KeyboardInterrupt):
        run("parts", stream, interrupt(3))
    parts = run("parts", stream)
    assert all(np.array_equal(parts[name], straight[name]) for name in whole)


@pytest.mark.parametrize("outside", [False, pytest.param(True, marks=pytest.mark.long)])
def test_rollouts_take_the_next_prompts_of_a_stream(
    outside: bool, tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed within a rollout or between two, each prompt comes once, in the order of the run that was not killed.

    outside: rollouts are sampled ahead, in threads; else several rounds of them when they are due.
    """
    policies: dict[int, Any] = {}
    if outside:

        def publish(self: Any, params: Any, version: int) -> int:
            policies.setdefault(version, jax.tree.map(jnp.copy, params))
            return version

        def sample(self: Any, version: int, *arguments: Any) -> Any:
            return honest(self, policies[version], *arguments)

        honest = Sampler.__call__
        monkeypatch.setattr(Sampler, "publish", publish, raising=False)
        monkeypatch.setattr(Sampler, "published", lambda self, version: version, raising=False)
        monkeypatch.setattr(Sampler, "__call__", sample)
    monkeypatch.setattr("rlhf_core.data.streams.SAMPLE", 4)
    monkeypatch.setattr("rlhf_core.data.source.BLOCK", 3)
    letters = [f"{a} {b}" for a in "abcdefgh" for b in "abcdefg"]

    def rows() -> Iterator[dict[str, Any]]:
        for i, text in enumerate(letters):
            yield {"prompt": text if i % 5 else "a " * 99, "answer": text}

    def reward(completions: list[str], answer: list[str], prompts: list[str]) -> list[float]:
        assert answer == prompts
        return [len(text) / 8 for text in completions]

    def run(at: str, *listeners: Any) -> dict[str, Any]:
        config = GRPOConfig(
            **{**SETTINGS, "total_batch_size": 4, "num_generations": 2, "steps_per_generation": 2},
            sampling={"max_completion_length": 4},
            max_prompt_length=12,
            max_training_steps=8,
            dynamic_sampling=None if outside else {"max_rounds": 2},
            rollouts_ahead=int(outside),
            num_preview_samples=0,
        )
        given = {"train_dataset": rows, "rewards": [reward]}
        model = tiny.make_model(scale=4.0)
        found = tiny.run("grpo", config, tmp_path / at, model=model, listeners=listeners, **given)
        return dict(tiny.leaves(load_model(found.path).params))

    straight = run("straight")
    for stop in (5, 6):
        with pytest.raises(KeyboardInterrupt):
            run(f"parts {stop}", interrupt(stop))
        parts = run(f"parts {stop}")
        assert all(np.array_equal(parts[name], straight[name]) for name in straight)
    files = sorted((tmp_path / "straight/samples").glob("update-*.jsonl"))
    seen = [row["prompt"] for file in files for row in tiny.read_rows(file)[::2]]
    assert len(seen) == len(set(seen)) == 16
    windows = [letters.index(prompt) // 8 for prompt in seen]
    assert windows == sorted(windows)
    assert seen != sorted(seen)


def test_a_function_is_the_same_data_while_its_source_is(tiny: ModuleType, tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield from tiny.pairs(40)

    def others() -> Iterator[dict[str, Any]]:
        yield from tiny.pairs(41)

    config = RewardConfig(max_training_steps=2, save_directory=tmp_path, **SETTINGS)
    RewardTrainer(config, model=tiny.make_model("score"), train_dataset=rows).train()
    longer = config.replace(max_training_steps=3)
    with pytest.raises(InputError, match="train_data"):
        RewardTrainer(longer, model=tiny.make_model("score"), train_dataset=others).train()
    again = RewardTrainer(longer, model=tiny.make_model("score"), train_dataset=rows).train()
    assert again.metrics["loss"] > 0


def test_a_check_tells_what_is_known_of_a_stream(place: Any, rlhf: Callable[..., Any]) -> None:
    place.settings("policy.toml", 'train_data = { path = "prompts.jsonl", streaming = true }')
    told = rlhf("check", "policy.toml")
    assert told.code == 0
    text = " ".join(told.out.split())
    assert "of the first 4,096 rows of the stream: 4,096 prompts: 4,096 kept" in text
    assert "2 updates of 4 completions; 1 update per rollout; the length of the data is not known" in text


def test_splits_are_sets_to_evaluate_and_not_rows_to_train_on(tiny: ModuleType, tmp_path: Path) -> None:
    easy, hard = (datasets.Dataset.from_list(tiny.texts(5, seed=seed)) for seed in (1, 2))
    splits = datasets.DatasetDict({"easy": easy, "hard": hard})
    config = SFTConfig(max_training_steps=1, save_directory=tmp_path, **SETTINGS)
    given = {"model": tiny.make_model(), "eval_dataset": splits}
    found = SFTTrainer(config, train_dataset=tiny.texts(8), **given).train()
    assert {"eval_easy_loss", "eval_hard_loss"} <= set(found.metrics)
    with pytest.raises(InputError, match=r"several splits \(easy, hard\): give one of them"):
        SFTTrainer(config, model=tiny.make_model(), train_dataset=splits).train()
