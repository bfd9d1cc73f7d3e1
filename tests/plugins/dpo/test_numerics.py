"""The objective over packed rows: equal to float64 NumPy, and to itself however the pairs are laid out."""

from functools import cache, partial

import jax
import numpy as np
import pytest
from rlhf_dpo import DPO_LOSS
from rlhf_dpo.objective import objective, pair_loss

from rlhf_core import installed_registry
from rlhf_core.mesh import make_mesh, put_rows
from rlhf_core.packing import Layout, Tree, pack, tree
from rlhf_core.step import accumulate
from tests.shared import reference
from tests.shared.decoder_configs import defined
from tests.shared.reference import CONFIG

BETA = 0.2
ONE = Layout((64,), (20,), (16,), (64,))
SHORT = Layout((32, 64), (3, 2), (4, 8), (32, 64))
PADDED = Layout((32,), (4,), (2,), (32,))
MODEL = defined(CONFIG, "lm")


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(lambda x: x * 4.0 if x.ndim > 1 else x, MODEL.init(jax.random.key(7)))


@pytest.fixture(scope="module")
def pairs(params):
    """[(prompt length, [chosen, rejected], their reference log-probabilities)]; some completions begin alike."""
    rng, own, out = np.random.default_rng(1), reference.as_float64(jax.device_get(params)), []
    for i in range(12):
        prompt, alike = rng.integers(1, 48, rng.integers(1, 9)), rng.integers(1, 48, i % 3)
        sides = [
            np.concatenate([prompt, alike, rng.integers(1, 48, rng.integers(1, 8))]).astype(np.int32)
            for _ in "cr"
        ]
        near = [reference.logps(own, CONFIG, ids)[len(prompt) - 1 :].sum() + rng.normal() for ids in sides]
        out.append((len(prompt), sides, np.array(near, np.float32)))
    return out


def trees(pairs, *, shared=True):
    out = []
    for start, sides, near in pairs:
        weights = [(np.arange(len(ids)) >= start).astype(np.float32) for ids in sides]
        counts = np.array([w.sum() for w in weights], np.float32)
        values = {"reference": near, "tokens": counts}
        nothing = np.zeros(0, np.int32)
        out.append(
            tree(sides, weights, sequence_values=values)
            if shared
            else Tree(nothing, tuple(sides), tuple(weights), {}, values)
        )
    return out


def expected(params, pairs, kind):
    values = []
    for start, sides, near in pairs:
        if kind == "orpo":
            logps = [reference.logps(params, CONFIG, ids)[start - 1 :].mean() for ids in sides]
            chosen, rejected = (m - np.log(-np.expm1(m)) for m in logps)
            values.append(-logps[0] + 0.1 * np.logaddexp(0, rejected - chosen))
            continue
        ratios = [
            reference.logps(params, CONFIG, ids)[start - 1 :].sum() - float(ref)
            for ids, ref in zip(sides, near, strict=True)
        ]
        a, b = (
            ratios
            if kind == "sigmoid"
            else [r / (len(ids) - start) for r, ids in zip(ratios, sides, strict=True)]
        )
        values.append(
            np.logaddexp(0, -BETA * (a - b)) if kind == "sigmoid" else (a - b - 1 / (2 * BETA)) ** 2
        )
    return float(np.mean(values))


def gradient(params, laid, layout, kind, *, devices=1):
    """(loss, mean gradient) of one update."""
    sizes = {1: {}, 8: {"data": 2, "fsdp": 2, "tensor": 2}}[devices]
    mesh = make_mesh(**sizes, devices=jax.devices()[:devices])
    params = jax.device_put(params, MODEL.shardings(mesh))
    measure = partial(pair_loss, installed_registry().get(DPO_LOSS, kind), name=kind)
    step = jax.jit(partial(accumulate, partial(objective, MODEL, measure, beta=BETA)))
    done = None
    names = ("tokens",) if kind == "orpo" else ("reference", "tokens")
    for batch in pack(laid, layout, sequence_names=names, group=2):
        done = step(params, put_rows(mesh, batch), done)
    mean = jax.tree.map(lambda g: np.asarray(g) / float(done.loss.count), done.grads)
    return float(done.loss.result()), mean


@pytest.fixture(scope="module")
def packed(params, pairs):
    """Compute a loss and its gradient, of all pairs in one batch."""
    return cache(lambda kind: gradient(params, trees(pairs), ONE, kind))


@pytest.mark.parametrize("kind", [pytest.param("sigmoid", marks=pytest.mark.long), "ipo", "orpo"])
def test_value_and_gradient_equal_float64(params, pairs, packed, kind):
    loss, grads = packed(kind)
    exact = reference.as_float64(jax.device_get(params))
    assert loss == pytest.approx(expected(exact, pairs, kind), rel=2e-5)
    rng = np.random.default_rng(11)
    size = np.sqrt(reference.inner(grads, reference.as_float64(grads)))
    for _ in range(2):
        direction = reference.random_direction(exact, rng)
        up, down = (expected(reference.move(exact, direction, by), pairs, kind) for by in (1e-6, -1e-6))
        assert reference.inner(grads, direction) == pytest.approx((up - down) / 2e-6, abs=2e-4 * size)


@pytest.mark.parametrize(
    ("kind", "layout", "shared", "reverse", "devices"),
    [
        pytest.param(
            "ipo", SHORT, True, True, 1, marks=pytest.mark.long, id="ipo packed otherwise, reversed"
        ),
        pytest.param("orpo", SHORT, True, True, 1, id="orpo packed otherwise, reversed"),
        pytest.param("ipo", PADDED, False, False, 8, id="ipo on 8 devices, padded"),
        pytest.param("orpo", PADDED, False, False, 8, marks=pytest.mark.long, id="orpo on 8 devices, padded"),
    ],
)
def test_the_layout_changes_nothing(params, pairs, packed, kind, layout, shared, reverse, devices):
    loss, grads = packed(kind)
    laid = trees(pairs[::-1] if reverse else pairs, shared=shared)
    other, others = gradient(params, laid, layout, kind, devices=devices)
    assert other == pytest.approx(loss, rel=3e-6)
    size = np.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(grads)))
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6 * size)


def test_a_completion_is_never_shared_even_where_both_begin_alike(pairs):
    for (start, sides, _), laid in zip(pairs, trees(pairs), strict=True):
        assert len(laid.prefix) <= start
        assert sum(len(laid.prefix) + len(own) for own in laid.branches) == sum(map(len, sides))
