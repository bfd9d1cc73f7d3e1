"""Simulate an engine and a trainer with rollouts ahead: how long is each idle, where some completions are very long?

    python benchmarks/ahead/simulate.py

Prints a table. An engine decodes SLOTS completions at a time, a token per step each; lengths are lognormal. A rollout
has COMPLETIONS of them, and is asked for when the policy exists that it is meant for: rollout r by the one after the
updates of rollout r - k - 1. A free slot takes the next completion of the oldest rollout. The trainer waits for all of
rollout r, then trains for `ratio` times as long as a rollout takes while all slots are busy.
"""

from __future__ import annotations

import heapq

import numpy as np

SLOTS, COMPLETIONS, ROLLOUTS = 64, 256, 400
MEDIAN = 400.0
"""Of the lengths, tokens."""
SIGMAS = (0.5, 1.0, 1.5)
"""Of their logarithms."""
AHEAD = (0, 1, 2, 4)


def simulate(ahead: int, sigma: float, ratio: float, *, seed: int = 0) -> tuple[float, float]:
    """Return the shares of time that the engine's slots and the trainer are idle."""
    draw = np.random.default_rng(seed)
    lengths = MEDIAN * np.exp(sigma * draw.standard_normal((ROLLOUTS, COMPLETIONS)))
    training = ratio * COMPLETIONS * MEDIAN * np.exp(sigma**2 / 2) / SLOTS
    free = [0.0] * SLOTS
    trained: list[float] = []
    for rollout in range(ROLLOUTS):
        asked = 0.0 if rollout <= ahead else trained[rollout - ahead - 1]
        ends = []
        for length in lengths[rollout]:
            end = max(heapq.heappop(free), asked) + length
            heapq.heappush(free, end)
            ends.append(end)
        trained.append(max(max(ends), trained[-1] if trained else 0.0) + training)
    whole = trained[-1]
    return 1 - lengths.sum() / (SLOTS * whole), 1 - ROLLOUTS * training / whole


def table() -> str:
    """Make the table, idle shares in percent."""
    head = ["σ of the log lengths", "engine's time / trainer's", *(f"k = {k}" for k in AHEAD)]
    lines = [head, ["---:"] * len(head)]
    for sigma in SIGMAS:
        for ratio, named in ((2.0, "1 / 2"), (1.0, "1"), (0.5, "2")):
            found = [simulate(k, sigma, ratio) for k in AHEAD]
            cells = [f"{100 * engine:.0f} / {100 * trainer:.0f}" for engine, trainer in found]
            lines.append([f"{sigma:g}", named, *cells])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


if __name__ == "__main__":
    print(table())
