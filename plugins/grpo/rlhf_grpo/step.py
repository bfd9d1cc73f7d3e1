"""GRPO's update as one function over a padded batch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rlhf_core.metrics import Mean, Metric, results
from rlhf_core.step import split_step
from rlhf_grpo.functional import completion_logps, kept_by_entropy, loss_by_name, padded_inputs
from rlhf_grpo.objective import Terms, combine

if TYPE_CHECKING:
    from rlhf_core import TrainState
    from rlhf_core.contracts import PolicyLoss


def grpo_step(
    state: TrainState,
    batch: Mapping[str, Any],
    num_generations: int = 4,
    beta: float = 0.04,
    loss_type: str = "dapo",
    epsilon: float = 0.2,
    epsilon_high: float | None = 0.2,
    delta: float | None = None,
    importance_sampling_level: str = "token",
    top_entropy_quantile: float = 1.0,
    use_bias_correction_kl: bool = False,
    temperature: float = 1.0,
    max_completion_length: int | None = None,
    gradient_accumulation_steps: int = 1,
    is_training: bool = True,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update on a padded batch of completions; nothing is donated.

    batch: prompt_ids, prompt_mask int [N or N / num_generations, P], left-padded; completion_ids, completion_mask int
    [N, C]; advantages float [N]; optionally old_per_token_logps and ref_per_token_logps float [N, C] (nats; the latter
    is needed where beta > 0), and num_items_in_batch, a scalar: the tokens of the whole batch, that means over tokens
    divide by. Normalisers and the entropy quantile are those of the whole batch, whatever
    `gradient_accumulation_steps` splits it into. is_training=False computes the same without an update.
    Returns the next state and metrics: loss, grad_norm (before the optimizer), clip ratios, entropy, kl.
    """
    arrays = _batch(batch, num_generations, beta)
    component = loss_by_name(
        loss_type,
        epsilon=epsilon,
        epsilon_high=epsilon if epsilon_high is None else epsilon_high,
        delta=delta,
        importance_sampling_level=importance_sampling_level,
    )
    terms = Terms(
        name=loss_type,
        beta=beta,
        bias_correction=use_bias_correction_kl,
        max_completion_length=max_completion_length or arrays["completion_ids"].shape[1],
    )
    return _grpo_step(
        state,
        arrays,
        component=component,
        terms=terms,
        share=top_entropy_quantile,
        temperature=temperature,
        splits=gradient_accumulation_steps,
        is_training=is_training,
    )


def _batch(batch: Mapping[str, Any], num_generations: int, beta: float) -> dict[str, jax.Array]:
    needed = ["prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"]
    needed += ["ref_per_token_logps"] if beta else []
    if missing := [name for name in needed if name not in batch]:
        raise ValueError(f"batch lacks {', '.join(missing)}; it has {', '.join(sorted(batch))}")
    arrays = {}
    for name in needed:
        kind = jnp.int32 if name.endswith(("_ids", "_mask")) else jnp.float32
        arrays[name] = jnp.asarray(batch[name], kind)
    for name in ("old_per_token_logps", "ref_per_token_logps", "num_items_in_batch"):
        if batch.get(name) is not None:
            arrays[name] = jnp.asarray(batch[name], jnp.float32)
    rows = arrays["completion_ids"].shape[0]
    for name in ("prompt_ids", "prompt_mask"):
        if arrays[name].shape[0] * num_generations == rows:
            arrays[name] = jnp.repeat(arrays[name], num_generations, axis=0)
        if arrays[name].shape[0] != rows:
            raise ValueError(
                f"batch.{name} has {arrays[name].shape[0]} rows for {rows} completions and "
                f"num_generations={num_generations}"
            )
    return arrays


@partial(jax.jit, static_argnames=("component", "terms", "share", "temperature", "splits", "is_training"))
def _grpo_step(
    state: TrainState,
    batch: dict[str, jax.Array],
    *,
    component: PolicyLoss,
    terms: Terms,
    share: float,
    temperature: float,
    splits: int,
    is_training: bool,
) -> tuple[TrainState, dict[str, jax.Array]]:
    def read(params: Any, part: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        ids = jnp.concatenate([part["prompt_ids"], part["completion_ids"]], axis=1)
        mask = jnp.concatenate([part["prompt_mask"], part["completion_mask"]], axis=1)
        return completion_logps(state.model, params, ids, mask, part["prompt_ids"].shape[1], temperature)

    def compute(params: Any, part: Mapping[str, jax.Array]) -> tuple[Mean, Mapping[str, Metric]]:
        logps, entropies = read(params, part)
        mask = part["completion_mask"].astype(jnp.float32)
        items = part["num_items_in_batch"] / splits if "num_items_in_batch" in part else None
        inputs = padded_inputs(
            logps,
            part.get("old_per_token_logps"),
            part["advantages"],
            mask,
            part.get("ref_per_token_logps"),
            entropies,
        )
        return combine(
            component, inputs, terms, sequences=mask.shape[0], kept=part.get("kept"), num_items=items
        )

    if share < 1.0:
        # The quantile is over the whole batch, so it is taken before the batch is split.
        mask = batch["completion_mask"].astype(jnp.float32)
        batch = {**batch, "kept": kept_by_entropy(read(state.params, batch)[1], mask, share)}
    if not is_training:
        value, metrics = compute(state.params, {**batch, **_whole(batch, splits)})
        return state, {**results(metrics), "loss": value.result()}
    state, stepped = split_step(compute, state, batch, splits)
    return state, results(stepped)


def _whole(batch: Mapping[str, jax.Array], splits: int) -> dict[str, jax.Array]:
    """Undo the share of the items that each split takes, for a batch computed in one piece."""
    return {k: batch[k] * splits for k in ("num_items_in_batch",) if k in batch}
