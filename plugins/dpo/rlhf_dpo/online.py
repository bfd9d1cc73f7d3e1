"""The online DPO trainer: completions of the policy, pairs of them by their rewards, and the DPO objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from numpy.typing import NDArray

from rlhf_core import AdvantageInputs
from rlhf_core.fit import TreeReader, empty_batches
from rlhf_core.objective import trained_logps
from rlhf_core.packing import Layout, Packed, Tree, pack
from rlhf_core.rollouts import (
    FixedPrompts,
    Reading,
    Rollout,
    RolloutOptions,
    RolloutUpdates,
    SamplingTest,
    choose_rollout_rows,
    open_collector,
    open_rewards,
)
from rlhf_core.training import Build, Context, Reference, define_trainer, python_trainer
from rlhf_dpo.objective import objective
from rlhf_dpo.online_config import OnlineDPOConfig
from rlhf_dpo.train import open_loss

if TYPE_CHECKING:
    from rlhf_core import TrainState
    from rlhf_core.models import Definition, Model
    from rlhf_core.rollouts import Reward, RolloutCollector

REFERENCE = "ref_logps"
"""The token value of a rollout that has the log-probabilities under the reference."""


def build(config: OnlineDPOConfig, context: Context) -> Build:
    """Improve `config.model` on the prompts of `config.train_data` by pairs of its own completions."""
    measure, reads_reference = open_loss(config, context)
    policy = context.model("lm")
    rewards = open_rewards(config.rewards, context.stage, weights=config.reward_weights)
    options = config.rollout_options(
        config.num_generations,
        config.prompts_per_rollout,
        updates_per_rollout=config.updates_per_rollout,
        test=config.sampling_test,
    )
    collector = open_collector(context, policy, rewards, options)
    assert collector is not None
    held_out = _held_out(config, context, policy, rewards, options)
    model, layout = choose_pair_rows(config, context, policy, collector)
    reference = reading = None
    if reads_reference:
        reference, reading = _open_reference(config, context, policy, model, layout)
    steps = OnlineDPOSteps(collector.prompts, layout, config.steps_per_generation, reading)
    test = SamplingTest(context, collector, model, layout)
    updates = RolloutUpdates(context, collector, layout, steps, reading=reading, test=test)
    for fixed in held_out.values():
        context.ahead(fixed.warm_up, policy)
    own = FixedPrompts(collector, len(collector.prompts), config.num_preview_samples, policy.as_stored)
    shown = next(iter(held_out.values()), own)
    actions = context.evaluations(lambda field: held_out[field].evaluate) if held_out else []
    return Build(
        model,
        updates,
        partial(objective, model.definition, measure, beta=config.beta),
        [*actions, shown.previews(end=not held_out)],
        held={} if reference is None else {"reference": reference.copied},
    )


def _held_out(
    config: OnlineDPOConfig, context: Context, model: Model, rewards: list[Reward], options: RolloutOptions
) -> dict[str, FixedPrompts]:
    """Open the prompts of `eval_data`, or of each of its sets, for one completion each: {field: prompts}.

    Completions of the first set alone are written.
    """
    size = config.eval_batch_size or config.total_batch_size
    options = replace(options, num_generations=1, prompts_per_rollout=size, updates_per_rollout=1)
    found: dict[str, FixedPrompts] = {}
    for field in context.eval_fields:
        collector = open_collector(context, model, rewards, options, field)
        if collector is None:
            continue
        count = len(collector.prompts)
        steps = config.max_evaluation_steps
        count = count if steps is None else min(count, size * steps)
        shown, name = (0, field) if found else (config.num_preview_samples, "evaluation")
        found[field] = FixedPrompts(collector, count, shown, model.as_stored, name=name)
    return found


def choose_pair_rows(
    config: OnlineDPOConfig, context: Context, model: Model, collector: RolloutCollector
) -> tuple[Model, Layout]:
    """Choose rows with room for pairs of the full length, each in one row; return the model, its attention chosen for
    them, too. Without devices the layout is None.
    """
    # To a row, a pair is one completion of twice the length that is two sequences.
    sampling = config.sampling.replace(max_completion_length=2 * config.sampling.max_completion_length)
    pairs = replace(collector, options=replace(collector.options, num_generations=1, sampling=sampling))
    per_update = config.replace(total_batch_size=config.total_batch_size // config.num_generations)
    model, layout = choose_rollout_rows(context.by(per_update), model, pairs)
    if layout is not None:
        layout = layout._replace(sequences=tuple(2 * count for count in layout.sequences))
    return model, layout


def _open_reference(
    config: OnlineDPOConfig, context: Context, policy: Model, model: Model, layout: Layout
) -> tuple[Reference, Reading]:
    """Keep the model that training starts from; return it, and what reads pairs with it.

    model: the policy with the attention that suits the rows of `layout`.
    """
    offload = "reference" in config.offload
    reference = Reference(
        policy.params, config.frozen_parameters, context.mesh, offload=offload, definition=policy.definition
    )
    reader = TreeReader(partial(_token_logps, model.definition), layout, context.mesh, per="token")
    context.ahead(reader.compile, reference.params)
    # A reference shares the frozen parameters.
    return reference, Reading(reader, lambda params: reference.params, ("reference", "frozen parameters"))


def _token_logps(model: Definition, params: Any, batch: Packed) -> jax.Array:
    return trained_logps(model, params, batch)[0]


@dataclass(frozen=True)
class OnlineDPOSteps:
    """Makes pairs of a rollout's completions, and cuts them into minibatches.

    reading: of the log-probabilities under the reference; None: the loss reads none, and they are 0.
    """

    prompts: Any
    layout: Layout
    count: int
    """Of minibatches."""
    reading: Reading | None
    token_names = ()
    sequence_names = ("index", "reference", "tokens")

    def prepare(self, rollout: Rollout, state: TrainState) -> Rollout:
        """Give chosen completions the advantage 1 and rejected ones −1, and read both with the reference."""
        total = rollout.total.reshape(-1, rollout.group)
        marks = choose_pairs(total)
        compared = (~np.isnan(total)).sum(1) > 1
        shares = {"frac_tied": compared & ~marks.any(1), "frac_unscored": ~compared}
        metrics = {**rollout.metrics, **{name: float(share.mean()) for name, share in shares.items()}}
        rollout = replace(rollout, advantages=marks.reshape(-1), metrics=metrics)
        if self.reading is None:
            return rollout
        trees = [tree for _, tree in pair_trees(rollout, self.prompts)]
        read = self.reading.reader(self.reading.params(state.params), trees)
        numbers = [int(i) for tree in trees for i in tree.sequence_values["index"]]
        logps = np.zeros(rollout.samples.tokens.shape, np.float32)
        for i, values in zip(numbers, read, strict=True):
            logps[i, : len(values)] = values
        return replace(rollout, token_values={REFERENCE: logps})

    def minibatches(self, rollout: Rollout) -> list[list[Packed]]:
        size = len(rollout.prompts) // self.count
        return [
            self._pack(pair_trees(rollout, self.prompts, at, at + size))
            for at in range(0, len(rollout.prompts), size)
        ]

    def _pack(self, pairs: Sequence[tuple[int, Tree]]) -> list[Packed]:
        if not pairs:
            return empty_batches(self.layout, sequence_names=self.sequence_names)
        # Batches number the trees that they are made of, and a group without a pair has none.
        groups = np.array([group for group, _ in pairs], np.int32)
        packed = pack([tree for _, tree in pairs], self.layout, sequence_names=self.sequence_names, group=2)
        return [
            batch._replace(example=np.where(batch.example < 0, -1, groups[batch.example])) for batch in packed
        ]


def choose_pairs(total: NDArray[np.float64]) -> NDArray[np.float32]:
    """Mark the best completion of each prompt with 1 and the worst with −1, the others with 0, float32 [P, n].

    total: rewards, float64 [P, n], NaN where no function applies. Of several that are best, or worst, the first counts.
    Where all rewards are equal up to rounding, or fewer than two are known, none is marked.
    """
    scored = ~np.isnan(total)
    best = np.where(scored, total, -np.inf).argmax(1)
    worst = np.where(scored, total, np.inf).argmin(1)
    differ = np.flatnonzero(~AdvantageInputs.all_equal(total))
    marks = np.zeros(total.shape, np.float32)
    marks[differ, best[differ]] = 1.0
    marks[differ, worst[differ]] = -1.0
    return marks


def pair_trees(
    rollout: Rollout, prompts: Any, start: int = 0, stop: int | None = None
) -> list[tuple[int, Tree]]:
    """Return (number of the group from `start` on, its pair, chosen first) for the groups from `start` to `stop` that
    have one. prompts: as for `Rollout.trees`.
    """
    marks = rollout.advantages.reshape(-1, rollout.group)[start:stop]
    groups = zip(rollout.trees(prompts, start, stop), marks, strict=True)
    return [
        (i, _pair(tree, [own.argmax(), own.argmin()])) for i, (tree, own) in enumerate(groups) if own.any()
    ]


def _pair(group: Tree, places: Sequence[int]) -> Tree:
    """Take two branches of a group, with what the objective reads of each: `reference`, nats, and `tokens`."""
    assert group.weights is not None
    branches = tuple(group.branches[i] for i in places)
    weights = tuple(group.weights[i] for i in places)
    values = {name: tuple(each[i] for i in places) for name, each in group.token_values.items()}
    reference = values.get(REFERENCE, (np.zeros(1), np.zeros(1)))
    sums = {
        "index": group.sequence_values["index"][places],
        "reference": np.array([logps.sum(dtype=np.float64) for logps in reference], np.float32),
        "tokens": np.array([np.count_nonzero(weight) for weight in weights], np.float32),
    }
    return Tree(group.prefix, branches, weights, values, sums)


trainer = define_trainer(OnlineDPOConfig, {"model": "language_model"}, build)
OnlineDPOTrainer = python_trainer("online_dpo", OnlineDPOConfig, __name__)
