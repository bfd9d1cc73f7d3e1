"""The dtype of the computation, and what is recomputed, through the trainers."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from rlhf_core import load_model
from rlhf_core.models import Decoder


@pytest.fixture
def hidden_dtypes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(dtype, remat) of every config that a pass was traced with."""
    seen: list[tuple[str, str]] = []

    def spied(original: Any) -> Any:
        def hidden(definition: Decoder, *arguments: Any) -> jax.Array:
            states: jax.Array = original(definition, *arguments)
            seen.append((str(states.dtype), definition.remat))
            return states

        return hidden

    for name in ("hidden", "hidden_at"):
        monkeypatch.setattr(Decoder, name, spied(getattr(Decoder, name)))
    return seen


@pytest.mark.parametrize(
    ("trainer", "given"),
    [
        pytest.param("sft", "directory", marks=pytest.mark.long),
        ("reward", "object"),
        pytest.param("grpo", "object", marks=pytest.mark.long),
    ],
)
def test_a_run_in_bfloat16(
    short: Any, tiny: ModuleType, tmp_path: Path, hidden_dtypes: Any, trainer: str, given: str
) -> None:
    """It starts with the float32 run's loss, goes the same way, and leaves float32 weights."""
    inputs = {}
    if given == "directory":
        short.models[trainer].save(tmp_path / "base")
        inputs = {"model": str(tmp_path / "base")}
    start = tiny.leaves(short.models[trainer].params)
    whole, by = short.train(trainer, at="float32")
    assert set(hidden_dtypes) == {("float32", "auto")}
    hidden_dtypes.clear()
    half, watch = short.train(trainer, at="bfloat16", inputs=inputs, dtype="bfloat16", remat="full")
    assert set(hidden_dtypes) == {("bfloat16", "full")}
    assert all(np.isfinite(row["loss"]) for row in watch.rows if "loss" in row)
    for name, leaf in start.items():
        if np.any(whole[name] != leaf):
            assert np.any(half[name] != leaf), name
            assert np.any(half[name] != whole[name]), name
    if trainer != "grpo":  # whose completions part after a few tokens
        assert watch.rows[0]["loss"] == pytest.approx(by.rows[0]["loss"], rel=0.02)
        moved, apart = (
            np.sqrt(sum(np.square(whole[name] - other[name]).sum() for name in whole))
            for other in (start, half)
        )
        assert apart < 0.6 * moved
    artifact = tmp_path / "bfloat16" / trainer / "artifacts" / "model"
    head: Any = "score" if trainer == "reward" else "lm"
    assert load_model(artifact, head).stored_dtype == "float32"


@pytest.mark.long
def test_a_tied_model_trains_in_bfloat16(short: Any, tiny: ModuleType) -> None:
    """Its unembedding is its embedding, turned over: XLA on CPU cannot run every such product."""
    model = tiny.make_model(tie_word_embeddings=True, scale=4.0)
    _, watch = short.train("sft", at="tied", inputs={"model": model}, dtype="bfloat16")
    losses = [row["loss"] for row in watch.rows if "loss" in row]
    assert losses[-1] < losses[0]
