"""Draw docs/reference/losses/policy.svg: each policy loss and its gradient against the importance ratio, for A = ±1.

    python benchmarks/losses/plot.py

It needs matplotlib, the dependency group `docs`; the same versions write the same bytes. The values are those of
`rlhf_grpo.losses`, the gradients `jax.grad`'s of them, at the options that the page recommends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from rlhf_grpo.losses import CISPO, DAPO, GRPO, GSPO, SAPO

from rlhf_core import LossOutput, PolicyInputs

matplotlib.use("svg")
from matplotlib import pyplot

FILE = Path(__file__).resolve().parents[2] / "docs/reference/losses/policy.svg"
VALUE, GRADIENT, BESIDE, BOUND = "#0b5394", "#cc4125", "#e69f00", "#777777"
POINTS = 150
"""No bound of a picture is a point: there `min` and `clip` tie, and `jax.grad` splits the tie."""
Loss = Callable[[PolicyInputs], LossOutput]


@dataclass(frozen=True)
class Picture:
    """bounds: where the loss changes its rule, {label: ratio}, for A = +1 and A = −1; beside: another gradient."""

    loss: Loss
    title: str
    bounds: tuple[dict[str, float], dict[str, float]] = field(default_factory=lambda: ({}, {}))
    ratios: tuple[float, float] = (0.0, 3.0)
    beside: tuple[str, Loss] | None = None


def clipped(low: float, high: float) -> tuple[dict[str, float], dict[str, float]]:
    return {"1 + ε_high": 1 + high}, {"1 − ε": 1 - low}


PICTURES = (
    Picture(GRPO(), "grpo, dr_grpo: ε = ε_high = 0.2", clipped(0.2, 0.2)),
    Picture(DAPO(epsilon_high=0.28), "dapo, bnpo: ε_high = 0.28", clipped(0.2, 0.28)),
    Picture(
        DAPO(epsilon_high=0.28, delta=2.0),
        "dapo: ε_high = 0.28, delta = 2",
        ({"1 + ε_high": 1.28}, {"1 − ε": 0.8, "delta": 2.0}),
        beside=("without delta", DAPO(epsilon_high=0.28)),
    ),
    Picture(
        CISPO(epsilon_high=5.0),
        "cispo: ε_high = 5",
        ({"ε_high": 5.0}, {"ε_high": 5.0}),
        ratios=(0.0, 7.0),
        beside=("ε_high = 0.2", CISPO()),
    ),
    Picture(
        GSPO(epsilon=3e-4, epsilon_high=4e-4),
        "gspo, gspo_token: ε = 3e-4, ε_high = 4e-4",
        clipped(3e-4, 4e-4),
        ratios=(0.999, 1.001),
    ),
    Picture(SAPO(), "sapo: τ_pos = 1, τ_neg = 1.05", beside=("grpo", GRPO())),
)


def curves(loss: Loss, ratios: np.ndarray, advantage: float) -> tuple[np.ndarray, np.ndarray]:
    """Loss and d loss / d logp at each ratio: sequences of one token, whose probability at the largest ratio is 1."""
    old = jnp.full((len(ratios), 1), -np.log(ratios.max()), jnp.float32)
    mask = jnp.ones_like(old)

    def values(logps: jax.Array) -> jax.Array:
        return loss(PolicyInputs(logps=logps, old_logps=old, advantages=advantage * mask, mask=mask)).loss

    logps = old + jnp.log(jnp.asarray(ratios, jnp.float32))[:, None]
    gradient = jax.grad(lambda x: values(x).sum())(logps)
    return np.asarray(values(logps))[:, 0], np.asarray(gradient)[:, 0]


def draw(picture: Picture, figure: Any) -> None:
    """Two panels, A = +1 and A = −1, with a title and a legend."""
    low, high = picture.ratios
    ratios = np.linspace(low, high, POINTS)[1 if low == 0 else 0 :]
    panels = figure.subplots(1, 2)
    for panel, advantage, bounds in zip(panels, (1.0, -1.0), picture.bounds, strict=True):
        value, gradient = curves(picture.loss, ratios, advantage)
        for label, bound in bounds.items():
            panel.axvline(bound, color=BOUND, linestyle=":", linewidth=1)
            panel.text(bound, 1.01, label, transform=panel.get_xaxis_transform(), color=BOUND, ha="center")
        panel.axhline(0, color=BOUND, linewidth=0.6)
        panel.plot(ratios, value, color=VALUE)
        panel.plot(ratios, gradient, color=GRADIENT, linestyle="--")
        if picture.beside is not None:
            label, other = picture.beside
            beside = curves(other, ratios, advantage)[1]
            panel.plot(
                ratios, beside, color=BESIDE, linestyle="-.", linewidth=1.2, label=f"gradient, {label}"
            )
        panel.set_xlabel("r, A = +1" if advantage > 0 else "r, A = −1")
        panel.set_xlim(low, high)
        panel.ticklabel_format(useOffset=False)
        panel.locator_params(axis="x", nbins=4)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    if picture.beside is not None:
        panels[1].legend(frameon=False, fontsize=8)
    figure.suptitle(picture.title, fontsize=10)


if __name__ == "__main__":
    pyplot.rcParams.update(
        {"svg.hashsalt": "rlhf", "svg.fonttype": "none", "font.size": 9, "path.simplify_threshold": 0.3}
    )
    whole = pyplot.figure(figsize=(11.0, 8.4), layout="constrained")
    for picture, part in zip(PICTURES, whole.subfigures(3, 2, hspace=0.05).flat, strict=True):
        draw(picture, part)
    whole.savefig(FILE, metadata={"Date": None, "Creator": None}, facecolor="white")
    print(FILE)
