"""Built-in optimizers and learning-rate schedules, with the gradient clipping and decay mask that they share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from pydantic import Field

from rlhf_core.config.trainer import SCHEDULES
from rlhf_core.contracts import OPTIMIZER
from rlhf_core.contracts.trainers import WSD_DECAY
from rlhf_core.errors import InputError, RunError, Stopped, error_line
from rlhf_core.plugins.component import load_function

if TYPE_CHECKING:
    from rlhf_core.config import TrainerConfig
    from rlhf_core.plugins.registry import Registry

__all__ = ["make_optimizer"]


Schedule = Callable[[Any], Any]
NotNegative = Annotated[float, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
"""The decay of a running average: the share of it that an update keeps."""
MomentDtype = Literal["float32", "bfloat16"]
"""The dtype in which an optimizer keeps its first moment; it computes in float32."""


def decay_mask(params: Any) -> Any:
    """Mark the parameters that weight decay applies to: all but norms, biases and what has no gradient, by the last
    two names of a path.
    """

    def is_decayed(path: Any, _: Any) -> bool:
        names = [str(getattr(k, "key", k)) for k in path]
        fixed = names[-1].endswith("bias") or names[-1] == "layer_scalar"
        return not (fixed or any("norm" in name for name in names[-2:]))

    return jax.tree_util.tree_map_with_path(is_decayed, params)


def adamw(
    learning_rate: Any,
    *,
    weight_decay: NotNegative = 0.01,
    b1: Decay = 0.9,
    b2: Decay = 0.999,
    eps: NotNegative = 1e-8,
    mu_dtype: MomentDtype = "float32",
) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019)."""
    return optax.adamw(
        learning_rate,
        b1=b1,
        b2=b2,
        eps=eps,
        weight_decay=weight_decay,
        mask=decay_mask,
        mu_dtype=jnp.dtype(mu_dtype),
    )


def adafactor(learning_rate: Any, *, weight_decay: NotNegative = 0.0) -> optax.GradientTransformation:
    """Adafactor (Shazeer and Stern 2018), without its own learning-rate scaling, with decoupled weight decay."""
    # Given a rate, optax decays per update; here it is per unit of learning rate, as in the other optimizers.
    direction = optax.adafactor(None, multiply_by_parameter_scale=False)
    return _decoupled(optax.chain(direction, optax.scale(-1.0)), learning_rate, weight_decay)


def lion(
    learning_rate: Any,
    *,
    weight_decay: NotNegative = 0.01,
    b1: Decay = 0.9,
    b2: Decay = 0.99,
    mu_dtype: MomentDtype = "float32",
) -> optax.GradientTransformation:
    """Lion (Chen et al. 2023)."""
    dtype = jnp.dtype(mu_dtype)
    return optax.lion(learning_rate, b1=b1, b2=b2, weight_decay=weight_decay, mask=decay_mask, mu_dtype=dtype)


def muon(
    learning_rate: Any,
    *,
    weight_decay: NotNegative = 0.01,
    beta: Decay = 0.95,
    mu_dtype: MomentDtype = "float32",
) -> optax.GradientTransformation:
    """Muon (Jordan 2024) on the layers' matrices, AdamW on embeddings, heads, norms and biases.

    Its updates have a root mean square of about 0.2, like AdamW's (Liu et al. 2025), so both parts can share one
    learning rate and weight decay.
    """
    axes = optax.contrib.MuonDimensionNumbers(-2, -1)  # [in, out]; earlier axes are layers or experts
    dtype = jnp.dtype(mu_dtype)
    orthogonal = optax.contrib.muon(
        -1.0, beta=beta, consistent_rms=0.2, muon_weight_dimension_numbers=axes, mu_dtype=dtype
    )
    adam = optax.scale_by_adam(mu_dtype=dtype)
    direction = optax.partition({"matrix": orthogonal, "other": adam}, _label_matrices)
    return _decoupled(direction, learning_rate, weight_decay)


def _label_matrices(params: Any) -> Any:
    """Label every kernel within a layer "matrix", and all else "other", a head's kernel included.

    A layer's kernels are below `layers` or stacked by layer, at any depth of `params`.
    """

    def label(path: Any, leaf: Any) -> str:
        *above, last = (getattr(key, "key", None) for key in path)
        within = "layers" in above or leaf.ndim > 2
        return "matrix" if last == "kernel" and within else "other"

    return jax.tree_util.tree_map_with_path(label, params)


def sgd(
    learning_rate: Any,
    *,
    momentum: Decay = 0.0,
    weight_decay: NotNegative = 0.0,
    mu_dtype: MomentDtype = "float32",
) -> optax.GradientTransformation:
    """Stochastic gradient descent, with optional momentum and decoupled weight decay."""
    dtype = jnp.dtype(mu_dtype)
    direction = optax.trace(momentum, accumulator_dtype=dtype) if momentum else optax.identity()
    return _decoupled(direction, learning_rate, weight_decay)


def _decoupled(
    direction: optax.GradientTransformation, learning_rate: Any, weight_decay: float
) -> optax.GradientTransformation:
    """Subtract learning_rate × (direction + weight_decay × parameters) (Loshchilov and Hutter 2019)."""
    return optax.chain(
        direction,
        optax.add_decayed_weights(weight_decay, mask=decay_mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def schedule(
    name: str, learning_rate: float, total: int, *, warmup: int = 0, end: float | None = None
) -> Schedule:
    """Make the learning rate a function of the update `step`, from 0 to `total`: linear warmup, then the named shape.

    constant; linear and cosine, which fall to `end` (default 0) at `total`; wsd, which is constant and falls linearly
    to `end` over the last tenth.
    """
    begins, ends = float(warmup), float(total)  # an integer may be more than the int32 of a step
    if name == "constant":
        return partial(_constant_rate, learning_rate, begins)
    return partial(_falling_rate, name, learning_rate, 0.0 if end is None else end, begins, ends)


def _constant_rate(learning_rate: float, warmup: float, step: Any) -> Any:
    return learning_rate * _rise(warmup, step) * jnp.ones(jnp.shape(step))


def _falling_rate(name: str, learning_rate: float, end: float, warmup: float, total: float, step: Any) -> Any:
    at = jnp.clip((step - warmup) / max(total - warmup, 1.0), 0.0, 1.0)
    return _rise(warmup, step) * (end + (learning_rate - end) * _SHAPES[name](at))


def _rise(warmup: float, step: Any) -> Any:
    # Update 0 must already train: in a warmup of n updates it has 1/n of the rate.
    return jnp.minimum((step + 1.0) / warmup, 1.0) if warmup else 1.0


_SHAPES: dict[str, Callable[[Any], Any]] = {
    "linear": lambda at: 1.0 - at,
    "cosine": lambda at: 0.5 * (1.0 + jnp.cos(jnp.pi * at)),
    "wsd": lambda at: jnp.clip((1.0 - at) / WSD_DECAY, 0.0, 1.0),
}
"""The level that a rate falls to, from 1 to 0, at a share of the updates after the warmup."""


MOST_TRIED = 10_000
"""Updates whose rate by a function is looked at before the first."""


def _custom_schedule(named: str | Callable[..., Any], total: int) -> Schedule:
    """Make the schedule of a function from the number of updates to an optax schedule, and try it."""
    try:
        function = load_function(named) if isinstance(named, str) else named
    except InputError as error:
        raise InputError(*(f"scheduler: {problem}" for problem in error.problems)) from error
    return _tried(lambda: function(total), total, "scheduler: its function", "return a schedule, a function")


def _tried(make: Callable[[], Schedule], total: int, what: str, must: str) -> Schedule:
    """Make a schedule and try it. Raises InputError where it fails, or returns no rates. what, must: for messages."""
    try:
        made = make()
        rate = jax.eval_shape(made, jax.ShapeDtypeStruct((), jnp.int32))
    except (InputError, RunError, Stopped):
        raise
    except Exception as error:
        raise InputError(f"{what} {error_line(error)}") from error
    if getattr(rate, "shape", None) != ():
        raise InputError(f"{what} must {must} from the update's number to one number")
    _require_rates(made, total, what)
    return made


def _require_rates(made: Schedule, total: int, what: str) -> None:
    """Raise InputError for a rate that is not finite or negative, of all updates, or of many evenly spaced ones."""
    if not total:
        return
    steps = np.unique(np.linspace(0, total - 1, min(total, MOST_TRIED)).astype(np.int32))
    with jax.ensure_compile_time_eval():
        rates = np.asarray(jax.lax.map(made, jnp.asarray(steps)), np.float64)
    rounding = 1e-6 * np.nanmax(np.abs(rates), initial=0)
    wrong = np.flatnonzero(~(np.isfinite(rates) & (rates >= -rounding)))
    if wrong.size:
        raise InputError(
            f"{what.partition(':')[0]}: the learning rate of update {steps[wrong[0]] + 1:,} of {total:,} is "
            f"{rates[wrong[0]]:g}: its function must give finite rates of at least 0"
        )


def make_optimizer(
    config: TrainerConfig,
    registry: Registry,
    total: int,
    given: tuple[optax.GradientTransformation | None, Schedule | None] = (None, None),
) -> tuple[optax.GradientTransformation, Schedule]:
    """Make the optimizer and the schedule that a trainer's config asks for.

    The optimizer first clips gradients to a global norm of `max_grad_norm`. given: an optimizer and a schedule that go
    before the config's. An optimizer that is given alone has its own rate, which is logged as NaN.
    """
    named, peak, end = config.scheduler, config.learning_rate, config.learning_rate_end
    tx, own_rate = given
    if own_rate is not None:
        rate = _tried(lambda: own_rate, total, "optimizers: its schedule", "be a function")
    elif tx is not None:
        rate = optax.constant_schedule(float("nan"))
    elif isinstance(named, str) and named in SCHEDULES:
        rate = schedule(named, peak, total, warmup=config.warmup_steps, end=end)
    else:
        rate = _custom_schedule(named, total)
    if tx is not None:
        return _clipped(lambda _: tx, rate, config.max_grad_norm), rate
    options = dict(config.optimizer.options)
    if config.optimizer.name in registry.names(OPTIMIZER) and not registry.check(
        OPTIMIZER, config.optimizer.name, {"weight_decay": config.weight_decay}
    ):
        options.setdefault("weight_decay", config.weight_decay)
    make = registry.get(OPTIMIZER, config.optimizer.name, **options)
    return _clipped(make, rate, config.max_grad_norm), rate


def _clipped(
    make: Callable[[Schedule], optax.GradientTransformation], rate: Schedule, max_norm: float | None
) -> optax.GradientTransformation:
    tx = make(rate)
    return tx if max_norm is None else optax.chain(optax.clip_by_global_norm(max_norm), tx)
