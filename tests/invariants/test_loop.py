"""The training loop with the three trainers: compiles once, evaluates, limits, freezes, logs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_core import fit, optimizers
from rlhf_core.step import Programs

ADAPTERS = {"rank": 2, "dropout": 0.1}


@pytest.fixture
def monkeypatch() -> Iterator[pytest.MonkeyPatch]:
    """Nothing that is patched here is traced: unlike other tests, these share their programs."""
    with pytest.MonkeyPatch.context() as patches:
        yield patches


@pytest.mark.parametrize(
    ("trainer", "lora"),
    [
        ("grpo", None),
        *(
            pytest.param(name, None, marks=pytest.mark.long)
            for name in ("sft", "reward", "dpo", "online_dpo", "kto")
        ),
        pytest.param("grpo", ADAPTERS, marks=pytest.mark.long),  # whose reference is the model without them
        *(
            pytest.param(trainer, ADAPTERS, marks=pytest.mark.exhaustive)
            for trainer in ("sft", "reward", "dpo", "online_dpo")
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "adapters" if value else "all",
)
@pytest.mark.usefixtures("nothing_shared")
def test_nothing_compiles_after_the_third_update_and_nothing_moves_unasked(
    short: Any,
    short_runs: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    trainer: str,
    lora: Any,
) -> None:
    """Batches, packings, rollouts, reference moves and evaluations differ from update to update; programs do not."""
    calls: Counter[str] = Counter()

    class Guarded(Programs):
        def accumulate(self, *arguments: Any) -> Any:
            calls["accumulate"] += 1
            with jax.transfer_guard("disallow"):
                return super().accumulate(*arguments)

        def apply(self, *arguments: Any) -> Any:
            calls["apply"] += 1
            with jax.transfer_guard("disallow"):
                return super().apply(*arguments)

    monkeypatch.setattr(fit, "Programs", Guarded)
    before = len(short_runs.COMPILED)
    with jax.transfer_guard("disallow"), pytest.raises(Exception, match=r"[Dd]isallowed"):
        jax.jit(jnp.sin)(np.ones(3))  # the guard guards
    changes, inputs = {}, {}
    if lora is not None:
        short.models[trainer].save(tmp_path / "base")
        inputs = {"model": str(tmp_path / "base")}
        changes = {"lora": lora} | ({"sync_ref_model": False} if trainer == "grpo" else {})
    _, watch = short.train(trainer, inputs=inputs, **changes)
    assert watch.steps() == [1, 2, 3, 4, 5, 6]
    # The first update has what it needs; what others need is compiled beside the second and waited for in the third.
    # The last row comes after the state was saved, for which orbax copies arrays by small programs of its own.
    later = watch.compiled[2:-1]
    assert watch.compiled[0] > 0
    assert later == [later[0]] * len(later)
    assert calls["apply"] == 6
    assert calls["accumulate"] >= 6
    updates = [name for name in short_runs.COMPILED[before:] if "accumulate" in name or "apply" in name]
    assert 2 <= len(updates) <= 5, updates


def test_frozen_parameters_keep_their_bits(tiny: ModuleType, short: Any) -> None:
    before = tiny.leaves(short.models["sft"].params)
    frozen = [r"self_attn|layers\.1\.mlp", r"^norm\."]
    after, _ = short.train("sft", frozen_parameters=frozen, weight_decay=0.5)
    still = {name for name in before if "self_attn" in name or name.startswith("norm.")}
    assert still
    for name, leaf in after.items():
        if ".mlp." in name:
            np.testing.assert_array_equal(leaf[1], before[name][1], err_msg=name)
            assert (leaf[0] != before[name][0]).any(), name
        else:
            assert np.array_equal(leaf, before[name]) == (name in still), name


@pytest.mark.parametrize(
    "trainer",
    [
        "sft",
        *(
            pytest.param(trainer, marks=pytest.mark.long)
            for trainer in ("reward", "grpo", "online_dpo", "kto")
        ),
        pytest.param("dpo", marks=pytest.mark.exhaustive),
    ],
)
def test_accumulation_changes_nothing_but_rounding(
    short: Any, monkeypatch: pytest.MonkeyPatch, trainer: str
) -> None:
    put: list[int] = []
    plain = fit.put_rows
    monkeypatch.setattr(
        fit, "put_rows", lambda mesh, batch: (put.append(len(batch.last)), plain(mesh, batch))[1]
    )
    changes = {"max_training_steps": 3, "total_batch_size": 11}
    if trainer in ("grpo", "online_dpo"):
        changes |= {"total_batch_size": 32}
    whole, one = short.train(trainer, at="1", **changes)
    micro_batches = len(put)
    parts, four = short.train(trainer, at="4", gradient_accumulation_steps=4, **changes)
    assert len(put) - micro_batches > micro_batches
    for a, b in zip(one.rows, four.rows, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4, abs=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
    for name, leaf in whole.items():
        np.testing.assert_allclose(leaf, parts[name], atol=2e-4, err_msg=name)


def expected_rate(name: str, step: int, *, peak: float, end: float, warmup: int, total: int) -> float:
    if step < warmup:
        return peak * (step + 1) / warmup
    at = (step - warmup) / (total - warmup)
    level = {
        "constant": 1.0,
        "linear": 1 - at,
        "cosine": (1 + math.cos(math.pi * at)) / 2,
        "wsd": min((1 - at) / 0.1, 1.0),
    }[name]
    return peak if name == "constant" else end + (peak - end) * level


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize(("warmup", "end"), [(0, 0.0), (8, 0.0), (8, 2e-4)])
def test_schedules(name: str, warmup: int, end: float) -> None:
    schedule = optimizers.schedule(name, 1e-3, 48, warmup=warmup, end=end)
    for step in range(48):
        expected = expected_rate(name, step, peak=1e-3, end=end, warmup=warmup, total=48)
        assert float(schedule(np.int32(step))) == pytest.approx(expected, rel=1e-5, abs=1e-9)
    assert float(schedule(0)) > 0  # the first update moves


def test_the_logged_rate_is_the_one_applied(tiny: ModuleType, short: Any) -> None:
    """With plain descent and no clipping, a parameter moves by rate × gradient."""
    after, watch = short.train(
        "sft", optimizer="sgd", scheduler="linear", warmup_steps=2, learning_rate=0.1, max_grad_norm=None,
        weight_decay=0.0, max_training_steps=1,
    )  # fmt: skip
    assert watch.rows[0]["learning_rate"] == pytest.approx(0.05)
    before = tiny.leaves(short.models["sft"].params)
    moved = math.sqrt(sum(((after[n].astype(np.float64) - before[n]) ** 2).sum() for n in before))
    assert moved == pytest.approx(0.05 * watch.rows[0]["grad_norm"], rel=1e-3)
