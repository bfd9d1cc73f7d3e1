"""Draw the pictures of this directory: each loss and its gradient against the importance ratio, for both signs of A.

    python docs/losses/plot.py

It needs matplotlib, the dependency group `docs`; the same versions write the same bytes.

The values are those of `rlhf_grpo.losses`, the gradients `jax.grad`'s of them, at the options that the pages advise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from rlhf_grpo.losses import BNPO, CISPO, DAPO, GRPO, GSPO, SAPO, DrGRPO, GSPOToken

from rlhf_core import LossOutput, PolicyInputs

matplotlib.use("svg")
from matplotlib import pyplot

HERE = Path(__file__).parent
VALUE, GRADIENT, BESIDE, BOUND = "#0b5394", "#cc4125", "#e69f00", "#777777"
POINTS = 600
"""No bound of a picture falls on one of them: there `min` and `clip` tie, and `jax.grad` splits the tie."""
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


PICTURES = {
    "grpo": Picture(GRPO(), "grpo, ε = ε_high = 0.2", clipped(0.2, 0.2)),
    "bnpo": Picture(BNPO(epsilon_high=0.28), "bnpo, ε = 0.2, ε_high = 0.28", clipped(0.2, 0.28)),
    "dr_grpo": Picture(DrGRPO(), "dr_grpo, ε = ε_high = 0.2", clipped(0.2, 0.2)),
    "dapo": Picture(DAPO(epsilon_high=0.28), "dapo, ε = 0.2, ε_high = 0.28", clipped(0.2, 0.28)),
    "cispo": Picture(
        CISPO(epsilon_high=5.0),
        "cispo, ε_high = 5",
        ({"ε_high": 5.0}, {"ε_high": 5.0}),
        ratios=(0.0, 7.0),
        beside=("gradient at ε_high = 0.2", CISPO()),
    ),
    "gspo": Picture(
        GSPO(epsilon=3e-4, epsilon_high=4e-4),
        "gspo, ε = 3e-4, ε_high = 4e-4",
        clipped(3e-4, 4e-4),
        ratios=(0.999, 1.001),
    ),
    "gspo_token": Picture(
        GSPOToken(epsilon=3e-4, epsilon_high=4e-4),
        "gspo_token, ε = 3e-4, ε_high = 4e-4",
        clipped(3e-4, 4e-4),
        ratios=(0.999, 1.001),
    ),
    "sapo": Picture(
        SAPO(), "sapo, τ_pos = 1, τ_neg = 1.05", beside=("gradient of grpo, ε = ε_high = 0.2", GRPO())
    ),
    "clipping": Picture(
        DAPO(epsilon_high=0.28, delta=2.0),
        "dapo, ε_high = 0.28, delta = 2",
        ({"1 + ε_high": 1.28}, {"1 − ε": 0.8, "delta": 2.0}),
        beside=("gradient without delta", DAPO(epsilon_high=0.28)),
    ),
}


def curves(loss: Loss, ratios: np.ndarray, advantage: float) -> tuple[np.ndarray, np.ndarray]:
    """Loss and d loss / d logp at each ratio: sequences of one token, whose probability at the largest ratio is 1."""
    old = jnp.full((len(ratios), 1), -np.log(ratios.max()), jnp.float32)
    mask = jnp.ones_like(old)

    def values(logps: jax.Array) -> jax.Array:
        return loss(PolicyInputs(logps=logps, old_logps=old, advantages=advantage * mask, mask=mask)).loss

    logps = old + jnp.log(jnp.asarray(ratios, jnp.float32))[:, None]
    gradient = jax.grad(lambda x: values(x).sum())(logps)
    return np.asarray(values(logps))[:, 0], np.asarray(gradient)[:, 0]


def draw(name: str, picture: Picture) -> None:
    low, high = picture.ratios
    ratios = np.linspace(low, high, POINTS)[1 if low == 0 else 0 :]
    figure, panels = pyplot.subplots(1, 2, figsize=(8.4, 3.3), layout="constrained")
    for panel, advantage, bounds in zip(panels, (1.0, -1.0), picture.bounds, strict=True):
        value, gradient = curves(picture.loss, ratios, advantage)
        for label, bound in bounds.items():
            panel.axvline(bound, color=BOUND, linestyle=":", linewidth=1)
            panel.text(bound, 1.01, label, transform=panel.get_xaxis_transform(), color=BOUND, ha="center")
        panel.axhline(0, color=BOUND, linewidth=0.6)
        panel.plot(ratios, value, color=VALUE, label="loss")
        panel.plot(ratios, gradient, color=GRADIENT, linestyle="--", label="d loss / d logp")
        if picture.beside is not None:
            label, other = picture.beside
            beside = curves(other, ratios, advantage)[1]
            panel.plot(ratios, beside, color=BESIDE, linestyle="-.", linewidth=1.2, label=label)
        panel.set_title("A = +1" if advantage > 0 else "A = −1", loc="left", fontsize=9)
        panel.set_xlabel("importance ratio r")
        panel.set_xlim(low, high)
        panel.ticklabel_format(useOffset=False)
        panel.locator_params(axis="x", nbins=6)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(picture.title, fontsize=10)
    figure.savefig(HERE / f"{name}.svg", metadata={"Date": None, "Creator": None}, facecolor="white")
    pyplot.close(figure)


if __name__ == "__main__":
    pyplot.rcParams.update(
        {"svg.hashsalt": "rlhf", "svg.fonttype": "path", "font.size": 9, "path.simplify_threshold": 0.3}
    )
    for name, picture in PICTURES.items():
        draw(name, picture)
        print(HERE / f"{name}.svg")
