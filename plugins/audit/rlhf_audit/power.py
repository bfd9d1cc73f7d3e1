"""How many tokens the sampling test needs to find a sampler that lies, as a table."""

from __future__ import annotations

import math

from rlhf_audit.sampling import LAMBDAS, LIMIT

TOLERANCE = 0.02
"""Nats per token, `limits.surprisal_gap`."""
GAPS = (0.05, 0.1, 0.2)
VARIANCES = (0.1, 1.0, 3.0)


def tokens_needed(gap: float, variance: float, *, tolerance: float = TOLERANCE) -> int | None:
    """Return after how many tokens the evidence is expected to reach 10⁹; None: never.

    gap: of mean surprisal and entropy, nats per token. variance: of log p(x) under p, nats². A bet with exponent λ
    gains |λ| (gap − tolerance) − λ² variance / 2 per token, to second order in λ. The evidence is the mean over the
    exponents, and begins at the first rollout with 1/2: both are to be won back.
    """
    cost = math.log(len(LAMBDAS)) + math.log(2)
    gains = [abs(each) * (gap - tolerance) - each**2 * variance / 2 for each in LAMBDAS]
    best = max(gains)
    return math.ceil((LIMIT + cost) / best) if best > 0 else None


def power_table() -> str:
    """Return the tokens needed as lines of Markdown."""
    heads = ["gap, nats per token", *(f"V = {variance:g}" for variance in VARIANCES)]
    rows = [heads, ["---"] * len(heads)]
    for gap in GAPS:
        found = [tokens_needed(gap, variance) for variance in VARIANCES]
        rows.append([f"{gap:g}", *("never" if each is None else f"{each:,}" for each in found)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    print(power_table(), end="")
