"""GRPO's mathematics as plain functions over padded arrays."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rlhf_core import POLICY_LOSS, InputError, PolicyInputs
from rlhf_core.metrics import Mean, Metric
from rlhf_core.models import Model
from rlhf_core.objective import trained_logps
from rlhf_core.training import PaddedObjective, named_loss, padded_rows
from rlhf_grpo.objective import Terms, combine, objective

if TYPE_CHECKING:
    from rlhf_core import PolicyLoss, TrainState
    from rlhf_core.models import Definition
    from rlhf_core.packing import Packed


def policy_loss(
    logps: jax.Array,
    old_logps: jax.Array | None,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    ref_logps: jax.Array | None = None,
    loss_type: str = "dapo",
    beta: float = 0.0,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    importance_sampling_level: str = "token",
    top_entropy_quantile: float = 1.0,
    entropies: jax.Array | None = None,
    max_completion_length: int | None = None,
    num_items: Any = None,
    use_bias_correction_kl: bool = False,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    kl: str = "k3",
    dual_clip: float | None = None,
    entropy_coef: float = 0.0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Compute the policy loss of one update, differentiable in `logps` (and `entropies`).

    logps, old_logps, ref_logps, entropies: float32 [N, T], nats; old_logps None: this policy's own, ratio 1 with its
    gradient. advantages: float32 [N] or [N, T]. mask: [N, T], may have holes. epsilon_high None: epsilon.
    num_items: what a mean over tokens divides by, None: the tokens in the mask; max_completion_length None: T.
    top_entropy_quantile: share of the tokens, by entropy over the mask, that the policy loss keeps (needs `entropies`).
    Options that `loss_type` does not have are ignored, and "token" leaves `gspo` and `gspo_token` their level.
    Returns the loss, float32 [], and metrics, float32 [] each: clip ratios, kl and entropy where they are known.
    """
    component = loss_by_name(
        loss_type,
        epsilon=epsilon,
        epsilon_high=epsilon if epsilon_high is None else epsilon_high,
        delta=delta,
        dual_clip=dual_clip,
        importance_sampling_level=importance_sampling_level,
        temperature_pos=sapo_temperature_pos,
        temperature_neg=sapo_temperature_neg,
    )
    terms = Terms(
        name=loss_type,
        beta=beta,
        kl=kl,
        bias_correction=use_bias_correction_kl,
        entropy_coef=entropy_coef,
        max_completion_length=logps.shape[1] if max_completion_length is None else max_completion_length,
    )
    if beta and ref_logps is None:
        raise ValueError(f"beta={beta} needs ref_logps")
    mask = jnp.asarray(mask, jnp.float32)
    kept = None
    if top_entropy_quantile < 1.0:
        if entropies is None:
            raise ValueError(f"top_entropy_quantile={top_entropy_quantile} needs entropies")
        kept = kept_by_entropy(entropies, mask, top_entropy_quantile)
    inputs = padded_inputs(logps, old_logps, advantages, mask, ref_logps, entropies)
    value, metrics = combine(
        component, inputs, terms, sequences=mask.shape[0], kept=kept, num_items=num_items
    )
    losses = [value] if isinstance(value, Mean) else value.values()
    # Where nothing is in the mask the loss is 0, not 0/0.
    loss = jnp.stack([each.total / jnp.where(each.count > 0, each.count, 1.0) for each in losses]).sum()
    return loss, {k: metric.result() for k, metric in metrics.items()}


def kept_by_entropy(entropies: jax.Array, mask: jax.Array, share: float) -> jax.Array:
    """Mark with 1 the tokens whose entropy reaches the (1 − share) quantile over the mask (linear interpolation).

    entropies: float32 [N, T], nats; mask [N, T] (Wang et al. 2025, "Beyond the 80/20 rule").
    """
    entropies = jax.lax.stop_gradient(entropies)
    threshold = jnp.nanquantile(jnp.where(mask > 0, entropies, jnp.nan), 1.0 - share)
    return ((entropies >= threshold) & (mask > 0)).astype(jnp.float32)


def compute_per_token_logps(logits: jax.Array, input_ids: jax.Array, prompt_length: int) -> jax.Array:
    """Compute log-probabilities of the tokens after the prompt, float32 [B, T − prompt_length], nats.

    input_ids: int [B, T]. logits: [B, T, V], of the whole sequences, [B, T − 1, V] without those of the last token, or
    [B, T − prompt_length, V], only those that predict the tokens after the prompt. Raises InputError for other shapes.
    """
    tokens = jnp.asarray(input_ids, jnp.int32)
    shapes = (
        f"got logits {list(jnp.shape(logits))}, input_ids {list(tokens.shape)}, prompt_length {prompt_length}"
    )
    if tokens.ndim != 2 or jnp.ndim(logits) != 3 or len(tokens) != len(logits):
        raise InputError(f"compute_per_token_logps: logits are [B, T, V] and input_ids [B, T]; {shapes}")
    length = tokens.shape[1]
    if not 0 < prompt_length <= length:
        raise InputError(f"compute_per_token_logps: prompt_length must be from 1 to {length}; {shapes}")
    count = length - prompt_length
    starts = {count: 0, length - 1: prompt_length - 1, length: prompt_length - 1}
    start = starts.get(logits.shape[1])
    if start is None:
        raise InputError(
            f"compute_per_token_logps: give logits of {length} positions, or of the {count} that predict the tokens "
            f"after the prompt; {shapes}"
        )
    logits = logits[:, start : start + count].astype(jnp.float32)
    tokens = tokens[:, prompt_length:]
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def get_per_token_logps(
    model: Model, input_ids: Any, attention_mask: Any, prompt_length: int, temperature: float = 1.0
) -> jax.Array:
    """Compute a model's log-probabilities of the tokens after the prompt, float32 [B, T − prompt_length], nats.

    input_ids, attention_mask: int [B, T]; positions follow the mask. Logits are divided by `temperature`.
    """
    return get_per_token_logps_and_entropies(model, input_ids, attention_mask, prompt_length, temperature)[0]


def get_per_token_logps_and_entropies(
    model: Model, input_ids: Any, attention_mask: Any, prompt_length: int, temperature: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Compute what `get_per_token_logps` does, and the entropies of the model's distributions at these tokens, nats."""
    ids, mask = jnp.asarray(input_ids, jnp.int32), jnp.asarray(attention_mask, jnp.int32)
    return _read(model.definition, model.params, ids, mask, prompt_length, temperature)


@partial(jax.jit, static_argnums=(0, 4, 5))
def _read(
    model: Definition, params: Any, ids: jax.Array, mask: jax.Array, prompt_length: int, temperature: float
) -> tuple[jax.Array, jax.Array]:
    rows = padded_rows((ids, mask, jnp.ones(ids.shape)), start=prompt_length)
    return trained_logps(model, params, rows, temperature=temperature, entropy=True)


def padded_inputs(
    logps: jax.Array,
    old_logps: jax.Array | None,
    advantages: jax.Array,
    mask: jax.Array,
    ref_logps: jax.Array | None,
    entropies: jax.Array | None,
) -> PolicyInputs:
    # What lies outside the mask may be anything, infinities of padding included; it must not reach a gradient.
    def inside(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else jnp.where(mask > 0, x, 0.0)

    logps = jnp.where(mask > 0, logps, 0.0)
    advantages = jnp.asarray(advantages, jnp.float32)
    advantages = advantages[:, None] if advantages.ndim == 1 else advantages
    return PolicyInputs(
        logps=logps,
        old_logps=jax.lax.stop_gradient(logps if old_logps is None else jnp.where(mask > 0, old_logps, 0.0)),
        advantages=jnp.broadcast_to(advantages, mask.shape),
        mask=mask,
        ref_logps=inside(ref_logps),
        entropies=inside(entropies),
    )


def loss_by_name(name: str, **options: Any) -> PolicyLoss:
    """Make the named loss from those of the options that it has.

    Raises InputError for a value that it does not take, and for an importance_sampling_level other than "token" where
    the loss has no such option.
    """
    level = options["importance_sampling_level"]
    if level == "token":
        # The default, which leaves each loss its own.
        del options["importance_sampling_level"]
    _, loss = named_loss(POLICY_LOSS, name, **options)
    own = POLICY_LOSS.attribute(loss, "importance_sampling_level")
    if level not in ("token", own):
        raise InputError(f"importance_sampling_level: '{level}', but policy loss '{name}' has level '{own}'")
    return loss


UNUSED = {
    "loss_config": "the loss is `loss_type`, with the options beside it",
    "learning_rate_fn": "the transformation that the state was created with has the schedule",
    "partition_spec": "a batch is split as its arrays and the state are placed",
}
"""Arguments of EasyDeL's function that have no effect: what takes their place."""


def grpo_step(
    state: TrainState,
    batch: Mapping[str, Any],
    num_generations: int = 4,
    beta: float = 0.04,
    loss_config: Any = None,
    learning_rate_fn: Any = None,
    partition_spec: Any = None,
    gradient_accumulation_steps: int = 1,
    is_training: bool = True,
    loss_type: str = "dapo",
    epsilon: float = 0.2,
    epsilon_high: float | None = 0.2,
    delta: float | None = None,
    importance_sampling_level: str = "token",
    top_entropy_quantile: float = 1.0,
    use_bias_correction_kl: bool = False,
    temperature: float = 1.0,
    max_completion_length: int | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Run one update on a padded batch of completions; nothing is donated.

    batch: prompt_ids, prompt_mask int [N or N / num_generations, P], left-padded; completion_ids, completion_mask int
    [N, C]; advantages float [N]; optionally old_per_token_logps and ref_per_token_logps float [N, C] (nats; the latter
    is needed where beta > 0), and num_items_in_batch, a scalar: the tokens of the whole batch, that means over tokens
    divide by. Normalisers and the entropy quantile are those of the whole batch, whatever
    `gradient_accumulation_steps` splits it into. With is_training=False nothing is updated, and grad_norm is left out.
    Options that `loss_type` does not have are ignored, and "token" leaves `gspo` and `gspo_token` their level.
    loss_config, learning_rate_fn, partition_spec: EasyDeL's; a warning says what takes their place.
    Returns the next state and metrics, by name and as attributes: loss, grad_norm (before the optimizer), clip ratios,
    entropy, kl.
    """
    given = {
        "loss_config": loss_config,
        "learning_rate_fn": learning_rate_fn,
        "partition_spec": partition_spec,
    }
    for name, instead in UNUSED.items():
        if given[name] is not None:
            warnings.warn(f"{name}: has no effect here: {instead}", stacklevel=2)
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
        max_completion_length=max_completion_length or jnp.shape(arrays["completion_ids"])[1],
    )
    padded = _PaddedGRPO(component, terms, temperature)
    if top_entropy_quantile < 1.0:
        # The quantile is over the whole batch, so it is taken before the batch is split.
        arrays["kept"] = _kept(temperature, state, padded.arrays(arrays), top_entropy_quantile)
    if not is_training:
        return state, padded.evaluate(state, arrays)
    if arrays.get("num_items_in_batch") is not None:
        arrays["num_items_in_batch"] = (
            jnp.asarray(arrays["num_items_in_batch"], jnp.float32) / gradient_accumulation_steps
        )
    return padded.update(state, arrays, gradient_accumulation_steps)


def _batch(batch: Mapping[str, Any], num_generations: int, beta: float) -> dict[str, Any]:
    """Repeat prompts that are given once per group. Raises ValueError for missing arrays, and for rows that differ."""
    needed = (*_PaddedGRPO.ids, *_PaddedGRPO.numbers, *(("ref_per_token_logps",) if beta else ()))
    missing = [name for name in needed if batch.get(name) is None]
    if missing:
        raise ValueError(f"batch lacks {', '.join(missing)}; it has {', '.join(sorted(batch))}")
    arrays = dict(batch)
    rows = jnp.shape(arrays["completion_ids"])[0]
    for name in ("prompt_ids", "prompt_mask"):
        array = arrays[name] = jnp.asarray(arrays[name], jnp.int32)
        if array.shape[0] * num_generations == rows:
            array = arrays[name] = jnp.repeat(array, num_generations, axis=0)
        if array.shape[0] != rows:
            raise ValueError(
                f"batch.{name} has {array.shape[0]} rows for {rows} completions and "
                f"num_generations={num_generations}"
            )
    return arrays


@dataclass(frozen=True)
class _PaddedGRPO(PaddedObjective):
    """The trainer's objective of a padded batch."""

    ids = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    numbers = ("advantages",)
    optional = ("old_per_token_logps", "ref_per_token_logps", "num_items_in_batch", "kept")
    component: PolicyLoss
    terms: Terms
    temperature: float

    def compute(
        self, model: Definition, params: Any, batch: Mapping[str, jax.Array]
    ) -> tuple[Mean | Mapping[str, Mean], Mapping[str, Metric]]:
        return objective(
            model,
            self.component,
            self.terms,
            params,
            _rows(batch),
            temperature=self.temperature,
            num_items=batch.get("num_items_in_batch"),
        )


def _rows(batch: Mapping[str, jax.Array]) -> Packed:
    """Lay out prompts with their completions."""
    mask, prompt_mask = batch["completion_mask"], batch["prompt_mask"]
    values = {"advantages": jnp.broadcast_to(batch["advantages"][:, None], mask.shape)}
    names = {"old_logps": "old_per_token_logps", "ref_logps": "ref_per_token_logps", "kept": "kept"}
    values |= {name: batch[given] for name, given in names.items() if given in batch}
    if "ref_logps" in values:  # the objective reads NaN as "this policy is the reference"
        values["ref_logps"] = jnp.nan_to_num(
            values["ref_logps"], nan=jnp.inf, posinf=jnp.inf, neginf=-jnp.inf
        )
    return padded_rows(
        (
            jnp.concatenate([batch["prompt_ids"], batch["completion_ids"]], axis=1),
            jnp.concatenate([prompt_mask, mask], axis=1),
            jnp.concatenate([jnp.zeros_like(prompt_mask), mask], axis=1),
        ),
        start=prompt_mask.shape[1],
        token_values=values,
    )


@partial(jax.jit, static_argnums=(0, 3))
def _kept(temperature: float, state: TrainState, batch: Mapping[str, jax.Array], share: float) -> jax.Array:
    rows: Any = _rows(batch)
    _, entropies = trained_logps(state.model, state.params, rows, temperature=temperature, entropy=True)
    return kept_by_entropy(entropies, rows.trained >= 0, share)
