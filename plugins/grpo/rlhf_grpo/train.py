"""The GRPO trainer: model, rollouts and objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from rlhf_core import ADVANTAGE, POLICY_LOSS, PolicyInputs, Rollouts
from rlhf_core.fit import Action, TreeReader
from rlhf_core.objective import Moments, trained_logps, trained_moments
from rlhf_core.packing import Layout, Packed, pack
from rlhf_core.rollouts import (
    FixedPrompts,
    Reading,
    Rollout,
    RolloutCollector,
    RolloutOptions,
    RolloutUpdates,
    SamplingTest,
    choose_rollout_rows,
    open_collector,
    open_rewards,
)
from rlhf_core.training import Build, Context, Reference, define_trainer, python_trainer
from rlhf_grpo.config import GRPOConfig, watch
from rlhf_grpo.config_warnings import grpo_warnings
from rlhf_grpo.objective import Terms, combine, kl_estimate, objective

if TYPE_CHECKING:
    from rlhf_core import Advantage, PolicyLoss, TrainState
    from rlhf_core.models import Model
    from rlhf_core.packing import Tree
    from rlhf_core.rollouts import Reward

SAMPLED = ("sampling_logps",)
"""Per-token values that every micro-batch carries, also when the policies read it."""
PER_SEQUENCE = ("index", "reward")
"""Per-sequence values: a completion's number in its rollout, and its total reward."""


def build(config: GRPOConfig, context: Context) -> Build:
    """Improve `config.model` on the prompts of `config.train_data` by the rewards of its completions."""
    registry, temperature = context.registry, config.sampling.temperature
    advantage = registry.get(ADVANTAGE, config.advantage.name, **config.advantage.options)
    loss = registry.get(POLICY_LOSS, config.loss.name, **config.loss.options)
    _try_loss(config, context, loss)
    policy = context.model("lm")
    rewards = open_rewards(
        config.rewards, context.stage, weights=config.reward_weights, environment=config.environment
    )

    collector = open_collector(context, policy, rewards, _sampled(config))
    assert collector is not None
    held_out = _held_out(config, context, policy, rewards)
    moves, reference = config.sync_ref_model, None
    if config.keeps_reference:
        waits = "reference" in config.offload
        reference = Reference(
            policy.params,
            config.frozen_parameters,
            context.mesh,
            moves=moves,
            offload=waits,
            definition=policy.definition,
        )
    # The model that is trained may compute attention otherwise than samplers, which all take `policy`.
    model, layout = choose_rollout_rows(context, policy, collector)
    logps = partial(trained_logps, model.definition, temperature=temperature, entropy=True)
    moments = partial(trained_moments, model.definition, temperature=temperature)
    test = SamplingTest(context, collector, model, layout)
    reader = partial(TreeReader, layout=layout, mesh=context.mesh, per="token", routes=collector.routes)
    policies = PolicyReader(config, logps, reference, reader, moments)
    context.ahead(policies.compile, model.params)
    updates = RolloutUpdates(
        context,
        collector,
        layout,
        GRPOSteps(config, collector, advantage, policies, layout, test),
        reference=reference,
        reading=policies.reading,
        test=test,
        completions_to_print=config.num_completions_to_print if config.log_completions else 0,
    )
    context.warn(*grpo_warnings(config, loss, updates=updates.total))
    for fixed in held_out.values():
        context.ahead(fixed.warm_up, policy)
    own = FixedPrompts(collector, len(collector.prompts), config.num_preview_samples, policy.as_stored)
    shown = next(iter(held_out.values()), own)
    actions = context.evaluations(lambda field: held_out[field].evaluate) if held_out else []
    actions += test.actions
    if moves and reference:
        actions.append(_reference_sync(config, context, reference))
    if config.limits.kl is not None or config.limits.entropy is not None:
        limits = config.limits
        actions.append(
            Action(lambda at: bool(at.metrics), lambda at: at.stop(watch(limits, at.metrics)), "watch")
        )
    return Build(
        model,
        updates,
        partial(
            objective,
            model.definition,
            loss,
            Terms.of(config),
            temperature=temperature,
            correction=config.correction,
            moments=bool(test.actions),
        ),
        [*actions, shown.previews(end=not held_out)],
        held={} if reference is None else {"reference": reference.copied},
    )


def _sampled(config: GRPOConfig) -> RolloutOptions:
    return config.rollout_options(
        config.num_generations,
        config.prompts_per_rollout,
        updates_per_rollout=config.updates_per_rollout,
        max_rounds=config.dynamic_sampling.max_rounds if config.dynamic_sampling else 1,
        environment=config.environment,
        replay_routes=config.replay_routes,
        test=config.sampling_test,
    )


def _held_out(
    config: GRPOConfig, context: Context, model: Model, rewards: list[Reward]
) -> dict[str, FixedPrompts]:
    """Open the prompts of `eval_data`, or of each of its sets, with samplers of their own: {field: prompts}.

    Completions of the first set alone are written.
    """
    own = config.evaluation
    size = config.eval_batch_size or max(config.total_batch_size // own.num_generations, 1)
    options = replace(
        _sampled(config),
        num_generations=own.num_generations,
        sampling=config.evaluation_sampling,
        prompts_per_rollout=size,
        updates_per_rollout=1,
        max_rounds=1,
        replay_routes=False,
    )
    found: dict[str, FixedPrompts] = {}
    for field in context.eval_fields:
        collector = open_collector(context, model, rewards, options, field)
        if collector is None:
            continue
        count = len(collector.prompts)
        steps = config.max_evaluation_steps
        count = count if steps is None else min(count, size * steps)
        shown, name = (0, field) if found else (config.num_preview_samples, "evaluation")
        stored, threshold = model.as_stored, own.pass_threshold
        found[field] = FixedPrompts(collector, count, shown, stored, threshold, name=name)
    return found


def _reference_sync(config: GRPOConfig, context: Context, reference: Reference) -> Action:
    """Return what moves the reference towards the policy every `ref_model_sync_steps` updates."""
    share = config.ref_model_mixup_alpha
    context.ahead(reference.compile, share)  # now rather than between two updates
    return Action(config.ref_model_sync_steps, lambda at: reference.move(at.state.params, share), "move")


def _try_loss(config: GRPOConfig, context: Context, loss: PolicyLoss) -> None:
    tokens = jax.ShapeDtypeStruct((2, 3), jnp.float32)

    def measure(logps: jax.Array, ref_logps: jax.Array) -> Any:
        inputs = PolicyInputs(
            logps=logps,
            old_logps=logps,
            advantages=logps,
            mask=jnp.ones_like(logps),
            ref_logps=ref_logps if config.keeps_reference else None,
            entropies=logps,
            sequence=jnp.zeros(logps.shape, jnp.int32),
            sequences=4,
            rewards=logps,
        )
        return combine(loss, inputs, Terms.of(config), sequences=4)

    context.try_loss(measure, tokens, tokens)


class GRPOSteps:
    """Gives rollouts group-normalised advantages, and cuts them into minibatches of whole groups."""

    def __init__(
        self,
        config: GRPOConfig,
        collector: RolloutCollector,
        advantage: Advantage,
        policies: PolicyReader,
        layout: Layout,
        test: SamplingTest | None = None,
    ) -> None:
        self.config, self.collector, self.prompts = config, collector, collector.prompts
        self.advantage, self.policies = advantage, policies
        self.layout, self.test = layout, test
        self.keeps_share = config.top_entropy_quantile < 1
        read = [name for name in policies.names if name != "entropies"]
        self.token_names = (*SAMPLED, "advantages", *read, *(("kept",) if self.keeps_share else ()))
        self.sequence_names = PER_SEQUENCE

    def prepare(self, rollout: Rollout, state: TrainState) -> Rollout:
        config = self.config
        in_reward = config.kl.place == "reward" and "ref_logps" in self.policies.names
        trained = self._mask(rollout)
        moments = {}
        mask = trained
        if self.policies.names or self.policies.moments:
            # A completion that is masked in the loss has its reward all the same, and its KL is part of that.
            mask = rollout.samples.mask if in_reward or self.policies.moments else trained
            values = self.policies.read(rollout.trees(self.prompts, mask=mask), state.params)
            moments = {name: values.pop(name) for name in self.policies.moments}
            rollout = rollout.with_token_values(values, mask=mask)
        if self.test is not None and moments:
            self.test.add(mask, moments)
        elif self.test is not None:
            self.test.add(trained)
        if in_reward and not self.policies.at_reference(state.params):
            penalty = sequence_kl(rollout.samples, rollout.token_values["ref_logps"], config.kl.name)
            rollout = replace(rollout, total=rollout.total - config.kl.beta * penalty)
        return rollout.with_advantages(self.advantage, self.collector.rewards, name=config.advantage.name)

    def minibatches(self, rollout: Rollout) -> list[list[Packed]]:
        groups = self.config.total_batch_size // self.config.num_generations
        mask = self._mask(rollout)
        packed = [
            pack(
                rollout.trees(self.prompts, m * groups, (m + 1) * groups, mask=mask),
                self.layout,
                token_names=(*SAMPLED, "advantages", *self.policies.names),
                sequence_names=PER_SEQUENCE,
            )
            for m in range(self.config.steps_per_generation)
        ]
        if self.keeps_share:
            packed = [with_kept(batches, self.config.top_entropy_quantile) for batches in packed]
        return packed

    def _mask(self, rollout: Rollout) -> NDArray[np.bool_]:
        """Mark the tokens that are trained on, bool [N, C]."""
        mask = rollout.samples.mask
        if self.config.mask_truncated_completions:
            mask = mask & rollout.samples.finished[:, None]
        return mask


Logps: TypeAlias = Callable[..., tuple[jax.Array, jax.Array]]
"""(params, batch) → log-probabilities and entropies, nats, float32 [rows, trained]; `replay` as of `trained_logps`."""


def read_values(
    logps: Logps,
    moments: Callable[..., Moments] | None,
    names: Sequence[str],
    params: Mapping[str, Any],
    batch: Packed,
) -> dict[str, jax.Array]:
    """Compute the named values per trained token, {name: float32 [rows, trained]}; params: by policy.

    moments: as `logps`, returns what `trained_moments` does; None where none are among the names.
    """
    replay = {} if batch.routes is None else {"replay": True}
    every: dict[str, jax.Array] = {}
    # What is not returned is not computed: the compiler leaves it out.
    if moments is None:
        old, entropies = logps(params["policy"], batch, **replay)
    else:
        found = moments(params["policy"], batch, **replay)
        old, entropies = found.logps, found.entropies
        every |= found.named()
    every |= {"old_logps": old, "entropies": entropies}
    if "reference" in params:
        every["ref_logps"] = logps(params["reference"], batch)[0]
    return {name: every[name] for name in names}


class PolicyReader:
    """Reads rollouts with the policy of their start and with the reference, as far as the config needs that.

    names: of what `read` returns: `old_logps` where the policy moves during a rollout, `ref_logps`, `entropies`.
    moments: of what it returns besides, those of the sampling test where no update computes them.

    reader: makes the `TreeReader` of a function. logps, moments: (params, batch) → what `trained_logps` and
    `trained_moments` do; None: there is no sampling test.
    """

    def __init__(
        self,
        config: GRPOConfig,
        logps: Logps,
        reference: Reference | None,
        reader: Callable[[Callable[[Any, Packed], Any]], TreeReader],
        moments: Callable[..., Moments] | None = None,
    ) -> None:
        self.reference = reference
        self.names = (
            *(("old_logps",) if config.updates_per_rollout > 1 else ()),
            *(("ref_logps",) if reference is not None else ()),
            *(("entropies",) if config.top_entropy_quantile < 1 else ()),
        )
        reads_moments = moments is not None and config.sampling_test.read_by == "rollout"
        self.moments = Moments.names() if reads_moments else ()
        whole = moments if reads_moments else None
        self._reader = reader(partial(read_values, logps, whole, (*self.names, *self.moments)))

    def compile(self, params: Any) -> None:
        """Start to compile in the background, for a policy that is placed like `params`."""
        if self.names or self.moments:
            self._reader.compile(self._policies(params))

    def read(self, trees: Sequence[Tree], params: Any) -> dict[str, list[NDArray[np.float32]]]:
        """Return {name: a value per trained token of every branch}. params: the policy's, as they are now."""
        values: dict[str, list[NDArray[np.float32]]] = self._reader(self._policies(params), trees)
        return values

    def _policies(self, params: Any) -> dict[str, Any]:
        return {"policy": params, **({} if self.reference is None else {"reference": self.reference.params})}

    @property
    def reading(self) -> Reading | None:
        """What a compiler needs to know of `read`; None where nothing is read."""
        reads_policy = self.moments or {"old_logps", "entropies"} & set(self.names)
        policy = ("parameters", "frozen parameters") if reads_policy else ()
        # A reference shares the frozen parameters.
        reference = ("reference", "frozen parameters") if "ref_logps" in self.names else ()
        held = (*policy, *reference)
        return Reading(self._reader, self._policies, held) if held else None

    def at_reference(self, params: Any) -> bool:
        """Return whether the policy is the reference, so that their KL is 0. params: the policy's, as they are now."""
        return self.reference is not None and self.reference.equals(params)


def with_kept(batches: Sequence[Packed], share: float) -> list[Packed]:
    """Replace `entropies` by `kept`: the share of a minibatch's tokens with the highest entropies (linear quantile)."""
    entropies = [batch.token_values["entropies"] for batch in batches]
    there = [batch.trained >= 0 for batch in batches]
    trained = np.concatenate([e[t] for e, t in zip(entropies, there, strict=True)])
    # All completions may have been truncated, and masked.
    threshold = np.quantile(trained, 1 - share) if len(trained) else np.inf
    marked = []
    for batch, e, t in zip(batches, entropies, there, strict=True):
        values = {name: x for name, x in batch.token_values.items() if name != "entropies"}
        values["kept"] = ((e >= threshold) & t).astype(np.float32)
        marked.append(batch._replace(token_values=values))
    return marked


def sequence_kl(samples: Rollouts, ref_logps: NDArray[np.float32], name: str) -> NDArray[np.float64]:
    """Sum the sampling policy's KL estimate over the tokens that it wrote, float64 [N], nats.

    ref_logps: float32 [N, C], as `samples.logps`.
    """
    there = samples.mask
    logps = np.where(there, samples.logps, 0.0).astype(np.float32)
    kl = np.asarray(kl_estimate(jnp.asarray(logps), jnp.asarray(ref_logps), name), np.float64)
    total: NDArray[np.float64] = np.where(there, kl, 0.0).sum(1)
    return total


trainer = define_trainer(GRPOConfig, {"model": "language_model"}, build)
GRPOTrainer = python_trainer("grpo", GRPOConfig, __name__)
