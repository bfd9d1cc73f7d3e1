"""One GRPO stage, top to bottom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_core import ADVANTAGE, POLICY_LOSS, artifacts, data, optimizers
from rlhf_core.doors import Result, door_inputs, open_model, open_records, run_alone, tell
from rlhf_core.errors import InputError
from rlhf_core.feeds import MICRO_BATCH_TOKENS
from rlhf_core.fit import fit
from rlhf_core.layout import row_cost
from rlhf_core.mesh import row_multiple
from rlhf_core.rows import Layout, choose_layout
from rlhf_core.sampling import Sampler
from rlhf_core.state import create_state
from rlhf_grpo.config import GRPOConfig
from rlhf_grpo.feed import RolloutFeed
from rlhf_grpo.objective import Terms, objective, reader
from rlhf_grpo.rewards import Reward, check_columns, make_rewards, set_up
from rlhf_grpo.rollout import measure, reward_inputs

if TYPE_CHECKING:
    from rlhf_core import Stage, TrainState
    from rlhf_core.data import Prompts
    from rlhf_core.models import Model


def run(config: GRPOConfig, stage: Stage) -> None:
    """Improve `config.model` on the prompts of `config.train_data` and save the artifact `model`."""
    registry, temperature = stage.registry, config.sampling.temperature
    model = open_model(config, stage, head="lm")
    prompts = _prompts(config, stage, model.tokenizer, "train_data")
    assert prompts is not None
    rewards = make_rewards(
        config.rewards, stage.inputs.get("rewards"), config.reward_weights, registry, f"stage '{stage.name}'"
    )
    set_up(rewards, list(prompts.columns), stage)
    loss = registry.get(POLICY_LOSS, config.loss.name, **config.loss.options)
    aggregation = getattr(loss, "aggregation", "token_mean")
    terms = Terms(
        name=config.loss.name,
        beta=config.kl.beta if config.kl.place == "loss" else 0.0,
        kl=config.kl.name,
        bias_correction=config.use_bias_correction_kl,
        entropy_coef=config.entropy_coef,
        max_completion_length=config.sampling.max_completion_length,
    )
    # The loop donates the policy's buffers: the reference needs its own.
    reference = jax.tree.map(jnp.copy, model.params) if config.kl.beta else None
    feed = RolloutFeed(
        stage,
        config,
        prompts,
        model.tokenizer,
        _sampler(config, stage, model, prompts, config.num_generations, config.prompts_per_rollout),
        rewards,
        registry.get(ADVANTAGE, config.advantage.name, **config.advantage.options),
        reader(model.definition, temperature=temperature),
        _layout(config, stage, model, prompts),
        reference,
        aggregation,
    )
    tx, schedule = optimizers.make(config, registry, feed.total)
    fitted = fit(
        stage,
        config,
        create_state(model, tx, seed=stage.seed),
        objective(model.definition, loss, terms, temperature=temperature),
        feed,
        schedule=schedule,
        evaluate=_evaluation(config, stage, model, rewards),
        after_update=_reference_sync(config, feed) if config.sync_ref_model and config.kl.beta else None,
    )
    artifacts.save_model(stage, "model", "language_model", model.with_params(fitted.state.params))


def plan(config: GRPOConfig, stage: Stage) -> Sequence[str]:
    """What `run` would do, from the data alone."""
    rewards = make_rewards(
        config.rewards,
        stage.inputs.get("rewards"),
        config.reward_weights,
        stage.registry,
        f"stage '{stage.name}'",
    )
    count, said = _count(config, stage, rewards)
    rollouts = data.updates(count, config.prompts_per_rollout, config.num_train_epochs, None)
    total = config.max_training_steps or rollouts * config.updates_per_rollout
    completions = config.prompts_per_rollout * config.num_generations
    drawn = -(-total // config.updates_per_rollout) * completions
    return [
        said,
        f"a rollout is {config.prompts_per_rollout:,} prompts × {config.num_generations} "
        f"completions = {completions:,}",
        f"{total:,} updates of {config.total_batch_size:,} completions; a rollout serves {config.updates_per_rollout}; "
        f"{drawn // config.num_generations / count:.2f} epochs",
        f"{drawn:,} completions, at most {drawn * config.sampling.max_completion_length:,} sampled tokens",
    ]


def _count(config: GRPOConfig, stage: Stage, rewards: Sequence[Reward]) -> tuple[int, str]:
    """(prompts, a line about them): as they will be used where the tokenizer is at hand, else all rows."""
    tokenizer = stage.inputs.get("tokenizer")
    if tokenizer is None:
        records = open_records(config, stage, "train_data")
        assert records is not None
        return len(records), f"{len(records):,} prompts before length limits"
    for field in ("eval_data", "train_data"):
        prompts = _prompts(config, stage, tokenizer, field, needed=field == "train_data")
        if prompts is not None:
            check_columns(rewards, list(prompts.columns), stage)
    assert prompts is not None
    return len(prompts), str(prompts.report)


def _prompts(
    config: GRPOConfig, stage: Stage, tokenizer: Any, field: str, *, needed: bool = True
) -> Prompts | None:
    records = open_records(config, stage, field, needed=needed)
    if records is None:
        return None
    encoded = data.encode_prompts(
        records,
        tokenizer,
        max_prompt_length=config.max_prompt_length,
        overlong=config.overlong,
        truncation_mode=config.truncation_mode,
        chat_template=config.chat_template,
    )
    tell(encoded.report, stage, field)
    return encoded


def _sampler(
    config: GRPOConfig, stage: Stage, model: Model, prompts: Prompts, group: int, at_once: int
) -> Sampler:
    if not model.stop_ids:
        raise InputError(
            f"stage '{stage.name}'.model: neither the tokenizer nor generation_config.json names an end-of-sequence "
            "token, so no completion could ever stop; set eos_token in tokenizer_config.json"
        )
    return Sampler(
        model.definition,
        config.sampling,
        mesh=stage.devices(),
        stop_ids=model.stop_ids,
        num_generations=group,
        prompts_per_call=at_once,
        max_prompt_length=max(len(ids) for ids in prompts.ids),
    )


def _layout(config: GRPOConfig, stage: Stage, model: Model, prompts: Prompts) -> Layout:
    """Rows for groups whose completions are not known yet: sized for completions of the full length."""
    group, length = config.num_generations, config.sampling.max_completion_length
    width, together = model.definition.hidden_size, group
    prompt_sizes = np.array([len(ids) for ids in prompts.ids])
    cost = _group_cost(float(prompt_sizes.mean()), length, group, group, 6 * width)
    for part in (g for g in range(1, group) if group % g == 0):
        # Sharing the prompt does not pay where attention over the whole group costs more than repeating it.
        if (split := _group_cost(float(prompt_sizes.mean()), length, group, part, 6 * width)) < 0.9 * cost:
            together, cost = part, split
    sizes = prompt_sizes + together * length
    per_update = config.total_batch_size // together
    wanted = int(np.ceil(sizes.mean() * per_update)) // config.gradient_accumulation_steps
    return choose_layout(
        sizes,
        together,
        hidden_size=width,
        max_tokens=min(MICRO_BATCH_TOKENS, max(wanted, 1)),
        trees_per_update=per_update,
        trained_counts=np.full(len(sizes), together * length),
        row_multiple=row_multiple(stage.devices()),
        longest=int(sizes.max()),
    )


def _group_cost(prompt: float, length: int, group: int, together: int, crossover: int) -> float:
    """Relative cost of a group in rows that hold the prompt and `together` of its completions."""
    return group // together * row_cost(int(prompt + together * length), crossover)


def _evaluation(config: GRPOConfig, stage: Stage, model: Model, rewards: Sequence[Reward]) -> Any:
    """Mean reward of one completion a held-out prompt, sampled as in training; None without `eval_data`."""
    prompts = _prompts(config, stage, model.tokenizer, "eval_data", needed=False)
    if prompts is None:
        return None
    check_columns(rewards, list(prompts.columns), stage)
    at_once = min(len(prompts), config.eval_batch_size or config.total_batch_size)
    sampler = _sampler(config, stage, model, prompts, 1, at_once)
    count = len(prompts) if config.max_evaluation_steps is None else at_once * config.max_evaluation_steps
    chosen = list(range(min(count, len(prompts))))

    def evaluate(state: TrainState) -> dict[str, float]:
        # The same keys every time: a difference between two evaluations is the policy's.
        samples = sampler(
            state.params, [prompts.ids[i] for i in chosen], jax.random.fold_in(state.key, 2**31 - 1)
        )
        each, total = measure(rewards, reward_inputs(prompts, chosen, samples, model.tokenizer))
        by_label = {f"rewards/{r.label}/mean": float(np.nanmean(each[:, f])) for f, r in enumerate(rewards)}
        return {
            "reward": float(np.nanmean(total)),
            "reward_std": float(np.nanstd(total, ddof=1)) if len(total) > 1 else 0.0,
            "completions/mean_length": float(np.mean(samples.lengths)),
            "completions/clipped_ratio": float(np.mean(~samples.finished)),
            **by_label,
        }

    return evaluate


def _reference_sync(config: GRPOConfig, feed: RolloutFeed) -> Any:
    """reference ← α · policy + (1 − α) · reference, every `ref_model_sync_steps` updates
    (TR-DPO, Gorbatovski et al. 2024).
    """
    alpha = config.ref_model_mixup_alpha

    @jax.jit
    def mix(policy: Any, reference: Any) -> Any:
        return jax.tree.map(lambda p, r: alpha * p + (1 - alpha) * r, policy, reference)

    mix(feed.reference, feed.reference)  # compiled now rather than between two updates

    def after_update(count: int, state: TrainState) -> None:
        if count % config.ref_model_sync_steps == 0:
            feed.reference = mix(state.params, feed.reference)

    return after_update


class GRPOTrainer:
    """The Python door: `GRPOTrainer(config, model=…, rewards=[…], train_dataset=rows).train()`."""

    def __init__(self, config: GRPOConfig | None = None, **inputs: Any) -> None:
        """inputs: `model`, `rewards` (callables, registered names, reward model directories), `train_dataset`,
        `eval_dataset`, `tokenizer`; `args`, `arguments` and `processing_class` too.
        """
        self.config, self.inputs = door_inputs(GRPOConfig, config, inputs)

    def train(self) -> Result:
        """Train; returns the artifact and the last metrics."""
        return run_alone("grpo", self.config, **self.inputs)
