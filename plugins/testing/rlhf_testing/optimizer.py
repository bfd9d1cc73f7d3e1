"""Check optimizers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_testing.findings import Broken, Findings, require_finite

UPDATES = 200
SHAPES = {
    "embed_tokens": {"embedding": (6, 4)},
    "layers": {"q_proj": {"kernel": (2, 4, 4)}, "norm": {"scale": (2, 4)}},
}
"""Parameters like a model's: an embedding, kernels stacked by layer, norms."""


def check_optimizer(optimizer: Any, **options: Any) -> None:
    """Raise AssertionError that lists every property that `optimizer` breaks.

    optimizer: the registered function (learning_rate, **options) → optax.GradientTransformation.

    component: it returns one for a schedule. jit: it can be traced.
    shapes: updates have the parameters' shapes and dtypes.
    state: it holds arrays only, so that it can be saved and sharded.
    finite: also where all gradients are 0.
    learning rate: at 0 nothing moves. schedule: each update uses its own rate, from update 0.
    downhill: it lowers a quadratic loss.
    """
    findings = Findings("optimizer", optimizer)
    with findings.property("component"):
        tx = optimizer(_rate(0.01), **options)
        if not (hasattr(tx, "init") and hasattr(tx, "update")):
            raise Broken(f"it returned {type(tx).__name__}; return an optax.GradientTransformation")
    findings.stop_if_broken()
    params, slope = _tree(0), _tree(1)
    with findings.property("jit"):
        jax.eval_shape(tx.update, slope, tx.init(params), params)
    compile_ = (lambda f: f) if "jit" in findings.failures else jax.jit
    update = compile_(tx.update)
    with findings.property("shapes"):
        updates, _ = update(slope, tx.init(params), params)
        if _described(updates) != _described(params):
            raise Broken(
                f"updates are {_described(updates)} for parameters {_described(params)}; keep shape and dtype"
            )
    findings.stop_if_broken()
    with findings.property("state"):
        other = [x for x in jax.tree.leaves(tx.init(params)) if not isinstance(x, jax.Array | np.ndarray)]
        if other:
            raise Broken(f"its state has a {type(other[0]).__name__}; jnp.asarray it, or keep it out of init")
    with findings.property("finite"):
        still = jax.tree.map(jnp.zeros_like, slope)
        for what, gradient in (("ordinary gradients", slope), ("gradients of 0", still)):
            _finite(update(gradient, tx.init(params), params)[0], what)
    with findings.property("learning rate"):
        frozen = optimizer(_rate(0.0), **options)
        moved = _largest(compile_(frozen.update)(slope, frozen.init(params), params)[0])
        if moved > 0:
            raise Broken(
                f"at learning rate 0 a parameter moves by {moved:.3g}; scale the whole update by the rate"
            )
    with findings.property("schedule"):
        later = optimizer(lambda count: jnp.where(count < 1, 0.0, 0.01), **options)
        move = compile_(later.update)
        first, state = move(slope, later.init(params), params)
        second, _ = move(slope, state, params)
        if _largest(first) > 0 or _largest(second) == 0:
            raise Broken(
                f"with a rate of 0 at update 0 and 0.01 after, the first two updates are {_largest(first):.3g} and "
                f"{_largest(second):.3g}; call learning_rate(count) with the number of updates done"
            )
    with findings.property("downhill"):
        _downhill(update, tx.init(params), params)
    findings.end()


def _rate(value: float) -> Any:
    return lambda count: jnp.asarray(value, jnp.float32) * jnp.ones_like(count, jnp.float32)


def _tree(seed: int) -> Any:
    draw = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: np.asarray(draw.normal(size=shape), np.float32),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def _described(tree: Any) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): f"{x.dtype}{list(x.shape)}"
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def _largest(tree: Any) -> float:
    return max(float(jnp.abs(x).max()) for x in jax.tree.leaves(tree))


def _finite(tree: Any, what: str) -> None:
    for x in jax.tree.leaves(tree):
        require_finite(x, what)


def _downhill(update: Any, state: Any, params: Any) -> None:
    """Check that `UPDATES` steps lower ½ |parameters|²."""

    def loss(params: Any) -> float:
        return sum(float(0.5 * jnp.square(x).sum()) for x in jax.tree.leaves(params))

    start = loss(params)
    for _ in range(UPDATES):
        steps, state = update(params, state, params)
        params = jax.tree.map(lambda x, step: np.asarray(x + step), params, steps)
    if not loss(params) < 0.9 * start:
        raise Broken(
            f"½ |parameters|² goes from {start:.3g} to {loss(params):.3g} in {UPDATES} updates at a learning rate of "
            "0.01; updates are added to the parameters: they must point downhill"
        )
