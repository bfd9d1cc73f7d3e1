"""Collect metrics between two logged steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from rlhf_core.errors import InputError
from rlhf_core.metrics import Metric, Metrics, fetch_metrics, from_json, merge, to_json

if TYPE_CHECKING:
    from rlhf_core.fit.batches import Update

TIME = "time/"
"""Begins the names of seconds per update; time/update is the part of `step_time` that an Update does not report."""


@dataclass
class MetricWindow:
    """Metrics of the sound updates since the last logged step."""

    device: list[Metrics] = field(default_factory=list)
    host: list[Mapping[str, float]] = field(default_factory=list)
    merged_host: dict[str, Metric] = field(default_factory=dict)
    tokens: int = 0
    slots: int = 0
    updates: int = 0
    before: float = 0.0  # seconds, in the process that was interrupted
    started: float = field(default_factory=time.perf_counter)

    def add(self, update: Update, metrics: Metrics) -> None:
        """Add one update. Raises InputError where it reports a metric of the step or the objective."""
        reported = {**update.metrics, **update.timing}
        if both := sorted(reported.keys() & metrics.keys()):
            raise InputError(
                f"metrics: {', '.join(both)} reported both by the Update and by the objective or the step; "
                "rename the Update's"
            )
        self.device.append(metrics)
        self.host.append({name: value for name, value in reported.items() if not isinstance(value, Metric)})
        self.merged_host = merge(
            self.merged_host, {name: value for name, value in reported.items() if isinstance(value, Metric)}
        )
        self.tokens += update.tokens
        self.slots += sum(batch.rows.tokens.size for batch in update.batches)
        self.updates += 1

    def elapsed(self) -> float:
        return self.before + time.perf_counter() - self.started

    def merged(self) -> dict[str, Metric]:
        total: dict[str, Metric] = {}
        for metrics in jax.device_get(self.device):
            total = merge(total, metrics)
        return total

    def read(self, total_tokens: int) -> dict[str, float]:
        elapsed = self.elapsed()
        names = dict.fromkeys(name for metrics in self.host for name in metrics)
        averages = {}
        for name in names:
            values = [m[name] for m in self.host if name in m and np.isfinite(m[name])]
            averages[name] = float(np.mean(values)) if values else float("nan")
        step_time = elapsed / max(self.updates, 1)
        parts = [value for name, value in averages.items() if name.startswith(TIME)]
        return {
            **fetch_metrics(self.merged()),
            **averages,
            **fetch_metrics(self.merged_host),
            **({f"{TIME}update": max(step_time - sum(parts), 0.0)} if parts else {}),
            "num_tokens": float(total_tokens),
            "tokens_per_second": self.tokens / elapsed,
            "useful_fraction": self.tokens / max(self.slots, 1),
            "step_time": step_time,
        }

    def to_json(self) -> dict[str, Any]:
        """Describe the window for a checkpoint, so that the next logged step is the same as without a stop."""
        return {
            "device": to_json(self.merged()),
            "host": [dict(metrics) for metrics in self.host],
            "merged_host": to_json(self.merged_host),
            "tokens": self.tokens,
            "slots": self.slots,
            "updates": self.updates,
            "elapsed": self.elapsed(),
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> MetricWindow:
        return cls(
            [from_json(saved["device"])],
            saved["host"],
            from_json(saved["merged_host"]),
            saved["tokens"],
            saved["slots"],
            saved["updates"],
            saved["elapsed"],
        )
