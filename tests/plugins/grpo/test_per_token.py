"""Whole runs with what goes per token: a mask with holes, advantages [prompts, samples, time], a loss's rewards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rlhf_grpo import GRPOConfig, compute_per_token_logps

from rlhf_core import (
    ADVANTAGE,
    POLICY_LOSS,
    SAMPLER,
    AdvantageInputs,
    InputError,
    LossOutput,
    PolicyInputs,
    Registry,
    Rollouts,
    SamplerInputs,
    hookimpl,
    load_model,
)

C = 6
HOLE = slice(2, 4)
"""Positions of tokens that a world added, between those that the policy wrote."""


def with_holes(inputs: SamplerInputs) -> Callable[..., Rollouts]:
    def sample(params: Any, prompts: Any, key: Any, ids: Any = None) -> Rollouts:
        n = len(prompts) * inputs.num_generations
        draw = np.random.default_rng([int(ids[0]), *np.asarray(jax.random.key_data(key)).tolist()])
        lengths = draw.integers(1, C + 1, n).astype(np.int32)
        there = np.arange(C) < lengths[:, None]
        mask = there.copy()
        mask[:, HOLE] = False
        tokens = np.where(there, draw.integers(3, 40, (n, C)), 0).astype(np.int32)
        logps = np.where(there, -draw.random((n, C)), 0).astype(np.float32)
        return Rollouts(tokens, lengths, logps, lengths < C, mask)

    return sample


@dataclass(frozen=True)
class Baseline:
    """The reward, 0 where there is none, per completion or per token; `hole` and `first` are added to some tokens."""

    per_token: bool = False
    hole: float = 0.0
    first: float = 0.0

    def __call__(self, inputs: AdvantageInputs) -> np.ndarray:
        out = np.nan_to_num(np.asarray(inputs.rewards, np.float32))
        if not self.per_token:
            return out
        by_token = np.repeat(out[..., None], C, axis=-1)
        by_token[..., HOLE] += self.hole
        by_token[..., 0] += self.first
        return by_token


@dataclass(frozen=True)
class Reinforce:
    """−x logp, where x is the advantage or the reward."""

    of_rewards: bool = False

    def __call__(self, inputs: PolicyInputs) -> LossOutput:
        if self.of_rewards and inputs.rewards is None:
            raise InputError("the trainer gives no rewards")
        return LossOutput(-(inputs.rewards if self.of_rewards else inputs.advantages) * inputs.logps)


class Components:
    @hookimpl
    def rlhf_register(self, registry: Registry) -> None:
        registry.add(SAMPLER, "with_holes", with_holes)
        registry.add(ADVANTAGE, "baseline", Baseline)
        registry.add(POLICY_LOSS, "reinforce", Reinforce)


def reward(completion_ids: list[list[int]]) -> list[float | None]:
    return [None if sum(ids) % 5 == 0 else sum(ids) % 7 / 7 - 0.5 for ids in completion_ids]


@pytest.fixture(scope="module")
def trained(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """The parameters after two updates that use one rollout, read with the policy and a reference."""
    model = tiny.make_model("lm", scale=4.0)

    def train(loss: dict[str, Any] | None = None, **advantage: Any) -> dict[str, Any]:
        config = GRPOConfig(
            learning_rate=1e-2,
            total_batch_size=8,
            num_generations=4,
            num_iterations=2,
            max_training_steps=2,
            num_preview_samples=0,
            sampling={"max_completion_length": C},
            sampler="with_holes",
            advantage={"name": "baseline", **advantage},
            loss={"name": "reinforce", **(loss or {})},
            kl={"beta": 0.1},
        )
        artifact = tiny.run(
            "grpo",
            config,
            tmp_path_factory.mktemp("run"),
            listeners=[Components()],
            model=model,
            rewards=[reward],
            train_dataset=tiny.prompts(4),
        )
        return tiny.leaves(load_model(Path(artifact.path), mesh=tiny.one_device()).params)

    return train


@pytest.fixture(scope="module")
def plain(trained: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Of an advantage per completion."""
    return trained()


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(np.array_equal(a[name], b[name]) for name in a)


def test_tokens_of_the_environment_are_not_trained_on(
    trained: Callable[..., dict[str, Any]], plain: dict[str, Any]
) -> None:
    """The policy's tokens have the same number each, as in a run with one for all of them."""
    assert same(trained(per_token=True, hole=1000.0), plain)


def test_the_advantage_of_a_token_counts(
    trained: Callable[..., dict[str, Any]], plain: dict[str, Any]
) -> None:
    assert not same(trained(per_token=True, first=1.0), plain)


def test_a_loss_sees_the_rewards(trained: Callable[..., dict[str, Any]], plain: dict[str, Any]) -> None:
    """The reward where the plain advantage is the same; 0 for completions that no function scored."""
    seen = trained({"of_rewards": True}, per_token=True, first=1.0)
    for name, leaf in seen.items():  # two programs: Adam may enlarge what they round differently
        np.testing.assert_allclose(leaf, plain[name], rtol=0, atol=1e-4, err_msg=name)


def test_log_probabilities_of_logits_equal_float64():
    draw = np.random.default_rng(0)
    logits = draw.normal(0, 3, (2, 7, 11)).astype(np.float32)
    ids = draw.integers(0, 11, (2, 7))
    wide = logits.astype(np.float64)[:, 2:-1]
    expected = np.take_along_axis(wide - np.log(np.exp(wide).sum(-1, keepdims=True)), ids[:, 3:, None], -1)[
        ..., 0
    ]
    np.testing.assert_allclose(compute_per_token_logps(logits, ids, 3), expected, atol=2e-6)
    assert compute_per_token_logps(logits.astype(jnp.bfloat16), ids, 3).dtype == jnp.float32
    for trimmed in (logits[:, :-1], logits[:, 2:-1]):
        np.testing.assert_allclose(compute_per_token_logps(trimmed, ids, 3), expected, atol=2e-6)
