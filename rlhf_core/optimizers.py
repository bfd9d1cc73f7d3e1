"""Optimizers and learning-rate schedules by name, and what every one of them shares: clipping and the decay mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import jax
import jax.numpy as jnp
import optax
from pydantic import Field

from rlhf_core.contracts import OPTIMIZER
from rlhf_core.errors import InputError

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.plugins.registry import Registry

Schedule = Callable[[Any], Any]
NotNegative = Annotated[float, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
"""Of a running average: what is kept of it at an update."""


def decay_mask(params: Any) -> Any:
    """True where weight decay applies: not on norms and biases, told by the last two names of a parameter's path."""

    def one(path: Any, _: Any) -> bool:
        names = [str(getattr(k, "key", k)) for k in path]
        return not any("norm" in name or name == "bias" for name in names[-2:])

    return jax.tree_util.tree_map_with_path(one, params)


def adamw(
    learning_rate: Any,
    *,
    weight_decay: NotNegative = 0.01,
    b1: Decay = 0.9,
    b2: Decay = 0.999,
    eps: NotNegative = 1e-8,
) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019)."""
    return optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decay_mask)


def adafactor(learning_rate: Any, *, weight_decay: NotNegative = 0.0) -> optax.GradientTransformation:
    """Adafactor (Shazeer and Stern 2018), without its own learning-rate scaling, with decoupled weight decay."""
    # With a rate, its decay is per update; here it is per unit of learning rate, as in the others.
    downhill = optax.adafactor(None, multiply_by_parameter_scale=False)
    return _decoupled(optax.chain(downhill, optax.scale(-1.0)), learning_rate, weight_decay)


def lion(
    learning_rate: Any, *, weight_decay: NotNegative = 0.01, b1: Decay = 0.9, b2: Decay = 0.99
) -> optax.GradientTransformation:
    """Lion (Chen et al. 2023)."""
    return optax.lion(learning_rate, b1=b1, b2=b2, weight_decay=weight_decay, mask=decay_mask)


def muon(
    learning_rate: Any, *, weight_decay: NotNegative = 0.01, beta: Decay = 0.95
) -> optax.GradientTransformation:
    """Muon (Jordan 2024) on the layers' matrices, AdamW on embeddings, heads, norms and biases.

    Its updates have a root mean square of about 0.2, as AdamW's (Liu et al. 2025), so that one learning rate and weight
    decay do for both.
    """
    axes = optax.contrib.MuonDimensionNumbers(-2, -1)  # [in, out]: those before them count layers or experts
    orthogonal = optax.contrib.muon(-1.0, beta=beta, consistent_rms=0.2, muon_weight_dimension_numbers=axes)
    direction = optax.partition({"matrix": orthogonal, "other": optax.scale_by_adam()}, _kinds)
    return _decoupled(direction, learning_rate, weight_decay)


def _kinds(params: Any) -> Any:
    """ "matrix" for every kernel within a layer, else "other": a head's kernel is not within one.

    A layer's kernels are below `layers` or stacked by layer, however deep in `params` their model is.
    """

    def one(path: Any, leaf: Any) -> str:
        *above, last = (getattr(key, "key", None) for key in path)
        within = "layers" in above or leaf.ndim > 2
        return "matrix" if last == "kernel" and within else "other"

    return jax.tree_util.tree_map_with_path(one, params)


def sgd(
    learning_rate: Any, *, momentum: Decay = 0.0, weight_decay: NotNegative = 0.0
) -> optax.GradientTransformation:
    """Stochastic gradient descent, with momentum and decoupled weight decay where asked for."""
    direction = optax.trace(momentum) if momentum else optax.identity()
    return _decoupled(direction, learning_rate, weight_decay)


def _decoupled(
    direction: optax.GradientTransformation, learning_rate: Any, weight_decay: float
) -> optax.GradientTransformation:
    """A step of learning_rate × (direction + weight_decay × parameters) downhill (Loshchilov and Hutter 2019)."""
    return optax.chain(
        direction,
        optax.add_decayed_weights(weight_decay, mask=decay_mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def schedule(
    name: str, learning_rate: float, total: int, *, warmup: int = 0, end: float | None = None
) -> Schedule:
    """Learning rate of update `step` (from 0) of `total`: linear warmup, then the named shape.

    constant; linear and cosine fall to `end` (default 0) at `total`; wsd is constant and falls linearly to `end` over
    the last tenth.
    """
    final = 0.0 if end is None else end

    def shape(step: Any) -> Any:
        # The first update already moves: step 0 of a warmup of n has 1/n of the rate.
        rise = jnp.minimum((step + 1.0) / warmup, 1.0) if warmup else 1.0
        length = max(total - warmup, 1)
        at = jnp.clip((step - warmup) / length, 0.0, 1.0)
        if name == "linear":
            level = 1.0 - at
        elif name == "cosine":
            level = 0.5 * (1.0 + jnp.cos(jnp.pi * at))
        elif name == "wsd":
            level = jnp.clip((1.0 - at) / 0.1, 0.0, 1.0)
        elif name == "constant":
            return learning_rate * rise * jnp.ones_like(at)
        else:
            raise InputError(
                f"scheduler: no schedule named '{name}'; constant, linear, cosine and wsd are known"
            )
        return rise * (final + (learning_rate - final) * level)

    return shape


def make_optimizer(
    config: TrainerConfig, registry: Registry, total: int
) -> tuple[optax.GradientTransformation, Schedule]:
    """The optimizer a trainer's config asks for, and its schedule.

    Gradients are clipped to `max_grad_norm` by their global norm first.
    """
    rate = schedule(
        config.scheduler,
        config.learning_rate,
        total,
        warmup=config.warmup_steps,
        end=config.learning_rate_end,
    )
    options = dict(config.optimizer.options)
    if config.optimizer.name in registry.names(OPTIMIZER) and not registry.check(
        OPTIMIZER, config.optimizer.name, {"weight_decay": config.weight_decay}
    ):
        options.setdefault("weight_decay", config.weight_decay)
    tx = registry.get(OPTIMIZER, config.optimizer.name, **options)(rate)
    if config.max_grad_norm is not None:
        tx = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), tx)
    return tx, rate
