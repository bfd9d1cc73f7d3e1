"""Proximal policy optimization (Schulman et al. 2017) with a critic, as in Ouyang et al. 2022: `trainer = "ppo"`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
from pydantic import Field

from rlhf_core import (
    POLICY_LOSS,
    REWARD,
    TRAINER,
    Component,
    Forecast,
    PolicyInputs,
    Registry,
    Stage,
    Trainer,
    TrainerConfig,
    TrainState,
    create_state,
    hookimpl,
)
from rlhf_core.artifacts import save_model
from rlhf_core.fit import TokenReader, empty_batches, fit
from rlhf_core.metrics import Mean
from rlhf_core.models import Model
from rlhf_core.objective import loss_output, trained_logps, trained_scores, trained_sequence, trained_weight
from rlhf_core.optimizers import make_optimizer
from rlhf_core.packing import Layout, Packed, pack
from rlhf_core.rollouts import (
    FixedPrompts,
    Rollout,
    RolloutCollector,
    RolloutUpdates,
    WeightedReward,
    choose_rollout_rows,
    forecast_rollouts,
    open_collector,
)
from rlhf_core.sampling import SamplingOptions
from rlhf_core.step import Objective
from rlhf_core.training import Reference, open_model, open_rewards

KEPT = ("advantages", "old_logps", "old_values", "returns")
"""What every trained token carries."""


class PPOConfig(TrainerConfig):
    """The fields that every trainer has, and those of sampling, scoring, the critic and the clipped updates."""

    learning_rate: float = Field(1e-6, gt=0, description="the policy's, at its peak")
    critic_learning_rate: float = Field(1e-5, gt=0, description="the critic's, at its peak")
    num_generations: int = Field(4, ge=1, description="completions per prompt")
    num_iterations: int = Field(2, ge=1, description="updates per rollout")
    max_prompt_length: int = Field(512, ge=1, description="tokens; longer prompts are dropped or cut")
    sampling: SamplingOptions = Field(SamplingOptions(), description="how completions are sampled")
    rewards: list[Annotated[WeightedReward, REWARD]] = Field([], description="reward functions")
    loss: Annotated[Component, POLICY_LOSS] = Field(Component(name="dapo"), description="the policy loss")
    kl_coefficient: float = Field(0.05, ge=0, description="weight of the KL penalty in each token's reward")
    value_coefficient: float = Field(0.5, ge=0, description="weight of the value loss")
    value_clip: float = Field(0.2, gt=0, description="how far a value may move from the rollout's")
    gamma: float = Field(1.0, gt=0, le=1, description="discount per token")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="of generalized advantage estimation")


def objective(models: Mapping[str, Any], loss: Any, config: PPOConfig) -> Objective:
    """Make the objective: the policy loss and the clipped value loss, each averaged over trained tokens."""
    name, temperature = config.loss.name, config.sampling.temperature

    def compute(params: Any, batch: Packed) -> tuple[dict[str, Mean], dict[str, Any]]:
        kept, mask = batch.token_values, trained_weight(batch)
        logps, entropies = trained_logps(
            models["policy"], params["policy"], batch, temperature=temperature, entropy=True
        )
        inputs = PolicyInputs(
            logps=logps,
            old_logps=kept["old_logps"],
            advantages=kept["advantages"],
            mask=mask,
            entropies=entropies,
            sequence=trained_sequence(batch),
            sequences=batch.last.shape[1],
        )
        policy = loss_output(
            loss, inputs, mask.shape, what=f"policy loss '{name}'", element="token", caller=__file__
        )
        values, old = trained_scores(models["critic"], params["critic"], batch), kept["old_values"]
        near = old + jnp.clip(values - old, -config.value_clip, config.value_clip)
        errors = jnp.maximum((values - kept["returns"]) ** 2, (near - kept["returns"]) ** 2)
        metrics = {f"{name}/{key}": Mean.of(x, mask) for key, x in policy.metrics.items()}
        metrics["entropy"] = Mean.of(entropies, mask)
        losses = {
            "policy": Mean.of(policy.loss, mask),
            "value": Mean.of(config.value_coefficient * errors, mask),
        }
        return losses, metrics

    return compute


def gae(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, *, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """Estimate advantages and returns, float64 [N, C] each; 0 outside the mask (Schulman et al. 2016).

    δ_t = r_t + γ V_{t+1} − V_t and A_t = δ_t + γ λ A_{t+1}, with V = A = 0 after a completion's last token.
    """
    advantages = np.zeros(rewards.shape)
    following, value = np.zeros(len(rewards)), np.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        advantage = rewards[:, t] + gamma * value - values[:, t] + gamma * lam * following
        following = np.where(mask[:, t], advantage, following)
        value = np.where(mask[:, t], values[:, t], value)
        advantages[:, t] = np.where(mask[:, t], advantage, 0.0)
    return advantages, np.where(mask, advantages + values, 0.0)


class PPOUpdates(RolloutUpdates):
    """Rollouts with advantages of the critic's, each trained on `num_iterations` times."""

    def __init__(
        self,
        stage: Stage,
        config: PPOConfig,
        collector: RolloutCollector,
        layout: Layout,
        policy: Model,
        critic: Model,
    ) -> None:
        super().__init__(
            stage,
            config,
            collector,
            prompts_per_rollout=config.total_batch_size // config.num_generations,
            updates_per_rollout=config.num_iterations,
        )
        self.config, self.layout, temperature = config, layout, config.sampling.temperature
        self.reference = Reference(policy.params, config.frozen_parameters, stage.devices())

        def read(params: Mapping[str, Any], batch: Packed) -> dict[str, Any]:
            old, _ = trained_logps(policy.definition, params["policy"], batch, temperature=temperature)
            ref, _ = trained_logps(policy.definition, params["reference"], batch, temperature=temperature)
            values = trained_scores(critic.definition, params["critic"], batch)
            return {"old_logps": old, "ref_logps": ref, "old_values": values}

        self.read = TokenReader(read, layout, stage.devices())
        self.read.compile(
            {"policy": policy.params, "critic": critic.params, "reference": self.reference.params}
        )

    def shapes(self) -> list[Packed]:
        return empty_batches(self.layout, token_names=KEPT)

    def complete(self, rollout: Rollout, state: TrainState) -> Rollout:
        mask, lengths = rollout.samples.mask, np.asarray(rollout.samples.lengths)
        params = {**state.params, "reference": self.reference.params}
        rollout = rollout.with_token_values(self.read(params, rollout.trees(self.prompts)))
        kept = {name: x.astype(np.float64) for name, x in rollout.token_values.items()}
        rewards = -self.config.kl_coefficient * (kept["old_logps"] - kept.pop("ref_logps"))
        rewards[np.arange(len(lengths)), lengths - 1] += np.nan_to_num(rollout.total)
        advantages, kept["returns"] = gae(
            rewards, kept["old_values"], mask, gamma=self.config.gamma, lam=self.config.gae_lambda
        )
        whitened = (advantages - advantages[mask].mean()) / (advantages[mask].std() + 1e-8)
        return replace(
            rollout,
            advantages=np.where(mask, whitened, 0.0).astype(np.float32),
            token_values={name: x.astype(np.float32) for name, x in kept.items()},
        )

    def minibatches(self, rollout: Rollout) -> list[list[Packed]]:
        return [pack(rollout.trees(self.prompts), self.layout, token_names=KEPT)]


def collector_of(
    config: PPOConfig, stage: Stage, model: Model, rewards: Any, field: str
) -> RolloutCollector | None:
    """Open the prompts of `train_data` or `eval_data` and a sampler for them; None where there is no eval_data."""
    return open_collector(
        config,
        stage,
        model,
        rewards,
        field,
        max_prompt_length=config.max_prompt_length,
        num_generations=config.num_generations,
        sampling=config.sampling,
        prompts_per_call=config.total_batch_size // config.num_generations,
        policy=lambda params: params["policy"],
    )


def run(config: PPOConfig, stage: Stage) -> None:
    """Improve `config.model` on the prompts of `config.train_data` and save the artifact `model`."""
    policy = open_model(config, stage, head="lm")
    rewards = open_rewards(config.rewards, stage)
    collector = collector_of(config, stage, policy, rewards, "train_data")
    assert collector is not None
    policy, layout = choose_rollout_rows(policy, config, stage, collector)
    critic = policy.with_head("score", seed=stage.seed)
    updates = PPOUpdates(stage, config, collector, layout, policy, critic)
    tx, schedule = make_optimizer(config, stage.registry, updates.total)
    critic_config = config.replace(learning_rate=config.critic_learning_rate)
    critic_tx, _ = make_optimizer(critic_config, stage.registry, updates.total)
    models = {"policy": policy, "critic": critic}
    loss = stage.registry.get(POLICY_LOSS, config.loss.name, **config.loss.options)
    held_out = collector_of(config, stage, policy, rewards, "eval_data")
    fixed = None if held_out is None else FixedPrompts(held_out, len(held_out.prompts), previewed=4)
    fitted = fit(
        stage,
        config,
        create_state(
            models,
            {"policy": tx, "critic": critic_tx},
            seed=stage.seed,
            frozen=config.frozen_parameters and {"policy": config.frozen_parameters},
        ),
        objective({name: model.definition for name, model in models.items()}, loss, config),
        updates,
        schedule=schedule,
        evaluate=None if fixed is None else fixed.evaluate,
    )
    save_model(stage, "model", "language_model", policy.with_params(fitted.state.params["policy"]))


def forecast(config: PPOConfig, stage: Stage) -> Forecast:
    """Forecast `run`; the critic and the reference count as copies of the policy."""
    return forecast_rollouts(
        config,
        stage,
        rewards=config.rewards,
        max_prompt_length=config.max_prompt_length,
        num_generations=config.num_generations,
        sampling=config.sampling,
        updates_per_rollout=config.num_iterations,
        copies=("critic", "reference"),
    )


PPO = Trainer(PPOConfig, {"model": "language_model"}, run, forecast)


@hookimpl
def rlhf_register(registry: Registry) -> None:
    registry.add(TRAINER, "ppo", PPO)
