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
    PolicyInputs,
    Registry,
    RolloutConfig,
    TrainState,
    hookimpl,
)
from rlhf_core.fit import TreeReader
from rlhf_core.metrics import Mean
from rlhf_core.models import Model
from rlhf_core.objective import (
    Moments,
    loss_output,
    trained_logps,
    trained_moments,
    trained_scores,
    trained_sequence,
    trained_weight,
)
from rlhf_core.packing import Layout, Packed, pack
from rlhf_core.rollouts import (
    FixedPrompts,
    Reading,
    Rollout,
    RolloutUpdates,
    SamplingTest,
    SamplingTestOptions,
    WeightedReward,
    choose_rollout_rows,
    open_collector,
    open_rewards,
)
from rlhf_core.step import Objective
from rlhf_core.training import Build, Context, Reference, define_trainer

KEPT = ("advantages", "old_logps", "old_values", "returns")
"""What every trained token carries."""


class PPOConfig(RolloutConfig):
    """The fields of every trainer that samples, and those of scoring, the critic and the clipped updates."""

    learning_rate: float = Field(1e-6, gt=0, description="the policy's, at its peak")
    critic_learning_rate: float = Field(1e-5, gt=0, description="the critic's, at its peak")
    num_generations: int = Field(4, ge=1, description="completions per prompt")
    num_iterations: int = Field(2, ge=1, description="updates per rollout")
    rewards: list[Annotated[WeightedReward, REWARD]] = Field([], description="reward functions")
    loss: Annotated[Component, POLICY_LOSS] = Field(Component(name="dapo"), description="the policy loss")
    kl_coefficient: float = Field(0.05, ge=0, description="weight of the KL penalty in each token's reward")
    value_coefficient: float = Field(0.5, ge=0, description="weight of the value loss")
    value_clip: float = Field(0.2, gt=0, description="how far a value may move from the rollout's")
    gamma: float = Field(1.0, gt=0, le=1, description="discount per token")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="of generalized advantage estimation")

    @property
    def sampling_test(self) -> SamplingTestOptions:
        """How the sampler is tested: with what is read before the first update."""
        return SamplingTestOptions(self.limits.surprisal_gap, "rollout")


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


class PPOSteps:
    """Gives every token of a rollout the critic's advantage, and trains on all of it in each update."""

    token_names, sequence_names = KEPT, ()

    def __init__(
        self,
        config: PPOConfig,
        prompts: Any,
        layout: Layout,
        reader: TreeReader,
        read_with: Any,
        test: SamplingTest,
    ):
        self.config, self.prompts, self.layout = config, prompts, layout
        self.read, self.read_with, self.test = reader, read_with, test

    def prepare(self, rollout: Rollout, state: TrainState) -> Rollout:
        mask, lengths = rollout.samples.mask, np.asarray(rollout.samples.lengths)
        values = self.read(self.read_with(state.params), rollout.trees(self.prompts))
        self.test.add(mask, {name: values.pop(name) for name in Moments.names()})
        rollout = rollout.with_token_values(values)
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


def make_reader(config: PPOConfig, policy: Model, critic: Model, layout: Layout, mesh: Any) -> TreeReader:
    """Read a rollout with the policy of its start, the reference and the critic, in one pass."""
    temperature = config.sampling.temperature

    def read(params: Mapping[str, Any], batch: Packed) -> dict[str, Any]:
        old = trained_moments(policy.definition, params["policy"], batch, temperature=temperature)
        ref, _ = trained_logps(policy.definition, params["reference"], batch, temperature=temperature)
        values = trained_scores(critic.definition, params["critic"], batch)
        return {"old_logps": old.logps, "ref_logps": ref, "old_values": values, **old.named()}

    return TreeReader(read, layout, mesh, per="token")


def build(config: PPOConfig, context: Context) -> Build:
    """Improve `config.model` on the prompts of `config.train_data`, beside a critic that begins as its copy."""
    sampled = context.model("lm")
    rewards = open_rewards(config.rewards, context.stage)
    group, serves = config.num_generations, config.num_iterations
    size = config.total_batch_size // group
    options = config.rollout_options(
        group, size, updates_per_rollout=serves, policy="policy", test=config.sampling_test
    )
    collector = open_collector(context, sampled, rewards, options)
    assert collector is not None
    held_out = open_collector(context, sampled, rewards, options, "eval_data")
    fixed = None if held_out is None else FixedPrompts(held_out, len(held_out.prompts), previewed=4)
    policy, layout = choose_rollout_rows(context, sampled, collector)
    critic = policy.with_head("score", seed=context.seed)
    reference = Reference(policy.params, config.frozen_parameters, context.mesh, definition=policy.definition)
    reader = make_reader(config, policy, critic, layout, context.mesh)

    def read_with(params: Any) -> dict[str, Any]:
        return {**params, "reference": reference.params}

    context.ahead(reader.compile, read_with({"policy": policy.params, "critic": critic.params}))
    reading = Reading(reader, read_with, ("parameters", "reference"))
    test = SamplingTest(context, collector, policy, layout)
    steps = PPOSteps(config, collector.prompts, layout, reader, read_with, test)
    models = {"policy": policy, "critic": critic}
    loss = context.registry.get(POLICY_LOSS, config.loss.name, **config.loss.options)
    of_critic = config.replace(learning_rate=config.critic_learning_rate, frozen_parameters=None)
    return Build(
        models,
        RolloutUpdates(context, collector, layout, steps, reading=reading, test=test),
        objective({name: model.definition for name, model in models.items()}, loss, config),
        [] if fixed is None else context.evaluations(lambda _: fixed.evaluate),
        trains={"policy": config, "critic": of_critic},
        held={"reference": reference.copied},
    )


PPO = define_trainer(PPOConfig, {"model": "language_model"}, build)


@hookimpl
def rlhf_register(registry: Registry) -> None:
    registry.add(TRAINER, "ppo", PPO)
