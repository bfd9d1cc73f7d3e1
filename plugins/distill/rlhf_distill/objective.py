"""The loss of an update: the divergence between teacher and student, averaged over trained tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp

from rlhf_core import InputError, RunError
from rlhf_core.metrics import Mean, Metric
from rlhf_core.objective import trained_weight
from rlhf_distill.contract import DIVERGENCE, Divergence
from rlhf_distill.vocabulary import Head, token_divergences

if TYPE_CHECKING:
    from rlhf_core import Stage
    from rlhf_core.models import Definition
    from rlhf_core.packing import Packed
    from rlhf_core.step import Objective
    from rlhf_distill.config import DistillConfig

STUDENT, TEACHER = "policy", "teacher"
"""Names of the models in a state."""
Models: TypeAlias = "Mapping[str, Definition]"
WANTED = "expected one term per id, in the shape of the two arrays; the trainer sums them"


def read_divergences(
    models: Models, divergence: Divergence, config: DistillConfig
) -> Callable[[Any, Packed], jax.Array]:
    """Make the function (parameters by name, batch) → divergence at every trained token, float32 [rows, trained], nats.

    A token's distributions are those of the state that predicts it. The hidden states of both models are compacted to
    trained tokens before the heads; those of the teacher get no gradient.
    """
    return partial(_read, models[STUDENT], models[TEACHER], divergence, config.temperature, config.top_k)


def objective(models: Models, divergence: Divergence, config: DistillConfig) -> Objective:
    """Make the objective: the mean over trained tokens of the divergence.

    There is no gradient through the sampling of completions (Agarwal et al. 2024).
    """
    return partial(_objective, read_divergences(models, divergence, config))


def _read(
    student: Definition,
    teacher: Definition,
    divergence: Divergence,
    temperature: float,
    top_k: int | None,
    params: Any,
    batch: Packed,
) -> jax.Array:
    heads = (_head(model, params[name], batch) for name, model in ((STUDENT, student), (TEACHER, teacher)))
    values = token_divergences(divergence, *heads, temperature=temperature, top_k=top_k)
    return jnp.where(batch.trained >= 0, values, 0.0)


def _objective(
    read: Callable[[Any, Packed], jax.Array], params: Any, batch: Packed
) -> tuple[Mean, Mapping[str, Metric], Mapping[str, jax.Array]]:
    values = read(params, batch)
    return Mean.of(values, trained_weight(batch)), {}, {"loss": values}


def _head(model: Definition, params: Any, batch: Packed) -> Head:
    rows = batch.rows
    at = jnp.take_along_axis(rows.parent, jnp.maximum(batch.trained, 0), axis=1)
    hidden = model.hidden_at(params, rows.tokens, rows.positions, rows.visible_until, jnp.maximum(at, 0))
    kernel, cap = model.unembedding(params)
    return Head(hidden, jnp.eye(model.vocab_size) if kernel is None else kernel, cap)


def open_divergence(config: DistillConfig, stage: Stage) -> Divergence:
    """Make the config's divergence. Raises InputError where it does not return a term for each id."""
    name, options = config.divergence.name, config.divergence.options
    divergence: Divergence = stage.registry.get(DIVERGENCE, name, **options)
    where = f"stage '{stage.name}'.divergence: '{name}'"
    logps = jax.ShapeDtypeStruct((3, 4), jnp.float32)
    try:
        terms = jax.eval_shape(divergence, logps, logps)
    except (InputError, RunError):
        raise
    except Exception as error:
        raise InputError(f"{where} raised {type(error).__name__}: {error}; {WANTED}") from error
    shape = getattr(terms, "shape", None)
    if shape != logps.shape:
        got = type(terms).__name__ if shape is None else f"shape {list(shape)}"
        raise InputError(f"{where} returned {got} for {list(logps.shape)}; {WANTED}")
    return divergence
