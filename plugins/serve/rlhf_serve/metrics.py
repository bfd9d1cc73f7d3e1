"""Counters of a server, for `/metrics`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

if TYPE_CHECKING:
    from rlhf_serve.answers import SampledRequest

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150, 300)


class Metrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        options: Any = {"registry": self.registry, "namespace": "rlhf"}
        self.requests = Counter("requests", "Answered requests.", ["path", "status"], **options)
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of prompts.", ["model"], **options)
        self.generation_tokens = Counter("generation_tokens", "Sampled tokens.", ["model"], **options)
        self.ended = Counter("completions", "Completions by what ended them.", ["model", "reason"], **options)
        self.first_token = Histogram(
            "time_to_first_token_seconds", "From a request to its first token.", buckets=SECONDS, **options
        )
        self.whole = Histogram(
            "request_seconds", "From a request to its last token.", buckets=SECONDS, **options
        )
        self.scored = Counter("scored_rows", "Rows that were scored.", ["model"], **options)
        self.running = Gauge("completions_running", "Completions that have a slot.", **options)
        self.waiting = Gauge("completions_waiting", "Completions that wait for a slot.", **options)

    def count(self, call: SampledRequest, now: float) -> None:
        """Count the completions of a request that is over. now: of `time.monotonic`."""
        name = call.target.name
        self.prompt_tokens.labels(name).inc(sum(map(len, call.prompts)))
        self.whole.observe(now - call.began)
        first = [pending.first_token for pending in call.completions if pending.first_token is not None]
        if first:
            self.first_token.observe(min(first) - call.began)
        for pending in call.completions:
            self.generation_tokens.labels(name).inc(len(pending.tokens))
            self.ended.labels(name, pending.finish_reason or "abort").inc()

    def text(self, running: int, waiting: int) -> bytes:
        """Write everything in Prometheus's format."""
        self.running.set(running)
        self.waiting.set(waiting)
        return generate_latest(self.registry)
