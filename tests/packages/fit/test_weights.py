"""What is logged of weights, by its formula in NumPy, and in runs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_core import hookimpl
from rlhf_core.fit.weights import BINS, statistics
from rlhf_core.mesh import make_mesh
from rlhf_core.step import layer_norms


class Weights:
    """A logger that keeps what it is told of weights, and interrupts where it is asked to."""

    def __init__(self, until: int = 10**9) -> None:
        self.until = until
        self.told: dict[int, dict[str, Any]] = {}

    @hookimpl
    def rlhf_weights(self, step: int, weights: dict[str, Any]) -> None:
        self.told[step] = weights

    @hookimpl
    def rlhf_step_end(self, step: int) -> None:
        if step == self.until:
            raise KeyboardInterrupt


def test_statistics_are_those_of_numpy() -> None:
    draw = np.random.default_rng(0)
    before = draw.normal(size=(37, 11)).astype(np.float32)
    after = (before + 0.01 * draw.normal(size=before.shape)).astype(np.float32)
    after[:5] = 0.0
    found = jax.jit(statistics)(before, after)
    exact, moved = after.astype(np.float64), after.astype(np.float64) - before
    np.testing.assert_allclose(found["norm"], np.linalg.norm(exact), rtol=1e-6)
    np.testing.assert_allclose(found["zeros"], (exact == 0).mean(), rtol=1e-6)
    ratio = np.linalg.norm(moved) / np.linalg.norm(before.astype(np.float64))
    np.testing.assert_allclose(found["update_ratio"], ratio, rtol=1e-6)
    counts, edges = np.histogram(exact, BINS)
    assert (found["least"], found["largest"]) == (edges[0].astype(np.float32), edges[-1].astype(np.float32))
    assert np.abs(np.asarray(found["counts"]) - counts).sum() <= 2  # a value at an edge of a bin
    assert found["counts"].sum() == exact.size
    still = statistics(jnp.zeros(4), jnp.zeros(4))
    assert (still["norm"], still["zeros"], still["update_ratio"], still["counts"][0]) == (0, 1, 0, 4)


def test_weights_are_written_and_logged_and_change_nothing(short: Any, tmp_path: Path) -> None:
    plain, _ = short.train("sft", at="plain")
    watch = Weights()
    given = {"weight_distribution_log_steps": 2, "weight_distribution_pattern": r"layers\.1\.mlp|^norm"}
    found, _ = short.train("sft", at="logged", listeners=(watch,), **given)
    for path, leaf in plain.items():
        np.testing.assert_array_equal(leaf, found[path], err_msg=path)
    rows = [json.loads(line) for line in (tmp_path / "logged/sft/weights.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert {row["step"]: row["weights"] for row in rows} == watch.told
    told, name = rows[-1]["weights"], "layers.1.mlp.up_proj.kernel"
    assert "norm.weight" in told
    assert len(told) == 4
    kernel = found["layers.mlp.up_proj.kernel"][1].astype(np.float64)
    np.testing.assert_allclose(told[name]["norm"], np.linalg.norm(kernel), rtol=1e-5)
    assert 0 < told[name]["update_ratio"] < 0.1
    for at, until in (("again", 5), ("at the end", 6)):
        with pytest.raises(KeyboardInterrupt):
            short.train("sft", at=at, listeners=(Weights(until),), save_steps=3, **given)
        short.train("sft", at=at, **given)
        again, whole = ((tmp_path / each / "sft/weights.jsonl").read_text() for each in (at, "logged"))
        assert again == whole


def test_weights_on_a_mesh(short: Any) -> None:
    one, many = Weights(), Weights()
    given = {"max_training_steps": 1, "log_weights": {"every": 1}}
    short.train("sft", at="one", listeners=(one,), **given)
    mesh = make_mesh(data=2, fsdp=2, devices=jax.devices()[:4])
    short.train("sft", at="many", listeners=(many,), inputs={"mesh": mesh}, **given)
    for name, each in one.told[1].items():
        for key in ("norm", "zeros", "update_ratio"):
            np.testing.assert_allclose(many.told[1][name][key], each[key], rtol=1e-3, err_msg=f"{name} {key}")


def test_norms_of_layers_of_several_kinds() -> None:
    stacks = {"full": SimpleNamespace(layers=(1,)), "sliding": SimpleNamespace(layers=(0, 2))}
    model = SimpleNamespace(config=SimpleNamespace(stacks=stacks))
    grads = {
        "layers": {
            "full": {"mlp": {"kernel": jnp.full((1, 2, 2), 3.0)}},
            "sliding": {"mlp": {"kernel": jnp.stack([jnp.full((2, 2), 1.0), jnp.full((2, 2), 2.0)])}},
        }
    }
    found = {name: float(x) for name, x in layer_norms(grads, model).items()}
    assert found == {"layers.1": 6.0, "layers.0": 2.0, "layers.2": 4.0}
