"""Mergeable metrics: sums, counts and extremes, turned into floats only when they are fetched.

Merging is associative and commutative, so any order of micro-batches, devices and steps gives the same number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["Max", "Mean", "Metric", "Min", "Sum", "fetch_metrics"]


class Sum(NamedTuple):
    """A total."""

    total: Any

    @classmethod
    def of(cls, x: Any) -> Sum:
        return cls(jnp.sum(x, dtype=jnp.float32))

    def merge(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)

    def result(self) -> Any:
        return self.total


class Mean(NamedTuple):
    """A weighted average; NaN when nothing was counted."""

    total: Any
    count: Any

    @classmethod
    def of(cls, x: Any, weight: Any = None) -> Mean:
        """Average `x`, counting each element `weight` times (default 1)."""
        x = jnp.asarray(x, jnp.float32)
        weight = jnp.ones_like(x) if weight is None else jnp.broadcast_to(weight, x.shape).astype(jnp.float32)
        # An element of weight 0 must not poison the sum, whatever it holds.
        return cls(jnp.sum(jnp.where(weight != 0, x * weight, 0.0)), jnp.sum(weight))

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def result(self) -> Any:
        xp = _library(self.total)
        return xp.where(self.count != 0, self.total / xp.where(self.count != 0, self.count, 1.0), math.nan)


class Max(NamedTuple):
    """The largest element; -inf when nothing was counted."""

    maximum: Any

    @classmethod
    def of(cls, x: Any, where: Any = None) -> Max:
        x = jnp.asarray(x, jnp.float32)
        return cls(jnp.max(x if where is None else jnp.where(where, x, -jnp.inf), initial=-jnp.inf))

    def merge(self, other: Max) -> Max:
        return Max(_library(self.maximum).maximum(self.maximum, other.maximum))

    def result(self) -> Any:
        return self.maximum


class Min(NamedTuple):
    """The smallest element; inf when nothing was counted."""

    minimum: Any

    @classmethod
    def of(cls, x: Any, where: Any = None) -> Min:
        x = jnp.asarray(x, jnp.float32)
        return cls(jnp.min(x if where is None else jnp.where(where, x, jnp.inf), initial=jnp.inf))

    def merge(self, other: Min) -> Min:
        return Min(_library(self.minimum).minimum(self.minimum, other.minimum))

    def result(self) -> Any:
        return self.minimum


def _library(x: Any) -> Any:
    """Choose jax for metrics on the device and numpy for fetched ones, which merge without waking the device."""
    return jnp if isinstance(x, jax.Array) else np


Metric: TypeAlias = Sum | Mean | Max | Min
"""A metric that merges over micro-batches."""
Metrics: TypeAlias = Mapping[str, Metric]


def merge(a: Metrics, b: Metrics) -> dict[str, Metric]:
    """Merge the metrics of two disjoint sets of elements; a name that only one has is kept."""
    return {k: a[k].merge(b[k]) if k in a and k in b else (a[k] if k in a else b[k]) for k in {**a, **b}}  # type: ignore[arg-type]


def empty_metric(like: Metric) -> Metric:
    """Make a metric over no elements, of the same kind as `like`; merging it changes nothing."""
    return type(like).of(jnp.zeros(0))


def fetch_metrics(metrics: Metrics) -> dict[str, float]:
    """Compute every metric as a Python float, after one transfer from the device."""
    host = jax.device_get(dict(metrics))
    return {name: float(metric.result()) for name, metric in host.items()}


def results(metrics: Metrics) -> dict[str, Any]:
    """Compute every metric as a float32 [] array, for use inside jit."""
    return {name: metric.result() for name, metric in metrics.items()}


def to_json(metrics: Metrics) -> dict[str, list[Any]]:
    """Write fetched metrics as {name: [kind, number, ...]}; `from_json` restores the same bits."""
    return {name: [type(metric).__name__, *map(float, metric)] for name, metric in metrics.items()}


def from_json(stored: Mapping[str, list[Any]]) -> dict[str, Metric]:
    """Restore metrics from what `to_json` returned."""
    kinds: dict[str, type[Metric]] = {kind.__name__: kind for kind in (Sum, Mean, Max, Min)}
    return {name: kinds[kind](*map(np.float32, numbers)) for name, (kind, *numbers) in stored.items()}
