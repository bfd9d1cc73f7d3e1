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


class Uneven(NamedTuple):
    """The largest of several totals over their mean, in the group where it is largest; NaN when nothing was counted."""

    totals: Any
    """float32 [groups, n]."""

    def merge(self, other: Uneven) -> Uneven:
        return Uneven(self.totals + other.totals)

    def result(self) -> Any:
        xp = _library(self.totals)
        mean = self.totals.mean(-1)
        return xp.max(xp.where(mean > 0, self.totals.max(-1) / xp.where(mean > 0, mean, 1.0), math.nan))


class Unused(NamedTuple):
    """The share of several totals that are 0; NaN when nothing was counted."""

    totals: Any
    """float32 [groups, n]."""

    def merge(self, other: Unused) -> Unused:
        return Unused(self.totals + other.totals)

    def result(self) -> Any:
        xp = _library(self.totals)
        return xp.where(self.totals.sum() > 0, (self.totals == 0).mean(dtype=np.float32), math.nan)


class Balance(NamedTuple):
    """The load-balancing loss of mixtures of experts (Fedus et al. 2022), from sums over tokens and layers:
    Σ probability · pairs / tokens², with the gradient of the probabilities alone.

    The pairs are sums over the whole update, so that the loss does not depend on how it is split.
    """

    probability: Any
    """float32 [experts]: of the router, times the loss's weight and the number of experts."""
    pairs: Any
    """float32 [experts]: tokens that were sent to each expert."""
    tokens: Any
    """float32 []."""

    def merge(self, other: Balance) -> Balance:
        return Balance(*(a + b for a, b in zip(self, other, strict=True)))

    def mean(self, count: tuple[Any, Any]) -> Any:
        """Compute these probabilities' part of an update's loss; 0 without tokens. count: its pairs and tokens."""
        pairs, tokens = count
        xp = _library(tokens)
        return (self.probability * pairs).sum() / xp.square(xp.maximum(tokens, 1.0))

    def result(self) -> Any:
        return self.mean((self.pairs, self.tokens))


def _library(x: Any) -> Any:
    """Choose jax for metrics on the device and numpy for fetched ones, which merge without waking the device."""
    return jnp if isinstance(x, jax.Array) else np


Metric: TypeAlias = Sum | Mean | Max | Min | Uneven | Unused | Balance
"""A metric that merges over micro-batches."""
Metrics: TypeAlias = Mapping[str, Metric]


def merge(a: Metrics, b: Metrics) -> dict[str, Metric]:
    """Merge the metrics of two disjoint sets of elements; a name that only one has is kept."""
    both = {k: a[k].merge(b[k]) for k in a if k in b}  # type: ignore[arg-type]  # metrics of one name are of one kind
    return {**a, **b, **both}


def empty_metric(like: Metric) -> Metric:
    """Make a metric over no elements, of the same kind as `like`; merging it changes nothing."""
    if isinstance(like, Sum | Mean | Max | Min):
        return type(like).of(jnp.zeros(0))
    return type(like)(*(jnp.zeros(x.shape) for x in like))


def fetch_metrics(metrics: Metrics) -> dict[str, float]:
    """Compute every metric as a Python float, after one transfer from the device."""
    host = jax.device_get(dict(metrics))
    return {name: float(metric.result()) for name, metric in host.items()}


def results(metrics: Metrics) -> dict[str, Any]:
    """Compute every metric as a float32 [] array, for use inside jit."""
    return {name: metric.result() for name, metric in metrics.items()}


def to_json(metrics: Metrics) -> dict[str, list[Any]]:
    """Write fetched metrics as {name: [kind, number or list, ...]}; `from_json` restores the same bits."""
    return {
        name: [type(metric).__name__, *(np.asarray(x).tolist() for x in metric)]
        for name, metric in metrics.items()
    }


def from_json(stored: Mapping[str, list[Any]]) -> dict[str, Metric]:
    """Restore metrics from what `to_json` returned."""
    kinds: dict[str, type[Metric]] = {
        kind.__name__: kind for kind in (Sum, Mean, Max, Min, Uneven, Unused, Balance)
    }
    return {name: kinds[kind](*map(np.float32, numbers)) for name, (kind, *numbers) in stored.items()}
