"""GAE against its definition, and the trainer against the kit: it is killed, resumed and run on another mesh."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from rlhf_ppo import PPO, PPOConfig, gae

from rlhf_core.testing import check_trainer, prompts

jax.config.update("jax_num_cpu_devices", 2)  # first of all: the kit compares one device with two


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 1.0), (0.99, 0.0)])
def test_gae_is_its_sum(gamma: float, lam: float) -> None:
    """A_t = Σ_k (γλ)^k δ_{t+k} over the rest of the completion."""
    draw = np.random.default_rng(0)
    rewards, values = draw.normal(size=(3, 5)), draw.normal(size=(3, 5))
    lengths = [5, 3, 1]
    mask = np.arange(5) < np.array(lengths)[:, None]
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for i, length in enumerate(lengths):
        after = np.append(values[i, 1:length], 0.0)
        deltas = rewards[i, :length] + gamma * after - values[i, :length]
        expected = [sum((gamma * lam) ** k * deltas[t + k] for k in range(length - t)) for t in range(length)]
        np.testing.assert_allclose(advantages[i, :length], expected)
    np.testing.assert_allclose(returns, np.where(mask, advantages + values, 0.0))
    assert not advantages[~mask].any()


def short(completions: list[str]) -> list[float]:
    return [-len(text) / 100 for text in completions]


def test_the_kit() -> None:
    config = PPOConfig(num_generations=2, num_iterations=2, sampling={"max_completion_length": 6})
    check_trainer(PPO, config, rows=prompts(), rewards=[short], eval_dataset=prompts(4))
