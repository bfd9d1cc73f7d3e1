import itertools
import json
import math

import jax
import numpy as np
import pytest

from rlhf_core.metrics import (
    Max,
    Mean,
    Min,
    Sum,
    empty_metric,
    fetch_metrics,
    from_json,
    merge,
    to_json,
)

VALUES = np.random.default_rng(0).normal(3.0, 2.0, 24).astype(np.float32)
WEIGHTS = np.random.default_rng(1).integers(0, 3, 24).astype(np.float32)


def everything(x: np.ndarray, w: np.ndarray) -> dict:
    return {
        "sum": Sum.of(x),
        "mean": Mean.of(x, w),
        "max": Max.of(x, w > 0),
        "min": Min.of(x, w > 0),
    }


@pytest.mark.parametrize("on_host", [True, False])
def test_any_split_in_any_order_gives_the_same_numbers(on_host):
    cuts = (0, 1, 2, 9, 24)
    parts = [everything(VALUES[a:b], WEIGHTS[a:b]) for a, b in itertools.pairwise(cuts)]
    if on_host:
        parts = jax.device_get(parts)
    total: dict = {}
    for part in reversed(parts):
        total = merge(total, part)
    x, w = VALUES.astype(np.float64), WEIGHTS.astype(np.float64)
    seen = x[w > 0]
    expected = {
        "sum": x.sum(),
        "mean": (x * w).sum() / w.sum(),
        "max": seen.max(),
        "min": seen.min(),
    }
    assert fetch_metrics(total) == pytest.approx(expected, rel=1e-6)


def test_nothing_counted():
    empty = fetch_metrics(everything(np.ones(3, np.float32), np.zeros(3, np.float32)))
    assert math.isnan(empty["mean"])
    assert empty["max"] == -math.inf
    assert empty["min"] == math.inf


def test_nothing_merged_on_either_side_changes_no_bit():
    some = everything(VALUES, WEIGHTS)
    none = {name: empty_metric(metric) for name, metric in some.items()}
    for whole in (merge(some, none), merge(none, some)):
        assert jax.device_get(whole) == jax.device_get(some)


def test_an_element_that_does_not_count_cannot_poison_the_mean():
    assert (
        fetch_metrics({"m": Mean.of(np.array([1.0, np.nan, np.inf]), np.array([1.0, 0.0, 0.0]))})["m"] == 1.0
    )


def test_a_name_in_one_part_only_is_kept():
    assert fetch_metrics(merge({"a": Sum.of(np.ones(2))}, {"b": Sum.of(np.ones(3))})) == {"a": 2.0, "b": 3.0}


def test_json_gives_back_the_same_bits():
    """A checkpoint stores the metrics of the steps since the last logged one."""
    first, second = (jax.device_get(everything(VALUES[at], WEIGHTS[at])) for at in (slice(7), slice(7, 24)))
    first["none"] = jax.device_get(Max.of(np.zeros(2, np.float32), np.zeros(2, bool)))
    kept = from_json(json.loads(json.dumps(to_json(first))))
    assert kept == first
    assert fetch_metrics(merge(kept, second)) == fetch_metrics(merge(first, second))
