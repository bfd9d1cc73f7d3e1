"""A model's readings of packed rows, for objectives: log-probabilities and scores of tokens and of sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_core.contracts import LossOutput
from rlhf_core.errors import InputError, RunError, code_location, error_line
from rlhf_core.logprobs import token_logps, token_moments
from rlhf_core.mesh import take_tokens
from rlhf_core.metrics import Balance, Mean, Uneven, Unused
from rlhf_core.models.experts import Load, recording
from rlhf_core.packing.rows import REPEATED
from rlhf_core.surprisal import Moments

if TYPE_CHECKING:
    from rlhf_core.models import Definition
    from rlhf_core.packing.rows import Packed

__all__ = [
    "Moments",
    "loss_output",
    "sequence_scores",
    "sequence_sums",
    "trained_logps",
    "trained_moments",
    "trained_scores",
    "trained_sequence",
    "trained_weight",
]


def trained_logps(
    model: Definition,
    params: Any,
    batch: Packed,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    replay: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Compute log-probability and entropy of every trained token, float32 [rows, trained], nats; 0 where unused.

    Hidden states are compacted before the head, so that neither the head nor a loss sees a token that is not trained.
    With entropy=False the second array is zeros. replay: send tokens to the experts of `batch.routes`, as an objective
    does for the models that it trains.
    """
    states, kernel, targets, options = _head(model, params, batch, temperature, replay=replay)
    return token_logps(states, kernel, targets, entropy=entropy, **options)


def trained_moments(
    model: Definition,
    params: Any,
    batch: Packed,
    *,
    temperature: float = 1.0,
    replay: bool = False,
    keep: Callable[[jax.Array], jax.Array] | None = None,
) -> Moments:
    """Compute what `trained_logps` does with entropies, and the moments that the sampling test needs, in one pass.

    Gradients come through log-probabilities and entropies alone. `Moments.named` returns all as values of an objective.
    keep: leaves of masses what filters of sampling do, for moments of that distribution, without a gradient.
    """
    states, kernel, targets, options = _head(model, params, batch, temperature, replay=replay)
    return token_moments(states, kernel, targets, keep=keep, **options)


def _head(
    model: Definition, params: Any, batch: Packed, temperature: float, *, replay: bool
) -> tuple[jax.Array, jax.Array | None, jax.Array, dict[str, Any]]:
    """Return what the head reads at every trained token: hidden states, the unembedding, targets and options."""
    rows = batch.rows
    with recording([model], routes=batch.routes) if replay else nullcontext():
        hidden = model.hidden(params, rows.tokens, rows.positions, rows.visible_until)
    states = take_tokens(hidden, _parents(batch))
    tokens = jnp.take_along_axis(rows.tokens, jnp.maximum(batch.trained, 0), axis=1)
    targets = jnp.where(batch.trained >= 0, tokens, -1)
    kernel, softcap = model.unembedding(params)
    return states, kernel, targets, {"temperature": temperature, "softcap": softcap, "absent": model.absent}


def trained_weight(batch: Packed) -> jax.Array:
    """Look up the weight of every trained token, float32 [rows, trained]; 0 where unused."""
    weight = jnp.take_along_axis(batch.rows.weight, jnp.maximum(batch.trained, 0), axis=1)
    return jnp.where(batch.trained >= 0, weight, 0.0)


def trained_sequence(batch: Packed) -> jax.Array:
    """Look up the sequence of every trained token in its row, int32 [rows, trained]; 0 where unused."""
    return jnp.maximum(jnp.take_along_axis(batch.rows.sequence, jnp.maximum(batch.trained, 0), axis=1), 0)


def sequence_sums(values: Any, batch: Packed) -> jax.Array:
    """Sum the values of every sequence's trained tokens, [rows, trained] → [rows, sequences]; 0 without any.

    Of log-probabilities that is the log-probability of a completion, nats; of ones, its number of tokens.
    """
    sequences = jnp.arange(batch.last.shape[1])
    member = (trained_sequence(batch)[:, :, None] == sequences) & (batch.trained >= 0)[:, :, None]
    # A sum, not a product with `member`: accelerators round the factors of products.
    return jnp.sum(jnp.where(member, jnp.asarray(values)[:, :, None], 0.0), axis=1)


def trained_scores(model: Definition, params: Any, batch: Packed) -> jax.Array:
    """Apply the score head at the parent of every trained token, float32 [rows, trained]; 0 where unused.

    This is a value function's estimate before each token is written.
    """
    rows = batch.rows
    parents = _parents(batch)
    hidden = model.hidden_at(params, rows.tokens, rows.positions, rows.visible_until, parents)
    return jnp.where(batch.trained >= 0, model.score(params, hidden), 0.0)


def _parents(batch: Packed) -> jax.Array:
    """Index the token that predicts each trained token, int32 [rows, trained]; 0 where unused."""
    at = jnp.maximum(batch.trained, 0)
    return jnp.maximum(jnp.take_along_axis(batch.rows.parent, at, axis=1), 0)


def sequence_scores(model: Definition, params: Any, batch: Packed) -> jax.Array:
    """Apply the score head at every sequence's last token, float32 [rows, sequences]; arbitrary where `last` is -1."""
    rows = batch.rows
    ends = jnp.maximum(batch.last, 0)
    return model.score(params, model.hidden_at(params, rows.tokens, rows.positions, rows.visible_until, ends))


def with_experts(
    objective: Callable[[Any, Any], Any], definitions: Mapping[str, Definition], weights: Mapping[str, float]
) -> Callable[[Any, Any], Any]:
    """Add the load of experts to an objective's metrics, and a loss of its balance (Fedus et al. 2022, section 2.2).

    A model's balance is weight · experts · Σ_e f_e · p_e: over all counted tokens of the update and all layers with
    experts, f_e is the number of tokens that expert e gets per token, and p_e the mean probability of the router.
    Padding does not count, and a shared prompt counts once.

    definitions: the trained models with experts, by name. weights: of their balance, unitless; 0: metrics alone.
    """
    return partial(_with_experts, objective, definitions, weights)


def _with_experts(
    objective: Callable[[Any, Any], Any],
    definitions: Mapping[str, Definition],
    weights: Mapping[str, float],
    params: Any,
    batch: Packed,
) -> tuple[Any, ...]:
    counted = (batch.rows.visible_until > 0) & (batch.rows.sequence != REPEATED)
    with recording(definitions.values(), jnp.asarray(counted), batch.routes) as recorder:
        loss, metrics, *values = objective(params, batch)
    losses = dict(loss) if isinstance(loss, Mapping) else {"objective": loss}
    metrics = dict(metrics)
    for name, definition in definitions.items():
        loads = [load for of, load in recorder.found if of == definition]
        if not loads:  # the objective does not read it
            continue
        load: Load = jax.lax.stop_gradient(reduce(lambda a, b: jax.tree.map(jnp.add, a, b), loads))
        suffix = f"/{name}" if len(definitions) > 1 else ""
        metrics[f"experts/load_max{suffix}"] = Uneven(load.pairs)
        metrics[f"experts/unused{suffix}"] = Unused(load.pairs)
        if batch.routes is not None:
            given, apart = load.replayed.sum(0)
            metrics[f"experts/routed_apart{suffix}"] = Mean(apart, given)
        if weights[name]:
            layers, experts = load.pairs.shape
            probability = sum(each.probability.sum(0) for each in loads)
            tokens = jnp.float32(layers * len(loads)) * counted.sum()
            factor = weights[name] * experts
            losses[f"router{suffix}"] = Balance(factor * probability, load.pairs.sum(0), tokens)
    return (losses if len(losses) > 1 else loss), metrics, *values


def loss_output(
    loss: Callable[[Any], LossOutput],
    inputs: Any,
    shape: Sequence[int],
    *,
    what: str,
    element: str,
    caller: str,
) -> LossOutput:
    """Call a loss and check its output. Raises InputError where it raises, or does not return a value per element.

    shape: of the inputs. what: the loss, such as "policy loss 'dapo'". element: such as "token". caller: the calling
    file, which error messages leave out.
    """
    try:
        out = loss(inputs)
    except (InputError, RunError):
        raise
    except Exception as error:
        here = (str(Path(__file__).parent), str(Path(caller).parent))
        if isinstance(error, jax.errors.JAXTypeError):
            raise InputError(
                f"{what} uses a traced value as a Python number ({type(error).__name__}): use jnp instead of "
                f"np, jnp.where instead of if, and no float(){code_location(error, *here)}"
            ) from error
        raise InputError(f"{what} {error_line(error, *here)}") from error
    if not isinstance(out, LossOutput):
        got = "an array" if isinstance(out, jax.Array) else type(out).__name__
        raise InputError(f"{what} returned {got}; expected LossOutput(loss, metrics)")
    wanted = f"expected one number per {element}, {list(shape)} like its inputs; the trainer takes the mean"
    if jnp.shape(out.loss) != tuple(shape):
        raise InputError(f"{what} returned an array of shape {list(jnp.shape(out.loss))}; {wanted}")
    if not isinstance(out.metrics, Mapping):
        got = type(out.metrics).__name__
        raise InputError(f"{what} returned metrics of type {got}; expected a dict of names and arrays")
    for name, value in out.metrics.items():
        if not isinstance(value, jax.Array | np.ndarray):
            raise InputError(f"{what} returned {type(value).__name__} as metric {name!r}; {wanted}")
        if value.shape != tuple(shape):
            raise InputError(f"{what} returned metric {name!r} of shape {list(value.shape)}; {wanted}")
    return out
